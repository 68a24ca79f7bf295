"""Tests of `longstep.canonicalize`: what each canonicalizer removes, and what it leaves."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest

from longstep.canonicalize import (
    chain,
    collapse_spaces,
    crop_image,
    drop_digits,
    drop_timestamps,
    lower,
    round_floats,
    sort_lines,
    sort_lists,
    strip,
)
from longstep.errors import ConfigError, DataError
from longstep.state_key import state_key


@pytest.mark.parametrize(
    ("canonicalize", "observation", "expected"),
    [
        (drop_digits, "Turn 12: you have 3 keys", "Turn : you have  keys"),
        (lower, "A Red Door", "a red door"),
        (strip, "  a door \n", "a door"),
        (collapse_spaces, "\ta  red\n\n door ", "a red door"),
        (sort_lines, "mug\napple\nlamp", "apple\nlamp\nmug"),
        (drop_timestamps, "2026-11-30 12:03:43.5 +01:00 ok", " ok"),
        (drop_timestamps, "seen 2026-11-30T12:03Z, 31.12.2026 and 1/2/2026", "seen ,  and "),
        (drop_timestamps, "from 9:05 to 11:59:59 PM", "from  to "),
        (drop_timestamps, "room 12, 3-4, ratio 1:2, port 10.0.0.1:8080", None),
        (round_floats(1), 0.26, 0.3),
        (round_floats(-1), 26.0, 30.0),
        (round_floats(1), 26, 26),
    ],
)
def test_canonicalizer_removes_only_its_own(
    canonicalize: Any, observation: Any, expected: Any
) -> None:
    wanted = observation if expected is None else expected
    assert canonicalize(observation) == wanted
    nested = {"A 1": [observation, (observation, None, 7)], "seen": frozenset({observation})}
    assert canonicalize(nested) == {
        "A 1": [wanted, (wanted, None, 7)],
        "seen": frozenset({wanted}),
    }


def test_sorted_lists_have_one_key_for_every_order() -> None:
    one = {"items": [3, "a", None, [2, 1]], "at": (2, 1)}
    other = {"items": [[1, 2], None, "a", 3], "at": (1, 2)}
    assert state_key(one, canonicalize=sort_lists) == state_key(other, canonicalize=sort_lists)
    assert state_key(one, canonicalize=sort_lists) != state_key(
        {"items": [3, "a", None], "at": (2, 1)}, canonicalize=sort_lists
    )


def test_rounding_reaches_arrays_and_numpy_scalars_but_not_integers() -> None:
    rounded = round_floats(2)(
        {"x": np.array([0.123, 1.0]), "y": np.float32(0.126), "n": np.arange(3)}
    )
    assert rounded["x"].tolist() == [0.12, 1.0]
    assert rounded["y"] == np.float32(0.13)
    assert rounded["n"].tolist() == [0, 1, 2]


def test_cropping_cuts_the_sides_of_arrays_and_pictures() -> None:
    frame = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    crop = crop_image(top=1, bottom=2, left=3, right=1)
    assert (crop(frame) == frame[1:4, 3:7]).all()
    assert (crop({"screen": frame[..., 0]})["screen"] == frame[1:4, 3:7, 0]).all()
    assert crop(np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    counter = frame.copy()
    counter[0] = 255
    assert state_key(frame, canonicalize=crop) == state_key(counter, canonicalize=crop)
    image = pytest.importorskip("PIL.Image")
    assert (np.asarray(crop(image.fromarray(frame))) == frame[1:4, 3:7]).all()


def test_wrong_margins_are_an_error() -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        crop_image(top=-1)
    with pytest.raises(DataError, match="4 x 4"):
        crop_image(top=2, bottom=2)(np.zeros((4, 4)))


def test_chained_canonicalizers_run_in_order_and_can_be_pickled() -> None:
    tidy = chain(drop_digits, lower, collapse_spaces, round_floats(1), crop_image(top=1))
    again = pickle.loads(pickle.dumps(functools.partial(state_key, canonicalize=tidy)))
    assert again("Step 3:  A Room") == state_key("step : a room")
    assert chain()("as it is") == "as it is"


def test_a_cycle_is_an_error_and_not_endless() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(DataError, match="contains itself"):
        lower(cycle)


def test_the_observation_itself_is_not_changed() -> None:
    observation = {"items": ["B", "a"]}
    sort_lists(lower(observation))
    assert observation == {"items": ["B", "a"]}
