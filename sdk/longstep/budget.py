"""Cutting a text to a token budget with few calls of the tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Shown", "cut_last_lines", "cut_middle", "cut_oldest", "fit"]

_MAX_PROBES = 14
_SLACK = 0.02
"""Share of the budget that may stay unused rather than ask the tokenizer once more."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What is shown of a text: its beginning and its end, and a marker where something is missing."""

    head: str = ""
    marker: str = ""
    tail: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        return self.head + self.marker + self.tail

    @property
    def num_kept(self) -> int:
        """Characters of the original."""
        return len(self.head) + len(self.tail)


def cut_oldest(text: str, kept: int) -> Shown:
    r"""At most `kept` characters from the end of a text, beginning with a line where one begins there.

    >>> cut_oldest("one\ntwo\nthree", 8).text
    '[earlier left out]\nthree'
    """
    if kept >= len(text):
        return Shown(tail=text)
    start = len(text) - max(0, kept)
    tail = text[text.find("\n", start - 1) + 1 or start :]
    return Shown(marker="[earlier left out]\n", tail=tail) if tail else Shown()


def cut_middle(text: str, kept: int) -> Shown:
    r"""At most `kept` characters of a text, half of them from its beginning and half from its end.

    >>> cut_middle("abcdefghij", 4).text
    'ab\n[6 characters left out]\nij'
    """
    if kept >= len(text):
        return Shown(head=text)
    if kept <= 0:
        return Shown()
    head, tail = text[: kept - kept // 2], text[len(text) - kept // 2 :]
    return Shown(head, f"\n[{len(text) - kept} characters left out]\n", tail)


def cut_last_lines(text: str, kept: int) -> Shown:
    r"""The first whole lines of a text, at most `kept` characters.

    >>> cut_last_lines("north\nsouth\neast", 8).text
    'north\n[and 2 more]'
    """
    if kept >= len(text):
        return Shown(head=text)
    head = text[: max(0, text.rfind("\n", 0, max(0, kept) + 1))]
    num_missing = text.count("\n", len(head))
    return Shown(head, f"\n[and {num_missing} more]") if head else Shown()


def fit(
    count: Callable[[int], int], length: int, num_tokens: int, max_tokens: int
) -> tuple[int, int]:
    """How much of a text may stay: the most characters found, and the number of tokens then.

    Every answer was counted, so it holds for tokenizers whose counts are not monotone; it is within 2% of the budget
    of the best where the tokenizer is roughly linear. The first number is 0 when not even that is enough.

    Args:
        count: Tokens of the whole prompt when at most so many characters of the text are kept.
        length: Characters of the text.
        num_tokens: Tokens of the prompt with the whole text, more than `max_tokens`.
        max_tokens: The budget.
    """
    low, low_tokens = 0, count(0)
    if low_tokens > max_tokens:
        return low, low_tokens
    high, high_tokens = length, num_tokens
    for probe in range(_MAX_PROBES):
        if high - low <= 1 or max_tokens - low_tokens <= _SLACK * max_tokens:
            break
        middle = (low + high) // 2
        if probe % 3 != 2 and high_tokens > low_tokens:  # every third halves, lest a step stall it
            share = (max_tokens - low_tokens) / (high_tokens - low_tokens)
            middle = min(max(low + int((high - low) * share), low + 1), high - 1)
        tokens = count(middle)
        if tokens <= max_tokens:
            low, low_tokens = middle, tokens
        else:
            high, high_tokens = middle, tokens
    return low, low_tokens
