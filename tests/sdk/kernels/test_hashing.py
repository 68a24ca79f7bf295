"""Tests of `longstep.kernels.hashing`: the compiled loops give the bits of the xxhash package."""

from __future__ import annotations

import numpy as np
import pytest

from longstep import kernels
from longstep.kernels.hashing import MAX_ROW_BYTES, MIN_ROW_BYTES, row_digests
from longstep.state_key import fold_history, state_key, state_keys

xxhash = pytest.importorskip("xxhash")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    pytest.importorskip("numba")
    kernels.warm_up()
    assert kernels.backend() == "numba"


def test_rows_of_every_length_have_the_digests_of_xxhash() -> None:
    rng = np.random.default_rng(0)
    for size in range(1, MAX_ROW_BYTES + 20):
        rows = rng.integers(0, 256, (2, size), np.uint8)
        header = b"h" * (1 + size % (MAX_ROW_BYTES - 16))
        expected = [xxhash.xxh3_128_digest(header + xxhash.xxh3_128_digest(row)) for row in rows]
        assert [digest.tobytes() for digest in row_digests(rows, header)] == expected
        with kernels.numpy_only():
            assert [digest.tobytes() for digest in row_digests(rows, header)] == expected


def test_compiled_batch_keys_are_the_keys_of_the_elements() -> None:
    rng = np.random.default_rng(1)
    for shape in ((5, MIN_ROW_BYTES), (5, 8, 8), (5, 7, 7, 3), (5, 15, 16), (5, 4), (1, 100)):
        for dtype in (np.uint8, np.int8, np.bool_, np.float16):
            boards = rng.integers(0, 2, shape).astype(dtype)
            assert [key.tobytes() for key in state_keys(boards)] == [state_key(b) for b in boards]


def test_folded_history_is_the_same_in_both_backends() -> None:
    rng = np.random.default_rng(2)
    keys = state_keys(rng.integers(0, 4, 200).tolist())
    trajectories = rng.integers(0, 9, 200)
    for k in (1, 5, 20):
        with kernels.numpy_only():
            expected = fold_history(keys, trajectories, k)
        assert fold_history(keys, trajectories, k).tobytes() == expected.tobytes()
