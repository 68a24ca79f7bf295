"""Tests of `longstep.state_key`: what is one state, what is two, and that keys are the same everywhere."""

from __future__ import annotations

import collections
import datetime
import enum
import functools
import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from longstep.canonicalize import drop_digits
from longstep.credit import group_steps
from longstep.errors import ConfigError, DataError, UnsupportedTypeError
from longstep.state_encoding import MAX_DEPTH
from longstep.state_key import (
    KEY_SIZE_BYTES,
    CheckedStateKey,
    fold_history,
    state_key,
    state_keys,
)

RGB = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)

# A change of any of these breaks stored data and mixed versions: it needs a new major version.
FIXED_KEYS: list[tuple[Any, str]] = [
    ("You are in a kitchen.", "bd0d662036142abd041f0602725d1e54"),
    ("", "99aa06d3014798d86001c324468d497f"),
    ("厨房 😀", "bf39c293d77f7b355461639d6a640797"),
    ("\ud800", "5d8223c465c8d5f1daab8382539269d0"),
    (b"You are in a kitchen.", "8d5e8428a58ee698c78b81b4ce4f7374"),
    (b"", "5274f72100705780605ecd8824b6d2bc"),
    (None, "c4a051d0e16f597e9a9f104a9e0cf667"),
    (True, "d3adf244d36c65c3b26900cdbefada0a"),
    (False, "c0c71a805911d83f6dd88a3971900c06"),
    (0, "fb0352685bbe2806d7b25d847f09b4e0"),
    (1, "e03a40a5e8986453ff9b342decd993f4"),
    (-1, "2776fbfc2f366e3094929dba9ec22c12"),
    (2**100, "46bafa4552468b3bc20c968951b829ac"),
    (0.0, "f5bdc4f3486a2f4837e3b97c9da87cfb"),
    (1.0, "b83c5ee20af010e419151944c71617c3"),
    (-0.1, "92f0d61a1fac3cc69d1d91bddcc3a7c2"),
    (math.inf, "67b4ad328c476c0d133dc8bd31dad35e"),
    (math.nan, "83b723256f5ea786bc4fce457e21b480"),
    ([], "6d61220bd0846a6483edb5e5d5654969"),
    ([1, 2, 3], "03e675d85a402729f135a3c0a5788b9a"),
    ((), "e19371bc4531c3d9c841f6204a1e198e"),
    ((1, 2, 3), "aa1ab9b79006e9483446dac350a9e48b"),
    (set(), "264423786b2f89e56cb27ffbdc455442"),
    ({1, "a", None, (2, 3)}, "70eae63b68f6ca828d4bb2e0c88a8ac1"),
    ({}, "43a620e7ccc95c1683cdbadc527d93f6"),
    (
        {"hp": 3, 7: "x", None: [True, 2.5], (1, 2): {"deep": ()}},
        "17011c3df8ed72f8c4ca9b5163831af5",
    ),
    (RGB, "e699fb43b849e9ee59f7f66089bd66ff"),
    (RGB.reshape(5, 4, 3), "cff8dae349dc247ad1ebc4ddeac49146"),
    (RGB[:, ::-1, 0], "4c19ab0d3e566e306fad0e4c2ab64395"),
    (np.array(7), "b6bfa972c774b13c59d838f97da144eb"),
    (np.zeros((0, 3), np.float32), "b9b9cbb41a0d49c95f07c457881e0c65"),
    (np.array([1.5, -0.0, math.nan]), "b525887866f8f203d49fa72aaee9e73d"),
    (np.array([1.5, -0.0, math.nan], np.float16), "43f4116a97e67ac2724831ba0c0e6c45"),
    (np.array([1 + 2j]), "365d8aef2ebfeb3b6c5ebef6c2f39e58"),
    (np.array([1, 300], ">u2"), "0ba6ad82f982ea25183e917a325a89d9"),
    (np.array([1, -300], np.int64), "4aaa2eacd72265e04e44bdb684e826dd"),
    (np.array([True, False]), "602a48bb4ae8f40ee719c626e6d443d3"),
    (np.array(["key", "lamp"]), "ce520069b749003efe5ebd1beef2b4b8"),
    (np.array([b"key"]), "1d16fcf644ef1fe8e892dc8775947b0c"),
    (np.arange(300, dtype=np.uint8), "136ccfe9819da5170643bc148af78cb9"),
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
hashables = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=6
)
observations = st.recursive(
    scalars | hashables,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(hashables, inner, max_size=4)
    ),
    max_leaves=12,
)
small_arrays = hnp.arrays(
    hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.array_shapes(min_dims=2, max_dims=4, min_side=0, max_side=5),
)


