"""Many environments in this process, for `Rollout` or for a loop of one's own.

`GroupVectorEnv` runs its environments one after the other, which is the fastest way for environments that take
microseconds. It speaks the commands of `VectorEnv` and has a Gymnasium-like surface (`reset`, `step`) beside it. Words:
a *slot* is one place for one environment; a *member* is one environment of an episode group.

One environment's exception is that slot's error and nobody else's; the environment is closed and built anew at the
slot's next reset. There is no autoreset: a finished environment rests until it is told to reset.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longstep.arguments import check_count
from longstep.commands import EnvCommand, EnvResult, VectorEnv, next_command_id
from longstep.errors import ConfigError, EnvError
from longstep.types import Task

if TYPE_CHECKING:
    from longstep.env import LLMAgentEnv

__all__ = ["EnvCommand", "EnvResult", "GroupVectorEnv", "VectorEnv", "next_command_id"]


class GroupVectorEnv:
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
        self._ready: list[EnvResult] = []
        self._last: list[EnvResult | None] = [None] * num_envs
        self.group_ids: NDArray[np.int64] = np.zeros(num_envs, dtype=np.int64)
        """int64[N]: episode group of each slot after `reset`."""
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
        busy = set(self._busy)
        for command in commands:
            self._check(command, busy)
            busy.add(command.slot)
        self._busy = busy
        self._pending.extend(commands)

    def recv(self, min_ready: int = 1, timeout_s: float | None = None) -> list[EnvResult]:
        """Run all queued commands and return their results. The arguments play no part: nothing runs in between.

        KeyboardInterrupt and SystemExit pass through; the results that were there already, and one with an error for
        the interrupted command, come with the next call.
        """
        while self._pending:
            command = self._pending.popleft()
            self._ready.append(self._execute(command))
        results, self._ready = self._ready, []
        for result in results:
            self._busy.discard(result.slot)
        return results

    def close(self) -> None:
        """Close every environment and forget queued commands. Idempotent; a later reset builds environments anew."""
        self._forget_commands()
        for slot in range(self.num_envs):
            self._discard(slot)

    # -- the Gymnasium-like surface, for loops without Rollout --------------------------------------------------------

    def reset(
        self,
        seeds: Sequence[int],
        *,
        group_size: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Start `group_size` members from each seed: slots `g * group_size` to `(g + 1) * group_size - 1` are group `g`.

        Args:
            seeds: One seed for each episode group.
            group_size: Members of each group.
            options: `options` of every environment's reset.

        Returns:
            Observations and infos, one for each slot. A member that failed has "" and {"error": ...}.

        Raises:
            ConfigError: `len(seeds) * group_size` is not `num_envs`.
        """
        if group_size < 1 or len(seeds) * group_size != self.num_envs:
            raise ConfigError(
                f"expected len(seeds) * group_size == num_envs, got {len(seeds)} * {group_size} and"
                f" {self.num_envs} environments"
            )
        self._forget_commands()
        self.group_ids = np.repeat(np.arange(len(seeds), dtype=np.int64), group_size)
        for slot in range(self.num_envs):
            seed = int(seeds[slot // group_size])
            task = Task(env_id=self.env_id or "", seed=seed, options=options)
            command = EnvCommand(slot=slot, command_id=next_command_id(), task=task)
            self._last[slot] = _as_last(self._execute(command), observation="")
        return [self._seen(slot).observation for slot in range(self.num_envs)], self._infos()

    def step(
        self, actions: Sequence[str | None]
    ) -> tuple[
        list[str],
        NDArray[np.float64],
        NDArray[np.bool_],
        NDArray[np.bool_],
        list[dict[str, Any]],
    ]:
        """Step every member that has not finished.

        Args:
            actions: One completion for each slot. Those of finished members are not looked at and may be None.

        Returns:
            Observations, rewards float64[N], terminated bool[N], truncated bool[N], infos. A finished member keeps its
            last observation, flags and info, and its reward is 0. A member that failed counts as truncated, and its
            info has `error`.

        Raises:
            ConfigError: Before `reset`, a wrong number of actions, or None for a member that has not finished.
        """
        if len(actions) != self.num_envs:
            raise ConfigError(f"expected {self.num_envs} actions, got {len(actions)}")
        running = [slot for slot in range(self.num_envs) if not self._finished(slot)]
        missing = [slot for slot in running if actions[slot] is None]
        if missing:
            raise ConfigError(
                f"expected an action for slot {missing[0]}, got None; it has not finished"
            )
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        for slot in running:
            command = EnvCommand(slot=slot, command_id=next_command_id(), action=actions[slot])
            result = _as_last(self._execute(command), self._seen(slot).observation)
            self._last[slot] = result
            rewards[slot] = result.reward
        seen = [self._seen(slot) for slot in range(self.num_envs)]
        return (
            [result.observation for result in seen],
            rewards,
            np.array([result.terminated for result in seen], dtype=np.bool_),
            np.array([result.truncated for result in seen], dtype=np.bool_),
            self._infos(),
        )

    @property
    def done(self) -> NDArray[np.bool_]:
        """bool[N]: True where the member has finished or failed."""
        return np.array([self._finished(slot) for slot in range(self.num_envs)], dtype=np.bool_)

    @property
    def errors(self) -> list[str | None]:
        """What failed in each slot since `reset`; None where nothing did."""
        return [self._seen(slot).error for slot in range(self.num_envs)]

    @property
    def final_observation(self) -> list[str | None]:
        """Last observation of each finished member; None where the episode goes on."""
        slots = range(self.num_envs)
        return [self._seen(slot).observation if self._finished(slot) else None for slot in slots]

    @property
    def final_info(self) -> list[dict[str, Any] | None]:
        """Last info of each finished member; None where the episode goes on."""
        slots = range(self.num_envs)
        return [self._seen(slot).info if self._finished(slot) else None for slot in slots]

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

    def _check(self, command: EnvCommand, busy: set[int]) -> None:
        """Raise when a command is wrong."""
        slot = command.slot
        if not 0 <= slot < self.num_envs:
            raise ConfigError(f"expected a slot below {self.num_envs}, got {slot}")
        if slot in busy:
            raise ConfigError(
                f"expected one command at a time for slot {slot}, got command {command.command_id} while another is "
                "pending; call `recv` first"
            )
        if (command.task is None) == (command.action is None):
            raise ConfigError(
                f"expected exactly one of `task` and `action` in command {command.command_id}, "
                f"got {'neither' if command.task is None else 'both'}"
            )
        if command.task is None and not self._in_episode[slot]:
            raise ConfigError(
                f"expected slot {slot} to be in an episode at a step, but it was not reset, has finished or has "
                "failed; send a command with `task` first"
            )
        if command.task is not None and self.env_id not in (None, command.task.env_id):
            raise ConfigError(
                f"expected tasks of `{self.env_id}`, got one of `{command.task.env_id}`; "
                "a GroupVectorEnv holds one kind of environment"
            )

    def _execute(self, command: EnvCommand) -> EnvResult:
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
            self._in_episode[slot] = not (terminated or truncated)
            return EnvResult(
                slot=slot,
                command_id=command.command_id,
                observation=observation,
                reward=float(reward),
                terminated=bool(terminated),
                truncated=bool(truncated),
                info=info,
                error=None,
                seconds=time.perf_counter() - start,
            )
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
        self._last = [None] * self.num_envs

    def _seen(self, slot: int) -> EnvResult:
        result = self._last[slot]
        if result is None:
            raise ConfigError(
                "expected `reset` before this call; call reset(seeds, group_size=...)"
            )
        return result

    def _finished(self, slot: int) -> bool:
        result = self._seen(slot)
        return result.terminated or result.truncated

    def _infos(self) -> list[dict[str, Any]]:
        return [self._seen(slot).info for slot in range(self.num_envs)]


def _describe(failure: Exception) -> str:
    """Type and message of what an environment raised; one whose message cannot be had is no reason to fail."""
    try:
        return f"{type(failure).__name__}: {failure}"
    except Exception as error:
        return f"{type(failure).__name__} (its message raised {type(error).__name__})"


def _failed(command: EnvCommand, error: str, start: float) -> EnvResult:
    return EnvResult(
        slot=command.slot,
        command_id=command.command_id,
        observation="",
        reward=0.0,
        terminated=False,
        truncated=False,
        info={},
        error=error,
        seconds=time.perf_counter() - start,
    )


def _as_last(result: EnvResult, observation: str) -> EnvResult:
    """What a loop without `Rollout` sees: a member that failed has ended, with what was last seen of it."""
    if result.error is None:
        return result
    info = {"error": result.error}
    return replace(result, observation=observation, truncated=True, info=info)
