"""Step groups of similar observations, for texts that differ in a word or vectors that nearly agree.

Two measures of texts, and one of vectors that the caller made (sentence embeddings, image features). Two observations
are compared only within their episode group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstep.credit.groups import StepGroups
from longstep.credit.rows import id_codes
from longstep.errors import ConfigError, DataError, UnsupportedTypeError, did_you_mean
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

    Raises:
        ConfigError: The threshold is outside (0, 1], the method is unknown, or `vectors` does not go with it.
        DataError: Lengths differ, or a vector is zero or not finite.
        UnsupportedTypeError: A text is not a str.
    """
    if not 0 < threshold <= 1:
        raise ConfigError(f"expected a number in (0, 1], got {threshold!r} at `threshold`")
    if method not in get_args(SimilarityMethod):
        raise ConfigError(
            f"expected `indel`, `difflib` or `cosine`, got {method!r} at `method`; "
            + did_you_mean(str(method), get_args(SimilarityMethod))
        )
    if (vectors is None) == (method == "cosine"):
        raise ConfigError(
            f"expected `vectors` with method `cosine` and only then, got method `{method}` "
            f"{'without' if vectors is None else 'with'} `vectors`"
        )
    num_rows = len(np.asarray(group_ids))
    groups, _ = id_codes("group_ids", group_ids, num_rows)
    if vectors is not None:
        return StepGroups.from_labels(
            _cosine_labels(_unit_vectors(vectors, num_rows), groups, threshold)
        )
    texts_N = _require_texts(texts, num_rows)
    unique, inverse = _unique_texts(texts_N, groups)
    if method == "indel":
        order = sorted(range(len(unique)), key=lambda at: (unique[at][0], len(unique[at][1])))
    else:
        order = sorted(range(len(unique)), key=lambda at: unique[at][0])
    ordered_groups = np.array([unique[at][0] for at in order], np.int64)
    bounds = np.flatnonzero(np.diff(ordered_groups, prepend=-1, append=-1)).astype(np.int64)
    label = indel_components if method == "indel" else greedy_clusters
    labels = np.empty(len(order), np.int64)
    labels[order] = label([unique[at][1] for at in order], bounds, float(threshold))
    return StepGroups.from_labels(labels[inverse])


def _require_texts(texts: Sequence[str] | NDArray[Any] | None, num_rows: int) -> list[str]:
    if texts is None or isinstance(texts, str):
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


def _unit_vectors(vectors: ArrayLike, num_rows: int) -> NDArray[np.float64]:
    try:
        vectors_ND = np.asarray(vectors, np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"expected numbers in `vectors`, got {error}") from error
    if vectors_ND.ndim != 2 or len(vectors_ND) != num_rows:
        raise DataError(
            f"expected `vectors` of shape [{num_rows}, D], one for each row of `group_ids`, got shape {vectors_ND.shape}"
        )
    scale_N = np.abs(vectors_ND).max(axis=1, initial=0.0)
    bad = np.flatnonzero(~(np.isfinite(scale_N) & (scale_N > 0)))
    if len(bad):
        raise DataError(
            f"expected finite vectors that are not zero, got {vectors_ND[bad[0]]} at row {bad[0]} of `vectors`; "
            "leave that row out"
        )
    scaled_ND = vectors_ND / scale_N[:, None]  # so that squares neither overflow nor vanish
    return scaled_ND / np.linalg.norm(scaled_ND, axis=1, keepdims=True)


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
