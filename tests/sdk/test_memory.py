"""Memories: what they keep, how they tell it, and that a user's own needs nothing but three methods."""

import copy
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longstep import (
    FrameMemory,
    KeyEventMemory,
    Memory,
    RetrievalMemory,
    SimpleMemory,
    SummaryMemory,
    WindowMemory,
)
from longstep.bm25 import BM25Index
from longstep.errors import ConfigError, DataError


def feed(memory, num_steps, start=0):
    for number in range(start, start + num_steps):
        info = {"observation": f"room {number + 1}"}
        memory.update(f"room {number}", f"go {number}", 0.0, False, info)
    return memory


def test_the_base_class_keeps_nothing():
    memory = feed(Memory(), 3)
    memory.reset()
    assert (memory.get_memory_text(), tuple(memory.get_images())) == ("", ())


def test_simple_memory_keeps_every_step_in_order():
    text = feed(SimpleMemory(), 100).get_memory_text()
    assert re.findall(r"\[Step (\d+)\] room (\d+)\n> go (\d+)", text) == [
        (str(n + 1), str(n), str(n)) for n in range(100)
    ]


@pytest.mark.parametrize("window_size", [0, 1, 3, 50])
def test_window_memory_keeps_the_last_steps(window_size):
    text = feed(WindowMemory(window_size), 10).get_memory_text()
    first = max(0, 10 - window_size)
    assert re.findall(r"go (\d+)", text) == [str(number) for number in range(first, 10)]


@pytest.mark.parametrize(
    "memory",
    [
        SimpleMemory(),
        WindowMemory(3),
        SummaryMemory(lambda previous, steps: "s", every=2, keep_last=1),
        KeyEventMemory(lambda *step: True),
        RetrievalMemory(2),
        FrameMemory(2),
    ],
    ids=lambda memory: type(memory).__name__,
)
def test_reset_forgets_everything(memory):
    feed(memory, 7)
    assert memory.get_memory_text()
    memory.reset()
    assert memory.get_memory_text() == ""
    assert tuple(memory.get_images()) == ()
    assert "[Step 1]" in feed(memory, 1).get_memory_text()


def test_an_invalid_action_is_told_with_its_reason():
    memory = SimpleMemory()
    memory.update(
        "A hall.", "fly", 0.0, False, {"action_valid": False, "action_reason": "no wings"}
    )
    assert memory.get_memory_text() == "[Step 1] A hall.\n> fly (invalid: no wings)"


def test_observations_that_are_not_text_are_told_as_text():
    memory = SimpleMemory()
    memory.update({"at": np.array([1, 2]), "key": True}, "go", 0.0, False, {})
    assert memory.get_memory_text() == "[Step 1] at: [1, 2]\nkey: True\n> go"


def test_summary_memory_summarises_the_oldest_and_keeps_the_last():
    calls = []

    def summarize(previous, steps):
        calls.append((previous, [step.number for step in steps]))
        return f"{previous}{len(steps)}."

    memory = feed(SummaryMemory(summarize, every=3, keep_last=2), 4)
    assert calls == []
    feed(memory, 5, start=4)
    assert calls == [("", [1, 2, 3]), ("3.", [4, 5, 6])]
    assert memory.get_memory_text().startswith("Earlier: 3.3.\n[Step 7]")
    assert re.findall(r"Step (\d)", memory.get_memory_text()) == ["7", "8", "9"]


def test_a_summary_that_is_no_text_is_an_error_with_name_and_step():
    memory = SummaryMemory(lambda previous, steps: None, every=2, keep_last=0)
    with pytest.raises(
        DataError, match=r"str from `summarize` of SummaryMemory, got NoneType after step 2"
    ):
        feed(memory, 2)


def test_key_event_memory_asks_with_what_update_was_given():
    seen = []

    def is_key(observation, action, reward, done, info):
        seen.append((observation, action, reward, done, info["observation"]))
        return "key" in info["observation"]

    memory = KeyEventMemory(is_key)
    memory.update("A hall.", "look", 0.0, False, {"observation": "You see a key."})
    memory.update("You see a key.", "take", 1.0, True, {"observation": "Done."})
    assert seen[1] == ("You see a key.", "take", 1.0, True, "Done.")
    assert memory.get_memory_text() == "[Step 1] A hall.\n> look"


