"""Estimators against tables worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from longstep.credit import (
    PRESETS,
    discounted_returns,
    drop_uniform_groups,
    gigpo,
    grpo,
    hgpo,
    reinforce_plus_plus,
    rloo,
)


def one_success_among_failures() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A group of 8: one success of 10 steps with reward 10 at its end, and seven failures of 50 steps."""
    lengths = [10, *[50] * 7]
    trajectories = np.repeat(np.arange(8), lengths)
    rewards = np.zeros(len(trajectories))
    rewards[9] = 10.0
    return rewards, trajectories, np.zeros_like(trajectories)


@pytest.mark.parametrize(
    ("preset", "normalize", "success", "failure"),
    [
        ("verl_agent", "none", 9.722, -0.278),
        ("paper", "none", 8.750, -1.250),
        ("verl_agent", "std", 5.908, -0.169),
        ("paper", "std", 2.475, -0.354),
    ],
)
def test_presets_weigh_long_trajectories_differently(
    preset: str, normalize: Any, success: float, failure: float
) -> None:
    result = grpo(*one_success_among_failures(), normalize=normalize, **PRESETS[preset])
    np.testing.assert_allclose(result.total[:10], success, atol=5e-4)
    np.testing.assert_allclose(result.total[10:], failure, atol=5e-4)


def test_discounted_returns_stay_within_interleaved_trajectories() -> None:
    returns = discounted_returns([1.0, 10.0, 2.0, 20.0, 4.0], ["a", "b", "a", "b", "a"], 0.5)
    np.testing.assert_array_equal(returns, [3.0, 20.0, 4.0, 20.0, 4.0])
    assert returns.dtype == np.float32


@pytest.mark.parametrize(("gamma", "expected"), [(0.0, [1.0, 2.0]), (1.0, [3.0, 2.0])])
def test_discounts_of_zero_and_one_are_allowed(gamma: float, expected: list[float]) -> None:
    np.testing.assert_array_equal(discounted_returns([1.0, 2.0], [0, 0], gamma), expected)


def test_rloo_leaves_one_trajectory_out_whatever_its_length() -> None:
    # returns 6, 3, 0; the others' means 1.5, 3, 4.5
    result = rloo([2.0, 4.0, 3.0, 0.0], [0, 0, 1, 2], [0, 0, 0, 0])
    np.testing.assert_allclose(result.total, [4.5, 4.5, 0.0, -4.5])


def test_rloo_by_rows_leaves_one_row_out() -> None:
    # row scores 6, 6, 3, 0; the others' means 3, 3, 4, 5
    result = rloo([2.0, 4.0, 3.0, 0.0], [0, 0, 1, 2], [0, 0, 0, 0], baseline="row")
    np.testing.assert_allclose(result.total, [3.0, 3.0, -1.0, -5.0])


def test_reinforce_plus_plus_standardises_returns_over_the_batch() -> None:
    # returns 3, 2 and 1: mean 2, population variance 2/3
    result = reinforce_plus_plus([1.0, 2.0, 1.0], [0, 0, 1], [0, 0, 1], ddof=0, epsilon=0.0)
    np.testing.assert_allclose(result.total, np.array([1.0, 0.0, -1.0]) * np.sqrt(1.5), rtol=1e-6)


def test_reinforce_plus_plus_with_baseline_takes_the_group_mean_off_first() -> None:
    # returns 4, 0 | 9, 9: minus their groups' means 2, -2 | 0, 0
    result = reinforce_plus_plus(
        [4.0, 0.0, 9.0, 9.0], [0, 1, 2, 3], [0, 0, 1, 1], baseline="trajectory", ddof=0, epsilon=0.0
    )
    np.testing.assert_allclose(result.total, np.array([2.0, -2.0, 0.0, 0.0]) / np.sqrt(2.0))


TABLE = ([0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], [0, 0, 0, 0], ["a", "b", "a", "b"])
# gamma 0.5: episode returns 1, 0; step returns 0.5, 1, 0, 0; step groups {0, 2} and {1, 3}


