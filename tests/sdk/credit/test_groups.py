"""Which rows form a step group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from longstep.credit import StepGroups, gigpo, group_steps
from longstep.errors import ConfigError, DataError, UnsupportedTypeError

STATES = ["hall", "cave", "hall", "cave", "hall"]
GROUPS = [0, 0, 0, 1, 1]
IDS = [0, 1, 0, 2, 3]


def digest(name: str) -> bytes:
    """16 bytes that end and begin with zeros, as a hash may."""
    return b"\0\0" + name.encode().ljust(12, b"\0") + b"\0\0"


@pytest.mark.parametrize(
    "state_keys",
    [
        STATES,
        tuple(STATES),
        [state.encode() for state in STATES],
        [digest(state) for state in STATES],
        np.array([np.void(digest(state)) for state in STATES]),
        np.array(STATES),
        np.array(STATES, dtype=object),
        [7, -3, 7, -3, 7],
        np.array([7, -3, 7, -3, 7]),
        np.array([7, 2**64 - 1, 7, 2**64 - 1, 7], np.uint64),
        np.array([[1, 2], [2, 1], [1, 2], [2, 1], [1, 2]], np.uint64),
        np.array([1, 0, 1, 0, 1], np.uint8),
    ],
    ids=lambda keys: f"{type(keys).__name__} of {type(keys[0]).__name__}",
)
def test_keys_may_come_in_any_usual_form(state_keys: Any) -> None:
    groups = group_steps(state_keys, GROUPS)
    assert groups.ids.tolist() == IDS
    assert groups.sizes.tolist() == [2, 1, 1, 1]
    assert [rows.tolist() for rows in groups.rows()] == [[0, 2], [1], [3], [4]]


def test_keys_that_share_one_word_are_apart() -> None:
    keys = np.array([[1, 1], [1, 2], [2, 1], [1, 1]], np.uint64)
    assert group_steps(keys, [0] * 4).ids.tolist() == [0, 1, 2, 0]


def test_a_history_tells_equal_states_apart() -> None:
    states = ["a", "c", "b", "c", "a", "c"]
    trajectories = [0, 0, 1, 1, 2, 2]
    groups = group_steps(states, [0] * 6, trajectory_ids=trajectories, history_length=1)
    assert groups.ids.tolist() == [0, 1, 2, 3, 0, 1]


def test_a_history_does_not_reach_across_interleaved_trajectories() -> None:
    states = ["a", "b", "c", "c"]
    groups = group_steps(states, [0] * 4, trajectory_ids=[0, 1, 0, 1], history_length=1)
    assert groups.ids.tolist() == [0, 1, 2, 3]


def test_a_state_at_the_start_is_not_one_with_a_longer_history() -> None:
    groups = group_steps(["a", "a", "a"], [0] * 3, trajectory_ids=[0, 0, 1], history_length=5)
    assert groups.ids.tolist() == [0, 1, 0]


def test_a_predicate_on_keys_is_asked_once_for_each() -> None:
    asked = []

    def may_anchor(key: str) -> bool:
        asked.append(key)
        return key != "hall"

    groups = group_steps(STATES, GROUPS, anchors=may_anchor)
    assert groups.ids.tolist() == [-1, 0, -1, 1, -1]
    assert asked == ["hall", "cave"]


def test_a_predicate_sees_sixteen_byte_keys_as_bytes() -> None:
    keys = np.array([np.void(digest(state)) for state in STATES])
    groups = group_steps(keys, GROUPS, anchors=lambda key: key == digest("cave"))
    assert groups.ids.tolist() == [-1, 0, -1, 1, -1]


def test_padding_rows_are_in_no_group() -> None:
    groups = group_steps(STATES, GROUPS, mask=[False, True, True, True, False])
    assert groups.ids.tolist() == [-1, 0, 1, 2, -1]
    assert groups.sizes.tolist() == [1, 1, 1]


def test_given_groups_replace_state_keys() -> None:
    columns = ([1.0, 0.0, 5.0], [0, 1, 2], [0, 0, 0])
    groups = StepGroups.from_labels([4, 4, -1])
    by_groups = gigpo(*columns, step_groups=groups)
    assert by_groups.step.tolist() == [0.5, -0.5, 0.0]
    by_both = gigpo(*columns, ["x", "y", "z"], step_groups=groups)
    np.testing.assert_array_equal(by_both.total, by_groups.total)


def test_given_groups_lose_their_padding_rows() -> None:
    groups = StepGroups.from_labels([0, 0, 0])
    result = gigpo(
        [1.0, 0.0, 9.0], [0, 1, 2], [0, 0, 0], step_groups=groups, mask=[True, True, False]
    )
    assert result.step.tolist() == [0.5, -0.5, 0.0]
    assert result.step_groups is not None
    assert result.step_groups.ids.tolist() == [0, 0, -1]


def test_a_group_that_spans_two_tasks_is_refused() -> None:
    groups = StepGroups.from_labels([0, 0])
    with pytest.raises(DataError, match=r"inside one episode group.*at row 0"):
        gigpo([1.0, 0.0], [0, 1], [0, 1], step_groups=groups)


def test_options_of_grouping_do_not_go_with_given_groups() -> None:
    groups = StepGroups.from_labels([0, 0])
    with pytest.raises(ConfigError, match="beside `step_groups`"):
        gigpo([1.0, 0.0], [0, 1], [0, 0], step_groups=groups, history_length=1)


def test_neither_keys_nor_groups_is_an_error() -> None:
    with pytest.raises(ConfigError, match="`state_keys` or `step_groups`, got neither"):
        gigpo([1.0], [0], [0])


def test_a_history_needs_trajectories() -> None:
    with pytest.raises(ConfigError, match="`trajectory_ids` with `history_length` 2"):
        group_steps(["a"], [0], history_length=2)


@pytest.mark.parametrize(
    ("state_keys", "message"),
    [
        (["a", None], "NoneType at row 1"),
        (["a", b"a"], "bytes at row 1"),
        ([1, True], "bool at row 1"),
        ([1.5, 2.5], "float at row 0"),
        (np.array([1.5, 2.5]), "float at row 0"),
        ("ab", "a sequence in `state_keys`, got str"),
    ],
)
def test_keys_without_identity_are_refused(state_keys: Any, message: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=message):
        group_steps(state_keys, [0, 0])


def test_labels_must_be_integers() -> None:
    with pytest.raises(DataError, match="integers in `labels`"):
        StepGroups.from_labels(["a", "b"])