class Mode(enum.StrEnum):
    OPEN = "open"


class Level(enum.IntEnum):
    LOW = 1


class Colour(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(("observation", "key"), FIXED_KEYS, ids=range(len(FIXED_KEYS)))
def test_keys_never_change(observation: Any, key: str) -> None:
    assert state_key(observation).hex() == key


def test_keys_of_different_states_differ() -> None:
    keys = [state_key(observation) for observation, _ in FIXED_KEYS]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {KEY_SIZE_BYTES}


@pytest.mark.parametrize("hash_seed", ["0", "1", "12345"])
def test_keys_are_equal_in_a_process_with_another_hash_seed(hash_seed: str) -> None:
    program = (
        "import numpy as np\n"
        "from longstep.state_key import state_key\n"
        "state = {'inventory': {'key', 'lamp', 'mug', 3, None, (1, 2)}, 'at': (2, 3.5), True: [b'x'],\n"
        "         'seen': frozenset(f'room {i}' for i in range(50)), 'map': np.eye(3)}\n"
        "print(state_key(state).hex())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    state = {
        "seen": frozenset(f"room {i}" for i in range(50)),
        "map": np.eye(3),
        True: [b"x"],
        "at": (2, 3.5),
        "inventory": {(1, 2), None, 3, "mug", "lamp", "key"},
    }
    assert run.stdout.strip() == state_key(state).hex()


def test_importing_state_keys_loads_no_heavy_package() -> None:
    program = (
        "import sys, longstep.state_key, longstep.canonicalize\n"
        "print([name for name in ('numba', 'torch', 'gymnasium', 'PIL', 'zmq') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_key_of_a_text_is_xxh3_of_its_utf8() -> None:
    xxhash = pytest.importorskip("xxhash")
    text = "Küche 厨房 😀"
    assert state_key(text) == xxhash.xxh3_128_digest(text.encode())


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (1, np.int64(1)),
        (1, np.uint8(1)),
        (1, Level.LOW),
        (True, np.bool_(True)),
        (0.5, np.float32(0.5)),
        (0.5, np.float64(0.5)),
        (math.nan, -math.nan),
        (math.nan, np.float16(math.nan)),
        (0.0, -0.0),
        ("open", Mode.OPEN),
        ("open", np.str_("open")),
        (b"ab", np.bytes_(b"ab")),
        ((1, 2), Point(1, 2)),
        ({1, 2}, frozenset({2, 1})),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1, "b": 2}, collections.OrderedDict(b=2, a=1)),
        (np.array([math.nan, 0.0]), np.array([-math.nan, -0.0])),
        (np.array([1.5, -2.0]), np.array([1.5, -2.0], ">f8")),
        (np.array([1, 300], "<u2"), np.array([1, 300], ">u2")),
        (np.array(["ab"], "<U2"), np.array(["ab"], ">U2")),
        (RGB, np.asfortranarray(RGB)),
        (RGB[::-1, ::2], RGB[::-1, ::2].copy()),
        (np.array([1 + 0j, math.nan]), np.array([complex(1, -0.0), math.nan])),
        (np.longlong(7), np.int32(7)),
    ],
)
def test_what_is_the_same_state_has_the_same_key(one: Any, same: Any) -> None:
    assert state_key(one) == state_key(same)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], (1, 2)),
        ([1, 2], np.array([1, 2])),
        ([[1], 2], [1, [2]]),
        ([[], []], [[[]]]),
        ({1: 2}, {2: 1}),
        ({1: 2}, {(1, 2)}),
        (1, np.array(1)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros((0, 3)), np.zeros((3, 0))),
        (np.zeros(2, np.uint8), np.zeros(2, np.int8)),
        (np.zeros(2, np.bool_), np.zeros(2, np.uint8)),
        (np.zeros((2, 2), np.uint8), np.zeros(4, np.uint8)),
        ("ab", b"ab"),
        ("", b""),
        ("", None),
        (0, None),
        ("\u00e9", "e\u0301"),
        (2**64, 0),
        (-1, 255),
        ({}, set()),
        ((), []),
    ],
)
def test_what_is_another_state_has_another_key(one: Any, other: Any) -> None:
    assert state_key(one) != state_key(other)


@settings(deadline=None)
@given(observations)
def test_equal_observations_made_apart_have_equal_keys(observation: Any) -> None:
    assert state_key(_rebuilt(observation)) == state_key(observation)


