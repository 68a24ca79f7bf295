"""What all parsers share: naming an admissible action, and saying why a completion is no action."""

from __future__ import annotations

from collections.abc import Sequence

from longstep.types import Action

__all__ = ["invalid", "match", "shorten"]

_SHOWN_CHARACTERS = 200


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
    if admissible is None or stripped in admissible:
        return Action(text=stripped, valid=True)
    longest = max(map(len, admissible), default=0)
    if len(stripped) <= 4 * longest + 16:  # more cannot be meant, and is not worth normalising
        wanted = _normal(stripped)
        alike = [action for action in admissible if _normal(action) == wanted]
        if len(alike) == 1:
            return Action(text=alike[0], valid=True)
    return invalid(stripped, f"{shorten(stripped)!r} is not admissible now")


def invalid(text: str, reason: str) -> Action:
    """An invalid action that shows the first of what was read."""
    return Action(text=shorten(text.strip()), valid=False, reason=reason)


def shorten(text: str) -> str:
    """The first 200 characters, marked where more was there."""
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold()
