import numpy as np
import pytest

from longstep.envs.draws import Draws


def make_draws(seed: int) -> Draws:
    return Draws(np.random.Generator(np.random.PCG64(seed)))


def test_draws_follow_the_raw_stream_and_never_change():
    draws = make_draws(7)
    assert [draws.below(6) for _ in range(8)] == [3, 5, 4, 1, 1, 5, 0, 4]
    items = list(range(10))
    make_draws(1).shuffle(items)
    assert items == [0, 4, 9, 3, 2, 7, 6, 1, 8, 5]


@pytest.mark.parametrize("bound", [1, 2, 7, 100])
def test_every_number_below_the_bound_is_about_equally_frequent(bound: int):
    draws = make_draws(bound)
    counts = np.bincount([draws.below(bound) for _ in range(200 * bound)], minlength=bound)
    assert len(counts) == bound
    assert counts.min() > 130
    assert counts.max() < 270


def test_distinct_numbers_differ_and_avoid_what_is_excluded():
    draws = make_draws(3)
    for _ in range(200):
        numbers = draws.distinct(3, 5, but=(2,))
        assert len(set(numbers)) == 3
        assert 2 not in numbers
        assert all(0 <= number < 5 for number in numbers)
