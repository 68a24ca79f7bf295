"""Prompts from templates, never longer than a token budget.

A template's texts hold placeholders: `{task_description}`, `{current_observation}`, `{memory}`,
`{admissible_actions}`, `{step}` and `{max_steps}`. `{{memory}}` stands for a literal `{memory}`; every other brace is
itself, so a template may show JSON. What is filled in is never read for placeholders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from longstep.arguments import check_callable, check_count, check_text, check_texts
from longstep.budget import Shown, cut_last_lines, cut_middle, cut_oldest, fit
from longstep.errors import ConfigError, DataError, PromptBudgetError, did_you_mean
from longstep.observations import IMAGE_PLACEHOLDER, NEUTRAL_PLACEHOLDER, is_image
from longstep.types import Dropped, Message, Prompt

__all__ = ["IMAGE_PLACEHOLDER", "PLACEHOLDERS", "PromptTemplate", "count_utf8_bytes"]

PLACEHOLDERS = (
    "task_description",
    "current_observation",
    "memory",
    "admissible_actions",
    "step",
    "max_steps",
)
"""What a template may hold between braces."""

_CUTS: Mapping[str, Callable[[str, int], Shown]] = {
    "memory": cut_oldest,
    "current_observation": cut_middle,
    "admissible_actions": cut_last_lines,
    "task_description": cut_middle,
}
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")


def count_utf8_bytes(text: str) -> int:
    """Length in UTF-8 bytes: never less than the tokens of a byte-level tokenizer, usually three to five times as many.

    >>> count_utf8_bytes("go north")
    8
    """
    return len(text) if text.isascii() else len(text.encode("utf-8", errors="surrogatepass"))


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a template: literal text, or a placeholder to be filled."""

    text: str
    placeholder: bool = False


@dataclass(frozen=True, slots=True)
class _Fill:
    """What goes into one placeholder: a text and the images of its image placeholders."""

    text: str
    images: tuple[NDArray[np.uint8], ...] = ()

    def shortened(self, shown: Shown) -> _Fill:
        """What is shown, with the images whose placeholders are left."""
        if not self.images:
            return _Fill(shown.text)
        num_head, num_tail = (
            shown.head.count(IMAGE_PLACEHOLDER),
            shown.tail.count(IMAGE_PLACEHOLDER),
        )
        tail = self.images[len(self.images) - num_tail :]
        return _Fill(shown.text, self.images[:num_head] + tail)


