"""Tests of `longstep.credit.similarity` against slow, independent versions, in numba and in plain Python."""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstep import kernels
from longstep.credit.similarity import group_similar
from longstep.errors import ConfigError, DataError, UnsupportedTypeError

GOLDEN = json.loads((Path(__file__).parent / "golden_advantages.json").read_text())
ALPHABETS = ["ab", "abcdefghij ", "aé漢字😀\ud800 ", "etaoinshrdlu bcdfgkmpvwxyz"]

texts_in_groups = st.lists(st.tuples(st.text("abc", max_size=9), st.integers(0, 1)), max_size=10)
thresholds = st.sampled_from([0.3, 0.5, 2 / 3, 0.8, 0.9, 1.0]) | st.floats(0.01, 1.0)


@pytest.fixture(params=["numpy", "numba"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with the plain twins and once compiled."""
    if request.param == "numpy":
        with kernels.numpy_only():
            yield request.param
    else:
        pytest.importorskip("numba")
        kernels.warm_up()
        assert kernels.backend() == "numba"
        yield request.param


def near_duplicates(seed: int, num_texts: int, length: int) -> tuple[list[str], list[int]]:
    """Texts made from a few others by insertions, deletions and replacements, in two groups."""
    rng = random.Random(seed)
    alphabet = rng.choice(ALPHABETS)
    bases = ["".join(rng.choices(alphabet, k=max(0, length - rng.randrange(3)))) for _ in range(3)]
    texts: list[str] = []
    for _ in range(num_texts):
        text = list(rng.choice(bases))
        for _ in range(rng.randint(0, max(1, length // 9))):
            at = rng.randrange(len(text) + 1)
            text[at : at + rng.randrange(2)] = rng.choices(alphabet, k=rng.randrange(2))
        texts.append("".join(text))
    return texts, [rng.randrange(2) for _ in texts]


def lcs_length(a: str, b: str) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        above = row
        row = [0]
        for j, y in enumerate(b):
            row.append(above[j] + 1 if x == y else max(above[j + 1], row[j]))
    return row[-1]


def indel_reference(texts: list[str], groups: list[int], threshold: float) -> list[int]:
    """Components by repeated relabelling of whatever pair is similar."""
    labels = list(range(len(texts)))
    for one in range(len(texts)):
        for other in range(one):
            total = len(texts[one]) + len(texts[other])
            similar = not total or 2.0 * lcs_length(texts[one], texts[other]) / total >= threshold
            if groups[one] == groups[other] and similar:
                old, new = labels[one], labels[other]
                labels = [new if label == old else label for label in labels]
    return first_appearance(labels)


def difflib_reference(texts: list[str], groups: list[int], threshold: float) -> list[int]:
    """Greedy first fit, every comparison made."""
    labels: list[int] = []
    for row, text in enumerate(texts):
        firsts = [at for at in range(row) if labels[at] == at and groups[at] == groups[row]]
        fitting = (
            at
            for at in firsts
            if difflib.SequenceMatcher(None, text, texts[at]).ratio() >= threshold
        )
        labels.append(next(fitting, row))
    return first_appearance(labels)


REFERENCES: dict[Any, Any] = {"indel": indel_reference, "difflib": difflib_reference}


def first_appearance(labels: list[int]) -> list[int]:
    numbers: dict[int, int] = {}
    return [numbers.setdefault(label, len(numbers)) for label in labels]


@pytest.mark.parametrize("method", ["indel", "difflib"])
@pytest.mark.parametrize("length", [0, 1, 20, 63, 64, 65, 130, 199, 200, 260])
def test_groups_are_those_of_the_slow_version(backend: str, method: Any, length: int) -> None:
    for seed, threshold in enumerate([0.4, 0.8, 0.9, 0.95, 1.0]):
        texts, groups = near_duplicates(100 * length + seed, 12, length)
        ids = group_similar(texts, groups, threshold, method=method).ids.tolist()
        assert ids == REFERENCES[method](texts, groups, threshold)


@pytest.mark.parametrize("method", ["indel", "difflib"])
@settings(deadline=None)
@given(rows=texts_in_groups, threshold=thresholds)
def test_short_texts_are_grouped_as_by_the_slow_version(
    method: Any, rows: list[tuple[str, int]], threshold: float
) -> None:
    kernels.warm_up()  # where numba is installed
    texts, groups = [text for text, _ in rows], [group for _, group in rows]
    expected = REFERENCES[method](texts, groups, threshold)
    assert group_similar(texts, groups, threshold, method=method).ids.tolist() == expected
    with kernels.numpy_only():
        assert group_similar(texts, groups, threshold, method=method).ids.tolist() == expected


@pytest.mark.parametrize("case", [c for c in GOLDEN if c["similarity"]], ids=lambda c: c["id"])
def test_difflib_gives_the_step_groups_of_verl_agent(backend: str, case: Any) -> None:
    rows = case["rows"]
    groups = group_similar(
        [row["state"] for row in rows],
        [row["group"] for row in rows],
        case["similarity"],
        method="difflib",
    )
    assert sorted(rows.tolist() for rows in groups.rows()) == sorted(
        sorted(rows) for rows in case["expected"]["step_groups"]
    )


def test_a_word_changed_in_a_long_text_joins_by_indel_but_not_by_difflib(backend: str) -> None:
    text = (
        "knife lamp shelf stove window shelf garden shelf table cellar apple kitchen garden mug window fridge table "
        "kitchen cellar drawer cabinet stove mug garden fridge sink apple cabinet knife fridge kitchen shelf fridge "
        "sink lamp drawer cellar garden window sink drawer window window cabinet drawer knife knife mug drawer "
        "drawer kitchen garden kitchen fridge window fridge drawer garden drawer lamp"
    )
    changed = text.replace("mug garden fridge", "door garden fridge", 1)
    assert difflib.SequenceMatcher(None, changed, text).ratio() < 0.4  # autojunk
    assert group_similar([text, changed], [0, 0], 0.95, method="difflib").num_groups == 2
    assert group_similar([text, changed], [0, 0], 0.95).num_groups == 1


@pytest.mark.parametrize("seed", range(5))
def test_indel_groups_do_not_depend_on_the_order_of_rows(backend: str, seed: int) -> None:
    texts, groups = near_duplicates(seed, 14, 40)
    ids = group_similar(texts, groups, 0.85).ids
    order = np.random.default_rng(seed).permutation(len(texts))
    shuffled = group_similar(
        [texts[row] for row in order], [groups[row] for row in order], 0.85
    ).ids
    same = ids[order][:, None] == ids[order][None, :]
    assert (same == (shuffled[:, None] == shuffled[None, :])).all()


def test_similar_texts_chain_into_one_group(backend: str) -> None:
    texts = ["abcdefghij", "abcdefghijk", "abcdefghijkl", "abcdefghijklm"]
    assert group_similar(texts, [0] * 4, 0.95).ids.tolist() == [0, 0, 0, 0]
    assert group_similar(texts[::3], [0] * 2, 0.95).ids.tolist() == [0, 1]


def test_a_threshold_of_one_groups_equal_texts_only(backend: str) -> None:
    texts = ["a", "b", "a", "", "ab", "", "ba"]
    for method in ("indel", "difflib"):
        groups = group_similar(texts, [0] * 7, 1, method=method)
        assert groups.ids.tolist() == [0, 1, 0, 2, 3, 2, 4]
        assert groups.sizes.tolist() == [2, 1, 2, 1, 1]


def test_texts_of_other_episode_groups_are_never_joined(backend: str) -> None:
    assert group_similar(["same"] * 3, ["x", "y", "x"], 0.5).ids.tolist() == [0, 1, 0]


def test_no_rows_give_no_groups(backend: str) -> None:
    for method in ("indel", "difflib"):
        assert group_similar([], [], 0.9, method=method).num_groups == 0
    assert group_similar(None, [], 0.9, method="cosine", vectors=np.zeros((0, 3))).num_groups == 0


def test_kernels_and_twins_agree_on_long_texts() -> None:
    pytest.importorskip("numba")
    kernels.warm_up()
    texts, groups = near_duplicates(7, 60, 900)
    for method in ("indel", "difflib"):
        ids = group_similar(texts, groups, 0.9, method=method).ids
        with kernels.numpy_only():
            assert (group_similar(texts, groups, 0.9, method=method).ids == ids).all()


def test_vectors_within_the_angle_join_and_others_do_not() -> None:
    angles = np.radians([0, 10, 20, 90, 100, 200, 0])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1) * [
        [1],
        [5],
        [0.1],
        [1],
        [3],
        [1],
        [9],
    ]
    close = np.cos(np.radians(11))
    groups = group_similar(None, [0] * 7, close, method="cosine", vectors=vectors)
    assert groups.ids.tolist() == [0, 0, 0, 1, 1, 2, 0]
    apart = group_similar(None, [0, 1, 0, 0, 1, 0, 1], close, method="cosine", vectors=vectors)
    assert apart.ids.tolist() == [0, 1, 2, 3, 4, 5, 1]


def test_equal_vectors_reach_a_threshold_of_one_at_any_scale() -> None:
    vector = np.random.default_rng(0).normal(size=700)
    vectors = np.stack([vector, vector * 1e-200, vector * 1e200, -vector])
    groups = group_similar(None, [0] * 4, 1.0, method="cosine", vectors=vectors)
    assert groups.ids.tolist() == [0, 0, 0, 1]


def test_cosine_components_are_those_of_the_whole_matrix() -> None:
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(300, 4))
    episode_groups = rng.integers(0, 3, 300)
    groups = group_similar(None, episode_groups, 0.97, method="cosine", vectors=vectors)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    near = (unit @ unit.T >= 0.97) & (episode_groups[:, None] == episode_groups[None, :])
    reach = near
    for _ in range(9):  # paths of up to 2^9 pairs
        reach = reach.astype(np.float32) @ reach.astype(np.float32) > 0
    assert (reach == (groups.ids[:, None] == groups.ids[None, :])).all()
    assert 3 < groups.num_groups < 300


@pytest.mark.parametrize("threshold", [0, -0.5, 1.0001, float("nan")])
def test_a_threshold_outside_its_range_is_an_error(threshold: float) -> None:
    with pytest.raises(ConfigError, match=r"\(0, 1\].*threshold"):
        group_similar(["a"], [0], threshold)


def test_wrong_arguments_are_errors_that_name_them() -> None:
    with pytest.raises(ConfigError, match=r"method.*did you mean `indel`"):
        group_similar(["a"], [0], 0.9, method="indell")  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match=r"2 rows in `texts`.*got 1.*row 1"):
        group_similar(["a"], [0, 0], 0.9)
    with pytest.raises(UnsupportedTypeError, match="row 1 of `texts`"):
        group_similar(["a", b"a"], [0, 0], 0.9)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnsupportedTypeError, match="sequence of str, got str"):
        group_similar("ab", [0, 0], 0.9)
    with pytest.raises(UnsupportedTypeError, match="got NoneType"):
        group_similar(None, [0, 0], 0.9)
    with pytest.raises(ConfigError, match="`cosine` without `vectors`"):
        group_similar(["a"], [0], 0.9, method="cosine")
    with pytest.raises(ConfigError, match="`indel` with `vectors`"):
        group_similar(["a"], [0], 0.9, vectors=[[1.0]])
    with pytest.raises(DataError, match=r"\[2, D\]"):
        group_similar(None, [0, 0], 0.9, method="cosine", vectors=[[1.0]])
    for bad in (0.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match="row 1 of `vectors`"):
            group_similar(None, [0, 0], 0.9, method="cosine", vectors=[[1.0], [bad]])


@pytest.mark.parametrize("method", ["indel", "difflib"])
def test_texts_that_never_anchor_are_in_no_group_and_join_no_others(
    backend: str, method: Any
) -> None:
    nothing = "Nothing happens, you see."
    texts = ["Nothing happens, you saw.", nothing, "Nothing happened, you see.", nothing, "A lamp."]
    groups = [0] * len(texts)
    joined = group_similar(texts, groups, 0.85, method=method)
    assert joined.ids.tolist() == [0, 0, 0, 0, 1]
    asked: list[str] = []

    def anchors(text: str) -> bool:
        asked.append(text)
        return text != nothing

    apart = group_similar(texts, groups, 0.93, method=method, anchors=anchors)
    assert apart.ids.tolist() == [0, -1, 1, -1, 2]  # without what joined them
    assert sorted(asked) == sorted(set(texts))
    by_rows = group_similar(
        texts, groups, 0.93, method=method, anchors=[text != nothing for text in texts]
    )
    assert by_rows.ids.tolist() == apart.ids.tolist()


def test_vectors_of_rows_that_never_anchor_or_are_padding_are_not_looked_at() -> None:
    vectors = [[1.0, 0.0], [np.nan, 0.0], [0.0, 0.0], [1.0, 0.0]]
    groups = group_similar(
        None,
        [0, 0, 0, 0],
        0.9,
        method="cosine",
        vectors=vectors,
        anchors=[True, False, True, True],
        mask=[True, True, False, True],
    )
    assert groups.ids.tolist() == [0, -1, -1, 0]
    with pytest.raises(ConfigError, match="booleans as `anchors` with method `cosine`"):
        group_similar(None, [0], 0.9, method="cosine", vectors=[[1.0]], anchors=lambda text: True)


def test_padding_rows_change_no_group_of_texts(backend: str) -> None:
    padded = group_similar(["a b", "a c", "a b"], [0, 0, 0], 0.9, mask=[True, False, True])
    assert padded.ids.tolist() == [0, -1, 0]
    assert padded.sizes.tolist() == [2]
