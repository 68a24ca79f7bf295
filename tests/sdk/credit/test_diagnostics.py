"""What is measured, and each warning on data that deserves it."""

from __future__ import annotations

import numpy as np
import pytest

from longstep.credit import Diagnostics, gigpo, grpo

NUM_STEPS = 10


def rollout(
    num_groups: int = 4, members: int = 4, num_states: int = 5, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Random walks over a few shared states, half of them rewarded at the end."""
    rng = np.random.default_rng(seed)
    trajectories = np.repeat(np.arange(num_groups * members), NUM_STEPS)
    rewards = np.zeros(len(trajectories))
    rewards[NUM_STEPS - 1 :: 2 * NUM_STEPS] = 1.0
    states = [f"room {number}" for number in rng.integers(0, num_states, len(trajectories))]
    return rewards, trajectories, trajectories // members, states


def the_warning(diagnostics: Diagnostics) -> str:
    assert len(diagnostics.warnings) == 1
    return diagnostics.warnings[0]


def test_a_healthy_batch_has_no_warning() -> None:
    assert gigpo(*rollout()).diagnostics.warnings == ()


def test_everything_is_measured_on_a_small_table() -> None:
    # group 0: trajectories 0 and 1; group 1: trajectory 2; states a a b | a c | d
    result = gigpo(
        [0.0, 0.0, 1.0, 0.0, 1.0, 0.0],
        [0, 0, 0, 1, 1, 2],
        [0, 0, 0, 0, 0, 1],
        ["a", "a", "b", "a", "c", "d"],
        gamma=0.5,
        omega=2.0,
        valid=[True, True, True, False, True, False],
    )
    weighted = 2.0 * result.step.astype(float)
    assert result.diagnostics == Diagnostics(
        num_rows=6,
        num_trajectories=3,
        num_episode_groups=2,
        lone_episode_groups=1,
        zero_variance_groups=1,
        invalid_share=pytest.approx(2 / 6),
        group_size_histogram={1: 3, 3: 1},
        singleton_share=pytest.approx(0.5),
        shared_share=pytest.approx(0.5),
        largest_group_share=1.0,
        step_variance_share=pytest.approx(1.0),
        warnings=(),
    )
    assert weighted.any()


def test_the_step_term_has_its_share_of_the_variance() -> None:
    result = gigpo(*rollout(), omega=0.5)
    episode, step = result.episode.var(), (0.5 * result.step).var()
    share = result.diagnostics.step_variance_share
    assert share == pytest.approx(step / (episode + step), rel=1e-4)


def test_estimators_without_step_groups_say_so() -> None:
    diagnostics = grpo(*rollout()[:3]).diagnostics
    assert diagnostics.group_size_histogram == {}
    assert (diagnostics.singleton_share, diagnostics.shared_share) == (1.0, 0.0)
    assert diagnostics.warnings == ()


def test_an_anchor_with_a_step_counter_is_noticed() -> None:
    *columns, states = rollout()
    counted = [f"{state}, step {row}" for row, state in enumerate(states)]
    warning = the_warning(gigpo(*columns, counted).diagnostics)
    assert warning.startswith("100% of steps are alone in their group")
    assert "pass `canonicalize` to `state_key`" in warning


def test_trajectories_that_share_no_state_are_noticed() -> None:
    rewards, trajectories, groups, states = rollout()
    own = [f"{name}: {state}" for name, state in zip(trajectories, states, strict=True)]
    warning = the_warning(gigpo(rewards, trajectories, groups, own).diagnostics)
    assert "only 0% of steps stand in a state that two trajectories visit" in warning


def test_an_error_message_that_joins_many_steps_is_noticed() -> None:
    *columns, states = rollout()
    failing = ["Nothing happens." if row % 10 < 7 else state for row, state in enumerate(states)]
    warning = the_warning(gigpo(*columns, failing).diagnostics)
    assert "one state holds 70% of the steps" in warning
    anchored = gigpo(*columns, failing, anchors=lambda key: key != "Nothing happens.")
    assert anchored.diagnostics.warnings == ()


def test_groups_of_equal_returns_are_noticed() -> None:
    rewards, *columns = rollout()
    warning = the_warning(gigpo(np.zeros_like(rewards), *columns).diagnostics)
    assert warning.startswith("in 4 of 4 episode groups all trajectories have the same return")


def test_groups_of_one_are_noticed() -> None:
    rewards, trajectories, _, _ = rollout()
    diagnostics = grpo(rewards, trajectories, trajectories).diagnostics
    assert diagnostics.lone_episode_groups == 16
    assert the_warning(diagnostics).startswith("16 episode groups have one trajectory")


def test_many_invalid_actions_are_noticed() -> None:
    columns = rollout()
    valid = np.arange(len(columns[0])) % 5 < 3
    warning = the_warning(gigpo(*columns, valid=valid).diagnostics)
    assert warning.startswith("40% of actions are invalid")
    few = np.arange(len(columns[0])) % 5 < 4
    assert gigpo(*columns, valid=few).diagnostics.warnings == ()