class PromptTemplate:
    r"""Builds the chat messages a model reads at one step.

    >>> template = PromptTemplate("You play a game.", "{memory}\n{current_observation}", max_tokens=61)
    >>> prompt = template.build(current_observation="A hall.", memory="x" * 90 + "\n[Step 9] A door.")
    >>> print(prompt.messages[1].content)
    [earlier left out]
    [Step 9] A door.
    A hall.
    >>> prompt.num_tokens, [(cut.part, cut.how, cut.num_characters) for cut in prompt.dropped]
    (61, [('memory', 'shortened', 91)])
    """

    def __init__(
        self,
        system: str | None,
        user: str,
        *,
        first_user: str | None = None,
        max_tokens: int | None = None,
        count_tokens: Callable[[str], int] | None = None,
        drop_order: Sequence[str] = tuple(_CUTS),
    ) -> None:
        """Args:
        system: Text of the system message; None or empty leaves the message out.
        user: Text of the user message.
        first_user: Text of the user message of an episode's first step, when there is no memory yet; None means `user`.
        max_tokens: Most tokens of the prompt's text; None means no budget. Images and what a chat template adds
            around the messages are not text: leave room for them.
        count_tokens: Gives the number of tokens of a text. The default counts UTF-8 bytes, which is never too few for
            a byte-level tokenizer. It is called once for a prompt that fits, and about ten times for one that is cut.
        drop_order: Placeholders that give way, in this order, when the prompt is too long. Memory loses its oldest
            lines, an observation and a task description their middle, admissible actions their last ones; each can
            vanish. What is not listed is never touched.
        """
        self.system = system
        self.user = user
        self.first_user = first_user
        self.max_tokens = max_tokens
        self.count_tokens = count_utf8_bytes if count_tokens is None else count_tokens
        check_texts("drop_order", drop_order)
        self.drop_order = tuple(drop_order)
        self._check_settings()
        self._system_parts = _parse(system or "", "system")
        self._user_parts = _parse(user, "user")
        self._first_parts = (
            self._user_parts if first_user is None else _parse(first_user, "first_user")
        )

    def _check_settings(self) -> None:
        check_text("system", self.system, optional=True)
        check_text("user", self.user)
        check_text("first_user", self.first_user, optional=True)
        check_count("max_tokens", self.max_tokens, 1, optional=True)
        check_callable("count_tokens", self.count_tokens)
        for name in self.drop_order:
            if name not in _CUTS:
                raise ConfigError(
                    f"expected placeholders that can be shortened in `drop_order`, got `{name}`; "
                    f"{did_you_mean(name, _CUTS)}"
                )
        if len(set(self.drop_order)) != len(self.drop_order):
            raise ConfigError(
                f"expected each placeholder once in `drop_order`, got {self.drop_order}"
            )

    def build(
        self,
        *,
        current_observation: str = "",
        task_description: str = "",
        memory: str = "",
        admissible_actions: Sequence[str] | None = None,
        step: int = 0,
        max_steps: int | None = None,
        images: Sequence[NDArray[np.uint8]] = (),
        memory_images: Sequence[NDArray[np.uint8]] = (),
    ) -> Prompt:
        """The prompt of one step, within the budget.

        Args:
            current_observation: Text of the current observation.
            task_description: What is to be done.
            memory: Text of the memory, oldest first.
            admissible_actions: The actions to choose from, shown one a line; None when anything may be said.
            step: Steps taken so far; 0 selects `first_user`.
            max_steps: Steps allowed; None shows as `unlimited`.
            images: The images of the placeholders in `current_observation`, in their order.
            memory_images: The images of the placeholders in `memory`, in their order.

        Raises:
            PromptBudgetError: What may not be dropped is longer than `max_tokens` on its own.
            DataError: A text has another number of image placeholders than it has images, or an image is none.
            ConfigError: An argument is of the wrong kind.
        """
        check_text("current_observation", current_observation)
        check_text("task_description", task_description)
        check_text("memory", memory)
        check_texts("admissible_actions", admissible_actions, optional=True)
        check_count("step", step, 0)
        check_count("max_steps", max_steps, 0, optional=True)
        _check_images("images", images)
        _check_images("memory_images", memory_images)
        fills = {
            "task_description": _Fill(task_description),
            "current_observation": _Fill(current_observation, tuple(images)),
            "memory": _Fill(memory, tuple(memory_images)),
            "admissible_actions": _Fill(
                "\n".join(() if admissible_actions is None else admissible_actions)
            ),
            "step": _Fill(str(step)),
            "max_steps": _Fill("unlimited" if max_steps is None else str(max_steps)),
        }
        if images or memory_images:
            fills = {name: _agree(name, fill) for name, fill in fills.items()}
        user_parts = self._user_parts if step else self._first_parts
        if self.max_tokens is None:
            return _assemble(self._system_parts, user_parts, fills)
        return self._fit(user_parts, fills, self.max_tokens)

    def _fit(self, user_parts: Sequence[_Part], fills: dict[str, _Fill], max_tokens: int) -> Prompt:
        def render() -> Prompt:
            return _assemble(self._system_parts, user_parts, fills)

        num_tokens = self._count(render().text)
        used = {part.text for part in (*self._system_parts, *user_parts) if part.placeholder}
        dropped: list[Dropped] = []
        for name in self.drop_order:
            full = fills[name]
            if num_tokens <= max_tokens or name not in used or not full.text:
                continue

            def count(kept: int, name: str = name, full: _Fill = full) -> int:
                fills[name] = full.shortened(_CUTS[name](full.text, kept))
                return self._count(render().text)

            kept, num_tokens = fit(count, len(full.text), num_tokens, max_tokens)
            shown = _CUTS[name](full.text, kept)
            fills[name] = full.shortened(shown)
            dropped.append(
                Dropped(
                    part=name,
                    how="shortened" if shown.num_kept else "removed",
                    num_characters=len(full.text) - shown.num_kept,
                )
            )
        if num_tokens > max_tokens:
            raise PromptBudgetError(
                f"expected a prompt of at most {max_tokens} tokens, got {num_tokens} for what may "
                f"not be dropped; raise `max_tokens`, shorten the template, or name more than "
                f"{self.drop_order} in `drop_order`"
            )
        return replace(render(), num_tokens=num_tokens, dropped=tuple(dropped))

    def _count(self, text: str) -> int:
        num_tokens: Any = self.count_tokens(text)
        is_whole = isinstance(num_tokens, int | np.integer) and not isinstance(num_tokens, bool)
        if not is_whole or num_tokens < 0:
            raise DataError(
                f"expected a whole number from `count_tokens`, got {num_tokens!r:.60}; return len(token ids)"
            )
        return int(cast(Any, num_tokens))


