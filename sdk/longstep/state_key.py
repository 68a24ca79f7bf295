"""State keys: the 128-bit identity of an observation, equal across processes, machines and Python versions.

A key is the XXH3 128-bit digest of a canonical form, in the digest's canonical (big-endian) byte order:

- a `str` is its UTF-8 bytes, nothing else, so any language can compute the key of a text;
- every other value starts with the byte 0xFF, which no UTF-8 text contains, and a letter for its type;
- an array is its dtype, its shape and the digest of its elements (C order, little-endian);
- a list or tuple is the keys of its items; a set is the sorted keys of its members; a dict is the sorted pairs of
  the keys of its keys and of its values.

What counts as the same state:

- types are told apart: `1`, `True`, `1.0` and `"1"` have four keys, and so have a list, a tuple and an array of the
  same numbers, and arrays that differ in dtype or shape only;
- a numpy scalar is the Python number it stands for: `np.int64(1)` and `np.uint8(1)` are `1`, `np.float32(0.5)` is `0.5`,
  `np.bool_(True)` is `True`. A zero-dimensional array is an array;
- a subclass is its base: a StrEnum member is its text, an IntEnum member its number, a namedtuple a tuple, an
  OrderedDict a dict whose order does not count; `set` and `frozenset` are one type;
- every NaN is the same NaN, and `-0.0` is `0.0`, as numbers and inside arrays;
- text is not normalised: what should not tell two states apart is removed by `canonicalize` (`longstep.canonicalize`).

The digest is not cryptographic. By accident two of n different observations share a key with probability n^2 / 2^129,
under 1e-25 for a million; somebody who chooses observations in order to collide can. `CheckedStateKey` compares.

Hashing on arrival is all the incremental use there is: a key costs well under a microsecond for a text and a few for an
RGB image of 96x96, so a collector computes it when the observation comes in, keeps 16 bytes, and grouping a batch only
has to compare integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from longstep.arguments import check_callable, check_count
from longstep.errors import DataError, UnsupportedTypeError
from longstep.kernels.hashing import row_digests
from longstep.state_encoding import (
    array_header,
    canonical_array,
    digest_observation,
    shorten,
    type_name,
    utf8,
)

__all__ = [
    "KEY_SIZE_BYTES",
    "CheckedStateKey",
    "StateKey",
    "fold_history",
    "state_key",
    "state_keys",
]

KEY_SIZE_BYTES = 16
"""Length of a state key."""

_MAX_HISTORY = 1000
_NO_SEQUENCES: Any = (str, bytes, bytearray, memoryview, set, frozenset, dict, type)
"""What has a length and is no sequence of observations all the same."""

StateKey: TypeAlias = Callable[[Any], bytes]
"""What gives the key of an observation: `state_key`, `functools.partial(state_key, canonicalize=...)`, or your own."""


def state_key(observation: Any, *, canonicalize: Callable[[Any], Any] | None = None) -> bytes:
    """The 16 bytes that identify an observation: equal observations have equal keys, everywhere.

    Args:
        observation: A str, bytes, bool, int, float, None, numpy scalar or array, PIL image, or a list, tuple, set or
            dict of these, nested at most 64 deep. It is not changed.
        canonicalize: Applied to the observation first, to remove what should not tell states apart; None hashes
            it as it is.

    Raises:
        UnsupportedTypeError: Some part has no stable identity; the message names it, such as `$.inventory[2]`.
        DataError: The observation is nested too deep, or contains itself.
        ConfigError: `canonicalize` is no function.

    >>> state_key("You are in a kitchen.").hex()
    'bd0d662036142abd041f0602725d1e54'
    >>> state_key({"hp": 1, "at": (2, 3)}) == state_key({"at": (2, 3), "hp": 1})
    True
    >>> state_key(1) == state_key(True)
    False
    """
    if canonicalize is not None:
        check_callable("canonicalize", canonicalize)
        observation = canonicalize(observation)
    if type(observation) is str:
        return xxh3_128_digest(utf8(observation))
    return digest_observation(observation, xxh3_128_digest)


def state_keys(
    observations: Sequence[Any] | NDArray[Any],
    *,
    canonicalize: Callable[[Any], Any] | None = None,
) -> NDArray[np.void]:
    """The keys of many observations: V16[N], each equal to `state_key` of that element.

    Args:
        observations: N observations; an array [N, ...] is N arrays, hashed where they lie.
        canonicalize: As in `state_key`, applied to each observation.

    Raises:
        UnsupportedTypeError: Some observation has no stable identity, or `observations` is not a sequence.
        DataError: An observation is nested too deep.

    >>> boards = np.zeros((3, 8, 8), np.uint8)
    >>> state_keys(boards)[2].tobytes() == state_key(boards[2])
    True
    """
    is_ordered = hasattr(observations, "__len__") and getattr(observations, "ndim", 1) > 0
    if not is_ordered or isinstance(observations, _NO_SEQUENCES):
        raise UnsupportedTypeError(
            f"expected a sequence or an array of observations, got {type_name(observations)} at `observations`; "
            "use `state_key` for one observation"
        )
    if canonicalize is None and isinstance(observations, np.ndarray) and observations.ndim > 1:
        return _array_rows_keys(observations)
    keys = bytearray()
    for row, observation in enumerate(observations):
        try:
            keys += state_key(observation, canonicalize=canonicalize)
        except (UnsupportedTypeError, DataError) as error:
            raise type(error)(f"{error} (observation {row})") from None
    return np.frombuffer(keys, dtype="V16")


def fold_history(
    keys: NDArray[np.void], trajectory_ids: NDArray[np.integer[Any]], k: int
) -> NDArray[np.void]:
    """Keys of a state together with the k states before it in its trajectory: V16[N].

    Two rows get the same key exactly when their last k + 1 states are the same; the first rows of a trajectory, which
    have fewer than k states before them, match only rows that have as few. These keys mean the same in every batch and
    process, to be kept with the steps. Within one batch `history_length` of `longstep.credit` makes the same groups
    from the plain keys, without a digest.

    Args:
        keys: V16[N], rows of one trajectory in order of time.
        trajectory_ids: [N], the trajectory of each row; trajectories may be interleaved.
        k: How many earlier states count, from 0, which gives the keys back, to 1,000.

    Raises:
        DataError: The lengths differ, or `keys` is not V16.
        ConfigError: `k` is out of range.
    """
    check_count("k", k, 0, most=_MAX_HISTORY)
    given: Any = keys
    if not isinstance(given, np.ndarray) or keys.dtype != np.dtype("V16") or keys.ndim != 1:
        raise DataError(f"expected V16[N], got {shorten(given)} at `keys`; use `state_keys`")
    ids = np.asarray(trajectory_ids)
    if ids.size and ids.dtype.kind not in "iuUS":
        raise DataError(
            f"expected integers or strings, got {ids.dtype} at `trajectory_ids`; number them"
        )
    if ids.shape != keys.shape:
        raise DataError(
            f"expected {keys.size} trajectory ids, one for each key, got shape {ids.shape} at `trajectory_ids`"
        )
    if k == 0 or keys.size == 0:
        return keys.copy()
    order = np.argsort(ids, kind="stable")
    sorted_ids = ids[order]
    sorted_keys = keys[order]
    history = np.zeros((keys.size, k + 1), "V16")  # no state has the key zero, so zeros tell "none"
    history[:, 0] = sorted_keys
    for back in range(1, k + 1):
        same = np.flatnonzero(sorted_ids[back:] == sorted_ids[:-back])
        history[same + back, back] = sorted_keys[same]
    folded = np.empty(keys.size, "V16")
    folded[order] = state_keys(history.view(np.uint8).reshape(keys.size, -1))
    return folded


class CheckedStateKey:
    """A state key that also compares the observations of equal keys, and raises when they differ.

    For debugging a key function of your own, or to rule out a collision. It keeps a 256-bit cryptographic fingerprint
    of each observation that had a new key: 48 bytes and one more hash for each.

    >>> checked = CheckedStateKey(key=lambda text: state_key(len(text)))
    >>> _ = checked("north")
    >>> checked("south")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    longstep.errors.DataError: expected different keys for different observations, got key ... twice...
    """

    def __init__(
        self, key: StateKey = state_key, *, canonicalize: Callable[[Any], Any] | None = None
    ) -> None:
        """Check `key`; `canonicalize` is applied first, so what it removes may differ."""
        check_callable("key", key)
        if canonicalize is not None:
            check_callable("canonicalize", canonicalize)
        self._key = key
        self._canonicalize = canonicalize
        self._fingerprints: dict[bytes, bytes] = {}

    def __call__(self, observation: Any) -> bytes:
        """The key of `observation`.

        Raises:
            DataError: A different observation had this key.
        """
        if self._canonicalize is not None:
            observation = self._canonicalize(observation)
        key: Any = self._key(observation)
        if not isinstance(key, bytes):
            raise DataError(
                f"expected bytes from the key function, got {shorten(key)}; hash what you return with `state_key`"
            )
        fingerprint = digest_observation(observation, _blake2b)
        if self._fingerprints.setdefault(key, fingerprint) != fingerprint:
            raise DataError(
                f"expected different keys for different observations, got key {key.hex()} twice, now for "
                f"{shorten(observation)}; use a key function that keeps what tells these states apart"
            )
        return key


def _array_rows_keys(array: NDArray[Any]) -> NDArray[np.void]:
    """The key of each `array[i]`, hashing the rows where they lie."""
    digest_observation(array[:0], xxh3_128_digest)  # raises for what `state_key` rejects
    header = array_header(array.dtype, array.shape[1:])
    rows = canonical_array(array)
    if rows.size == 0:
        one = xxh3_128_digest(header + xxh3_128_digest(b""))
        return np.frombuffer(bytearray(one * len(array)), "V16")
    return row_digests(rows.reshape(len(array), -1).view(np.uint8), header).view("V16").reshape(-1)


def _blake2b(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
