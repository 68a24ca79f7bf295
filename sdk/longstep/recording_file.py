"""The file of a `RolloutBatch`: an `.npz` archive of arrays that also holds the texts as JSON lines. No pickle.

`trajectories.jsonl` begins with a header line and has one line for each trajectory. Token ids and log-probabilities of
all steps, failed trajectories included, are the columns of `recording.token_columns`. Observations and options are in the
form of `recording_values`; arrays go to members `value/K.npy`.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from longstep.errors import DataError
from longstep.recording import step_columns, token_columns
from longstep.recording_values import decode_value, encode_value
from longstep.state_key import KEY_SIZE_BYTES
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
_NONE, _NUMBER = type(None), (int, float)
_TRAJECTORY_TYPES: Mapping[str, tuple[type, ...]] = {
    "trajectory_id": (str,), "task": (dict,), "group_id": (int,), "member": (int,), "stop_reason": (str,),
    "success": (bool,), "error": (str, _NONE), "steps": (list,),
}  # fmt: skip
_TASK_TYPES: Mapping[str, tuple[type, ...]] = {"env_id": (str,), "seed": (int,), "name": (str,)}
_STEP_TYPES: Mapping[str, tuple[type, ...]] = {
    "step": (int,), "prompt": (dict,), "completion": (dict,), "action": (list,), "state_key": (str,),
    "reward": _NUMBER, "raw_reward": _NUMBER, "terminated": (bool,), "truncated": (bool,), "seconds": (dict,),
}  # fmt: skip
_PROMPT_TYPES: Mapping[str, tuple[type, ...]] = {
    "messages": (list,), "images": (list,), "num_tokens": (int, _NONE), "dropped": (list,),
}  # fmt: skip
_COMPLETION_TYPES: Mapping[str, tuple[type, ...]] = {
    "request_id": (str,), "text": (str,), "finish_reason": (str,), "policy_version": (int,), "constrained": (bool,),
    "error": (str, _NONE), "resubmitted": (int,),
}  # fmt: skip
"""JSON types of the fields of each record: what another program wrote may be well-formed and still be nonsense."""


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
            "options": encode_value(None if task.options is None else dict(task.options), values),
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
    _require_types(line, _TRAJECTORY_TYPES)
    _require_types(line["task"], _TASK_TYPES)
    task = {**line["task"], "options": decode_value(line["task"]["options"], values)}
    if not isinstance(task["options"], dict | None):
        raise ValueError("options that are no dict")
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
            "images": encode_value(list(prompt.images), values),
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
            "resubmitted": int(completion.resubmitted),
        },
        "action": [step.action.text, bool(step.action.valid), step.action.reason],
        "observation": encode_value(step.observation, values),
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
    _require_types(line, _STEP_TYPES)
    _require_types(line["seconds"], dict.fromkeys(line["seconds"], _NUMBER))
    _require_types(line["prompt"], _PROMPT_TYPES)
    prompt, completion = line["prompt"], {"resubmitted": 0, **line["completion"]}
    _require_types(completion, _COMPLETION_TYPES)
    if not completion.pop("constrained"):
        arrays = {**arrays, "allowed_token_ids": None}
    completion["finish_reason"] = FinishReason(completion["finish_reason"])
    text, valid, reason = _require_items(line["action"], (str, bool, str))
    fields: dict[str, Any] = {
        **line,
        "prompt": Prompt(
            messages=tuple(
                Message(role=role, content=content)
                for role, content in (_require_items(m, (str, str)) for m in prompt["messages"])
            ),
            images=tuple(decode_value(prompt["images"], values)),
            num_tokens=prompt["num_tokens"],
            dropped=tuple(
                Dropped(part=part, how=how, num_characters=count)
                for part, how, count in (
                    _require_items(cut, (str, str, int)) for cut in prompt["dropped"]
                )
            ),
        ),
        "completion": Completion(**completion, **arrays),
        "action": Action(text=text, valid=valid, reason=reason),
        "observation": decode_value(line["observation"], values),
        "state_key": bytes.fromhex(line["state_key"]),
    }
    if not all(isinstance(image, np.ndarray) for image in fields["prompt"].images):
        raise ValueError("images that are no arrays")
    if len(fields["state_key"]) != KEY_SIZE_BYTES:
        raise ValueError(f"a state key of {len(fields['state_key'])} bytes")
    return StepRecord(**fields)


def _require_types(fields: Any, types: Mapping[str, tuple[type, ...]]) -> None:
    """Raise a ValueError unless every field is there and of one of its types; a bool is no number."""
    for name, allowed in types.items():
        value = fields[name]
        if type(value) not in allowed:
            raise ValueError(f"a {type(value).__name__} as `{name}`")


def _require_items(items: Any, types: tuple[type, ...]) -> list[Any]:
    """The items of a list, as many and of the types given; a ValueError otherwise."""
    if not isinstance(items, list) or tuple(map(type, cast("list[Any]", items))) != types:
        raise ValueError(f"{items!r:.60} instead of {', '.join(kind.__name__ for kind in types)}")
    return cast("list[Any]", items)


def _completion_arrays(arrays: Mapping[str, NDArray[Any]]) -> Iterator[dict[str, Any]]:
    """The arrays of each completion, in the order of the steps."""
    prompts = _pieces(arrays["prompt_token_ids"], arrays["prompt_offsets"])
    ends = arrays["completion_offsets"]
    sampled = _pieces(arrays["completion_token_ids"], ends)
    logprobs = _pieces(arrays["logprobs"], ends, np.float32)
    allowed: list[NDArray[Any]] = []
    if "allowed_offsets" in arrays:
        allowed = _pieces(arrays["allowed_token_ids"], arrays["allowed_offsets"])
        if len(allowed) != ends[-1]:
            raise ValueError(f"allowed ids for {len(allowed)} of {ends[-1]} tokens")
    for i in range(len(prompts)):
        yield {
            "prompt_token_ids": prompts[i],
            "token_ids": sampled[i],
            "logprobs": logprobs[i],
            "allowed_token_ids": tuple(allowed[ends[i] : ends[i + 1]]),
        }


def _pieces(
    flat: NDArray[Any], offsets: NDArray[np.int64], dtype: type[np.generic] = np.int32
) -> list[NDArray[Any]]:
    if flat.dtype != dtype or flat.ndim != 1 or offsets.dtype != np.int64 or offsets.ndim != 1:
        raise ValueError(f"columns of {flat.dtype} with offsets of {offsets.dtype}")
    if offsets[0] != 0 or offsets[-1] != len(flat) or (np.diff(offsets) < 0).any():
        raise ValueError(f"offsets that do not divide {len(flat)} entries")
    return [flat[offsets[i] : offsets[i + 1]] for i in range(len(offsets) - 1)]