def _check_images(name: str, images: Any) -> None:
    """Raise unless these are images; none at all, `()`, is the usual case."""
    if isinstance(images, tuple) and not images:
        return
    if not isinstance(images, Sequence) or isinstance(images, str | bytes):
        raise ConfigError(
            f"expected a sequence of images as `{name}`, got {type(images).__name__}; put a single one into a list"
        )
    for index, image in enumerate(cast("Sequence[Any]", images)):
        if not is_image(image):
            raise DataError(
                f"expected a uint8 array [H, W, 3] as `{name}[{index}]`, got {_describe(image)}; convert it"
            )


def _describe(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return type(value).__name__
    array = cast("NDArray[Any]", value)
    return f"{array.dtype} of shape {array.shape}"


def _parse(template: str, name: str) -> tuple[_Part, ...]:
    parts: list[_Part] = []
    end = 0
    for match in _PLACEHOLDER.finditer(template):
        literal, placeholder = match.groups()
        if placeholder is not None and placeholder not in PLACEHOLDERS:
            raise ConfigError(
                f"expected a known placeholder in `{name}`, got `{{{placeholder}}}`; "
                f"{did_you_mean(placeholder, PLACEHOLDERS)} (for the text itself write "
                f"`{{{{{placeholder}}}}}`)"
            )
        parts.append(_Part(template[end : match.start()]))
        parts.append(_Part(placeholder, True) if placeholder else _Part(f"{{{literal}}}"))
        end = match.end()
    return (*parts, _Part(template[end:]))


def _assemble(
    system_parts: Sequence[_Part], user_parts: Sequence[_Part], fills: Mapping[str, _Fill]
) -> Prompt:
    messages: list[Message] = []
    images: list[NDArray[np.uint8]] = []
    for role, parts in (("system", system_parts), ("user", user_parts)):
        texts: list[str] = []
        for part in parts:
            fill = fills[part.text] if part.placeholder else _Fill(part.text)
            texts.append(fill.text)
            images.extend(fill.images)
        content = "".join(texts)
        if content or role == "user":
            messages.append(Message(role=role, content=content))
    return Prompt(messages=tuple(messages), images=tuple(images))


def _agree(name: str, fill: _Fill) -> _Fill:
    """The fill with as many placeholders as images, in a prompt that holds images."""
    num_placeholders = fill.text.count(IMAGE_PLACEHOLDER)
    if num_placeholders == len(fill.images):
        return fill
    if not fill.images:
        return _Fill(fill.text.replace(IMAGE_PLACEHOLDER, NEUTRAL_PLACEHOLDER))
    raise DataError(
        f"expected {len(fill.images)} placeholders `{IMAGE_PLACEHOLDER}` in `{name}`, one for each "
        f"image, got {num_placeholders}; write one where each image belongs"
    )
