"""What an environment's commands and results look like on the wire: service `longstep.env`, version 1.

`run` takes `[slots, operations, arguments]`, three arrays of one length, and gives columns of that length:
`[observations, rewards, terminated, truncated, infos, errors, seconds]`. Operations and their arguments:

    reset    [seed, options]
    step     the action: a completion's text for an agent environment
    replay   [[seed, options] or nil, actions]: reset if given, then step; the observation column holds a list with
             one entry for each reset and step: the state key of an agent environment, else the observation
    copy     a slot of the same session: stand where it stands, by its snapshot

An *agent* environment gives prompts (it is an LLMAgentEnv), a *raw* one does not. Of an agent's `info` everything
crosses that the wire can carry. Two values of it have a form of their own: `prompt` is a Prompt, `[role, content, role,
content, ...], images, num_tokens, [part, how, num_characters, ...]`, where nil among the images stands for the info's
`observation`; and `allowed_completions` is a tuple of str. An agent's observation is its prompt's text and travels in the
prompt alone. A value that cannot cross is its slot's error, with its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from longstep.errors import ProtocolError, UnsupportedTypeError
from longstep.types import Dropped, Message, Prompt
from longstep_bindings.limits import MIB, Limits
from longstep_bindings.wire import encode

__all__ = [
    "REPLY_LIMITS",
    "SERVICE",
    "VERSION",
    "Row",
    "agent_row",
    "encode_rows",
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


class Row(NamedTuple):
    """What one command gave."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    error: str | None
    seconds: float


def failed_row(error: str, seconds: float = 0.0) -> Row:
    """The row of a command that failed."""
    return Row(None, 0.0, False, False, {}, error, seconds)


# ---- server ----


def encode_rows(rows: Sequence[Row]) -> list[bytes]:
    """The frames of a reply; a row that cannot travel is replaced by its error."""
    try:
        return encode(_columns(rows), REPLY_LIMITS)
    except UnsupportedTypeError:
        return encode(_columns([_sendable(row) for row in rows]), REPLY_LIMITS)


def _columns(rows: Sequence[Row]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _sendable(row: Row) -> Row:
    for name, value in (("observation", row.observation), ("info", row.info), ("error", row.error)):
        try:
            encode(value, REPLY_LIMITS)
        except UnsupportedTypeError as error:
            text = str(error).replace("$", name, 1).encode("utf-8", "replace").decode()
            return failed_row(f"UnsupportedTypeError: {text}", row.seconds)
    return row


def agent_row(given: tuple[Any, float, bool, bool, dict[str, Any]], seconds: float) -> Row:
    """The row of what an agent environment gave (observation, reward, terminated, truncated, info), as it travels."""
    text, reward, terminated, truncated, info = given
    info = dict(info)
    prompt, observed = info["prompt"], info.get("observation")
    spoken = [part for message in prompt.messages for part in (message.role, message.content)]
    images = [None if image is observed else image for image in prompt.images]
    cuts = [part for cut in prompt.dropped for part in (cut.part, cut.how, cut.num_characters)]
    info["prompt"] = [spoken, images, prompt.num_tokens, cuts]
    if type(info.get("allowed_completions")) is tuple:
        info["allowed_completions"] = list(info["allowed_completions"])
    told = None if text == prompt.text else text
    return Row(told, reward, terminated, truncated, info, None, seconds)


# ---- client ----


def read_reply(reply: Any, num_rows: int) -> list[tuple[Any, ...]]:
    """The rows of a reply, each as a Row has it, checked.

    Raises:
        ProtocolError: It is not a reply to `num_rows` commands.
    """
    columns = reply if type(reply) is list else []
    if len(columns) != len(Row._fields) or any(
        type(column) is not list or len(column) != num_rows for column in columns
    ):
        raise ProtocolError(f"expected {len(Row._fields)} columns of {num_rows} rows as a reply")
    for name, column, kinds in zip(Row._fields[1:], columns[1:], _KINDS, strict=True):
        if not set(map(type, column)) <= kinds:
            raise ProtocolError(f"expected another type in the column `{name}` of a reply")
    return list(zip(*columns, strict=True))


_KINDS: tuple[set[type], ...] = (
    {float, int},
    {bool},
    {bool},
    {dict},
    {str, type(None)},
    {float, int},
)


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
