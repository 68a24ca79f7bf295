"""Step groups of similar observations, for texts that differ in a word or vectors that nearly agree.

Two measures of texts, and one of vectors that the caller made (sentence embeddings, image features). Two observations
are compared only within their episode group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstep.arguments import check_choice, check_number
from longstep.credit.columns import as_array, bool_column, id_codes, require_length
from longstep.credit.groups import Anchors, StepGroups, may_anchor
from longstep.errors import ConfigError, DataError, UnsupportedTypeError
from longstep.kernels.similarity import greedy_clusters, indel_components

__all__ = ["SimilarityMethod", "group_similar"]

SimilarityMethod = Literal["indel", "difflib", "cosine"]
"""How alike two observations are; see `group_similar`."""

_ROUNDING = 1e-12  # of a cosine, so that equal vectors reach a threshold of 1


def group_similar(
    texts: Sequence[str] | NDArray[Any] | None,
    group_ids: ArrayLike,
    threshold: float,
    *,
    method: SimilarityMethod = "indel",
    vectors: ArrayLike | None = None,
    anchors: Anchors | None = None,
    mask: ArrayLike | None = None,
) -> StepGroups:
    """Step groups of rows whose observations are at least `threshold` similar.

    The methods are

    - `"indel"`: `2 * LCS(a, b) / (len(a) + len(b))` of the texts, with LCS the length of their longest common subsequence
      in code points. Exact. A step group is a connected component: rows reach each other over similar pairs, so
      the order of the rows does not matter, and two rows of a group may be less similar than the threshold.
    - `"difflib"`: what verl-agent does. `difflib.SequenceMatcher(None, text, first).ratio()`, greedy: a text joins the first
      cluster whose first member is similar enough. It depends on the order of the rows; and difflib's autojunk ignores
      common letters in texts of 200 characters and more, so that texts that differ in one word may be told apart.
    - `"cosine"`: the cosine of the rows of `vectors`, and connected components as in `"indel"`.

    Costs: pairs of a group that may be similar are compared, all others are ruled out by their letters. Without the
    compiled kernels (`longstep.kernels.warm_up`) it takes tens of times longer.

    >>> group_similar(["a red door", "a red doors", "a lamp"], [0, 0, 0], 0.9).ids.tolist()
    [0, 0, 1]

    Args:
        texts: [N] str. None with `"cosine"`.
        group_ids: [N] integers or strings, the episode group of each row.
        threshold: In (0, 1]; 1 groups equal observations only. verl-agent's default is 0.95.
        method: See above.
        vectors: [N, D] finite numbers, no row zero. For `"cosine"` only.
        anchors: Which states may form a group: [N] booleans, or a function that is called once with each distinct text.
            Other rows are in no group and join no others: "Nothing happens." is similar in every room. None means all.
        mask: [N] False for padding rows, which are in no group; None counts all rows.

    Raises:
        ConfigError: The threshold is outside (0, 1], the method is unknown, or `vectors` or `anchors` does not go with
            it.
        DataError: Lengths differ, or a vector is zero or not finite.
        UnsupportedTypeError: A text is not a str.
    """
    check_number("threshold", threshold)
    if not 0 < threshold <= 1:
        raise ConfigError(f"expected a number in (0, 1], got {threshold!r} at `threshold`")
    check_choice("method", method, get_args(SimilarityMethod))
    if (vectors is None) == (method == "cosine"):
        raise ConfigError(
            f"expected `vectors` with method `cosine` and only then, got method `{method}` "
            f"{'without' if vectors is None else 'with'} `vectors`"
        )
    column = as_array("group_ids", group_ids, "integers or strings")
    require_length("group_ids", column, None)
    num_rows = len(column)
    texts_N = _require_texts(texts, num_rows) if vectors is None else []
    counted = _counted(anchors, mask, texts_N, num_rows, method)
    kept = np.flatnonzero(counted)
    groups, _ = id_codes("group_ids", group_ids, num_rows, kept)
    if vectors is not None:
        found = _cosine_labels(_unit_vectors(vectors, num_rows, kept), groups, float(threshold))
    else:
        found = _text_labels([texts_N[row] for row in kept], groups, float(threshold), method)
    labels = np.full(num_rows, -1, np.int64)
    labels[kept] = found
    return StepGroups.from_labels(labels)


def _counted(
    anchors: Anchors | None,
    mask: ArrayLike | None,
    texts: list[str],
    num_rows: int,
    method: SimilarityMethod,
) -> NDArray[np.bool_]:
    """[N] False for rows that are in no group."""
    counted = np.ones(num_rows, np.bool_)
    if mask is not None:
        counted &= bool_column("mask", mask, num_rows)
    if callable(anchors):
        if method == "cosine":
            raise ConfigError(
                "expected booleans as `anchors` with method `cosine`, got a function, and no texts to ask it about; "
                "pass one True or False per row"
            )
        answers: dict[str, bool] = {}
        for row, text in enumerate(texts):
            if text not in answers:
                answers[text] = may_anchor(anchors, text, row)
        counted &= np.array([answers[text] for text in texts], np.bool_)
    elif anchors is not None:
        counted &= bool_column("anchors", anchors, num_rows)
    return counted


def _text_labels(
    texts: list[str], groups: NDArray[np.int64], threshold: float, method: SimilarityMethod
) -> NDArray[np.int64]:
    """[M] labels of texts by their letters, compared within their group."""
    unique, inverse = _unique_texts(texts, groups)
    if method == "indel":
        order = sorted(range(len(unique)), key=lambda at: (unique[at][0], len(unique[at][1])))
    else:
        order = sorted(range(len(unique)), key=lambda at: unique[at][0])
    ordered_groups = np.array([unique[at][0] for at in order], np.int64)
    bounds = np.flatnonzero(np.diff(ordered_groups, prepend=-1, append=-1)).astype(np.int64)
    label = indel_components if method == "indel" else greedy_clusters
    labels = np.empty(len(order), np.int64)
    labels[order] = label([unique[at][1] for at in order], bounds, threshold)
    return labels[inverse]


def _require_texts(texts: Sequence[str] | NDArray[Any] | None, num_rows: int) -> list[str]:
    is_sequence = isinstance(texts, Sequence) or getattr(texts, "ndim", 0)
    if texts is None or isinstance(texts, str | bytes) or not is_sequence:
        raise UnsupportedTypeError(
            f"expected a sequence of str, got {type(texts).__name__} at `texts`; pass one text per row"
        )
    texts_N: list[Any] = list(texts)
    if len(texts_N) != num_rows:
        raise DataError(
            f"expected {num_rows} rows in `texts`, as in `group_ids`, got {len(texts_N)}; "
            f"the first row without a partner is row {min(len(texts_N), num_rows)}"
        )
    for row, text in enumerate(texts_N):
        if not isinstance(text, str):
            raise UnsupportedTypeError(
                f"expected str, got {type(text).__name__} at row {row} of `texts`; similarity compares text: use "
                "`group_steps` for other observations, or method `cosine` with `vectors`"
            )
    return texts_N


def _unique_texts(
    texts: list[str], groups: NDArray[np.int64]
) -> tuple[list[tuple[int, str]], list[int]]:
    """The different (group, text), in order of first appearance, and which one each row has."""
    numbers: dict[tuple[int, str], int] = {}
    inverse = [
        numbers.setdefault(pair, len(numbers)) for pair in zip(groups.tolist(), texts, strict=True)
    ]
    return list(numbers), inverse


def _unit_vectors(vectors: ArrayLike, num_rows: int, kept: NDArray[np.intp]) -> NDArray[np.float64]:
    """[M, D] the vectors of the rows that count, of length 1."""
    array = as_array("vectors", vectors, "numbers")
    if array.ndim != 2 or len(array) != num_rows:
        raise DataError(
            f"expected `vectors` of shape [{num_rows}, D], one for each row of `group_ids`, got shape {array.shape}"
        )
    if array.size and array.dtype.kind not in "iuf":
        raise DataError(
            f"expected numbers in `vectors`, got an array of {array.dtype}; pass floats"
        )
    vectors_MD = array[kept].astype(np.float64)
    scale_M = np.abs(vectors_MD).max(axis=1, initial=0.0)
    bad = np.flatnonzero(~(np.isfinite(scale_M) & (scale_M > 0)))
    if len(bad):
        raise DataError(
            f"expected finite vectors that are not zero, got {vectors_MD[bad[0]]} at row {kept[bad[0]]} of `vectors`; "
            "leave that row out"
        )
    scaled_MD = vectors_MD / scale_M[:, None]  # so that squares neither overflow nor vanish
    return scaled_MD / np.linalg.norm(scaled_MD, axis=1, keepdims=True)


def _cosine_labels(
    vectors: NDArray[np.float64], groups: NDArray[np.int64], threshold: float
) -> NDArray[np.int64]:
    """[N] components over the pairs of a group, found breadth first: each row is compared with those not yet reached."""
    labels = np.full(len(vectors), -1, np.int64)
    order = np.argsort(groups, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        left = rows
        while len(left):
            seed, left = left[0], left[1:]
            labels[seed] = seed
            frontier = np.array([seed])
            while len(frontier) and len(left):
                now, frontier = frontier[:1024], frontier[1024:]
                near = (vectors[left] @ vectors[now].T >= threshold - _ROUNDING).any(axis=1)
                reached, left = left[near], left[~near]
                labels[reached] = seed
                frontier = np.concatenate((frontier, reached))
    return labels
