"""What an environment's commands and results look like on the wire: service `longstep.env`, version 1.

`run` takes `[slots, operations, arguments]`, three arrays of one length, and gives columns of that length:
`[observations, rewards, terminated, truncated, infos, errors, seconds]`. Operations and their arguments:

    reset    [seed, options]
    step     the action: a completion's text for an agent environment
    replay   [[seed, options] or nil, actions]: reset if given, then step; the observation column holds a list with
             one entry for each reset and step: the state key of an agent environment, else the observation
    copy     a slot of the same session: stand where it stands, by its snapshot

Where both ends say at `open` that they can (`compact_columns`, `one_operation`), columns of numbers travel as arrays, or as
one number when all are the same, columns of empty infos and of no errors as nil, and operations that are all the same as one
text: what a message of a thousand steps holds is then little but texts.

An *agent* environment gives prompts (it is an LLMAgentEnv), a *raw* one does not. Of an agent's `info` everything
crosses that the wire can carry. Two values of it have a form of their own: `prompt` is a Prompt, `[role, content, role,
content, ...], images, num_tokens, [part, how, num_characters, ...]`, where nil among the images stands for the info's
`observation`; and `allowed_completions` is a tuple of str. An agent's observation is its prompt's text and travels in the
prompt alone. A value that cannot cross is its slot's error, with its path.
"""

from __future__ import annotations

import array
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from longstep.errors import ProtocolError, UnsupportedTypeError
from longstep.types import Dropped, Message, Prompt
from longstep_bindings.limits import MIB, Limits
from longstep_bindings.wire import encode, encode_flat

__all__ = [
    "REPLY_LIMITS",
    "SERVICE",
    "VERSION",
    "Columns",
    "Row",
    "agent_row",
    "encode_rows",
    "failed_columns",
    "failed_row",
    "read_agent",
    "read_reply",
]

SERVICE, VERSION = "longstep.env", 1

REPLY_LIMITS = Limits(
    max_body_bytes=256 * MIB,
    max_frame_bytes=256 * MIB,
    max_frames=16384,
    max_message_bytes=1024 * MIB,
    max_items=256 * MIB,
)
"""What a client takes from an environment server: the prompts of many slots come in one message."""


Row: TypeAlias = tuple[Any, float, bool, bool, dict[str, Any], str | None, float]
"""What one command gave: observation, reward, terminated, truncated, info, error, seconds."""


class Columns(NamedTuple):
    """What the commands of a message gave."""

    observations: list[Any]
    rewards: list[float]
    terminated: list[bool]
    truncated: list[bool]
    infos: list[dict[str, Any]] | None
    """None when all are empty."""
    errors: list[str | None]
    seconds: list[float]


def failed_row(error: str, seconds: float = 0.0) -> Row:
    """The row of a command that failed."""
    return None, 0.0, False, False, {}, error, seconds


def failed_columns(error: str, num_rows: int) -> Columns:
    """The columns of commands that failed together."""
    rows = [failed_row(error) for _ in range(num_rows)]
    return Columns(*map(list, zip(*rows, strict=True)))  # pyright: ignore[reportArgumentType]


# ---- server ----

_MANY_ROWS = 100
"""From here on columns travel as arrays; to read one costs as much as some hundred numbers."""


def encode_rows(rows: Sequence[Row], *, compact: bool) -> list[bytes]:
    """The frames of a reply; a row that cannot travel is replaced by its error.

    Args:
        rows: What each command gave.
        compact: Send the columns in their short forms.
    """
    try:
        return _encode_rows(rows, compact=compact)
    except UnsupportedTypeError:
        return _encode_rows(list(map(_sendable, rows)), compact=compact)


def _encode_rows(rows: Sequence[Row], *, compact: bool) -> list[bytes]:
    columns = list(zip(*rows, strict=True))
    observations, rewards, terminated, truncated, infos, errors, seconds = columns
    if math.isnan(sum(rewards)) and any(map(math.isnan, rewards)):
        raise UnsupportedTypeError("expected a number, got NaN")
    if not compact:
        return encode(list(map(list, columns)), REPLY_LIMITS)
    sent = [
        list(observations),
        _compact_floats(rewards),
        _compact_flags(terminated),
        _compact_flags(truncated),
        list(infos) if any(infos) else None,
        None if errors.count(None) == len(errors) else list(errors),
        _compact_floats(seconds),
    ]
    if sent[4] is None and set(map(type, observations)) == {str}:
        return encode_flat(sent, REPLY_LIMITS)
    return encode(sent, REPLY_LIMITS)


def _compact_floats(column: Sequence[float]) -> Any:
    """One float when all are the same, bit by bit; an array when there are many."""
    data = array.array("d", column).tobytes()
    if data == data[:8] * len(column):
        return column[0]
    return list(column) if len(column) < _MANY_ROWS else np.frombuffer(data, np.float64)


