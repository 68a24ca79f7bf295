"""Turn-level GAE against tables worked out by hand and the textbook loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstep.credit import discounted_returns, turn_gae
from longstep.errors import ConfigError, DataError


def test_termination_is_followed_by_zero() -> None:
    # deltas 0 + 0.5 * 2 - 4 = -3 and 8 + 0 - 2 = 6; lam 0.5: -3 + 0.25 * 6
    advantages, returns = turn_gae(
        [0.0, 8.0], [4.0, 2.0], [0, 0], gamma=0.5, lam=0.5, terminated=[False, True]
    )
    assert advantages.tolist() == [-1.5, 6.0]
    assert returns.tolist() == [2.5, 8.0]


def test_truncation_is_followed_by_the_bootstrap_value() -> None:
    # the last delta is 8 + 0.5 * 10 - 2 = 11
    advantages, returns = turn_gae(
        [0.0, 8.0],
        [4.0, 2.0],
        [0, 0],
        gamma=0.5,
        lam=0.5,
        terminated=[False, False],
        bootstrap_values=[99.0, 10.0],
    )
    assert advantages.tolist() == [-0.25, 11.0]
    assert returns.tolist() == [3.75, 13.0]


def test_bootstrap_values_may_be_one_for_each_trajectory() -> None:
    # trajectory 7 appears first, its value is 1; trajectory 3 is second, its value is 2
    advantages, _ = turn_gae(
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [7, 3, 7, 3],
        gamma=1.0,
        lam=1.0,
        terminated=[False, False, False, False],
        bootstrap_values=[1.0, 2.0],
    )
    assert advantages.tolist() == [1.0, 2.0, 1.0, 2.0]


def test_lambda_one_without_values_gives_discounted_returns() -> None:
    rewards, trajectories = [1.0, 0.0, 2.0, 3.0], [0, 1, 0, 1]
    _, returns = turn_gae(
        rewards, [0.0] * 4, trajectories, gamma=0.9, lam=1.0, terminated=[False, False, True, True]
    )
    np.testing.assert_array_equal(returns, discounted_returns(rewards, trajectories, 0.9))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_interleaved_trajectories_are_the_textbook_loop(
    shapes: list[tuple[int, bool]], random: Any
) -> None:
    rng = np.random.default_rng(random.randrange(2**32))
    names = np.repeat(np.arange(len(shapes)), [length for length, _ in shapes])
    names = rng.permutation(names)
    rewards, values, bootstrap = rng.normal(size=(3, len(names)))
    terminated = np.zeros(len(names), bool)
    expected = np.zeros(len(names))
    for name, (length, ends) in enumerate(shapes):
        rows = np.flatnonzero(names == name)
        assert len(rows) == length
        terminated[rows[-1]] = ends
        carry, next_value = 0.0, 0.0 if ends else bootstrap[rows[-1]]
        for row in rows[::-1]:
            carry = rewards[row] + 0.9 * next_value - values[row] + 0.9 * 0.8 * carry
            expected[row], next_value = carry, values[row]
    advantages, returns = turn_gae(
        rewards,
        values,
        names,
        gamma=0.9,
        lam=0.8,
        terminated=terminated,
        bootstrap_values=bootstrap,
    )
    np.testing.assert_allclose(advantages, expected, atol=1e-5)
    np.testing.assert_allclose(returns, expected + values, atol=1e-5)


def test_padding_rows_get_zero_and_do_not_cut_a_trajectory() -> None:
    advantages, returns = turn_gae(
        [0.0, np.nan, 8.0],
        [4.0, np.nan, 2.0],
        [0, 0, 0],
        gamma=0.5,
        lam=0.5,
        terminated=[False, True, True],
        mask=[True, False, True],
    )
    assert advantages.tolist() == [-1.5, 0.0, 6.0]
    assert returns.tolist() == [2.5, 0.0, 8.0]


def test_an_open_end_without_a_bootstrap_value_is_an_error() -> None:
    with pytest.raises(DataError, match=r"`bootstrap_values`.*ends at row 1 did not terminate"):
        turn_gae([0.0, 0.0], [0.0, 0.0], [0, 0], gamma=1.0, lam=1.0, terminated=[False, False])


def test_a_step_after_termination_is_an_error() -> None:
    with pytest.raises(DataError, match="True at row 0, which row 2 follows"):
        turn_gae([0.0] * 3, [0.0] * 3, [0, 1, 0], gamma=1.0, lam=1.0, terminated=[True, True, True])


def test_bootstrap_values_of_another_length_are_an_error() -> None:
    with pytest.raises(DataError, match="expected 3 `bootstrap_values`, one per row, or 1"):
        turn_gae(
            [0.0] * 3,
            [0.0] * 3,
            [0, 0, 0],
            gamma=1.0,
            lam=1.0,
            terminated=[False] * 3,
            bootstrap_values=[0.0, 0.0],
        )


@pytest.mark.parametrize("name", ["gamma", "lam"])
def test_factors_outside_zero_and_one_are_errors(name: str) -> None:
    factors = {"gamma": 1.0, "lam": 1.0, name: 1.5}
    with pytest.raises(ConfigError, match=f"`{name}` in \\[0, 1\\], got 1.5"):
        turn_gae([0.0], [0.0], [0], terminated=[True], **factors)