@settings(deadline=None)
@given(observations, observations)
def test_keys_are_equal_exactly_for_equal_typed_observations(one: Any, other: Any) -> None:
    assert (state_key(one) == state_key(other)) == (_typed(one) == _typed(other))


@settings(deadline=None)
@given(st.lists(observations, max_size=5))
def test_batch_keys_are_the_keys_of_the_elements(batch: list[Any]) -> None:
    keys = state_keys(batch)
    assert keys.dtype == np.dtype("V16")
    assert [key.tobytes() for key in keys] == [state_key(observation) for observation in batch]


@settings(deadline=None)
@given(small_arrays)
def test_batch_keys_of_an_array_are_the_keys_of_its_rows(array: np.ndarray) -> None:
    rows = [state_key(row) for row in array]
    assert [key.tobytes() for key in state_keys(array)] == rows
    assert [key.tobytes() for key in state_keys(np.asfortranarray(array))] == rows
    swapped = array.astype(array.dtype.newbyteorder())
    assert [key.tobytes() for key in state_keys(swapped)] == rows


def test_batch_keys_of_images_and_of_scalars_match_single_keys() -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 96, 96, 3), np.uint8)
    assert [key.tobytes() for key in state_keys(images)] == [state_key(i) for i in images]
    assert [key.tobytes() for key in state_keys(np.array([1, 2]))] == [state_key(1), state_key(2)]
    texts = np.array(["a", 1, None], object)
    assert [key.tobytes() for key in state_keys(texts)] == [state_key(t) for t in texts]
    assert len(state_keys([])) == 0
    assert len(state_keys(np.zeros((0, 4, 4)))) == 0


def test_batch_keys_apply_the_canonicalizer() -> None:
    keys = state_keys(["turn 1", "turn 2"], canonicalize=drop_digits)
    assert keys[0].tobytes() == keys[1].tobytes() == state_key("turn ")


def test_arrays_are_hashed_without_being_changed() -> None:
    array = np.array([math.nan, -0.0])
    before = array.tobytes()
    state_key(array)
    state_keys(np.stack([array, array]))
    assert array.tobytes() == before


def test_pictures_are_told_apart_by_mode_palette_and_pixels() -> None:
    image = pytest.importorskip("PIL.Image")
    picture = image.fromarray(RGB)
    assert state_key(picture) == state_key(image.fromarray(RGB.copy()))
    assert state_key(picture) != state_key(RGB)
    assert state_key(picture) != state_key(picture.convert("L"))
    palettes = [image.new("P", (2, 2)) for _ in range(2)]
    palettes[0].putpalette([255, 0, 0])
    palettes[1].putpalette([0, 255, 0])
    assert state_key(palettes[0]) != state_key(palettes[1])
    assert state_key({"screen": picture}) == state_key({"screen": picture.copy()})


