"""Compiled kernels against their numpy twins, and life without numba."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstep import credit, kernels
from longstep.kernels import partition, segments


@pytest.fixture(scope="module")
def compiled() -> None:
    pytest.importorskip("numba", reason='needs numba: pip install "longstep[fast]"')
    assert kernels.warm_up()


def both(function: Any, *args: Any) -> tuple[Any, Any]:
    """The compiled result and that of the numpy twin."""
    assert kernels.backend() == "numba"
    result = function(*args)
    with kernels.numpy_only():
        assert kernels.backend() == "numpy"
        return result, function(*args)


def assert_same_bits(results: tuple[Any, Any]) -> None:
    compiled, plain = (r if isinstance(r, tuple) else (r,) for r in results)
    for one, other in zip(compiled, plain, strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


lengths = st.lists(st.integers(0, 30), max_size=12)
seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=50, deadline=None)
@given(lengths, seeds, st.sampled_from([0.0, 0.9, 1.0]))
@pytest.mark.usefixtures("compiled")
def test_returns_have_the_same_bits(lengths: list[int], seed: int, gamma: float) -> None:
    rewards = np.random.default_rng(seed).normal(size=sum(lengths))
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    assert_same_bits(both(segments.discounted_returns, rewards, offsets, gamma))


@pytest.mark.usefixtures("compiled")
def test_returns_of_many_short_and_of_one_long_trajectory_have_the_same_bits() -> None:
    rewards = np.random.default_rng(0).normal(size=3000)
    for offsets in (np.arange(0, 3001, 3), np.array([0, 3000])):
        assert_same_bits(both(segments.discounted_returns, rewards, offsets, 0.95))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), st.integers(1, 9), seeds)
@pytest.mark.usefixtures("compiled")
def test_group_statistics_have_the_same_bits(num_rows: int, num_groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, ids = rng.normal(size=num_rows), rng.integers(-1, num_groups, num_rows)
    results = both(segments.group_statistics, values, ids, num_groups)
    assert_same_bits(results)
    counts, means, squares = results[0]
    scaled = both(segments.centre_and_scale, values, ids, means, squares)
    assert_same_bits(scaled)
    for group in range(num_groups):
        members = values[ids == group]
        assert counts[group] == len(members)
        if len(members):
            assert means[group] == pytest.approx(members.mean())
            assert squares[group] == pytest.approx(members.var() * len(members), abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), st.integers(1, 3), seeds)
@pytest.mark.usefixtures("compiled")
def test_equal_rows_get_the_same_ids(num_rows: int, num_words: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 3, (num_rows, num_words)).astype(np.uint64) << np.uint64(61)
    classes = rng.integers(-1, 3, num_rows)
    results = both(partition.first_appearance_groups, words, classes)
    assert_same_bits(results)
    numbers: dict[Any, int] = {}
    for row, key in enumerate(zip(classes.tolist(), words.tolist(), strict=True)):
        expected = -1 if key[0] < 0 else numbers.setdefault(str(key), len(numbers))
        assert results[0][0][row] == expected
    assert results[0][1].tolist() == [int((results[0][0] == i).sum()) for i in range(len(numbers))]


def test_rows_that_share_a_hash_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "_mix", lambda columns: columns[1] % np.uint64(2))
    words = np.array([[4, 0], [2, 0], [4, 0], [4, 1], [3, 0], [2, 0]], np.uint64)
    classes = np.zeros(6, np.int64)
    with kernels.numpy_only():
        ids, sizes = partition.first_appearance_groups(words, classes)
    assert ids.tolist() == [0, 1, 0, 2, 3, 1]
    assert sizes.tolist() == [2, 2, 1, 1]


@pytest.mark.usefixtures("compiled")
def test_whole_advantages_have_the_same_bits() -> None:
    rng = np.random.default_rng(1)
    trajectories = np.sort(rng.integers(0, 200, 5000))
    columns = (rng.normal(size=5000), trajectories, trajectories // 8, rng.integers(0, 50, 5000))
    for estimator in (credit.gigpo, credit.hgpo, credit.graph):
        compiled, plain = both(estimator, *columns)
        for part in ("total", "episode", "step"):
            assert getattr(compiled, part).tobytes() == getattr(plain, part).tobytes()
        assert compiled.diagnostics == plain.diagnostics


def test_a_kernel_that_cannot_be_cached_on_disk_is_compiled_all_the_same() -> None:
    pytest.importorskip("numba", reason='needs numba: pip install "longstep[fast]"')
    module: dict[str, Any] = {}
    exec("def twice(value):\n    return 2.0 * value", module)
    assert kernels.Kernel(module["twice"], "float64(float64)")(4.0) == 8.0


def run(code: str) -> str:
    """Standard output of a fresh interpreter."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


USE_EVERYTHING = """
    from longstep import kernels
    from longstep.credit import gigpo, graph, hgpo
    columns = ([0.0, 1.0, 0.0], [0, 0, 1], [0, 0, 0], ["a", "b", "a"])
    totals = [estimator(*columns).total.tolist() for estimator in (gigpo, hgpo, graph)]
"""


def test_without_numba_everything_runs_and_warming_up_says_no() -> None:
    blocked = "import sys; sys.modules['numba'] = None\n" + textwrap.dedent(USE_EVERYTHING)
    report = "\nprint(kernels.warm_up(), kernels.backend(), totals)"
    again = "\nprint(totals == [e(*columns).total.tolist() for e in (gigpo, hgpo, graph)])"
    without = run(blocked + report + again)
    assert without.startswith("False numpy [[")
    assert without.endswith("True")
    assert run(textwrap.dedent(USE_EVERYTHING) + "\nprint(totals)") in without


def test_importing_and_using_credit_loads_no_numba_and_no_torch() -> None:
    code = (
        textwrap.dedent(USE_EVERYTHING)
        + "\nimport sys; print({'numba', 'torch'} & set(sys.modules))"
    )
    assert run(code) == "set()"


def test_kernels_take_arrays_that_are_read_only() -> None:
    kernels.warm_up()
    rewards, trajectories = np.array([0.0, 1.0], np.float32), np.array([0, 0])
    expected = credit.discounted_returns(rewards, trajectories, 0.5)
    for array in (rewards, trajectories):
        array.flags.writeable = False

    np.testing.assert_array_equal(credit.discounted_returns(rewards, trajectories, 0.5), expected)
    keys = [bytes([number] * 16) for number in (1, 2, 1)]  # become a view of one bytes object
    assert credit.group_steps(keys, np.zeros(3, int)).ids.tolist() == [0, 1, 0]
