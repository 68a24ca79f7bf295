"""Agents at the client: an LLMAgentEnv here for each raw environment elsewhere, without waiting for it.

A server in another language, or in an interpreter where longstep cannot be installed, knows observations and actions but
no prompts. The client then parses each completion, sends the action that it names, and when the answer is there, lets
an LLMAgentEnv take the step with an environment that gives this answer.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from longstep.commands import EnvCommand, EnvResult
from longstep.env import LLMAgentEnv
from longstep.errors import ProtocolError
from longstep.spaces import TextSpace
from longstep.text_actions import decode_action
from longstep_bindings.envs.recovery import History

__all__ = ["LocalAgent"]


class _Told(gymnasium.Env[Any, Any]):
    """Gives what it was told."""

    def __init__(self, traits: Mapping[str, Any]) -> None:
        self.observation_space = TextSpace()
        self.action_space = _space(traits.get("action_space"))
        self.max_steps = traits.get("max_steps")
        self.next: Any = None
        if traits.get("action_names") is not None:
            self.action_names = traits["action_names"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.next

    def step(self, action: Any) -> Any:
        return self.next


class LocalAgent:
    """The agent of one slot."""

    def __init__(self, settings: Mapping[str, Any], traits: Mapping[str, Any]) -> None:
        """Args:
        settings: Arguments of LLMAgentEnv; a memory is copied.
        traits: What the worker said of the environment.
        """
        self._told = _Told(traits)
        own = {
            name: copy.deepcopy(value) if name == "memory" else value
            for name, value in settings.items()
        }
        self._agent = LLMAgentEnv(self._told, **own)
        self._pending: EnvCommand | None = None
        self._info: dict[str, Any] = {}
        self._raw_info: dict[str, Any] = {}
        self.in_episode = False
        self.history: History | None = None
        """Task, completions that were answered since its reset, and state keys; None before, and after a failure."""

    def outgoing(self, command: EnvCommand) -> EnvCommand | EnvResult:
        """What to send for a command, or its result if there is nothing to be sent."""
        self._pending = command
        if command.task is not None:
            return command
        assert command.action is not None
        try:
            assert self._agent.parser is not None
            action = self._agent.parser.parse(command.action, self._info["admissible_actions"])
            raw, problem = None, action.reason
            if action.valid:
                raw, problem = decode_action(self._told, self._raw_info, action.text)
        except Exception as error:  # parsers are users' code
            return self._failed(command, f"{type(error).__name__}: {error}")
        if raw is None or problem:
            return self._advance(command, 0.0)
        return replace(command, action=raw)

    def incoming(self, result: EnvResult) -> EnvResult:
        """The agent's result for the environment's."""
        command = self._pending
        assert command is not None
        if result.error is not None:
            self.in_episode, self.history = False, None
            return result
        self._raw_info = result.info
        told = (result.observation, result.reward, result.terminated, result.truncated, result.info)
        self._told.next = told if command.task is None else (result.observation, result.info)
        return self._advance(command, result.seconds)

    def _advance(self, command: EnvCommand, seconds: float) -> EnvResult:
        start = time.perf_counter()
        reward, terminated, truncated = 0.0, False, False
        try:
            if command.task is not None:
                options = command.task.options
                observation, info = self._agent.reset(
                    seed=command.task.seed, options=None if options is None else dict(options)
                )
                self.history = History(command.task, [], [])
            else:
                assert command.action is not None
                assert self.history is not None
                observation, reward, terminated, truncated, info = self._agent.step(command.action)
                self.history.actions.append(command.action)
        except Exception as error:
            return self._failed(command, f"{type(error).__name__}: {error}")
        self.history.keys.append(info["state_key"])
        self._info, self.in_episode = info, not (terminated or truncated)
        return EnvResult(
            slot=command.slot,
            command_id=command.command_id,
            observation=observation,
            reward=float(reward),
            terminated=terminated,
            truncated=truncated,
            info=info,
            error=None,
            seconds=seconds + time.perf_counter() - start,
        )

    def _failed(self, command: EnvCommand, error: str) -> EnvResult:
        self.in_episode, self.history = False, None
        return EnvResult(
            slot=command.slot,
            command_id=command.command_id,
            observation="",
            reward=0.0,
            terminated=False,
            truncated=False,
            info={},
            error=error,
            seconds=0.0,
        )


def _space(plain: Any) -> gymnasium.Space[Any]:
    """The space that a worker described; one of texts for what it did not.

    Raises:
        ProtocolError: There is no such space.
    """
    try:
        match plain:
            case None:
                return TextSpace()
            case ["discrete", num_actions, start]:
                return spaces.Discrete(num_actions, start=start)
            case ["multi_discrete", sizes]:
                return spaces.MultiDiscrete(sizes)
            case ["multi_binary", size]:
                return spaces.MultiBinary(size)
            case ["box", low, high, dtype]:
                return spaces.Box(low, high, dtype=np.dtype(dtype).type)
            case ["tuple", parts]:
                return spaces.Tuple(map(_space, parts))
            case ["dict", parts]:
                return spaces.Dict({name: _space(part) for name, part in parts.items()})
    except (TypeError, ValueError, AssertionError, AttributeError):
        pass
    raise ProtocolError(f"expected the description of a space of actions, got {plain!r:.200}")
