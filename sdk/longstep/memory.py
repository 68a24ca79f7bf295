"""Memories: what an agent keeps of earlier steps, and how it is told in the prompt.

A memory sees one call of `update` for each step and gives one text for each prompt. It never holds the current
observation, which the prompt shows in a place of its own. Write your own by overriding `update`, `get_memory_text` and
`reset`; nothing else is needed, not even a call of `super().__init__()`.

    class LastAction(Memory):
        def reset(self):
            self.last = ""
        def update(self, observation, action, reward, done, info):
            self.last = action
        def get_memory_text(self):
            return self.last
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from longstep.bm25 import BM25Index
from longstep.errors import ConfigError, DataError
from longstep.observations import IMAGE_PLACEHOLDER, observation_images, observation_to_text

__all__ = [
    "FrameMemory",
    "KeyEventMemory",
    "Memory",
    "MemoryStep",
    "RetrievalMemory",
    "SimpleMemory",
    "SummaryMemory",
    "WindowMemory",
]

_MemoryT = TypeVar("_MemoryT", bound="Memory")


class Memory:
    """What is kept of earlier steps. This class itself keeps nothing: `Memory()` is an agent without a past."""

    observation_text: Callable[[Any], str] = staticmethod(observation_to_text)
    """An observation as text. A wrapper with an `observation_text` of its own sets it here."""

    def update(
        self, observation: Any, action: str, reward: float, done: bool, info: Mapping[str, Any]
    ) -> None:
        """Take in one step.

        Args:
            observation: What the environment had returned *before* the action, untouched: the state the action was
                chosen in. Its outcome is the next observation, `info["observation"]`.
            action: The action that was read out of the completion; for an invalid one, what could be read.
            reward: The environment's reward, neither scaled nor penalised; 0.0 for an invalid action.
            done: True when the episode ended with this step.
            info: The step's info, with `observation` (after the action), `action_valid`, `action_reason`, `step`,
                `task_description` and the environment's own keys.
        """

    def get_memory_text(self) -> str:
        """The text for the placeholder `{memory}`, oldest first; empty when there is nothing to tell."""
        return ""

    def get_images(self) -> Sequence[NDArray[np.uint8]]:
        """The images for the placeholders in the text, in their order; none for most memories."""
        return ()

    def reset(self) -> None:
        """Forget everything: a new episode begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStep:
    """One remembered step."""

    number: int
    """Position in the episode, from 1."""
    observation: str
    """Text of the observation the action was chosen in."""
    action: str
    reward: float
    invalid_reason: str = ""
    """Why the action was invalid; empty for a valid one."""

    @property
    def text(self) -> str:
        """The step as a prompt tells it.

        >>> print(MemoryStep(number=3, observation="A door.", action="open door", reward=0.0).text)
        [Step 3] A door.
        > open door
        """
        action = f"> {self.action}"
        if self.invalid_reason:
            action += f" (invalid: {self.invalid_reason})"
        return f"[Step {self.number}] {self.observation}\n{action}"


