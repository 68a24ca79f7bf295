import numpy as np
import pytest

from longstep.envs.words import WordSpace, require_word
from longstep.errors import ConfigError, UnsupportedTypeError


def test_samples_are_members_and_follow_the_seed():
    first, second = WordSpace(("a", "b", "c"), seed=5), WordSpace(("a", "b", "c"), seed=5)
    samples = [first.sample() for _ in range(20)]
    assert samples == [second.sample() for _ in range(20)]
    assert set(samples) == {"a", "b", "c"}
    assert all(sample in first for sample in samples)


def test_only_the_words_are_members():
    space = WordSpace(("a", "b"))
    assert "c" not in space
    assert 0 not in space
    assert ["a"] not in space


def test_mask_and_probability_restrict_the_samples():
    space = WordSpace(("a", "b", "c"), seed=0)
    mask = np.array([0, 1, 0], dtype=np.int8)
    assert {space.sample(mask=mask) for _ in range(10)} == {"b"}
    assert {space.sample(probability=[0.0, 0.0, 1.0]) for _ in range(10)} == {"c"}


def test_words_must_differ():
    with pytest.raises(ConfigError, match="expected different words"):
        WordSpace(("a", "a"))


def test_an_action_of_another_type_is_a_wrong_call():
    assert require_word("fly") == "fly"
    with pytest.raises(UnsupportedTypeError, match="expected a word"):
        require_word(3)
