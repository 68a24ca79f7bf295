"""Errors across the wire: a failure travels as (kind, message, where) and is raised again as the `LongstepError` it was.

`kind` is looked up in a fixed table; nothing that a peer sends is evaluated or imported.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import PurePath

from longstep import errors
from longstep.errors import LongstepError

__all__ = ["Failure", "raisable"]

MAX_MESSAGE = 8000
_MAX_WHERE = 400

_KINDS: dict[str, type[LongstepError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, LongstepError)
}


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong on the other side.

    >>> Failure.of(ValueError("seed is negative")).message
    'ValueError: seed is negative'
    """

    kind: str
    """Name of a class of `longstep.errors`."""
    message: str
    where: str = ""
    """Innermost line of code, as `file.py:12 in step`; empty when there is none."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure that tells of `error`; an error that is not ours travels as its type's name and its text."""
        kind = next((base.__name__ for base in type(error).__mro__ if base in _OURS), "")
        message = str(error) if kind else f"{type(error).__name__}: {error}"
        where = ""
        frames = traceback.extract_tb(error.__traceback__)
        if frames:
            last = frames[-1]
            where = f"{PurePath(last.filename).name}:{last.lineno} in {last.name}"
        message = message.encode("utf-8", "replace").decode()[:MAX_MESSAGE]
        return cls(kind or "LongstepError", message, where[:_MAX_WHERE])


_OURS = frozenset(_KINDS.values())


def raisable(failure: Failure, peer: str) -> LongstepError:
    """The error to raise here for what failed at `peer`."""
    place = f"{failure.where} at {peer}" if failure.where else peer
    kind = _KINDS.get(failure.kind, LongstepError)
    return kind(f"{failure.message} (from {place})")
