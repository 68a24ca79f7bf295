"""Which texts of a group are similar: bounds that rule a pair out, then an exact comparison of what is left.

Two texts of lengths la and lb are similar when `2 * matches / (la + lb) >= threshold`. Matches are bounded by the
shorter length and by what the two histograms of symbols have in common, which decides nearly every pair.

The compiled functions read the texts as symbols 0..A-1 laid end to end, `codes`, with `offsets`. Each has a twin in plain
Python (the longest common subsequence in one big integer; the standard library's `difflib`) that gives the same labels.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from longstep.kernels import Kernel, backend
from longstep.kernels.linked import LinkedKernel

__all__ = ["KERNELS", "greedy_clusters", "indel_components"]

_NUM_BINS = 128
_POPCOUNT_1, _POPCOUNT_2 = 0x5555555555555555, 0x3333333333333333
_POPCOUNT_4, _POPCOUNT_8 = 0x0F0F0F0F0F0F0F0F, 0x0101010101010101


def indel_components(
    texts: Sequence[str], bounds: NDArray[np.int64], threshold: float
) -> NDArray[np.int64]:
    """[U] a label for each text: connected components over the pairs of a group whose Indel similarity is enough.

    Indel similarity is `2 * LCS(a, b) / (len(a) + len(b))`, with LCS the length of the longest common subsequence.

    Args:
        texts: U texts, group by group, different within a group, in each group sorted by length.
        bounds: [G + 1] where each group starts.
        threshold: In (0, 1].
    """
    codes, offsets, num_symbols = _encode(texts)
    if backend() != "numba":
        return _indel_components_python(texts, codes, offsets, bounds, threshold)
    histograms = _histograms(codes, offsets, min(num_symbols, _NUM_BINS))
    return _indel_components(codes, offsets, histograms, bounds, threshold, num_symbols)


def greedy_clusters(
    texts: Sequence[str], bounds: NDArray[np.int64], threshold: float
) -> NDArray[np.int64]:
    """[U] a label for each text: greedy first fit by `difflib.SequenceMatcher(None, text, first).ratio()`.

    Each text joins the first cluster of its group whose first member is similar enough, or opens one. The default
    `autojunk` of difflib is in force: it ignores symbols that make up over 1% of a first member of 200 or more.

    Args:
        texts: U texts, group by group, different within a group, in the order of their first rows.
        bounds: [G + 1] where each group starts.
        threshold: In (0, 1].
    """
    codes, offsets, num_symbols = _encode(texts)
    if backend() != "numba":
        return _greedy_clusters_python(texts, codes, offsets, bounds, threshold)
    histograms = _histograms(codes, offsets, min(num_symbols, _NUM_BINS))
    return _greedy_clusters(codes, offsets, histograms, bounds, threshold, num_symbols)


def _encode(texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
    """Symbols of all texts as numbers 0..A-1, where each text starts, and A."""
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    joined = "".join(texts)
    if not joined:
        return np.zeros(0, np.int32), offsets, 1
    try:
        points = np.frombuffer(joined.encode("latin-1"), np.uint8)
    except UnicodeEncodeError:
        points = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), "<u4")
    used = np.zeros(int(points.max()) + 1, np.bool_)
    used[points] = True
    numbers = np.cumsum(used, dtype=np.int32) - np.int32(1)
    return numbers[points], offsets, int(numbers[-1]) + 1


# The parts of the compiled functions.


def _count_symbols(
    codes: NDArray[np.int32], offsets: NDArray[np.int64], num_bins: int
) -> NDArray[np.int32]:
    """[U, bins] how often each symbol, modulo the number of bins, occurs in each text."""
    histograms = np.zeros((len(offsets) - 1, num_bins), np.int32)
    for text in range(len(offsets) - 1):
        for at in range(offsets[text], offsets[text + 1]):
            histograms[text, codes[at] % num_bins] += 1
    return histograms


def _overlap(histogram_a: NDArray[np.int32], histogram_b: NDArray[np.int32]) -> int:
    """How many symbols two texts have in common, as multisets."""
    common = 0
    for symbol in range(len(histogram_a)):
        common += min(histogram_a[symbol], histogram_b[symbol])
    return common


def _matches_needed(total: int, threshold: float) -> int:
    """The least m with `2.0 * m / total >= threshold`, in the rounding of that comparison."""
    needed = math.ceil(threshold * total / 2)
    while needed > 0 and 2.0 * (needed - 1) / total >= threshold:
        needed -= 1
    while 2.0 * needed / total < threshold:
        needed += 1
    return needed


def _root(parent: NDArray[np.int64], text: int) -> int:
    """The representative of a text's component; shortens the path to it."""
    while parent[text] != text:
        parent[text] = parent[parent[text]]
        text = parent[text]
    return text


