"""State keys of many small arrays at once: XXH3 128-bit over the rows of one contiguous buffer.

For rows of some hundred bytes, such as the boards of a grid world, a call per row costs more than the hash. These loops
compute the digests that the xxhash package computes (its specification: XXH3, 128 bits, seed 0), for rows of
`MIN_ROW_BYTES` to `MAX_ROW_BYTES`; their twin is that package, row by row. For larger rows xxhash is the faster one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from longstep.kernels import Kernel, backend
from longstep.kernels.linked import LinkedKernel

__all__ = ["KERNELS", "MAX_ROW_BYTES", "MIN_ROW_BYTES", "row_digests"]

MIN_ROW_BYTES, MAX_ROW_BYTES = 17, 240
"""Lengths of a row, and of the header with a digest, that the compiled loops take."""

_P1, _P2, _P4 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x85EBCA77C2B2AE63
_AVALANCHE = 0x165667919E3779F9
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SECRET_WORDS = np.array(
    [int.from_bytes(_SECRET[at : at + 8], "little") for at in range(len(_SECRET) - 7)], np.uint64
)  # the eight bytes from each place on


def row_digests(rows: NDArray[np.uint8], header: bytes) -> NDArray[np.uint8]:
    """[N, 16] digest of the header followed by the digest of each row.

    Args:
        rows: [N, bytes] C-contiguous.
        header: What stands before the digest of a row.
    """
    fits = MIN_ROW_BYTES <= rows.shape[1] <= MAX_ROW_BYTES
    if fits and 0 < len(header) <= MAX_ROW_BYTES - 16 and backend() == "numba":
        return _row_digests(rows, np.frombuffer(bytearray(header), np.uint8), _SECRET_WORDS)
    buffer, size = memoryview(rows.reshape(-1)), rows.shape[1]  # pyright: ignore[reportArgumentType]
    digests = [
        xxh3_128_digest(header + xxh3_128_digest(buffer[start : start + size]))
        for start in range(0, len(buffer), size)
    ]
    return np.frombuffer(bytearray().join(digests), np.uint8).reshape(-1, 16)


def _word(data: NDArray[np.uint8], at: int) -> np.uint64:
    """Eight bytes, the first one lowest."""
    place, word = (
        np.uint64(at),
        np.uint64(0),
    )  # an unsigned index lets the compiler read all eight at once
    for i in range(np.uint64(8)):
        word |= np.uint64(data[place + np.uint64(i)]) << (np.uint64(8) * np.uint64(i))
    return word


def _mix(data: NDArray[np.uint8], at: int, secret: NDArray[np.uint64], secret_at: int) -> np.uint64:
    """Both halves of the 128-bit product of two words of data under the secret, folded into one."""
    a = _word(data, at) ^ secret[np.uint64(secret_at)]
    b = _word(data, at + 8) ^ secret[np.uint64(secret_at + 8)]
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    low_low = (a & low) * (b & low)
    high_low = (a >> half) * (b & low)
    low_high = (a & low) * (b >> half)
    middle = (low_low >> half) + (high_low & low) + low_high
    upper = (high_low >> half) + (middle >> half) + (a >> half) * (b >> half)
    return upper ^ ((middle << half) | (low_low & low))


def _avalanche(word: np.uint64) -> np.uint64:
    word ^= word >> np.uint64(37)
    word *= np.uint64(_AVALANCHE)
    return word ^ (word >> np.uint64(32))


def _digest(data: NDArray[np.uint8], secret: NDArray[np.uint64], digest: NDArray[np.uint8]) -> None:
    """Write the 16 bytes of the digest of 17 to 240 bytes of data."""
    length = len(data)
    low, high = np.uint64(length) * np.uint64(_P1), np.uint64(0)
    # pairs of 16-byte pieces: from both ends inward up to 128 bytes, in order and then the last one above
    num_pairs = (length - 1) // 32 + 1 if length <= 128 else length // 32 + 1
    for pair in range(num_pairs):
        if length <= 128:
            piece = num_pairs - 1 - pair
            one, other, secret_at = 16 * piece, length - 16 * piece - 16, 32 * piece
        elif pair < num_pairs - 1:
            one, other = 32 * pair, 32 * pair + 16
            secret_at = 32 * pair if pair < 4 else 32 * (pair - 4) + 3
        else:
            one, other, secret_at = length - 16, length - 32, 103
        if length > 128 and pair == 4:
            low, high = _avalanche(low), _avalanche(high)
        low += _mix(data, one, secret, secret_at)
        low ^= _word(data, other) + _word(data, other + 8)
        high += _mix(data, other, secret, secret_at + 16)
        high ^= _word(data, one) + _word(data, one + 8)
    mixed = low * np.uint64(_P1) + high * np.uint64(_P4) + np.uint64(length) * np.uint64(_P2)
    low_word, high_word = _avalanche(low + high), np.uint64(0) - _avalanche(mixed)
    for i in range(8):
        shift = np.uint64(56 - 8 * i)
        digest[i] = np.uint8((high_word >> shift) & np.uint64(255))
        digest[i + 8] = np.uint8((low_word >> shift) & np.uint64(255))


def _digest_rows(
    rows: NDArray[np.uint8], header: NDArray[np.uint8], secret: NDArray[np.uint64]
) -> NDArray[np.uint8]:
    digests = np.empty((len(rows), 16), np.uint8)
    framed = np.empty(len(header) + 16, np.uint8)
    framed[: len(header)] = header
    for row in range(len(rows)):
        _digest(rows[row], secret, framed[len(header) :])
        _digest(framed, secret, digests[row])
    return digests


_BYTES, _WORDS = "uint8[::1]", "uint64[::1]"
_parts = (
    Kernel(_word, f"uint64({_BYTES}, int64)"),
    Kernel(_avalanche, "uint64(uint64)"),
)
_mix_part = LinkedKernel(_mix, f"uint64({_BYTES}, int64, {_WORDS}, int64)", uses=_parts)
_digest_part = LinkedKernel(
    _digest, f"void({_BYTES}, {_WORDS}, {_BYTES})", uses=(*_parts, _mix_part)
)
_row_digests = LinkedKernel(
    _digest_rows,
    f"uint8[:, ::1](uint8[:, ::1], {_BYTES}, {_WORDS})",
    uses=(_digest_part,),
)
KERNELS = (_row_digests,)
