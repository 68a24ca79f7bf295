"""`RolloutBatch`: columns, summary and file."""

from __future__ import annotations

import functools
import io
import json
import math
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstep.errors import ConfigError, DataError, UnsupportedTypeError
from longstep.recording import RolloutBatch
from longstep.types import (
    Action,
    Completion,
    Dropped,
    FinishReason,
    Message,
    Prompt,
    StepRecord,
    StopReason,
    Task,
    Trajectory,
)


def completion(
    prompt_ids: list[int], ids: list[int], allowed: list[list[int]] | None = None
) -> Completion:
    return Completion(
        request_id="r",
        prompt_token_ids=np.array(prompt_ids, dtype=np.int32),
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=-np.arange(len(ids), dtype=np.float32) - 0.5,
        text=" ".join(map(str, ids)),
        finish_reason=FinishReason.STOP,
        policy_version=4,
        resubmitted=2,
        allowed_token_ids=None
        if allowed is None
        else tuple(np.array(row, dtype=np.int32) for row in allowed),
    )


def step(index: int, *, valid: bool = True, last: bool = False, **changes: Any) -> StepRecord:
    usual: dict[str, Any] = {
        "step": index,
        "prompt": Prompt(messages=(Message(role="user", content=f"state {index}"),)),
        "completion": completion([1, 2, 3], [5 + index]),
        "action": Action(text="go", valid=valid, reason="" if valid else "no tag"),
        "observation": f"state {index}",
        "state_key": bytes([index] * 16),
        "reward": 0.5 if valid else 0.4,
        "raw_reward": 0.5,
        "terminated": last,
        "truncated": False,
        "seconds": {"generate": 0.25, "env": 0.125},
    }
    return StepRecord(**{**usual, **changes})


def trajectory(
    group: int, member: int, steps: list[StepRecord], reason: StopReason, **changes: Any
) -> Trajectory:
    usual: dict[str, Any] = {
        "trajectory_id": f"g{group}m{member}",
        "task": Task(env_id="maze", seed=group),
        "group_id": group,
        "member": member,
        "steps": tuple(steps),
        "stop_reason": reason,
        "success": reason is StopReason.TERMINATED,
    }
    return Trajectory(**{**usual, **changes})


@pytest.fixture
def batch() -> RolloutBatch:
    """Two groups of two; one member failed after a step, one was cut after an invalid action."""
    failed = StopReason.ENV_FAILURE
    return RolloutBatch(
        trajectories=(
            trajectory(0, 0, [step(0), step(1, last=True)], StopReason.TERMINATED),
            trajectory(0, 1, [step(7)], failed, error="RuntimeError: died"),
            trajectory(1, 0, [step(0), step(1, valid=False)], StopReason.TIME_LIMIT),
            trajectory(1, 1, [step(2, last=True)], StopReason.TERMINATED, success=False),
        )
    )


