"""Laws that hold for every batch, and a slow version of GiGPO written straight from its equations."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from longstep.credit import (
    Advantages,
    StepGroups,
    gigpo,
    graph,
    grpo,
    hgpo,
    reinforce_plus_plus,
    rloo,
)


def assert_close(actual: Any, expected: Any, what: str = "") -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=what)


@dataclass(frozen=True)
class Batch:
    rewards: list[float]
    trajectories: list[int]
    groups: list[int]
    states: list[str]
    valid: list[bool]

    def __len__(self) -> int:
        return len(self.rewards)

    def columns(self) -> tuple[list[float], list[int], list[int], list[str]]:
        return self.rewards, self.trajectories, self.groups, self.states

    def take(self, rows: list[int]) -> Batch:
        picked = ([column[row] for row in rows] for column in (*self.columns(), self.valid))
        return Batch(*picked)


@st.composite
def batches(draw: st.DrawFn, max_groups: int = 3) -> Batch:
    """A few episode groups of short trajectories over few states, interleaved, in order of time."""
    steps = []
    for group in range(draw(st.integers(1, max_groups))):
        for member in range(draw(st.integers(1, 4))):
            for time in range(draw(st.integers(1, 6))):
                reward = draw(st.integers(-4, 4)) / 4
                state = draw(st.sampled_from("abcd"))
                steps.append((group * 10 + member, time, group, reward, state))
    interleaved = draw(st.permutations(range(len(steps))))
    steps = sorted(
        (steps[at] for at in interleaved), key=lambda step: step[1]
    )  # all first steps, then all second ones, trajectories in any order
    valid = draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))
    return Batch(
        rewards=[step[3] for step in steps],
        trajectories=[step[0] for step in steps],
        groups=[step[2] for step in steps],
        states=[step[4] for step in steps],
        valid=valid,
    )


gigpo_options = st.fixed_dictionaries(
    {
        "gamma": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
        "omega": st.sampled_from([0.0, 0.5, 1.0]),
        "normalize": st.sampled_from(["none", "std"]),
        "baseline": st.sampled_from(["trajectory", "row"]),
        "penalty_scope": st.sampled_from(["reward", "row"]),
        "invalid_action_penalty": st.sampled_from([0.0, 0.25]),
        "inner_group_size": st.sampled_from([2, 3]),
        "ddof": st.sampled_from([0, 1]),
        "std_floor": st.sampled_from([0.0, 0.5]),
        "epsilon": st.just(1e-3),
        "repeats": st.sampled_from(["all", "first", "mean"]),
        "lone_episode": st.sampled_from(["zero", "raw"]),
        "history_length": st.sampled_from([0, 1, 2]),
    }
)


def slow_relative(value: float, members: list[float], options: dict[str, Any]) -> float:
    """Equations 3 and 7, for one value and the members it is compared with."""
    mean = math.fsum(members) / len(members)
    if options["normalize"] == "none":
        return value - mean
    squares = math.fsum((member - mean) ** 2 for member in members)
    std = math.sqrt(squares / (len(members) - options["ddof"]))
    if not options["std_floor"] and max(members) - min(members) < 1e-9:
        return 0.0  # no scale to measure by
    return (value - mean) / (max(std, options["std_floor"]) + options["epsilon"])


def slow_gigpo(batch: Batch, options: dict[str, Any], anchors: str = "abcd") -> list[float]:
    """Equation 8, row by row, with loops over all other rows."""
    rows = range(len(batch))
    cost = [0.0 if ok else options["invalid_action_penalty"] for ok in batch.valid]
    in_reward = options["penalty_scope"] == "reward"
    reward = [batch.rewards[row] - (cost[row] if in_reward else 0.0) for row in rows]
    row_cost = [0.0 if in_reward else cost[row] for row in rows]
    of_trajectory = defaultdict(list)
    for row in rows:
        of_trajectory[batch.trajectories[row]].append(row)
    episode_return = {
        name: sum(reward[row] for row in of_trajectory[name]) for name in of_trajectory
    }
    step_return, keys = [0.0] * len(batch), [()] * len(batch)
    for members in of_trajectory.values():
        for at, row in enumerate(members):
            later = enumerate(members[at:])
            step_return[row] = sum(options["gamma"] ** n * reward[other] for n, other in later)
            step_return[row] -= row_cost[row]
            history = [batch.states[other] for other in members[: at + 1]]
            keys[row] = (batch.groups[row], *history[-options["history_length"] - 1 :])
    total = []
    for row in rows:
        peers = [other for other in rows if batch.groups[other] == batch.groups[row]]
        score = episode_return[batch.trajectories[row]] - row_cost[row]
        if options["baseline"] == "row":
            scores = [episode_return[batch.trajectories[peer]] - row_cost[peer] for peer in peers]
        else:
            scores = [episode_return[name] for name in {batch.trajectories[peer] for peer in peers}]
        if len(scores) > 1:
            episode = slow_relative(score, scores, options)
        else:
            episode = score if options["lone_episode"] == "raw" else 0.0
        visits = defaultdict(list)
        for peer in peers:
            if keys[peer] == keys[row]:
                visits[batch.trajectories[peer]].append(step_return[peer])
        members = {
            "all": [value for values in visits.values() for value in values],
            "first": [values[0] for values in visits.values()],
            "mean": [sum(values) / len(values) for values in visits.values()],
        }[options["repeats"]]
        step = 0.0
        if len(members) >= options["inner_group_size"] and batch.states[row] in anchors:
            step = slow_relative(step_return[row], members, options)
        total.append(episode + options["omega"] * step)
    return total


@settings(max_examples=150, deadline=None)
@given(batches(), gigpo_options)
def test_gigpo_is_its_equations(batch: Batch, options: dict[str, Any]) -> None:
    result = gigpo(*batch.columns(), valid=batch.valid, **options)
    assert_close(result.total, slow_gigpo(batch, options))


@settings(max_examples=50, deadline=None)
@given(batches(), gigpo_options, st.booleans())
def test_states_that_do_not_anchor_have_no_step_term(
    batch: Batch, options: dict[str, Any], as_mask: bool
) -> None:
    anchors: Any = (lambda key: key in "ab") if not as_mask else [s in "ab" for s in batch.states]
    result = gigpo(*batch.columns(), valid=batch.valid, anchors=anchors, **options)
    assert_close(result.total, slow_gigpo(batch, options, "ab"))


def estimate_all(batch: Batch, **more: Any) -> dict[str, Advantages]:
    """Every estimator on one batch."""
    episodes = batch.columns()[:3]
    return {
        "gigpo": gigpo(*batch.columns(), **more),
        "gigpo/std/row": gigpo(*batch.columns(), normalize="std", baseline="row", **more),
        "grpo": grpo(*episodes, **more),
        "rloo": rloo(*episodes, **more),
        "reinforce++": reinforce_plus_plus(*episodes, **more),
        "reinforce++/baseline": reinforce_plus_plus(*episodes, baseline="trajectory", **more),
        "hgpo": hgpo(*batch.columns(), episode_term=True, **more),
        "graph": graph(*batch.columns(), gamma=0.9, **more),
        "graph/mean": graph(*batch.columns(), gamma=0.9, backup="mean", **more),
    }


@settings(max_examples=25, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_permuting_trajectories_permutes_the_result(batch: Batch, random: Any) -> None:
    names = sorted(set(batch.trajectories))
    random.shuffle(names)
    place = {name: number for number, name in enumerate(names)}
    rows = sorted(range(len(batch)), key=lambda row: place[batch.trajectories[row]])
    permuted = estimate_all(batch.take(rows))
    for name, result in estimate_all(batch).items():
        assert_close(permuted[name].total, result.total[rows], name)


@settings(max_examples=25, deadline=None)
@given(batches(), st.integers(-8, 8), st.sampled_from(["trajectory", "row"]))
def test_a_constant_on_all_returns_of_a_group_changes_no_episode_term(
    batch: Batch, constant: int, baseline: Any
) -> None:
    last_row = {name: row for row, name in enumerate(batch.trajectories)}
    shifted = list(batch.rewards)
    for row in last_row.values():
        shifted[row] += constant * (batch.groups[row] == 0)
    for estimator in (grpo, rloo):
        before = estimator(*batch.columns()[:3], baseline=baseline)
        after = estimator(shifted, *batch.columns()[1:3], baseline=baseline)
        assert_close(after.total, before.total)


@settings(max_examples=25, deadline=None)
@given(batches())
def test_where_no_state_repeats_gigpo_and_graph_are_grpo(batch: Batch) -> None:
    states = [str(row) for row in range(len(batch))]
    episodes = batch.columns()[:3]
    for normalize in ("none", "std"):
        plain = grpo(*episodes, normalize=normalize)
        for result in (
            gigpo(*episodes, states, normalize=normalize),
            graph(*episodes, states, normalize=normalize),
            graph(*episodes, states, normalize=normalize, backup="mean"),
        ):
            np.testing.assert_array_equal(result.step, 0.0)
            np.testing.assert_array_equal(result.total, plain.total)


@settings(max_examples=25, deadline=None)
@given(batches(), st.data())
def test_masked_duplicate_rows_change_nothing(batch: Batch, data: st.DataObject) -> None:
    order = list(range(len(batch)))
    for copy in data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=5)):
        order.insert(data.draw(st.integers(0, len(order))), -1 - copy)
    padded = batch.take([at if at >= 0 else -1 - at for at in order])
    mask = np.array(order) >= 0
    expected = estimate_all(batch)
    for name, result in estimate_all(padded, mask=mask).items():
        np.testing.assert_array_equal(result.total[mask], expected[name].total, err_msg=name)
        np.testing.assert_array_equal(result.total[~mask], 0.0)
        assert result.diagnostics == expected[name].diagnostics


@settings(max_examples=25, deadline=None)
@given(batches())
def test_one_member_groups_have_no_advantage(batch: Batch) -> None:
    alone = {
        name: group
        for name, group in zip(batch.trajectories, batch.groups, strict=True)
        if len({t for t, g in zip(batch.trajectories, batch.groups, strict=True) if g == group})
        == 1
    }
    rows = [row for row, name in enumerate(batch.trajectories) if name in alone]
    for name in ("grpo", "rloo", "gigpo"):
        np.testing.assert_array_equal(estimate_all(batch)[name].episode[rows], 0.0)


@settings(max_examples=25, deadline=None)
@given(batches())
def test_the_step_terms_of_a_step_group_add_up_to_zero(batch: Batch) -> None:
    result = gigpo(*batch.columns())
    groups = result.step_groups
    assert isinstance(groups, StepGroups)
    sums = np.bincount(groups.ids, result.step, minlength=groups.num_groups)
    np.testing.assert_allclose(sums, 0.0, atol=1e-5)