def test_gigpo_adds_the_step_term_with_its_weight() -> None:
    result = gigpo(*TABLE, gamma=0.5, omega=2.0)
    np.testing.assert_allclose(result.episode, [0.5, 0.5, -0.5, -0.5])
    np.testing.assert_allclose(result.step, [0.25, 0.5, -0.25, -0.5])
    np.testing.assert_allclose(result.total, [1.0, 1.5, -1.0, -1.5])


def test_a_penalty_in_the_reward_reaches_earlier_steps() -> None:
    # rewards 0, 1 | 0, -0.4: returns 1, -0.4; step returns 0.5, 1, -0.2, -0.4
    valid = [True, True, True, False]
    result = gigpo(*TABLE, gamma=0.5, valid=valid, invalid_action_penalty=0.4)
    np.testing.assert_allclose(result.episode, [0.7, 0.7, -0.7, -0.7], rtol=1e-6)
    np.testing.assert_allclose(result.step, [0.35, 0.7, -0.35, -0.7], rtol=1e-6)


def test_a_penalty_on_the_row_stays_on_that_row() -> None:
    # baselines are those of the episodes, 0.5; step returns 0.5, 1, 0, -0.4
    valid = [True, True, True, False]
    result = gigpo(*TABLE, gamma=0.5, valid=valid, invalid_action_penalty=0.4, penalty_scope="row")
    np.testing.assert_allclose(result.episode, [0.5, 0.5, -0.5, -0.9], rtol=1e-6)
    np.testing.assert_allclose(result.step, [0.25, 0.7, -0.25, -0.7], rtol=1e-6)


LOOP = ([0.0, 0.0, 1.0, 0.0], [0, 0, 0, 1], [0, 0, 0, 0], ["a", "a", "b", "a"])
# gamma 0.5: state a has returns 0.25 and 0.5 of trajectory 0, and 0 of trajectory 1


@pytest.mark.parametrize(("repeats", "mean"), [("all", 0.25), ("first", 0.125), ("mean", 0.1875)])
def test_repeats_in_a_trajectory_count_as_asked(repeats: Any, mean: float) -> None:
    result = gigpo(*LOOP, gamma=0.5, repeats=repeats)
    expected = np.array([0.25, 0.5, mean, 0.0]) - mean  # the row of state b is alone
    np.testing.assert_allclose(result.step, expected, rtol=1e-6)


def test_a_loop_of_one_trajectory_is_no_group_when_repeats_count_once() -> None:
    looping = ([0.0, 1.0, 0.0], [0, 0, 1], [0, 0, 0], ["a", "a", "b"])
    assert gigpo(*looping, gamma=0.5).step.tolist() == [-0.25, 0.25, 0.0]
    assert gigpo(*looping, gamma=0.5, repeats="first").step.tolist() == [0.0, 0.0, 0.0]


def test_step_groups_below_the_inner_group_size_have_no_term() -> None:
    assert gigpo(*LOOP, gamma=0.5, inner_group_size=3).step.any()
    assert not gigpo(*LOOP, gamma=0.5, inner_group_size=4).step.any()


def test_nearly_equal_returns_are_blown_up_unless_the_std_has_a_floor() -> None:
    returns = [9.5, 9.5, 9.5, 9.025]
    columns = (returns, [0, 1, 2, 3], [0] * 4, ["a"] * 4)
    step = gigpo(*columns, normalize="std").step
    np.testing.assert_allclose(step, [0.5, 0.5, 0.5, -1.5], atol=1e-4)
    floored = gigpo(*columns, normalize="std", std_floor=1.0).step
    np.testing.assert_allclose(floored, [0.11875, 0.11875, 0.11875, -0.35625], atol=1e-4)


@pytest.mark.parametrize(("ddof", "std"), [(0, 1.0), (1, np.sqrt(2.0))])
def test_ddof_chooses_the_standard_deviation(ddof: int, std: float) -> None:
    result = grpo([2.0, 0.0], [0, 1], [0, 0], ddof=ddof, epsilon=0.0)
    np.testing.assert_allclose(result.total, np.array([1.0, -1.0]) / std, rtol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_equal_returns_give_zero_though_their_sums_are_rounded(epsilon: float) -> None:
    rewards = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1]
    assert sum(rewards[:3]) != sum(rewards[3:])
    columns = (rewards, [0, 0, 0, 1, 1, 1], [0] * 6)
    assert not grpo(*columns, epsilon=epsilon).total.any()
    assert not drop_uniform_groups(*columns).any()
    assert grpo(*columns).diagnostics.zero_variance_groups == 1