def same(left: Any, right: Any) -> bool:
    """Equal in value and type, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def test_rows_are_those_of_usable_trajectories_in_order_of_time(batch: RolloutBatch) -> None:
    assert [row.step for row in batch.rows] == [0, 1, 0, 1, 2]
    assert batch.errors == ("g0m1: RuntimeError: died",)


def test_columns_are_in_the_order_of_the_rows(batch: RolloutBatch) -> None:
    columns = batch.to_numpy()
    assert columns["trajectory_ids"].tolist() == [0, 0, 2, 2, 3]
    assert columns["group_ids"].tolist() == [0, 0, 1, 1, 1]
    assert columns["members"].tolist() == [0, 0, 0, 0, 1]
    assert columns["steps"].tolist() == [0, 1, 0, 1, 2]
    assert columns["rewards"].tolist() == pytest.approx([0.5, 0.5, 0.5, 0.4, 0.5])
    assert columns["raw_rewards"].tolist() == [0.5] * 5
    assert columns["valid"].tolist() == [True, True, True, False, True]
    assert columns["terminated"].tolist() == [False, True, False, False, True]
    assert columns["policy_versions"].tolist() == [4] * 5
    assert [key.tobytes() for key in columns["state_keys"]] == [row.state_key for row in batch.rows]
    assert columns["completion_token_ids"].tolist() == [5, 6, 5, 6, 7]
    assert columns["completion_offsets"].tolist() == [0, 1, 2, 3, 4, 5]
    assert columns["prompt_offsets"].tolist() == [0, 3, 6, 9, 12, 15]
    assert "allowed_token_ids" not in columns


def test_columns_have_the_promised_types(batch: RolloutBatch) -> None:
    types = {name: column.dtype.str for name, column in batch.to_numpy().items()}
    assert types == {
        "trajectory_ids": "<i8",
        "group_ids": "<i8",
        "members": "<i4",
        "rewards": "<f4",
        "raw_rewards": "<f4",
        "state_keys": "|V16",
        "steps": "<i4",
        "valid": "|b1",
        "terminated": "|b1",
        "truncated": "|b1",
        "policy_versions": "<i4",
        "prompt_token_ids": "<i4",
        "prompt_offsets": "<i8",
        "completion_token_ids": "<i4",
        "completion_offsets": "<i8",
        "logprobs": "<f4",
    }


def test_allowed_ids_have_one_range_for_each_completion_token() -> None:
    constrained = completion([1], [5, 6], allowed=[[5, 9], [6]])
    free, empty = completion([1], [7]), completion([1], [], allowed=[])
    steps = [step(i, completion=c) for i, c in enumerate((constrained, free, empty))]
    batch = RolloutBatch(trajectories=(trajectory(0, 0, steps, StopReason.TERMINATED),))
    columns = batch.to_numpy()
    assert columns["completion_offsets"].tolist() == [0, 2, 3, 3]
    assert columns["allowed_token_ids"].tolist() == [5, 9, 6]
    assert columns["allowed_offsets"].tolist() == [0, 2, 3, 3]


def test_summary_leaves_failures_out_of_means_and_counts_what_they_cost(
    batch: RolloutBatch,
) -> None:
    summary = batch.summary()
    shares = {name: value for name, value in summary.items() if name.startswith("stop/")}
    assert shares == {
        **{f"stop/{reason}": 0.0 for reason in StopReason},
        "stop/terminated": 0.5,
        "stop/time_limit": 0.25,
        "stop/env_failure": 0.25,
    }
    assert {name: value for name, value in summary.items() if name not in shares} == {
        "num_trajectories": 3.0,
        "num_failures": 1.0,
        "success_rate": pytest.approx(1 / 3),
        "return_mean": pytest.approx((1.0 + 1.0 + 0.5) / 3),
        "episode_length_mean": pytest.approx(5 / 3),
        "invalid_action_rate": pytest.approx(1 / 5),
        "env_steps": 6.0,
        "generated_tokens": 6.0,
        "loss_tokens": 5.0,
    }


def test_an_empty_batch_has_zeros_and_empty_columns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = RolloutBatch(trajectories=())
        assert set(batch.summary().values()) == {0.0}
        columns = batch.to_numpy()
    offsets = {"prompt_offsets", "completion_offsets"}
    assert all(columns[name].tolist() == [0] for name in offsets)
    assert all(len(column) == 0 for name, column in columns.items() if name not in offsets)
    assert columns["state_keys"].dtype == np.dtype("V16")


# -- the file ---------------------------------------------------------------------------------------------------------


def test_what_is_loaded_is_what_was_saved(batch: RolloutBatch, tmp_path: Path) -> None:
    batch.save(tmp_path / "batch.npz")
    loaded = RolloutBatch.load(tmp_path / "batch.npz")
    assert same(loaded.trajectories, batch.trajectories)
    assert loaded.trajectories[1].error == "RuntimeError: died"
    assert [path.name for path in tmp_path.iterdir()] == ["batch.npz"]


def test_an_empty_batch_is_saved_too(tmp_path: Path) -> None:
    RolloutBatch(trajectories=()).save(tmp_path / "batch")
    assert RolloutBatch.load(tmp_path / "batch").trajectories == ()


def test_numpy_reads_the_arrays_without_pickle(batch: RolloutBatch, tmp_path: Path) -> None:
    batch.save(tmp_path / "batch.npz")
    with np.load(tmp_path / "batch.npz", allow_pickle=False) as archive:
        assert archive["completion_token_ids"].tolist() == [5, 6, 12, 5, 6, 7]
        assert b"trajectories.jsonl" not in archive["trajectories.jsonl"]


def test_the_same_batch_gives_the_same_bytes(batch: RolloutBatch, tmp_path: Path) -> None:
    batch.save(tmp_path / "a")
    batch.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


NUMBERS = st.integers() | st.floats() | st.booleans() | st.none()
ARRAYS = st.sampled_from(
    [
        np.zeros((2, 3, 3), dtype=np.uint8),
        np.array([np.nan, -0.0, np.inf]),
        np.array("text"),
        np.array([], dtype=np.int64),
        np.arange(6).reshape(2, 3).T,
        np.float32(1.5),
        np.int8(-3),
        np.bool_(True),
    ]
)
HASHABLE = NUMBERS | st.text() | st.binary(max_size=8)
VALUES = st.recursive(
    HASHABLE | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
        | st.frozensets(st.integers() | st.text(max_size=4), max_size=3)
        | st.sets(st.binary(max_size=3), max_size=3)
    ),
    max_leaves=8,
)
TEXTS = st.text(st.characters(exclude_categories=()))
REWARDS = st.floats(-1e30, 1e30) | st.sampled_from([math.nan, math.inf, -0.0])
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4)


@st.composite
def batches(draw: st.DrawFn) -> RolloutBatch:
    def any_step(index: int) -> StepRecord:
        ids = draw(IDS)
        allowed = draw(st.none() | st.just([[i, 1] for i in ids]))
        prompt = Prompt(
            messages=tuple(
                Message(role=role, content=draw(TEXTS))
                for role in draw(st.sampled_from([(), ("user",), ("system", "user")]))
            ),
            images=tuple(
                np.full((2, 2, 3), i, dtype=np.uint8) for i in range(draw(st.integers(0, 2)))
            ),
            num_tokens=draw(st.none() | st.integers(0, 9)),
            dropped=(Dropped(part="memory", how="removed", num_characters=3),)
            * draw(st.integers(0, 1)),
        )
        return step(
            index,
            valid=draw(st.booleans()),
            prompt=prompt,
            completion=replace(completion(draw(IDS), ids, allowed), text=draw(TEXTS)),
            observation=draw(VALUES),
            state_key=draw(st.binary(min_size=16, max_size=16)),
            reward=draw(REWARDS),
            raw_reward=draw(REWARDS),
        )

    return RolloutBatch(
        trajectories=tuple(
            trajectory(
                group,
                0,
                [any_step(i) for i in range(draw(st.integers(0, 2)))],
                draw(st.sampled_from(StopReason)),
                error=draw(st.none() | TEXTS),
                success=draw(st.booleans()),
                task=Task(
                    env_id="maze",
                    seed=draw(st.integers(0, 2**63)),
                    options=draw(st.none() | st.dictionaries(st.text(), VALUES, max_size=2)),
                    name=draw(TEXTS),
                ),
            )
            for group in range(draw(st.integers(0, 3)))
        )
    )


@given(batches())
@settings(max_examples=80, deadline=None)
def test_any_batch_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, made: RolloutBatch
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.npz"
    made.save(path)
    loaded = RolloutBatch.load(path)
    assert same(loaded.trajectories, made.trajectories)


def test_a_failed_save_leaves_the_older_file_and_nothing_else(
    batch: RolloutBatch, tmp_path: Path
) -> None:
    path = tmp_path / "batch.npz"
    batch.save(path)
    before = path.read_bytes()
    strange = trajectory(0, 0, [step(0, observation=object())], StopReason.TERMINATED)
    with pytest.raises(UnsupportedTypeError, match="JSON or array types to save, got object"):
        RolloutBatch(trajectories=(strange,)).save(path)
    objects = trajectory(0, 0, [step(0, observation=np.array([object()]))], StopReason.TERMINATED)
    with pytest.raises(UnsupportedTypeError, match="got dtype object"):
        RolloutBatch(trajectories=(objects,)).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["batch.npz"]


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"expected a file of `RolloutBatch.save`"):
        RolloutBatch.load(path)
    np.savez(tmp_path / "other.npz", a=np.arange(3))
    with pytest.raises(DataError, match=r"expected a file of `RolloutBatch.save`"):
        RolloutBatch.load(tmp_path / "other.npz")
    with pytest.raises(FileNotFoundError):
        RolloutBatch.load(tmp_path / "missing.npz")


def test_a_damaged_file_is_refused_or_read_as_it_was(batch: RolloutBatch, tmp_path: Path) -> None:
    path = tmp_path / "batch.npz"
    batch.save(path)
    whole = path.read_bytes()
    num_refused = 0
    for position in range(0, len(whole), 23):
        damaged = bytearray(whole)
        damaged[position] ^= 0x55
        path.write_bytes(damaged)
        try:
            loaded = RolloutBatch.load(path)
        except DataError:
            num_refused += 1
        else:
            assert same(loaded.trajectories, batch.trajectories)
    assert num_refused > len(whole) // 46


def test_offsets_that_do_not_fit_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "batch.npz"
    RolloutBatch(trajectories=()).save(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    buffer = io.BytesIO()
    np.save(buffer, np.array([5, 9], dtype=np.int64))
    members["prompt_offsets.npy"] = buffer.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(DataError, match="do not divide 0 entries"):
        RolloutBatch.load(path)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the first trajectory's line, as another program might have written it."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header, first, *rest = members["trajectories.jsonl"].decode().splitlines()
    line = json.loads(first)
    change(line)
    members["trajectories.jsonl"] = "\n".join([header, json.dumps(line), *rest]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


WRONG_VALUES: list[Any] = ["x", None, [], {}, [1], {"a": 1}, 1.5, True, 7]


def places(line: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value of a line, but observations and options, which may be anything."""
    if path and path[-1] in ("observation", "options", "images"):
        return
    if path:
        yield path
    if isinstance(line, dict | list):
        for key, value in line.items() if isinstance(line, dict) else enumerate(line):
            yield from places(value, (*path, key))


