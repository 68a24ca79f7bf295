r"""Parsers: what the model wants to do, read out of what it wrote.

Every parser answers any completion with an `Action`; one that cannot be read is an invalid action with a reason, never
an exception, and none takes more than linear time in the length of the completion. (What is no text at all is a wrong
call, and an exception.) Where admissible actions are given,
the action must be one of them, up to case and white space, and is returned as the environment spells it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from longstep.arguments import check_count, check_text, check_texts
from longstep.errors import ConfigError
from longstep.reading import check_parse, invalid, match
from longstep.tool_calls import JsonParser, ToolCallParser
from longstep.types import Action

__all__ = [
    "ActionParser",
    "ChoiceParser",
    "JsonParser",
    "RegexParser",
    "TagParser",
    "ToolCallParser",
]


@runtime_checkable
class ActionParser(Protocol):
    """What reads an action out of a completion.

    A parser may also have `constraint(admissible) -> tuple[str, ...] | None`: the completions that are read as the
    admissible actions, in their order, for constrained decoding; and `instruction: str`: how the model is told to
    answer, for the default prompt.
    """

    def parse(self, completion: str, admissible: Sequence[str] | None) -> Action:
        """The action in a completion.

        Args:
            completion: What the model wrote, of any length and content.
            admissible: The actions the environment accepts now; None when it does not say.
        """
        ...


class ChoiceParser:
    r"""The completion is the action, and nothing else.

    >>> ChoiceParser().parse(" go north\n", ["go north", "look"])
    Action(text='go north', valid=True, reason='')
    """

    instruction = "Answer with the action and nothing else."

    def parse(self, completion: str, admissible: Sequence[str] | None) -> Action:
        """The whole completion, without white space at its ends."""
        check_parse(completion, admissible)
        return match(completion, admissible)

    def constraint(self, admissible: Sequence[str] | None) -> tuple[str, ...] | None:
        """The admissible actions themselves."""
        check_texts("admissible", admissible, optional=True)
        return None if admissible is None else tuple(admissible)


class TagParser:
    """The action stands between tags; the last complete pair counts.

    >>> parser = TagParser("action", think_tag="think")
    >>> parser.parse("<think>A door.</think><action>open door</action>", None).text
    'open door'
    >>> parser.parse("<action>open door</action>", None).reason
    'expected <think>...</think> before the action'
    """

    def __init__(self, tag: str = "action", think_tag: str | None = None) -> None:
        """Args:
        tag: Name of the tag around the action.
        think_tag: Name of a tag around the reasoning, which must come before the action; None asks for none.
        """
        check_text("tag", tag)
        check_text("think_tag", think_tag, optional=True)
        for name, value in (("tag", tag), ("think_tag", think_tag)):
            if value is not None and not re.fullmatch(r"[\w-]+", value):
                raise ConfigError(
                    f"expected `{name}` of letters, digits, `_` and `-`, got {value!r}; "
                    "leave out the angle brackets"
                )
        self.tag = tag
        self.think_tag = think_tag

    @property
    def instruction(self) -> str:
        """How the model is told to answer."""
        answer = f"Answer with the action between <{self.tag}> and </{self.tag}>."
        if self.think_tag is None:
            return answer
        return f"Think first, between <{self.think_tag}> and </{self.think_tag}>. {answer}"

    def parse(self, completion: str, admissible: Sequence[str] | None) -> Action:
        """What stands between the last opening tag that is closed and its closing tag."""
        check_parse(completion, admissible)
        answer = completion
        if self.think_tag is not None:
            thought, closed, answer = completion.partition(f"</{self.think_tag}>")
            if not closed or f"<{self.think_tag}>" not in thought:
                expected = f"<{self.think_tag}>...</{self.think_tag}>"
                return invalid(completion, f"expected {expected} before the action")
        end = answer.rfind(f"</{self.tag}>")
        start = answer.rfind(f"<{self.tag}>", 0, max(end, 0))
        if start < 0:
            return invalid(completion, f"expected <{self.tag}>...</{self.tag}>")
        return match(answer[start + len(self.tag) + 2 : end], admissible)

    def constraint(self, admissible: Sequence[str] | None) -> tuple[str, ...] | None:
        """The admissible actions between tags; None with reasoning, which is free."""
        check_texts("admissible", admissible, optional=True)
        if admissible is None or self.think_tag is not None:
            return None
        return tuple(f"<{self.tag}>{action}</{self.tag}>" for action in admissible)


class RegexParser:
    r"""The action is what a pattern captures; the last match that captures something counts.

    >>> RegexParser(r"ACTION: (.+)").parse("I see a door.\nACTION: open door", None).text
    'open door'
    """

    def __init__(self, pattern: str, *, max_characters: int = 4000) -> None:
        """Args:
        pattern: Regular expression, searched for in the completion. The action is its group `action`, else its first
            group, else the whole match.
        max_characters: Only so many characters at the end of the completion are searched, which bounds the time of
            patterns whose cost grows with a power of the length. Nothing bounds nested repetition such as `(a+)+`:
            do not write it.
        """
        check_text("pattern", pattern)
        check_count("max_characters", max_characters, 1)
        try:
            self._pattern = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                f"expected a regular expression as `pattern`, got {pattern!r}: {error}"
            ) from error
        self.pattern = pattern
        self.max_characters = max_characters

    @property
    def instruction(self) -> str:
        """How the model is told to answer."""
        return f"Answer in the form of the regular expression {self.pattern}"

    def parse(self, completion: str, admissible: Sequence[str] | None) -> Action:
        """What the last match that captures something captures."""
        check_parse(completion, admissible)
        if "action" in self._pattern.groupindex:
            group: str | int = "action"
        else:
            group = min(1, self._pattern.groups)
        matches = self._pattern.finditer(completion[-self.max_characters :])
        captured = [text for found in matches if (text := found[group])]
        if not captured:
            return invalid(completion, f"expected a match of {self.pattern}")
        return match(captured[-1], admissible)
