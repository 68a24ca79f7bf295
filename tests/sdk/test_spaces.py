"""The space of texts."""

import pickle

import gymnasium
import pytest

from longstep import TextSpace
from longstep.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["", "hello world", "a\nb\tc", "\N{DOOR} \u4f60\u597d", "x" * 100_000]
)
def test_any_string_is_contained(text):
    assert text in TextSpace()


@pytest.mark.parametrize("value", [None, 3, b"bytes", ["a"], 1.5])
def test_nothing_else_is_contained(value):
    assert value not in TextSpace()


def test_samples_are_contained_and_repeat_with_the_seed():
    samples = [TextSpace(seed=7).sample() for _ in range(2)]
    assert samples[0] == samples[1]
    space = TextSpace(seed=7)
    drawn = [space.sample() for _ in range(50)]
    assert all(text in space and 1 <= len(text) <= 64 for text in drawn)
    assert len(set(drawn)) > 40


def test_a_mask_is_refused():
    with pytest.raises(ConfigError, match="expected no `mask`"):
        TextSpace().sample(mask=[1])


def test_spaces_are_equal_hash_alike_and_survive_pickling():
    space = TextSpace(seed=3)
    again = pickle.loads(pickle.dumps(space))
    assert space == TextSpace() == again
    assert len({space, again}) == 1
    assert space != gymnasium.spaces.Text(5)
    assert again.sample() == TextSpace(seed=3).sample()
    assert repr(space) == "TextSpace()"