def _lcs_reaches(
    a: NDArray[np.int32],
    b: NDArray[np.int32],
    masks: NDArray[np.uint64],
    column: NDArray[np.uint64],
    needed: int,
) -> bool:
    """True when the longest common subsequence of a and b has at least `needed` symbols.

    Bit-parallel over a (Hyyro, "Bit-parallel LCS-length computation revisited", 2004), without the ends that a and b share,
    and only where enough matches remain possible: a match of a[i] with b[j] has `-b_gaps <= i - j <= a_gaps`.

    Args:
        a: Symbols, not more than b has.
        b: Symbols.
        masks: [A, words] bit i of row s: a[i] is s.
        column: [words] scratch.
        needed: At most `len(a)`.
    """
    prefix, suffix = 0, 0
    while prefix < len(a) and a[prefix] == b[prefix]:
        prefix += 1
    while suffix < len(a) - prefix and a[len(a) - 1 - suffix] == b[len(b) - 1 - suffix]:
        suffix += 1
    if prefix + suffix >= needed:
        return True
    a_gaps, b_gaps = len(a) - needed, len(b) - needed
    a_end, b_end = len(a) - suffix, len(b) - suffix
    first_word, end_word = prefix >> 6, (a_end + 63) >> 6
    one, all_ones = np.uint64(1), ~np.uint64(0)
    from_prefix = all_ones << np.uint64(prefix & 63)
    to_end = all_ones >> np.uint64(-a_end & 63)
    for word in range(first_word, end_word):
        column[word] = all_ones  # bit i becomes 0 where the LCS of b so far and a[: i + 1] grows
    for j in range(prefix, b_end):
        low_word = max(first_word, (j - b_gaps) >> 6)
        high_word = min(end_word, ((j + a_gaps) >> 6) + 1)
        carry = np.uint64(0)
        for word in range(low_word, high_word):
            old = column[word]
            hits = masks[b[j], word] & old
            if word == first_word:
                hits &= from_prefix
            added = old + hits
            total = added + carry
            carry = one if added < old or total < carry else np.uint64(0)
            column[word] = total | (old & ~hits)
        if j & 63 == 63 or j == b_end - 1:
            # the most that can still be matched: what is matched up to a[i], and what is left of both after that
            matched, most = prefix + suffix, 0
            for word in range(first_word, high_word):
                zeros = ~column[word]
                if word == end_word - 1:
                    zeros &= to_end
                zeros -= (zeros >> one) & np.uint64(_POPCOUNT_1)
                pairs = np.uint64(_POPCOUNT_2)
                zeros = (zeros & pairs) + ((zeros >> np.uint64(2)) & pairs)
                zeros = (zeros + (zeros >> np.uint64(4))) & np.uint64(_POPCOUNT_4)
                matched += np.int64((zeros * np.uint64(_POPCOUNT_8)) >> np.uint64(56))
                most = max(most, matched + min(a_end - (word << 6), b_end - 1 - j))
            if most < needed:
                return False
    return True


