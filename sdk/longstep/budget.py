"""Cutting a text to a token budget with few calls of the tokenizer.

A *cut* takes a text and the most characters to keep, and gives what is shown instead (with a marker where something is
missing) and the number of characters that were really kept. Keeping none gives an empty text.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Cut", "cut_last_lines", "cut_middle", "cut_oldest", "fit"]

Cut = Callable[[str, int], tuple[str, int]]

_MAX_PROBES = 14
_SLACK = 0.02
"""Share of the budget that may stay unused rather than ask the tokenizer once more."""


def cut_oldest(text: str, kept: int) -> tuple[str, int]:
    r"""The end of a text, from the beginning of a line where it has one.

    >>> cut_oldest("one\ntwo\nthree", 8)
    ('[earlier left out]\nthree', 5)
    """
    if kept >= len(text):
        return text, len(text)
    start = len(text) - kept
    line_start = text.find("\n", start - 1) + 1 if start else 0
    tail = text[line_start or start :]
    return (f"[earlier left out]\n{tail}", len(tail)) if tail else ("", 0)


def cut_middle(text: str, kept: int) -> tuple[str, int]:
    r"""The beginning and the end of a text.

    >>> cut_middle("abcdefghij", 4)
    ('ab\n[6 characters left out]\nij', 4)
    """
    if kept >= len(text):
        return text, len(text)
    if kept <= 0:
        return "", 0
    head, tail = text[: kept - kept // 2], text[len(text) - kept // 2 :]
    return f"{head}\n[{len(text) - kept} characters left out]\n{tail}", kept


def cut_last_lines(text: str, kept: int) -> tuple[str, int]:
    r"""The first whole lines of a text.

    >>> cut_last_lines("north\nsouth\neast", 8)
    ('north\n[and 2 more]', 5)
    """
    if kept >= len(text):
        return text, len(text)
    head = text[: max(0, text.rfind("\n", 0, kept + 1))]
    num_missing = text.count("\n", len(head)) if head else 0
    return (f"{head}\n[and {num_missing} more]", len(head)) if head else ("", 0)


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