def test_retrieval_memory_tells_the_steps_closest_to_the_current_observation():
    memory = RetrievalMemory(top_k=2)
    rooms = [
        "a blue kitchen with a stove",
        "a red cellar with wine",
        "a green attic",
        "a long corridor",
    ]
    for room in rooms:
        memory.update(room, "look", 0.0, False, {"observation": "the red cellar again, dark"})
    text = memory.get_memory_text()
    assert "[Step 2] a red cellar" in text
    memory.update(
        "a long corridor",
        "go up",
        0.0,
        False,
        {"observation": "attic", "task_description": "find a stove"},
    )
    assert re.findall(r"Step (\d)", memory.get_memory_text()) == ["1", "3"]


def test_retrieval_memory_is_deterministic_with_ties():
    def text():
        memory = RetrievalMemory(top_k=3)
        for number in range(20):
            memory.update("same room", f"go {number}", 0.0, False, {"observation": "same room"})
        return memory.get_memory_text()

    assert text() == text()
    assert re.findall(r"Step (\d+)", text()) == ["18", "19", "20"]


def bm25_by_hand(texts, query, k1=1.2, b=0.75):
    documents = [re.findall(r"\w+", text.lower()) for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for word in set(re.findall(r"\w+", query.lower())):
            count = document.count(word)
            containing = sum(word in other for other in documents)
            rarity = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
            score += rarity * count * (k1 + 1) / (count + k1 * (1 - b + b * len(document) / mean))
        scores.append(score)
    return scores


words = st.lists(st.sampled_from(["a", "b", "c", "d", "e", "f", "g"]), min_size=1, max_size=8).map(
    " ".join
)


@given(texts=st.lists(words, min_size=1, max_size=12), query=words, top_k=st.integers(1, 5))
def test_bm25_ranks_as_the_formula_says(texts, query, top_k):
    index = BM25Index()
    for text in texts:
        index.add(text)
    scores = bm25_by_hand(texts, query)
    found = index.search(query, top_k)
    assert len(found) == min(top_k, sum(score > 0 for score in scores))
    assert [scores[number] for number in found] == pytest.approx(
        sorted(scores, reverse=True)[: len(found)]
    )


def test_frame_memory_keeps_images_in_the_order_of_their_placeholders():
    memory = FrameMemory(2)
    for value in (1, 2, 3):
        image = np.full((4, 5, 3), value, np.uint8)
        memory.update({"view": image, "note": f"n{value}"}, "left", 0.0, False, {})
    assert memory.get_memory_text() == (
        "[Step 2] view: <image>\nnote: n2\n> left\n[Step 3] view: <image>\nnote: n3\n> left"
    )
    assert [int(image[0, 0, 0]) for image in memory.get_images()] == [2, 3]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: WindowMemory(-1), "window_size"),
        (lambda: FrameMemory(-1), "window_size"),
        (lambda: SummaryMemory(lambda p, s: "", every=0), "every"),
        (lambda: SummaryMemory(lambda p, s: "", keep_last=-1), "keep_last"),
        (lambda: RetrievalMemory(0), "top_k"),
    ],
)
def test_sizes_out_of_range_are_refused_by_name(make, name):
    with pytest.raises(ConfigError, match=f"`{name}` of at least"):
        make()


class Uncopyable:
    def __deepcopy__(self, memo):
        raise AssertionError("a model must not be copied")

    def summarize(self, previous, steps):
        return "s"

    def is_key(self, observation, action, reward, done, info):
        return True


@pytest.mark.parametrize(
    "memory",
    [
        SummaryMemory(Uncopyable().summarize, every=2, keep_last=1),
        KeyEventMemory(Uncopyable().is_key),
    ],
    ids=["summary", "key event"],
)
def test_copies_share_the_callable_and_nothing_else(memory):
    feed(memory, 5)
    twin = copy.deepcopy(memory)
    assert twin.get_memory_text() == memory.get_memory_text()
    feed(twin, 3, start=5)
    assert twin.get_memory_text() != memory.get_memory_text()
