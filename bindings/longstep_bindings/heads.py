"""Heads: the first frame of every message, which says what the message is and which request it belongs to.

A head is a msgpack array `[protocol version, kind, token, field, ...]`. The first three stand in every version of the
protocol, so that a peer of another version can be told so. The fields of each kind are checked against `_FIELDS`, the
schema of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from longstep.errors import ProtocolError
from longstep_bindings.packing import pack, unpack
from longstep_bindings.scan import check_body

__all__ = ["PROTOCOL_VERSION", "TOKEN_BYTES", "Head", "Kind", "pack_head", "unpack_head"]

PROTOCOL_VERSION = 1
TOKEN_BYTES = 16
MAX_SEQ = 1 << 53
"""Request numbers stay exact in languages whose only number is a double."""
MAX_OPEN = 4096
_MAX_TEXT = 10_000
_MAX_REMAINING_MS = 1 << 40
_MAX_DEPTH = 4
_SMALL_HEAD_BYTES = 256
"""A head of this size may claim at most 85 arrays of `MAX_OPEN`: 3 MB for a moment, not worth a walk."""


class Kind(IntEnum):
    """What a message is. c: sent by the client, s: sent by the server."""

    HELLO = 1
    """c: asks for a session."""
    WELCOME = 2
    """s: the session is open, on these terms."""
    REFUSED = 3
    """s: no session, and why."""
    REQUEST = 4
    """c: call a method. Followed by a body and raw frames."""
    REPLY = 5
    """s: the method's value. Followed by a body and raw frames."""
    ERROR = 6
    """s: the method failed, or was not called."""
    PING = 7
    """c: a heartbeat, which also says what is still unanswered."""
    PONG = 8
    """s: a heartbeat in answer, which says what has arrived."""
    CANCEL = 9
    """c: one request is withdrawn."""
    LOST = 10
    """s: the token is not that of an open session."""
    BYE = 11
    """both: the sender closes the session."""


class Head(NamedTuple):
    """A checked head."""

    kind: Kind
    token: bytes
    fields: tuple[Any, ...]


def _seq(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SEQ


def _seqs(value: Any) -> bool:
    return type(value) is list and len(value) <= MAX_OPEN and all(map(_seq, value))


def _text(value: Any) -> bool:
    return type(value) is str and len(value) <= _MAX_TEXT


def _terms(value: Any) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)


Check = Callable[[Any], bool]


def _each(*checks: Check) -> Check:
    """Whether there is a field for each of the checks, which it passes."""

    def check(fields: list[Any]) -> bool:
        return len(fields) == len(checks) and all(
            passes(field) for passes, field in zip(checks, fields, strict=True)
        )

    return check


def _is_request(fields: list[Any]) -> bool:
    """Whether these are seq, upto, open, remaining milliseconds and method. In one piece: most heads are read here."""
    if len(fields) != 5:
        return False
    seq, upto, open_seqs, remaining_ms, method = fields
    return (
        type(seq) is type(upto) is type(remaining_ms) is int
        and 0 <= seq <= MAX_SEQ
        and 0 <= upto <= MAX_SEQ
        and 0 <= remaining_ms <= _MAX_REMAINING_MS
        and _seqs(open_seqs)
        and _text(method)
    )


def _is_seq(fields: list[Any]) -> bool:
    return len(fields) == 1 and _seq(fields[0])


_FIELDS: Mapping[Kind, Check] = {
    Kind.HELLO: _each(_terms),
    Kind.WELCOME: _each(_terms),
    Kind.REFUSED: _each(_text, _text),  # kind of error, message
    Kind.REQUEST: _is_request,
    Kind.REPLY: _is_seq,
    Kind.ERROR: _each(_seq, _text, _text, _text),  # seq, kind of error, message, where
    Kind.PING: _each(_seq, _seq, _seqs),  # number of the ping, upto, open
    Kind.PONG: _each(_seq, _seqs),  # number of the ping, requests that are here
    Kind.CANCEL: _is_seq,
    Kind.LOST: _each(_text),
    Kind.BYE: _each(_text),
}


def pack_head(kind: Kind, token: bytes, *fields: Any) -> bytes:
    """The first frame of a message."""
    return pack([PROTOCOL_VERSION, kind, token, *fields])


def unpack_head(frame: bytes) -> Head:
    """The checked head of a message.

    Raises:
        ProtocolError: It is not a head of this version of the protocol. The token of a head of another version is
            in the error's `token` attribute where one could be read.
    """
    if len(frame) > _SMALL_HEAD_BYTES:
        check_body(frame, max_depth=_MAX_DEPTH, max_items=len(frame))
    parts = unpack(frame, max_array_len=MAX_OPEN, max_map_len=256)
    if type(parts) is not list or len(parts) < 3:
        raise ProtocolError("expected a head [version, kind, token, ...]")
    version, kind, token, *fields = parts
    if type(token) is not bytes or len(token) != TOKEN_BYTES:
        raise ProtocolError(f"expected a token of {TOKEN_BYTES} bytes")
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise WrongVersionError(version, token)
    if type(kind) is not int or kind not in _KINDS:
        raise ProtocolError(f"expected a kind from 1 to {max(Kind)}, got {kind!r:.80}")
    kind = _KINDS[kind]
    if not _FIELDS[kind](fields):
        raise ProtocolError(f"expected the fields of a head of kind {kind.name}, got others")
    return Head(kind, token, tuple(fields))


_KINDS = {int(kind): kind for kind in Kind}


class WrongVersionError(ProtocolError):
    """A peer speaks another version of the protocol; `token` is what an answer has to carry."""

    def __init__(self, version: object, token: bytes) -> None:
        super().__init__(
            f"expected protocol version {PROTOCOL_VERSION}, got {version!r:.40}; "
            "install the same version of longstep on both sides"
        )
        self.token = token
