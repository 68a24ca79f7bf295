"""What all parsers share: naming an admissible action, saying why a completion is no action, reading strict JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from longstep.arguments import check_text, check_texts
from longstep.types import Action

__all__ = ["DECODER", "check_parse", "invalid", "match", "read_json", "shorten"]

_SHOWN_CHARACTERS = 200


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
"""Reads JSON as the standard says: no NaN, no infinity."""


def read_json(text: str) -> Any:
    """The value of a JSON text; ValueError or RecursionError when it is none."""
    return DECODER.decode(text)


def check_parse(completion: Any, admissible: Any) -> None:
    """Raise unless `parse` was given a text and a sequence of texts or None: no completion is wrong, but these are."""
    check_text("completion", completion)
    check_texts("admissible", admissible, optional=True)


def match(text: str, admissible: Sequence[str] | None) -> Action:
    """The action a text names: itself, or the admissible action it equals up to case and white space.

    >>> match("Go  North", ["go north", "go south"]).text
    'go north'
    >>> match("fly", ["go north", "go south"]).reason
    "'fly' is not admissible now"
    """
    stripped = text.strip()
    if not stripped:
        return invalid("", "the action is empty")
    if not _is_unicode(stripped):
        return invalid(stripped, "the action is not valid Unicode")
    if admissible is None or stripped in admissible:
        return Action(text=stripped, valid=True)
    longest = max(map(len, admissible), default=0)
    if (
        len(stripped) <= 4 * longest + 16
    ):  # a longer one means none of them and is not worth folding
        wanted = _fold(stripped)
        alike = [action for action in admissible if _fold(action) == wanted]
        if len(alike) == 1:
            return Action(text=alike[0], valid=True)
    return invalid(stripped, f"{shorten(stripped, 60)!r} is not admissible now")


def invalid(text: str, reason: str) -> Action:
    """An invalid action that shows the first of what was read."""
    return Action(text=shorten(text.strip()), valid=False, reason=reason)


def shorten(text: str, length: int = _SHOWN_CHARACTERS) -> str:
    """The first characters of a text, 200 unless told, with dots where more was there; always valid Unicode."""
    shown = text if len(text) <= length else text[: length - 3] + "..."
    return shown.encode("utf-8", "replace").decode("utf-8")


def _is_unicode(text: str) -> bool:
    """False with a lone surrogate, which no wire and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _fold(text: str) -> str:
    return " ".join(text.split()).casefold()