def test_a_group_without_spread_has_no_scale_for_a_row_penalty() -> None:
    columns = ([1.0, 1.0], [0, 1], [0, 0])
    options: Any = {"valid": [True, False], "invalid_action_penalty": 0.1, "penalty_scope": "row"}
    assert grpo(*columns, **options).total.tolist() == [0.0, 0.0]
    np.testing.assert_allclose(grpo(*columns, normalize="none", **options).total, [0.0, -0.1])
    floored = grpo(*columns, std_floor=0.5, epsilon=0.0, **options)
    np.testing.assert_allclose(floored.total, [0.0, -0.2])


@pytest.mark.parametrize(("lone_episode", "expected"), [("zero", 0.0), ("raw", 7.0)])
def test_a_group_of_one_gets_the_documented_value(lone_episode: Any, expected: float) -> None:
    for estimator in (grpo, rloo):
        result = estimator([7.0], [0], [0], lone_episode=lone_episode)
        assert result.total.tolist() == [expected]
    assert gigpo([7.0], [0], [0], ["a"], lone_episode=lone_episode).total.tolist() == [expected]


def test_an_empty_batch_gives_empty_arrays() -> None:
    results = [
        gigpo([], [], [], []),
        grpo([], [], []),
        rloo([], [], []),
        hgpo([], [], [], [], episode_term=True),
        reinforce_plus_plus([], [], []),
    ]
    assert all(result.total.shape == (0,) for result in results)
    assert discounted_returns([], [], 0.9).shape == (0,)
    assert drop_uniform_groups([], [], []).shape == (0,)


def test_hgpo_weighs_longer_shared_histories_more() -> None:
    # state b after a in rows 1 and 3, b first in row 4; gamma 0: returns are rewards
    rewards, trajectories = [0.0, 4.0, 0.0, 0.0, 2.0], [0, 0, 1, 1, 2]
    states = ["a", "b", "a", "b", "b"]
    result = hgpo(
        rewards,
        trajectories,
        [0] * 5,
        states,
        gamma=0.0,
        normalize="none",
        history_length=1,
        epsilon=0.0,
    )
    # {1, 3, 4} mean 2: 2, -2, 0, weight 2; {1, 3} mean 2: 2, -2, weight 3
    np.testing.assert_allclose(result.total, [0.0, 2.0, 0.0, -2.0, 0.0])
    assert result.step_groups is not None
    assert result.step_groups.ids.tolist() == [0, 1, 0, 1, 1]


def test_uniform_groups_are_dropped_with_all_their_rows() -> None:
    rewards = [0.0, 1.0, 1.0, 0.0, 1.0, 5.0]
    keep = drop_uniform_groups(rewards, [0, 0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 2])
    assert keep.tolist() == [False, False, False, True, True, False]


def test_ids_may_be_strings_or_any_integers() -> None:
    names = gigpo([0.0, 1.0, 0.0, 0.0], ["x", "x", "y", "y"], ["g"] * 4, TABLE[3], gamma=0.5)
    numbers = gigpo([0.0, 1.0, 0.0, 0.0], [-5, -5, 2**60, 2**60], [99] * 4, TABLE[3], gamma=0.5)
    np.testing.assert_array_equal(names.total, numbers.total)


def test_inputs_are_left_as_they_were() -> None:
    rewards = np.array(TABLE[0], np.float64)
    columns = [rewards, *(np.array(column) for column in TABLE[1:3])]
    copies = [column.copy() for column in columns]
    gigpo(*columns, TABLE[3], valid=[True, False, True, True], invalid_action_penalty=1.0)
    for column, copy in zip(columns, copies, strict=True):
        np.testing.assert_array_equal(column, copy)