def test_a_value_of_another_type_is_damage_wherever_it_stands(
    batch: RolloutBatch, tmp_path: Path
) -> None:
    path = tmp_path / "batch.npz"
    batch.save(path)
    with zipfile.ZipFile(path) as archive:
        whole = json.loads(archive.read("trajectories.jsonl").decode().splitlines()[1])
    original = path.read_bytes()
    for place in places(whole):
        for wrong in WRONG_VALUES:
            *above, last = place
            inner = functools.reduce(lambda value, key: value[key], above, whole)
            may_be_either = type(inner[last]) in (int, float) and type(wrong) in (int, float)
            if type(wrong) is type(inner[last]) or may_be_either or inner[last] is None:
                continue
            if wrong is None and last in ("error", "num_tokens"):
                continue

            def change(line: dict[str, Any], place: Any = place, wrong: Any = wrong) -> None:
                *above, last = place
                functools.reduce(lambda value, key: value[key], above, line)[last] = wrong

            path.write_bytes(original)
            rewrite(path, change)
            with pytest.raises(DataError, match=r"expected a file of `RolloutBatch.save`"):
                RolloutBatch.load(path)


@pytest.mark.parametrize("key", ["", "00", "00" * 15, "zz" * 16])
def test_a_state_key_of_another_length_is_damage(
    batch: RolloutBatch, tmp_path: Path, key: str
) -> None:
    path = tmp_path / "batch.npz"
    batch.save(path)

    def change(line: dict[str, Any]) -> None:
        line["steps"][0]["state_key"] = key

    rewrite(path, change)
    with pytest.raises(DataError, match=r"expected a file of `RolloutBatch.save`"):
        RolloutBatch.load(path)


