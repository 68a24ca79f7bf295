"""The graph estimator against tables worked out by hand and slow independent versions."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstep.credit import graph, grpo
from longstep.errors import ConfigError

# start -> left -> end with reward 1; start -> right -> end with 0; start -> right -> left -> end with 1
REWARDS = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
TRAJECTORIES = [0, 0, 1, 1, 2, 2, 2]
STATES = ["start", "left", "start", "right", "start", "right", "left"]


def test_value_iteration_prefers_the_best_known_way() -> None:
    # gamma 0.5: V(left) = 1, V(right) = max(0, 0.5) = 0.5, V(start) = max(0.5, 0.25) = 0.5
    result = graph(REWARDS, TRAJECTORIES, [0] * 7, STATES, gamma=0.5, lam=0.0)
    np.testing.assert_allclose(result.step, [0.0, 0.0, -0.25, -0.5, -0.25, 0.0, 0.0])


def test_the_mean_backup_values_the_behaviour() -> None:
    # V(left) = 1, V(right) = (0 + 0.5) / 2 = 0.25, V(start) = (0.5 + 0.125 + 0.125) / 3 = 0.25
    result = graph(REWARDS, TRAJECTORIES, [0] * 7, STATES, gamma=0.5, lam=0.0, backup="mean")
    np.testing.assert_allclose(result.step, [0.25, 0.0, -0.125, -0.25, -0.125, 0.25, 0.0])


def test_lambda_carries_later_errors_back() -> None:
    # gamma lam = 0.25; row 2: -0.25 + 0.25 * -0.5
    result = graph(REWARDS, TRAJECTORIES, [0] * 7, STATES, gamma=0.5, lam=0.5)
    np.testing.assert_allclose(result.step, [0.0, 0.0, -0.375, -0.5, -0.25, 0.0, 0.0])


def test_the_episode_term_is_added() -> None:
    result = graph(REWARDS, TRAJECTORIES, [0] * 7, STATES, gamma=0.5, lam=0.0, omega=2.0)
    episode = grpo(REWARDS, TRAJECTORIES, [0] * 7, normalize="none").total
    np.testing.assert_array_equal(result.episode, episode)
    np.testing.assert_allclose(result.total, episode + 2.0 * result.step, rtol=1e-6)


def test_standardised_terms_have_unit_spread_in_each_group() -> None:
    result = graph(REWARDS, TRAJECTORIES, [0] * 7, STATES, normalize="std", ddof=0, epsilon=0.0)
    np.testing.assert_allclose([result.step.mean(), result.step.std()], [0.0, 1.0], atol=1e-6)


def test_states_of_other_groups_are_other_nodes() -> None:
    alone = graph(REWARDS, TRAJECTORIES, [0] * 7, STATES)
    twice = graph(
        REWARDS + [0.0] * 7,
        TRAJECTORIES + [name + 10 for name in TRAJECTORIES],
        [0] * 7 + [1] * 7,
        STATES * 2,
    )
    np.testing.assert_array_equal(twice.step[:7], alone.step)
    np.testing.assert_array_equal(twice.step[7:], 0.0)


def test_states_that_do_not_anchor_are_not_merged() -> None:
    result = graph(
        REWARDS,
        TRAJECTORIES,
        [0] * 7,
        STATES,
        gamma=0.5,
        lam=0.0,
        anchors=lambda key: key != "right",
    )
    # the two visits to right are nodes of their own: V = 0 and 0.5; V(start) = 0.5
    np.testing.assert_allclose(result.step, [0.0, 0.0, -0.5, 0.0, -0.25, 0.0, 0.0])


def test_a_paying_loop_without_discount_has_no_value() -> None:
    with pytest.raises(ConfigError, match=r"settle within `max_iterations` 50.*`gamma` 1\.0"):
        graph([1.0, 1.0, 1.0], [0] * 3, [0] * 3, ["a", "a", "a"], gamma=1.0, max_iterations=50)


def test_an_empty_batch_gives_empty_arrays() -> None:
    assert graph([], [], [], []).total.shape == (0,)


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[float], list[int], list[str]]:
    """One episode group: trajectory by trajectory."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    names = [name for name, length in enumerate(lengths) for _ in range(length)]
    rewards = [draw(st.integers(-4, 4)) / 4 for _ in names]
    return rewards, names, [draw(st.sampled_from("abcd")) for _ in names]


def steps_of(walk: tuple[list[float], list[int], list[str]]) -> list[tuple[str, float, str]]:
    """State, reward and next state of each row; `end` after the last."""
    rewards, names, states = walk
    return [
        (state, rewards[row], states[row + 1] if names[row : row + 2] == [name] * 2 else "end")
        for row, (name, state) in enumerate(zip(names, states, strict=True))
    ]


def best_values(steps: list[tuple[str, float, str]], gamma: float) -> dict[str, float]:
    """Value iteration with dictionaries."""
    edges = defaultdict(list)
    for state, reward, following in steps:
        edges[state, following].append(reward)
    values = dict.fromkeys([state for state, _, _ in steps], 0.0) | {"end": 0.0}
    for _ in range(400):
        values = {"end": 0.0} | {
            node: max(
                float(np.mean(rewards)) + gamma * values[following]
                for (state, following), rewards in edges.items()
                if state == node
            )
            for node in values
            if node != "end"
        }
    return values


def behaviour_values(steps: list[tuple[str, float, str]], gamma: float) -> dict[str, float]:
    """The linear system of the behaviour's values, solved exactly."""
    nodes = sorted({state for state, _, _ in steps})
    system, right = np.eye(len(nodes)), np.zeros(len(nodes))
    for number, node in enumerate(nodes):
        ways = [step for step in steps if step[0] == node]
        for _, reward, following in ways:
            right[number] += reward / len(ways)
            if following != "end":
                system[number, nodes.index(following)] -= gamma / len(ways)
    return dict(zip(nodes, np.linalg.solve(system, right), strict=True)) | {"end": 0.0}


@settings(max_examples=60, deadline=None)
@given(walks(), st.sampled_from(["max", "mean"]), st.sampled_from([0.0, 0.5, 1.0]))
def test_advantages_are_those_of_the_slow_version(
    walk: tuple[list[float], list[int], list[str]], backup: Any, lam: float
) -> None:
    gamma = 0.9
    rewards, names, states = walk
    steps = steps_of(walk)
    values = (best_values if backup == "max" else behaviour_values)(steps, gamma)
    expected, carry = [0.0] * len(steps), 0.0
    for row in reversed(range(len(steps))):
        state, reward, following = steps[row]
        carry = 0.0 if following == "end" else carry
        carry = reward + gamma * values[following] - values[state] + gamma * lam * carry
        expected[row] = carry
    result = graph(rewards, names, [0] * len(names), states, gamma=gamma, lam=lam, backup=backup)
    np.testing.assert_allclose(result.step, expected, atol=1e-4)