def _compact_flags(column: Sequence[bool]) -> Any:
    """One flag when all are the same; an array when there are many."""
    if True not in column or False not in column:
        return column[0]
    return list(column) if len(column) < _MANY_ROWS else np.frombuffer(bytes(column), np.bool_)


def _sendable(row: Row) -> Row:
    observation, reward, _, _, info, error, seconds = row
    told = {"observation": observation, "reward": reward, "info": info, "error": error}
    for name, value in told.items():
        try:
            encode(value, REPLY_LIMITS)
        except UnsupportedTypeError as wrong:
            text = str(wrong).replace("$", name, 1).encode("utf-8", "replace").decode()
            return failed_row(f"UnsupportedTypeError: {text}", seconds)
    return row


def agent_row(row: Row) -> Row:
    """The row of what an agent environment gave, as it travels."""
    text, reward, terminated, truncated, info, error, seconds = row
    info = dict(info)
    prompt, observed = info["prompt"], info.get("observation")
    spoken = [part for message in prompt.messages for part in (message.role, message.content)]
    images = [None if image is observed else image for image in prompt.images]
    cuts = [part for cut in prompt.dropped for part in (cut.part, cut.how, cut.num_characters)]
    info["prompt"] = [spoken, images, prompt.num_tokens, cuts]
    if type(info.get("allowed_completions")) is tuple:
        info["allowed_completions"] = list(info["allowed_completions"])
    told = None if text == prompt.text else text
    return told, reward, terminated, truncated, info, error, seconds


# ---- client ----


def read_reply(reply: Any, num_rows: int) -> Columns:
    """The columns of a reply, checked.

    Raises:
        ProtocolError: It is not a reply to `num_rows` commands.
    """
    if type(reply) is not list or len(reply) != len(_KINDS):
        raise ProtocolError(f"expected {len(_KINDS)} columns as a reply")
    columns: list[Any] = []
    for (name, kinds, singles), column in zip(_KINDS, reply, strict=True):
        if type(column) is not list:
            if type(column) in singles:  # one for all rows
                column = [column] * num_rows if column is not None or name == "errors" else None
            else:
                column = _read_array(column, name, num_rows)
        elif len(column) != num_rows:
            raise ProtocolError(f"expected {num_rows} rows in the column `{name}` of a reply")
        elif kinds and not kinds.issuperset(map(type, column)):
            raise ProtocolError(f"expected another type in the column `{name}` of a reply")
        columns.append(column)
    return Columns(*columns)


def _read_array(column: Any, name: str, num_rows: int) -> Any:
    """The values of a column that travels as an array."""
    dtype = _DTYPES.get(name)
    if dtype is None or not isinstance(column, np.ndarray):
        raise ProtocolError(f"expected {num_rows} rows in the column `{name}` of a reply")
    if column.shape != (num_rows,) or column.dtype != dtype:
        raise ProtocolError(
            f"expected {num_rows} of {dtype.__name__} as the column `{name}` of a reply"
        )
    return column.tolist()


_NOTHING: frozenset[type] = frozenset()
_NUMBER, _FLAG, _NIL = frozenset((float, int)), frozenset((bool,)), frozenset((type(None),))
_KINDS: list[tuple[str, frozenset[type], frozenset[type]]] = [
    ("observations", _NOTHING, _NOTHING),
    ("rewards", _NUMBER, _NUMBER),
    ("terminated", _FLAG, _FLAG),
    ("truncated", _FLAG, _FLAG),
    ("infos", frozenset((dict,)), _NIL),
    ("errors", frozenset((str, type(None))), _NIL),
    ("seconds", _NUMBER, _NUMBER),
]
"""Columns, what each may hold, where an observation may be anything, and what may stand for all of its values."""
_DTYPES: dict[str, type[np.generic]] = {
    "rewards": np.float64,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "seconds": np.float64,
}
"""What a column is as an array, where it may be one."""


def read_agent(text: Any, info: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Observation and info of an agent environment as it gave them.

    Raises:
        ProtocolError: The prompt is not one.
    """
    try:
        spoken, images, num_tokens, cuts = info["prompt"]
        observed: Any = info.get("observation")
        info["prompt"] = prompt = Prompt(
            messages=tuple(map(_message, spoken[::2], spoken[1::2])),
            images=tuple(observed if image is None else image for image in images),
            num_tokens=num_tokens,
            dropped=tuple(map(_cut, cuts[::3], cuts[1::3], cuts[2::3])),
        )
        text = prompt.text if text is None else text
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ProtocolError("expected a prompt in the info of an agent environment") from None
    if type(info.get("allowed_completions")) is list:
        info["allowed_completions"] = tuple(info["allowed_completions"])
    return text, info


def _message(role: str, content: str) -> Message:
    return Message(role=role, content=content)


def _cut(part: str, how: str, num_characters: int) -> Dropped:
    return Dropped(part=part, how=how, num_characters=num_characters)
