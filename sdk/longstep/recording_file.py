"""The file of a `RolloutBatch`: an `.npz` archive of arrays that also holds the texts as JSON lines. No pickle.

`trajectories.jsonl` begins with a header line and has one line for each trajectory. Token ids and log-probabilities of
all steps, failed trajectories included, are the columns of `recording.token_columns`. Values without a JSON form
(arrays, bytes, tuples, sets, dicts with other keys than str) are tagged objects; arrays go to members `value/K.npy`.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from longstep.errors import DataError, UnsupportedTypeError
from longstep.recording import step_columns, token_columns
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

__all__ = ["read_trajectories", "write_batch"]

_TEXTS = "trajectories.jsonl"
_HEADER = {"format": "longstep.RolloutBatch", "version": 1}
_TAG = "$"
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What reading another file, or a damaged one, may raise."""
_CONTAINERS: dict[str, Callable[..., Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def write_batch(trajectories: Sequence[Trajectory], path: str | PathLike[str]) -> None:
    """Write trajectories into one file that appears whole or not at all."""
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    arrays = {**step_columns(steps), **token_columns(steps)}
    values: list[NDArray[Any]] = []
    lines = [_HEADER, *(_trajectory_to_json(trajectory, values) for trajectory in trajectories)]
    arrays.update((f"value/{k}", value) for k, value in enumerate(values))
    texts = "".join(json.dumps(line, ensure_ascii=True) + "\n" for line in lines)

    def write(file: Any) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
            with archive.open(_TEXTS, "w", force_zip64=True) as member:
                member.write(texts.encode())

    _write_atomically(Path(path), write)


def read_trajectories(path: str | PathLike[str]) -> tuple[Trajectory, ...]:
    """The trajectories that `write_batch` wrote; raises `DataError` for anything else."""
    try:
        with zipfile.ZipFile(path) as archive:
            lines = [json.loads(line) for line in archive.read(_TEXTS).decode().splitlines()]
            if not lines or lines[0] != _HEADER:
                raise DataError(
                    f"expected the header {_HEADER} in `{path}`; save it again with `RolloutBatch.save`"
                )
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            arrays = {name[:-4]: _read_array(archive, name) for name in names}
        completions = iter(list(_completion_arrays(arrays)))
        values = [
            arrays[f"value/{k}"] for k in range(sum(name.startswith("value/") for name in arrays))
        ]
        trajectories = [_trajectory_from_json(line, completions, values) for line in lines[1:]]
        if next(completions, None) is not None:
            raise ValueError("token ids of more steps than its texts have")
        return tuple(trajectories)
    except (OSError, *_DAMAGE) as error:
        if isinstance(error, DataError):
            raise
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place outside the file
            raise
        raise DataError(
            f"expected a file of `RolloutBatch.save` at `{path}`, got one that is damaged or "
            f"something else ({type(error).__name__}: {error})"
        ) from error


def _write_atomically(path: Path, write: Callable[[Any], None]) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with archive.open(name) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


# -- records ----------------------------------------------------------------------------------------------------------


def _trajectory_to_json(trajectory: Trajectory, values: list[NDArray[Any]]) -> dict[str, Any]:
    task = trajectory.task
    return {
        "trajectory_id": trajectory.trajectory_id,
        "task": {
            "env_id": task.env_id,
            "seed": int(task.seed),
            "options": _encode(None if task.options is None else dict(task.options), values),
            "name": task.name,
        },
        "group_id": int(trajectory.group_id),
        "member": int(trajectory.member),
        "stop_reason": trajectory.stop_reason.value,
        "success": bool(trajectory.success),
        "error": trajectory.error,
        "steps": [_step_to_json(step, values) for step in trajectory.steps],
    }


def _trajectory_from_json(
    line: dict[str, Any], completions: Iterator[dict[str, Any]], values: list[NDArray[Any]]
) -> Trajectory:
    task = {**line["task"], "options": _decode(line["task"]["options"], values)}
    steps = tuple(_step_from_json(step, next(completions), values) for step in line["steps"])
    fields: dict[str, Any] = {**line, "task": Task(**task), "steps": steps}
    fields["stop_reason"] = StopReason(line["stop_reason"])
    return Trajectory(**fields)


def _step_to_json(step: StepRecord, values: list[NDArray[Any]]) -> dict[str, Any]:
    prompt, completion = step.prompt, step.completion
    return {
        "step": int(step.step),
        "prompt": {
            "messages": [[message.role, message.content] for message in prompt.messages],
            "images": _encode(list(prompt.images), values),
            "num_tokens": None if prompt.num_tokens is None else int(prompt.num_tokens),
            "dropped": [[d.part, d.how, d.num_characters] for d in prompt.dropped],
        },
        "completion": {
            "request_id": completion.request_id,
            "text": completion.text,
            "finish_reason": completion.finish_reason.value,
            "policy_version": int(completion.policy_version),
            "constrained": completion.allowed_token_ids is not None,
            "error": completion.error,
        },
        "action": [step.action.text, bool(step.action.valid), step.action.reason],
        "observation": _encode(step.observation, values),
        "state_key": step.state_key.hex(),
        "reward": float(step.reward),
        "raw_reward": float(step.raw_reward),
        "terminated": bool(step.terminated),
        "truncated": bool(step.truncated),
        "seconds": {part: float(seconds) for part, seconds in step.seconds.items()},
    }


def _step_from_json(
    line: dict[str, Any], arrays: dict[str, Any], values: list[NDArray[Any]]
) -> StepRecord:
    prompt, completion = line["prompt"], dict(line["completion"])
    if not completion.pop("constrained"):
        arrays = {**arrays, "allowed_token_ids": None}
    completion["finish_reason"] = FinishReason(completion["finish_reason"])
    text, valid, reason = line["action"]
    fields: dict[str, Any] = {
        **line,
        "prompt": Prompt(
            messages=tuple(Message(role=role, content=text) for role, text in prompt["messages"]),
            images=tuple(_decode(prompt["images"], values)),
            num_tokens=prompt["num_tokens"],
            dropped=tuple(
                Dropped(part=part, how=how, num_characters=count)
                for part, how, count in prompt["dropped"]
            ),
        ),
        "completion": Completion(**completion, **arrays),
        "action": Action(text=text, valid=valid, reason=reason),
        "observation": _decode(line["observation"], values),
        "state_key": bytes.fromhex(line["state_key"]),
    }
    return StepRecord(**fields)


def _completion_arrays(arrays: Mapping[str, NDArray[Any]]) -> Iterator[dict[str, Any]]:
    """The arrays of each completion, in the order of the steps."""
    prompts = _pieces(arrays["prompt_token_ids"], arrays["prompt_offsets"])
    ends = arrays["completion_offsets"]
    sampled = _pieces(arrays["completion_token_ids"], ends)
    logprobs = _pieces(arrays["logprobs"], ends)
    allowed: list[NDArray[Any]] = []
    if "allowed_offsets" in arrays:
        allowed = _pieces(arrays["allowed_token_ids"], arrays["allowed_offsets"])
    for i in range(len(prompts)):
        yield {
            "prompt_token_ids": prompts[i],
            "token_ids": sampled[i],
            "logprobs": logprobs[i],
            "allowed_token_ids": tuple(allowed[ends[i] : ends[i + 1]]),
        }


def _pieces(flat: NDArray[Any], offsets: NDArray[np.int64]) -> list[NDArray[Any]]:
    if offsets[0] != 0 or offsets[-1] != len(flat) or (np.diff(offsets) < 0).any():
        raise ValueError(f"offsets that do not divide {len(flat)} entries")
    return [flat[offsets[i] : offsets[i + 1]] for i in range(len(offsets) - 1)]


# -- values of any type: observations and options ---------------------------------------------------------------------


def _encode(value: Any, values: list[NDArray[Any]]) -> Any:
    """The JSON form of a value; arrays go to `values` and are referred to by index."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_array(cast("NDArray[Any] | np.generic[Any]", value), values)
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": value.hex()}
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return {_TAG: "dict", "value": [[_encode(k, values), _encode(v, values)] for k, v in pairs]}
    for kind, container in _CONTAINERS.items():
        if isinstance(value, cast("type", container)):
            encoded = [_encode(item, values) for item in cast("Iterable[Any]", value)]
            if kind in ("set", "frozenset"):  # no order of its own; the file must not depend on it
                encoded.sort(key=json.dumps)
            return encoded if kind == "list" else {_TAG: kind, "value": encoded}
    for base in (str, bool, int, float):
        if isinstance(value, base):  # an enum or another subclass is saved as its plain value
            return base(value)
    raise UnsupportedTypeError(
        "expected observations and options of JSON or array types to save, got "
        f"{type(value).__name__}; use text, numbers, arrays, lists, tuples, sets or dicts"
    )


def _encode_array(value: NDArray[Any] | np.generic[Any], values: list[NDArray[Any]]) -> Any:
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise UnsupportedTypeError(
            f"expected arrays of numbers or fixed-size items to save, got dtype {array.dtype}; "
            "convert it first"
        )
    values.append(array)
    kind = "array" if isinstance(value, np.ndarray) else "scalar"
    return {_TAG: kind, "value": len(values) - 1}


def _decode(value: Any, values: list[Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, values) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    tagged = cast("dict[str, Any]", value)
    kind, inner = tagged[_TAG], tagged["value"]
    decoded: Any = None
    if kind == "array":
        decoded = values[inner]
    elif kind == "scalar":
        decoded = values[inner][()]
    elif kind == "bytes":
        decoded = bytes.fromhex(inner)
    elif kind == "dict":
        decoded = {_decode(k, values): _decode(v, values) for k, v in inner}
    else:
        decoded = _CONTAINERS[kind]([_decode(item, values) for item in inner])
    return decoded