def test_a_state_key_of_another_length_is_named_before_it_is_written(tmp_path: Path) -> None:
    short = trajectory(0, 0, [step(0), step(1, state_key=b"short")], StopReason.TERMINATED)
    made = RolloutBatch(trajectories=(short,))
    for use in (made.to_numpy, lambda: made.save(tmp_path / "batch.npz")):
        with pytest.raises(DataError, match="16 bytes as `state_key`, got 5 at row 1"):
            use()


def test_a_batch_equals_itself_and_no_other(batch: RolloutBatch) -> None:
    twin = RolloutBatch(trajectories=batch.trajectories)
    assert batch == batch
    assert batch != twin
    assert len({batch, twin}) == 2


@pytest.mark.parametrize("given", [None, 5, [], ("x",), "x"])
def test_what_are_no_trajectories_is_a_wrong_call(given: Any) -> None:
    with pytest.raises(ConfigError, match="`trajectories"):
        RolloutBatch(trajectories=given)


@pytest.mark.parametrize("path", [None, 5, b"bytes"])
def test_what_is_no_path_is_a_wrong_call(batch: RolloutBatch, path: Any) -> None:
    with pytest.raises(ConfigError, match="a path as `path`"):
        batch.save(path)
    with pytest.raises(ConfigError, match="a path as `path`"):
        RolloutBatch.load(path)


def test_what_holds_arrays_is_equal_to_itself_alone() -> None:
    ours, theirs = (trajectory(0, 0, [step(0)], StopReason.TERMINATED) for _ in range(2))
    for mine, other in ((ours, theirs), (ours.steps[0], theirs.steps[0])):
        assert mine == mine
        assert mine != other
        assert mine in [other, mine]
        assert len({mine, other}) == 2
    assert ours.steps[0].completion not in [theirs.steps[0].completion]