@pytest.mark.parametrize(
    ("observation", "path"),
    [
        (object(), r"`\$`"),
        ({"inventory": [1, 2, object()]}, r"`\$\.inventory\[2\]`"),
        ({"a b": {3: (0, [1j])}}, r"`\$\['a b'\]\[3\]\[1\]\[0\]`"),
        ({"seen": {Colour.RED}}, r"`\$\.seen\{member\}`"),
        ([np.array([None])], r"dtype object at `\$\[0\]`"),
        (bytearray(b"ab"), "bytearray"),
        (np.longdouble(1), "longdouble"),
        (np.datetime64("2026-01-01"), "datetime64"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        (np.zeros(2, [("a", int)]), "dtype"),
        (datetime.date(2026, 1, 1), "datetime.date"),
        (iter(()), "iterator"),
        (len, "builtin_function"),
    ],
)
def test_what_has_no_stable_identity_is_an_error_that_names_it(observation: Any, path: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=path):
        state_key(observation)


def test_nesting_has_a_limit_and_a_cycle_is_found() -> None:
    nested: list[Any] = []
    for _ in range(MAX_DEPTH):
        nested = [nested]
    assert len(state_key(nested)) == KEY_SIZE_BYTES
    with pytest.raises(DataError, match="64 levels"):
        state_key([nested])
    cycle: dict[str, Any] = {}
    cycle["self"] = [cycle, cycle]
    with pytest.raises(DataError, match="contains itself"):
        state_key(cycle)


def test_an_error_in_a_batch_names_the_observation() -> None:
    with pytest.raises(UnsupportedTypeError, match=r"at `\$`.*observation 1"):
        state_keys(["a", object()])
    with pytest.raises(UnsupportedTypeError, match="dtype"):
        state_keys(np.zeros((2, 2), "O"))
    with pytest.raises(UnsupportedTypeError, match="MaskedArray"):
        state_keys(np.ma.masked_array(np.zeros((2, 2)), True))
    for single in ("text", b"bytes", 3):
        with pytest.raises(UnsupportedTypeError, match="sequence"):
            state_keys(single)  # pyright: ignore[reportArgumentType]


def test_canonicalizer_runs_before_the_hash() -> None:
    key = functools.partial(state_key, canonicalize=drop_digits)
    assert key("turn 3") == key("turn 14") == state_key("turn ")


def test_checked_key_accepts_repeats_and_reports_a_collision() -> None:
    checked = CheckedStateKey()
    for observation, key in [*FIXED_KEYS, *FIXED_KEYS]:
        assert checked(observation).hex() == key
    careless = CheckedStateKey(lambda text: state_key(len(text)))
    assert careless("north") == careless("north")
    with pytest.raises(DataError, match=r"expected different keys.*'south'"):
        careless("south")


def test_checked_key_ignores_what_the_canonicalizer_removes() -> None:
    checked = CheckedStateKey(canonicalize=drop_digits)
    assert checked("turn 1") == checked("turn 22")


def test_folded_history_tells_states_with_different_pasts_apart() -> None:
    #        trajectory 0: a b c a    trajectory 1: b c b, interleaved
    states = ["a", "b", "b", "c", "c", "b", "a"]
    trajectories = np.array([0, 1, 0, 1, 0, 1, 0])
    keys = state_keys(states)
    assert fold_history(keys, trajectories, 0).tobytes() == keys.tobytes()
    one = [key.tobytes() for key in fold_history(keys, trajectories, 1)]
    pasts = ["-a", "-b", "ab", "bc", "bc", "cb", "ca"]
    for row, past in enumerate(pasts):
        assert [key == one[row] for key in one] == [other == past for other in pasts]
    two = [key.tobytes() for key in fold_history(keys, trajectories, 2)]
    assert two[3] != two[4]  # --bc is not abc


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30), st.integers(1, 3))
def test_folded_history_is_equal_exactly_for_equal_recent_states(
    rows: list[tuple[int, int]], k: int
) -> None:
    keys = state_keys([state for state, _ in rows])
    folded = [key.tobytes() for key in fold_history(keys, np.array([t for _, t in rows], int), k)]
    pasts: list[tuple[int, ...]] = []
    for at, (_, trajectory) in enumerate(rows):
        own = [state for state, other in rows[: at + 1] if other == trajectory]
        pasts.append(tuple(own[-k - 1 :]))
    numbers = {past: folded[at] for at, past in enumerate(pasts)}
    assert [numbers[past] for past in pasts] == folded
    assert len(set(folded)) == len(set(pasts))


def test_folded_history_checks_its_arguments() -> None:
    keys = state_keys(["a", "b"])
    with pytest.raises(DataError, match="trajectory_ids"):
        fold_history(keys, np.array([0]), 1)
    with pytest.raises(DataError, match="V16"):
        fold_history(np.array([1, 2]), np.array([0, 0]), 1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="`k` of at least 0"):
        fold_history(keys, np.array([0, 0]), -1)
    with pytest.raises(ConfigError, match="`k` of at most 1000"):
        fold_history(keys, np.array([0, 0]), 10**9)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30), st.integers(0, 3))
def test_folded_history_makes_the_step_groups_of_credit(
    rows: list[tuple[int, int]], k: int
) -> None:
    keys = state_keys([state for state, _ in rows])
    trajectories = np.array([trajectory for _, trajectory in rows], int)
    groups = trajectories % 2
    folded = group_steps(fold_history(keys, trajectories, k), groups)
    of_plain_keys = group_steps(keys, groups, trajectory_ids=trajectories, history_length=k)
    assert folded.ids.tolist() == of_plain_keys.ids.tolist()


def _rebuilt(value: Any) -> Any:
    """An equal observation that shares nothing and has its dict entries in another order."""
    if isinstance(value, dict):
        return {_rebuilt(key): _rebuilt(item) for key, item in reversed(value.items())}
    if isinstance(value, list | tuple | frozenset):
        return type(value)(_rebuilt(item) for item in value)
    return value


def _typed(value: Any) -> Any:
    """A form whose equality is that of states: types told apart, NaN equal to itself."""
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else value + 0.0)
    if isinstance(value, dict):
        return ("dict", frozenset((_typed(key), _typed(item)) for key, item in value.items()))
    if isinstance(value, frozenset):
        return ("set", tuple(sorted(map(repr, map(_typed, value)))))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(map(_typed, value)))
    return (type(value).__name__, value)
