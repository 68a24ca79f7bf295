"""Many environments in this process, for `Rollout` or for a loop of one's own.

`GroupVectorEnv` runs its environments one after the other, which is the fastest way for environments that take
microseconds. It speaks the commands of `VectorEnv` and has a Gymnasium-like surface (`reset`, `step`; see `lockstep`)
beside it.

One environment's exception is that slot's error and nobody else's; the environment is closed and built anew at the
slot's next reset. There is no autoreset: a finished environment rests until it is told to reset.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from longstep.arguments import check_count
from longstep.commands import (
    CommandBatch,
    EnvCommand,
    EnvResult,
    ResultBatch,
    VectorEnv,
    check_commands,
    next_command_id,
)
from longstep.errors import ConfigError, EnvError
from longstep.lockstep import LockstepEnv
from longstep.types import Task

if TYPE_CHECKING:
    from longstep.env import LLMAgentEnv

__all__ = [
    "CommandBatch",
    "EnvCommand",
    "EnvResult",
    "GroupVectorEnv",
    "LockstepEnv",
    "ResultBatch",
    "VectorEnv",
    "check_commands",
    "next_command_id",
]


_Row: TypeAlias = tuple[int, int, str, float, bool, bool, dict[str, Any], str | None, float]
"""The fields of an `EnvResult`."""


class GroupVectorEnv(LockstepEnv):
    """Environments in this process, run one after the other.

    Environments are built when a slot is first reset; the first one is built at once, so that a wrong id or argument
    raises here and not in the middle of a rollout.

    >>> envs = GroupVectorEnv("longstep/KeyDoor-v0", num_envs=4)
    >>> observations, infos = envs.reset(seeds=[7, 8], group_size=2)
    >>> observations[0] == observations[1], envs.group_ids.tolist()
    (True, [0, 0, 1, 1])
    >>> envs.close()
    """

    def __init__(
        self,
        make_env: str | Callable[..., LLMAgentEnv],
        num_envs: int,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
            make_env: A registered id, or a function that gives a new environment at each call.
            num_envs: Number of slots, at least 1.
            env_kwargs: Arguments of `longstep.make`, or of the function.

        Raises:
            ConfigError: `num_envs` is below 1, or `make_env` is neither an id nor callable.
        """
        check_count("num_envs", num_envs, 1)
        if not isinstance(make_env, str) and not callable(make_env):
            raise ConfigError(
                f"expected `make_env` to be an environment id or a function, got {type(make_env).__name__};"
                " pass `lambda: make_my_env()`, each slot needs an environment of its own"
            )
        self.env_id = make_env if isinstance(make_env, str) else None
        """The registered id; None when a function makes the environments."""
        self._make_env = make_env
        self._env_kwargs = dict(env_kwargs or {})
        self._envs: list[LLMAgentEnv | None] = [None] * num_envs
        self._in_episode = [False] * num_envs
        self._pending: deque[EnvCommand] = deque()
        self._busy: set[int] = set()
        self._ready: list[_Row] = []
        self._envs[0] = self._build()

    @property
    def num_envs(self) -> int:
        """Number of slots."""
        return len(self._envs)

    # -- commands and results: what Rollout uses ----------------------------------------------------------------------

    def send(self, commands: Sequence[EnvCommand]) -> None:
        """Queue commands; they run in `recv`.

        Raises:
            ConfigError: Unknown or busy slot, task of another environment, step outside an episode, or not exactly one
                of `task` and `action`. None of `commands` was taken.
        """
        self._busy = check_commands(
            commands, busy=self._busy, in_episode=self._in_episode, env_id=self.env_id
        )
        self._pending.extend(commands)

    def recv(self, min_ready: int = 1, timeout_s: float | None = None) -> ResultBatch:
        """Run all queued commands and return their results. The arguments play no part: nothing runs in between.

        KeyboardInterrupt and SystemExit pass through; the results that were there already, and one with an error for
        the interrupted command, come with the next call.
        """
        while self._pending:
            command = self._pending.popleft()
            self._ready.append(self._execute(command))
        results = ResultBatch.of_rows(self._ready)
        self._ready = []
        self._busy.difference_update(results.slots)
        return results

    def close(self) -> None:
        """Close every environment and forget queued commands. Idempotent; a later reset builds environments anew."""
        self._forget_commands()
        self._episodes = None
        for slot in range(self.num_envs):
            self._discard(slot)

    # -- private ------------------------------------------------------------------------------------------------------

    def _build(self) -> LLMAgentEnv:
        if isinstance(self._make_env, str):
            from longstep.registration import make

            return make(self._make_env, **self._env_kwargs)
        env = self._make_env(**self._env_kwargs)
        if any(env is other for other in self._envs):
            raise ConfigError(
                "expected `make_env` to give a new environment at each call, got the same one twice; "
                "create it inside the function"
            )
        return env

    def _execute(self, command: EnvCommand) -> _Row:
        """Run one command; an environment's exception becomes the result's error."""
        slot, start = command.slot, time.perf_counter()
        try:
            if command.task is not None:
                observation, info = self._reset_slot(slot, command.task)
                reward, terminated, truncated = 0.0, False, False
            else:
                env = self._envs[slot]
                if env is None or command.action is None:
                    raise EnvError("the environment was lost when it was interrupted; reset it")
                observation, reward, terminated, truncated, info = env.step(command.action)
            reward, terminated, truncated = float(reward), bool(terminated), bool(truncated)
            self._in_episode[slot] = not (terminated or truncated)
            told = observation, reward, terminated, truncated, info, None
            return slot, command.command_id, *told, time.perf_counter() - start
        except Exception as failure:
            self._discard(slot)
            return _failed(command, _describe(failure), start)
        except BaseException as interrupt:
            self._discard(slot)
            self._ready.append(
                _failed(command, f"interrupted by {type(interrupt).__name__}", start)
            )
            raise

    def _reset_slot(self, slot: int, task: Task) -> tuple[str, dict[str, Any]]:
        env = self._envs[slot]
        if env is None:
            env = self._envs[slot] = self._build()
        options = None if task.options is None else dict(task.options)
        return env.reset(seed=task.seed, options=options)

    def _discard(self, slot: int) -> None:
        """Close a slot's environment; a broken one may fail at that too, and there is nobody left to tell."""
        env, self._envs[slot], self._in_episode[slot] = self._envs[slot], None, False
        if env is not None:
            with contextlib.suppress(Exception):
                env.close()

    def _forget_commands(self) -> None:
        self._pending.clear()
        self._ready.clear()
        self._busy.clear()


def _describe(failure: Exception) -> str:
    """Type and message of what an environment raised; one whose message cannot be had is no reason to fail."""
    try:
        return f"{type(failure).__name__}: {failure}"
    except Exception as error:
        return f"{type(failure).__name__} (its message raised {type(error).__name__})"


def _failed(command: EnvCommand, error: str, start: float) -> _Row:
    seconds = time.perf_counter() - start
    return command.slot, command.command_id, "", 0.0, False, False, {}, error, seconds
