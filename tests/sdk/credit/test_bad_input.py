"""Malformed arguments: each gives one error that names the argument and the row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from longstep.credit import (
    discounted_returns,
    drop_uniform_groups,
    gigpo,
    graph,
    grpo,
    hgpo,
    reinforce_plus_plus,
    rloo,
    turn_gae,
)
from longstep.errors import ConfigError, DataError

GOOD: dict[str, Any] = {
    "rewards": [0.0, 1.0, 0.0],
    "trajectory_ids": [0, 0, 1],
    "group_ids": [0, 0, 0],
}
KEYS = ["a", "b", "a"]


def estimators() -> dict[str, Any]:
    return {
        "gigpo": lambda **columns: gigpo(**{"state_keys": KEYS, **columns}),
        "hgpo": lambda **columns: hgpo(**{"state_keys": KEYS, **columns}),
        "graph": lambda **columns: graph(**{"state_keys": KEYS, **columns}),
        "grpo": grpo,
        "rloo": rloo,
        "reinforce_plus_plus": reinforce_plus_plus,
    }


every_estimator = pytest.mark.parametrize("name", list(estimators()))


@pytest.mark.parametrize(
    ("column", "bad", "message"),
    [
        ("rewards", [0.0, np.nan, 0.0], "finite numbers in `rewards`, got nan at row 1"),
        ("rewards", [0.0, 0.0, np.inf], "finite numbers in `rewards`, got inf at row 2"),
        ("rewards", ["x", "y", "z"], "expected numbers in `rewards`, got 'x' at row 0"),
        ("rewards", [0.0, "1", 0.0], "expected numbers in `rewards`, got '1' at row 1"),
        ("rewards", [0.0, 0.0, 1j], r"expected numbers in `rewards`, got 1j at row 2"),
        ("rewards", [0.0, 0.0, None], "expected numbers in `rewards`, got None at row 2"),
        ("rewards", [[0.0, 1.0, 2.0]], "one value per row in `rewards`, got an array of shape"),
        ("rewards", [0.0, [1.0], 2.0], "expected numbers in `rewards`"),
        ("trajectory_ids", [0, 0], "3 rows in `trajectory_ids`.* got 2; .* row 2"),
        ("trajectory_ids", [0, 0, 1, 1], "3 rows in `trajectory_ids`.* got 4; .* row 3"),
        ("trajectory_ids", [0.5, 0.5, 1.5], "integers or strings in `trajectory_ids`"),
        ("trajectory_ids", 0, "one value per row in `trajectory_ids`, got"),
        ("trajectory_ids", ["a", "a", np.nan], "strings in `trajectory_ids`, got nan at row 2"),
        ("trajectory_ids", [0, None, 1], "strings in `trajectory_ids`, got None at row 1"),
        ("group_ids", [0, 0], "3 rows in `group_ids`"),
        ("group_ids", [0, 1, 0], r"trajectory 0 in one .* group 0 at row 0 and group 1 at row 1"),
        ("mask", [True, True], "3 rows in `mask`"),
        ("mask", [1, 2, 0], "True or False per row in `mask`"),
    ],
)
@every_estimator
def test_malformed_columns_are_named(name: str, column: str, bad: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        estimators()[name](**{**GOOD, column: bad})


@every_estimator
def test_an_error_names_the_row_of_the_caller_when_some_are_padding(name: str) -> None:
    columns = {**GOOD, "rewards": [0.0, 0.0, np.nan], "mask": [False, True, True]}
    with pytest.raises(DataError, match="at row 2"):
        estimators()[name](**columns)


@pytest.mark.parametrize("name", ["gigpo", "hgpo", "graph"])
def test_state_keys_of_another_length_are_named(name: str) -> None:
    with pytest.raises(DataError, match=r"3 rows in `state_keys`.* got 2; .* row 2"):
        estimators()[name](**GOOD, state_keys=["a", "b"])


@every_estimator
def test_valid_of_another_length_is_named(name: str) -> None:
    with pytest.raises(DataError, match="3 rows in `valid`"):
        estimators()[name](**GOOD, valid=[True])


@every_estimator
def test_a_penalty_without_knowing_what_is_valid_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="expected `valid` with an `invalid_action_penalty`"):
        estimators()[name](**GOOD, invalid_action_penalty=0.1)


@pytest.mark.parametrize(
    ("option", "bad", "message"),
    [
        ("gamma", 1.1, r"`gamma` in \[0, 1\], got 1.1"),
        ("gamma", float("nan"), r"`gamma` in \[0, 1\], got nan"),
        ("gamma", "0.9", "a number as `gamma`, got '0.9'"),
        ("gamma", None, "a number as `gamma`, got None"),
        ("inner_group_size", 2.0, "a whole number as `inner_group_size`, got 2.0"),
        (
            "anchors",
            lambda key: "yes",
            "True or False from the function `anchors`, got 'yes' .* row 0",
        ),
        ("omega", float("inf"), "finite `omega`"),
        ("normalize", "sdt", "did you mean `std`"),
        ("baseline", "trajectories", "did you mean `trajectory`"),
        ("penalty_scope", "rows", "did you mean `row`"),
        ("repeats", "last", "one of 'all', 'first', 'mean', got 'last'"),
        ("lone_episode", None, "one of 'zero', 'raw', got None"),
        ("inner_group_size", 1, "`inner_group_size` of at least 2, got 1"),
        ("ddof", 2, "`ddof` of at most 1, got 2"),
        ("epsilon", -1.0, "`epsilon` of 0 or more"),
        ("std_floor", float("nan"), "`std_floor` of 0 or more"),
        ("history_length", -1, "`history_length` of at least 0, got -1"),
        ("invalid_action_penalty", -0.1, "`invalid_action_penalty` of 0 or more"),
        ("step_groups", [0, 1, 2], "StepGroups in `step_groups`, got list"),
    ],
)
def test_options_outside_their_range_are_named(option: str, bad: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gigpo(**GOOD, state_keys=KEYS, **{option: bad})


def test_the_other_functions_check_their_rows_too() -> None:
    with pytest.raises(DataError, match="`rewards`, got nan at row 0"):
        discounted_returns([np.nan], [0], 0.9)
    with pytest.raises(DataError, match="`rewards`, got nan at row 0"):
        drop_uniform_groups([np.nan], [0], [0])
    with pytest.raises(DataError, match="`values`, got nan at row 0"):
        turn_gae([0.0], [np.nan], [0], gamma=1.0, lam=1.0, terminated=[True])
    with pytest.raises(ConfigError, match="`max"):
        graph(**GOOD, state_keys=KEYS, backup="maximum")


@pytest.mark.parametrize("name", ["gigpo", "hgpo", "graph", "grpo", "rloo"])
def test_no_groups_are_not_taken_for_one_group(name: str) -> None:
    with pytest.raises(DataError, match="integers or strings in `group_ids`, got None"):
        estimators()[name](**{**GOOD, "group_ids": None})


def test_a_baseline_needs_groups() -> None:
    with pytest.raises(ConfigError, match="`group_ids` with `baseline` 'trajectory', got None"):
        reinforce_plus_plus([1.0, 0.0], [0, 1], baseline="trajectory")


def test_hgpo_names_the_ddof_that_is_wrong() -> None:
    with pytest.raises(ConfigError, match="`episode_ddof` of at most 1, got 2"):
        hgpo(**GOOD, state_keys=KEYS, episode_ddof=2)
    with pytest.raises(ConfigError, match="`length_weight_alpha` with finite weights, got 1e"):
        hgpo(**GOOD, state_keys=KEYS, length_weight_alpha=1e300)


def test_results_beyond_float32_are_an_error_at_their_row() -> None:
    with pytest.raises(DataError, match=r"float32 holds, got .* at row 0; scale the rewards"):
        grpo([1e39, 0.0], [0, 1], [0, 0], normalize="none")


def test_a_number_and_its_text_are_two_ids() -> None:
    codes = gigpo([1.0, 0.0], [1, "1"], [0, 0], ["a", "a"]).total
    assert codes.tolist() == [1.0, -1.0]


def test_a_history_longer_than_any_trajectory_ends_at_once() -> None:
    columns = {**GOOD, "state_keys": KEYS}
    for estimate in (gigpo, graph, hgpo):
        longest = estimate(**columns, history_length=2)
        endless = estimate(**columns, history_length=10**12)
        assert endless.total.tolist() == longest.total.tolist()