class _StepMemory(Memory):
    """Counts steps and turns each into a `MemoryStep`; subclasses say which they keep."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._num_steps = 0

    def _take(
        self, observation: Any, action: str, reward: float, info: Mapping[str, Any]
    ) -> MemoryStep:
        self._num_steps += 1
        reason = "" if info.get("action_valid", True) else str(info.get("action_reason", ""))
        return MemoryStep(
            number=self._num_steps,
            observation=self.observation_text(observation),
            action=action,
            reward=reward,
            invalid_reason=reason,
        )


class SimpleMemory(_StepMemory):
    """Keeps every step.

    >>> memory = SimpleMemory()
    >>> memory.update("A door.", "open door", 0.0, False, {})
    >>> memory.update("A hall.", "go north", 1.0, True, {})
    >>> print(memory.get_memory_text())
    [Step 1] A door.
    > open door
    [Step 2] A hall.
    > go north
    """

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._steps: list[MemoryStep] = []

    def update(
        self, observation: Any, action: str, reward: float, done: bool, info: Mapping[str, Any]
    ) -> None:
        """Keep the step."""
        self._steps.append(self._take(observation, action, reward, info))

    def get_memory_text(self) -> str:
        """All steps, oldest first."""
        return _join(self._steps)


class WindowMemory(_StepMemory):
    """Keeps the last `window_size` steps; 0 keeps none.

    >>> memory = WindowMemory(window_size=1)
    >>> memory.update("A door.", "open door", 0.0, False, {})
    >>> memory.update("A hall.", "go north", 1.0, True, {})
    >>> print(memory.get_memory_text())
    [Step 2] A hall.
    > go north
    """

    def __init__(self, window_size: int = 2) -> None:
        """Args:
        window_size: Steps to keep, at least 0. Two is what the GiGPO paper trained with.
        """
        self.window_size = _at_least(window_size, 0, "window_size")
        super().__init__()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._steps: deque[MemoryStep] = deque(maxlen=self.window_size)

    def update(
        self, observation: Any, action: str, reward: float, done: bool, info: Mapping[str, Any]
    ) -> None:
        """Keep the step, let go of the oldest."""
        self._steps.append(self._take(observation, action, reward, info))

    def get_memory_text(self) -> str:
        """The last steps, oldest first."""
        return _join(self._steps)


class SummaryMemory(_StepMemory):
    """Keeps the last steps as they are and a summary of all before them.

    >>> def count(previous, steps):
    ...     return f"{previous} {len(steps)} steps.".strip()
    >>> memory = SummaryMemory(count, every=2, keep_last=1)
    >>> for action in ("a", "b", "c"):
    ...     memory.update("A hall.", action, 0.0, False, {})
    >>> print(memory.get_memory_text())
    Earlier: 2 steps.
    [Step 3] A hall.
    > c
    """

    def __init__(
        self,
        summarize: Callable[[str, Sequence[MemoryStep]], str],
        every: int = 10,
        keep_last: int = 2,
    ) -> None:
        """Args:
        summarize: Gives the new summary from the previous one (empty at first) and the steps to add, oldest first.
            Called once in `every` steps, while the environment waits. Copies of this memory share it.
        every: Steps that are added to the summary at a time, at least 1.
        keep_last: Steps that always stay as they are, at least 0.
        """
        self.summarize = summarize
        self.every = _at_least(every, 1, "every")
        self.keep_last = _at_least(keep_last, 0, "keep_last")
        super().__init__()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._summary = ""
        self._steps: list[MemoryStep] = []

    def update(
        self, observation: Any, action: str, reward: float, done: bool, info: Mapping[str, Any]
    ) -> None:
        """Keep the step; summarise the oldest when `every` of them have gathered."""
        self._steps.append(self._take(observation, action, reward, info))
        if len(self._steps) < self.every + self.keep_last:
            return
        oldest, self._steps = self._steps[: self.every], self._steps[self.every :]
        summary: Any = self.summarize(self._summary, oldest)
        if not isinstance(summary, str):
            raise DataError(
                f"expected a str from `summarize` of {type(self).__name__}, got "
                f"{type(summary).__name__} after step {self._num_steps}; return the summary's text"
            )
        self._summary = summary

    def get_memory_text(self) -> str:
        """The summary, then the steps since."""
        lines = [f"Earlier: {self._summary}"] if self._summary else []
        return "\n".join([*lines, *(step.text for step in self._steps)])

    def __deepcopy__(self, memo: dict[int, Any]) -> SummaryMemory:
        """A copy with the same `summarize`, which may hold a whole model."""
        return _copy_sharing(self, self.summarize, memo)


class KeyEventMemory(_StepMemory):
    """Keeps the steps that matter, for ever.

    >>> def rewarded(observation, action, reward, done, info):
    ...     return reward > 0
    >>> memory = KeyEventMemory(rewarded)
    >>> memory.update("A hall.", "take key", 1.0, False, {})
    >>> memory.update("A hall.", "look", 0.0, False, {})
    >>> print(memory.get_memory_text())
    [Step 1] A hall.
    > take key
    """

    def __init__(self, is_key: Callable[[Any, str, float, bool, Mapping[str, Any]], bool]) -> None:
        """Args:
        is_key: Takes what `update` takes and says whether to keep the step. Copies of this memory share it.
        """
        self.is_key = is_key
        super().__init__()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._steps: list[MemoryStep] = []

    def update(
        self, observation: Any, action: str, reward: float, done: bool, info: Mapping[str, Any]
    ) -> None:
        """Keep the step if it is a key event."""
        step = self._take(observation, action, reward, info)
        if self.is_key(observation, action, reward, done, info):
            self._steps.append(step)

    def get_memory_text(self) -> str:
        """The key events, oldest first."""
        return _join(self._steps)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyEventMemory:
        """A copy with the same `is_key`."""
        return _copy_sharing(self, self.is_key, memo)


class RetrievalMemory(_StepMemory):
    """Keeps every step and tells the ones that are closest to the current observation and the task (BM25).

    >>> memory = RetrievalMemory(top_k=1)
    >>> memory.update("A red door.", "open red door", 0.0, False, {"observation": "A hall."})
    >>> memory.update("A hall.", "go east", 0.0, False, {"observation": "A red door, locked."})
    >>> print(memory.get_memory_text())
    [Step 1] A red door.
    > open red door
    """

    def __init__(self, top_k: int = 3) -> None:
        """Args:
        top_k: Steps to tell, at least 1.
        """
        self.top_k = _at_least(top_k, 1, "top_k")
        super().__init__()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._steps: list[MemoryStep] = []
        self._index = BM25Index()
        self._query = ""

    def update(
        self, observation: Any, action: str, reward: float, done: bool, info: Mapping[str, Any]
    ) -> None:
        """Keep the step; what the environment returned for it is the next query."""
        step = self._take(observation, action, reward, info)
        self._steps.append(step)
        self._index.add(f"{step.observation}\n{step.action}")
        current = info.get("observation")
        task = str(info.get("task_description", ""))
        self._query = f"{task}\n{self.observation_text(current)}"

    def get_memory_text(self) -> str:
        """The `top_k` closest steps, in order of time."""
        best = self._index.search(self._query, self.top_k)
        return _join(self._steps[number] for number in sorted(best))


class FrameMemory(_StepMemory):
    """Keeps the images of the last `window_size` steps, for vision models.

    Its text has a placeholder for each image, and `get_images` gives the pixels.
    """

    def __init__(self, window_size: int = 2) -> None:
        """Args:
        window_size: Steps to keep, at least 0.
        """
        self.window_size = _at_least(window_size, 0, "window_size")
        super().__init__()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._frames: deque[tuple[MemoryStep, tuple[NDArray[np.uint8], ...]]] = deque(
            maxlen=self.window_size
        )

    def update(
        self, observation: Any, action: str, reward: float, done: bool, info: Mapping[str, Any]
    ) -> None:
        """Keep the observation's images and the action."""
        images = observation_images(observation)
        step = self._take(images, action, reward, info)
        self._frames.append((step, images))

    def get_memory_text(self) -> str:
        """A placeholder and the action for each step, oldest first."""
        return _join(step for step, _ in self._frames)

    def get_images(self) -> tuple[NDArray[np.uint8], ...]:
        """The images, in the order of their placeholders."""
        return tuple(image for _, images in self._frames for image in images)

    def _take(
        self, observation: Any, action: str, reward: float, info: Mapping[str, Any]
    ) -> MemoryStep:
        placeholders = " ".join([IMAGE_PLACEHOLDER] * len(observation))
        return super()._take(placeholders, action, reward, info)


def _join(steps: Iterable[MemoryStep]) -> str:
    return "\n".join(step.text for step in steps)


def _at_least(value: int, least: int, name: str) -> int:
    if value < least:
        raise ConfigError(f"expected `{name}` of at least {least}, got {value}")
    return value


def _copy_sharing(memory: _MemoryT, shared: object, memo: dict[int, Any]) -> _MemoryT:
    twin = type(memory).__new__(type(memory))
    memo[id(memory)] = twin
    memo[id(shared)] = shared
    twin.__dict__.update(copy.deepcopy(memory.__dict__, memo))
    return twin
