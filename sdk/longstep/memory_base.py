"""What every memory is: the base class for users' own, one remembered step, and what the built-in kinds share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.arguments import check_mapping, check_number, check_text
from longstep.observations import observation_to_text

__all__ = ["Memory", "MemoryStep", "StepMemory", "join_steps"]


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


class StepMemory(Memory):
    """Counts steps and turns each into a `MemoryStep`; subclasses say which they keep."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._num_steps = 0

    def _take(self, text: str, action: str, reward: float, info: Mapping[str, Any]) -> MemoryStep:
        """The next step, from the text of its observation and what `update` was given."""
        check_text("action", action)
        check_number("reward", reward)
        check_mapping("info", info)
        self._num_steps += 1
        reason = "" if info.get("action_valid", True) else str(info.get("action_reason", ""))
        return MemoryStep(
            number=self._num_steps,
            observation=text,
            action=action,
            reward=reward,
            invalid_reason=reason,
        )


def join_steps(steps: Iterable[MemoryStep]) -> str:
    """The texts of steps, one after another."""
    return "\n".join(step.text for step in steps)