def _components(
    codes: NDArray[np.int32],
    offsets: NDArray[np.int64],
    histograms: NDArray[np.int32],
    bounds: NDArray[np.int64],
    threshold: float,
    num_symbols: int,
) -> NDArray[np.int64]:
    longest = 0
    for text in range(len(offsets) - 1):
        longest = max(longest, offsets[text + 1] - offsets[text])
    masks = np.zeros((num_symbols, longest // 64 + 1), np.uint64)
    column = np.empty(longest // 64 + 1, np.uint64)
    parent = np.arange(len(offsets) - 1)
    for group in range(len(bounds) - 1):
        for a in range(bounds[group], bounds[group + 1]):
            symbols_a = codes[offsets[a] : offsets[a + 1]]
            has_masks = False
            for b in range(a + 1, bounds[group + 1]):
                symbols_b = codes[offsets[b] : offsets[b + 1]]
                needed = _matches_needed(len(symbols_a) + len(symbols_b), threshold)
                if needed > len(symbols_a):
                    break  # the texts after b are no shorter
                root_a, root_b = _root(parent, a), _root(parent, b)
                if root_a == root_b or _overlap(histograms[a], histograms[b]) < needed:
                    continue
                if not has_masks:
                    has_masks = True
                    for i in range(len(symbols_a)):
                        masks[symbols_a[i], i >> 6] |= np.uint64(1) << np.uint64(i & 63)
                if _lcs_reaches(symbols_a, symbols_b, masks, column, needed):
                    parent[max(root_a, root_b)] = min(root_a, root_b)
            if has_masks:
                for i in range(len(symbols_a)):
                    masks[symbols_a[i], i >> 6] = np.uint64(0)
    for text in range(len(parent)):
        parent[text] = _root(parent, text)
    return parent


def _blocks_reach(
    a: NDArray[np.int32],
    b: NDArray[np.int32],
    first: NDArray[np.int64],
    counts: NDArray[np.int64],
    needed: int,
) -> bool:
    """True when the matching blocks that difflib finds have at least `needed` symbols.

    The longest block of two ranges (in `b` only from symbols that are not popular, then extended by any), the earliest
    in a and then in b among equals; the same on what is left and right of it, until nothing matches.

    Args:
        a: Symbols.
        b: Symbols.
        first: [A] scratch, all -1, and left so.
        counts: [A] scratch, all 0, and left so.
        needed: Matches.
    """
    following = np.empty(len(b), np.int64)  # the next place in b with the same symbol
    for j in range(len(b) - 1, -1, -1):
        following[j] = first[b[j]]
        first[b[j]] = j
        counts[b[j]] += 1
    most_of_one = len(b) // 100 + 1 if len(b) >= 200 else len(b)
    for j in range(len(b)):
        if counts[b[j]] > most_of_one:
            first[b[j]] = -1
    run_length = np.zeros(
        (2, len(b)), np.int64
    )  # of the blocks that end at a[i - 1] or a[i], and b[j]
    run_row = np.full((2, len(b)), -1, np.int64)  # in which row it was written
    stack = np.empty((min(len(a), len(b)) + 2, 4), np.int64)
    stack[0] = (0, len(a), 0, len(b))
    depth, row = 1, 0
    matched, possible = 0, min(len(a), len(b))
    while depth and matched < needed <= matched + possible:
        depth -= 1
        a_low, a_high, b_low, b_high = stack[depth]
        possible -= min(a_high - a_low, b_high - b_low)
        at_a, at_b, size = a_low, b_low, 0
        row += 1  # no block continues one of another range
        for i in range(a_low, a_high):
            row += 1
            now, before = row & 1, 1 - (row & 1)
            j = first[a[i]]
            while 0 <= j < b_high:
                if j >= b_low:
                    length = 1
                    if j > 0 and run_row[before, j - 1] == row - 1:
                        length += run_length[before, j - 1]
                    run_length[now, j] = length
                    run_row[now, j] = row
                    if length > size:
                        at_a, at_b, size = i - length + 1, j - length + 1, length
                j = following[j]
        while at_a > a_low and at_b > b_low and a[at_a - 1] == b[at_b - 1]:
            at_a, at_b, size = at_a - 1, at_b - 1, size + 1
        while at_a + size < a_high and at_b + size < b_high and a[at_a + size] == b[at_b + size]:
            size += 1
        if size:
            matched += size
            if a_low < at_a and b_low < at_b:
                stack[depth] = (a_low, at_a, b_low, at_b)
                possible += min(at_a - a_low, at_b - b_low)
                depth += 1
            if at_a + size < a_high and at_b + size < b_high:
                stack[depth] = (at_a + size, a_high, at_b + size, b_high)
                possible += min(a_high - at_a - size, b_high - at_b - size)
                depth += 1
    for j in range(len(b)):
        first[b[j]] = -1
        counts[b[j]] = 0
    return matched >= needed


def _first_fit(
    codes: NDArray[np.int32],
    offsets: NDArray[np.int64],
    histograms: NDArray[np.int32],
    bounds: NDArray[np.int64],
    threshold: float,
    num_symbols: int,
) -> NDArray[np.int64]:
    first = np.full(num_symbols, -1, np.int64)
    counts = np.zeros(num_symbols, np.int64)
    labels = np.arange(len(offsets) - 1)
    for group in range(len(bounds) - 1):
        for a in range(bounds[group], bounds[group + 1]):
            symbols_a = codes[offsets[a] : offsets[a + 1]]
            for b in range(bounds[group], a):
                if labels[b] != b:
                    continue  # not the first of its cluster
                symbols_b = codes[offsets[b] : offsets[b + 1]]
                needed = _matches_needed(len(symbols_a) + len(symbols_b), threshold)
                if needed > min(len(symbols_a), len(symbols_b)):
                    continue
                if _overlap(histograms[a], histograms[b]) < needed:
                    continue
                if _blocks_reach(symbols_a, symbols_b, first, counts, needed):
                    labels[a] = b
                    break
    return labels


_TEXTS = "int32[::1], int64[::1], int32[:, ::1], int64[::1], float64, int64"
_histograms = Kernel(_count_symbols, "int32[:, ::1](int32[::1], int64[::1], int64)")
_parts = (
    Kernel(_overlap, "int64(int32[::1], int32[::1])"),
    Kernel(_matches_needed, "int64(int64, float64)"),
    Kernel(_root, "int64(int64[::1], int64)"),
    Kernel(_lcs_reaches, "boolean(int32[::1], int32[::1], uint64[:, ::1], uint64[::1], int64)"),
    Kernel(_blocks_reach, "boolean(int32[::1], int32[::1], int64[::1], int64[::1], int64)"),
)
_indel_components = LinkedKernel(_components, f"int64[::1]({_TEXTS})", uses=_parts)
_greedy_clusters = LinkedKernel(_first_fit, f"int64[::1]({_TEXTS})", uses=_parts)
KERNELS = (_histograms, _indel_components, _greedy_clusters)


# The twins.


def _histograms_numpy(codes: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    bins = codes % _NUM_BINS
    return np.array(
        [np.bincount(bins[start:stop], minlength=_NUM_BINS) for start, stop in pairwise(offsets)]
    ).reshape(-1, _NUM_BINS)


def _candidates(
    histograms: NDArray[np.int64], text: int, others: NDArray[np.int64], threshold: float
) -> list[int]:
    """Those of `others` that may be similar to `text`."""
    if not len(others):
        return []
    common = np.minimum(histograms[text], histograms[others]).sum(axis=1)
    totals = histograms[text].sum() + histograms[others].sum(axis=1)
    return others[2.0 * common / totals >= threshold].tolist()


def _lcs_length(a: str, b: str, masks: dict[str, int]) -> int:
    """Length of the longest common subsequence; bit i of `masks[s]`: a[i] is s."""
    ones = (1 << len(a)) - 1
    column = ones
    for symbol in b:
        hits = column & masks.get(symbol, 0)
        column = ((column + hits) | (column - hits)) & ones
    return len(a) - column.bit_count()


def _indel_components_python(
    texts: Sequence[str],
    codes: NDArray[np.int32],
    offsets: NDArray[np.int64],
    bounds: NDArray[np.int64],
    threshold: float,
) -> NDArray[np.int64]:
    histograms = _histograms_numpy(codes, offsets)
    parent = np.arange(len(texts))
    for low, high in pairwise(bounds.tolist()):
        for text in range(low, high):
            a = texts[text]
            masks: dict[str, int] = {}
            others = np.arange(text + 1, high, dtype=np.int64)
            for other in _candidates(histograms, text, others, threshold):
                roots = _root(parent, text), _root(parent, other)
                if roots[0] == roots[1]:
                    continue
                if not masks:
                    for i, symbol in enumerate(a):
                        masks[symbol] = masks.get(symbol, 0) | (1 << i)
                b = texts[other]
                if 2.0 * _lcs_length(a, b, masks) / (len(a) + len(b)) >= threshold:
                    parent[max(roots)] = min(roots)
    return np.array([_root(parent, text) for text in range(len(texts))], np.int64)


def _greedy_clusters_python(
    texts: Sequence[str],
    codes: NDArray[np.int32],
    offsets: NDArray[np.int64],
    bounds: NDArray[np.int64],
    threshold: float,
) -> NDArray[np.int64]:
    histograms = _histograms_numpy(codes, offsets)
    labels = np.arange(len(texts))
    for low, high in pairwise(bounds.tolist()):
        matchers: dict[int, difflib.SequenceMatcher[str]] = {}
        for text in range(low, high):
            firsts = np.array(list(matchers), np.int64)
            for other in _candidates(histograms, text, firsts, threshold):
                matchers[other].set_seq1(texts[text])
                if matchers[other].ratio() >= threshold:
                    labels[text] = other
                    break
            else:
                matchers[text] = difflib.SequenceMatcher(None, "", texts[text])
    return labels
