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
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from longstep.arguments import check_callable, check_count
from longstep.bm25 import BM25Index
from longstep.errors import DataError
from longstep.memory_base import Memory, MemoryStep, StepMemory, join_steps
from longstep.observations import IMAGE_PLACEHOLDER, observation_images

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

_MemoryT = TypeVar("_MemoryT", bound=Memory)


class SimpleMemory(StepMemory):
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
        self._steps.append(self._take(self.observation_text(observation), action, reward, info))

    def get_memory_text(self) -> str:
        """All steps, oldest first."""
        return join_steps(self._steps)


class WindowMemory(StepMemory):
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
        self._steps.append(self._take(self.observation_text(observation), action, reward, info))

    def get_memory_text(self) -> str:
        """The last steps, oldest first."""
        return join_steps(self._steps)


class SummaryMemory(StepMemory):
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
        check_callable("summarize", summarize)
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
        self._steps.append(self._take(self.observation_text(observation), action, reward, info))
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


class KeyEventMemory(StepMemory):
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
        check_callable("is_key", is_key)
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
        step = self._take(self.observation_text(observation), action, reward, info)
        if self.is_key(observation, action, reward, done, info):
            self._steps.append(step)

    def get_memory_text(self) -> str:
        """The key events, oldest first."""
        return join_steps(self._steps)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyEventMemory:
        """A copy with the same `is_key`."""
        return _copy_sharing(self, self.is_key, memo)


class RetrievalMemory(StepMemory):
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
        step = self._take(self.observation_text(observation), action, reward, info)
        self._steps.append(step)
        self._index.add(f"{step.observation}\n{step.action}")
        current = info.get("observation")
        task = str(info.get("task_description", ""))
        self._query = f"{task}\n{self.observation_text(current)}"

    def get_memory_text(self) -> str:
        """The `top_k` closest steps, in order of time."""
        best = self._index.search(self._query, self.top_k)
        return join_steps(self._steps[number] for number in sorted(best))


class FrameMemory(StepMemory):
    """Keeps the last `window_size` steps with their images, for vision models.

    Its text has the placeholder `<image>` where an observation had an image; `get_images` gives the pixels.
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
        """Keep the step and its images, let go of the oldest."""
        text = self.observation_text(observation)
        images = observation_images(observation) if IMAGE_PLACEHOLDER in text else ()
        self._frames.append((self._take(text, action, reward, info), images))

    def get_memory_text(self) -> str:
        """The last steps, oldest first, with a placeholder for each image."""
        return join_steps(step for step, _ in self._frames)

    def get_images(self) -> tuple[NDArray[np.uint8], ...]:
        """The images, in the order of their placeholders."""
        return tuple(image for _, images in self._frames for image in images)


def _at_least(value: int, least: int, name: str) -> int:
    check_count(name, value, least, most=sys.maxsize)
    return int(value)


def _copy_sharing(memory: _MemoryT, shared: object, memo: dict[int, Any]) -> _MemoryT:
    twin = type(memory).__new__(type(memory))
    memo[id(memory)] = twin
    memo[id(shared)] = shared
    twin.__dict__.update(copy.deepcopy(memory.__dict__, memo))
    return twin
