"""`reset` and `step` of a whole vector environment, over its `send` and `recv`, for loops without `Rollout`.

Words: a *member* is one environment of an episode group. A finished member rests, and keeps what was last seen of it,
until the next `reset`. One that failed counts as truncated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.commands import CommandBatch, EnvCommand, EnvResult, ResultBatch, next_command_id
from longstep.errors import ConfigError
from longstep.types import Task

__all__ = ["LockstepEnv"]


class _Episodes:
    """What was last seen of each member."""

    def __init__(self, group_ids: NDArray[np.int64]) -> None:
        num_envs = len(group_ids)
        self.group_ids = group_ids
        self.observations = [""] * num_envs
        self.infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]
        self.errors: list[str | None] = [None] * num_envs
        self.terminated = np.zeros(num_envs, dtype=np.bool_)
        self.truncated = np.zeros(num_envs, dtype=np.bool_)

    def take(self, results: ResultBatch) -> None:
        """Look at results; of a member that failed the last observation stays."""
        slots = results.slots
        self.terminated[slots] = results.terminated
        self.truncated[slots] = results.truncated
        for slot, text, info, error in zip(
            slots, results.observations, results.infos, results.errors, strict=True
        ):
            self.errors[slot] = error
            if error is None:
                self.observations[slot], self.infos[slot] = text, info
            else:
                self.infos[slot], self.truncated[slot] = {"error": error}, True


class LockstepEnv(ABC):
    """Adds `reset` and `step` to a `VectorEnv`. Use either these or `send` and `recv`, not both in one episode."""

    _episodes: _Episodes | None = None
    """None before the first `reset`, and after what went wrong between two steps."""

    @property
    @abstractmethod
    def num_envs(self) -> int:
        """Number of slots."""

    @abstractmethod
    def send(self, commands: Sequence[EnvCommand]) -> None:
        """Take commands without waiting; see `VectorEnv`."""

    @abstractmethod
    def recv(self, min_ready: int = 1, timeout_s: float | None = None) -> Sequence[EnvResult]:
        """Results that are ready; see `VectorEnv`."""

    def reset(
        self,
        seeds: Sequence[int],
        *,
        group_size: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Start `group_size` members from each seed: slots `g * group_size` to `(g + 1) * group_size - 1` are group `g`.

        Commands that are under way are forgotten first.

        Args:
            seeds: One seed for each episode group.
            group_size: Members of each group.
            options: `options` of every environment's reset.

        Returns:
            Observations and infos, one for each slot. A member that failed has "" and {"error": ...}.

        Raises:
            ConfigError: `len(seeds) * group_size` is not `num_envs`.
        """
        num_envs = self.num_envs
        if group_size < 1 or len(seeds) * group_size != num_envs:
            raise ConfigError(
                f"expected len(seeds) * group_size == num_envs, got {len(seeds)} * {group_size} and"
                f" {num_envs} environments"
            )
        self._episodes = None
        self._forget_commands()
        env_id: str | None = getattr(self, "env_id", None)
        tasks = [Task(env_id=env_id or "", seed=int(seed), options=options) for seed in seeds]
        commands = [
            EnvCommand(slot=slot, command_id=next_command_id(), task=tasks[slot // group_size])
            for slot in range(num_envs)
        ]
        episodes = _Episodes(np.repeat(np.arange(len(seeds), dtype=np.int64), group_size))
        episodes.take(self._results_of(commands, [command.command_id for command in commands]))
        self._episodes = episodes
        return list(episodes.observations), list(episodes.infos)

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
            ConfigError: Before `reset`, after a `step` that was interrupted, a wrong number of actions, or None for a
                member that has not finished.
        """
        episodes, num_envs = self._seen(), self.num_envs
        if len(actions) != num_envs:
            raise ConfigError(f"expected {num_envs} actions, got {len(actions)}")
        running: list[int] = np.flatnonzero(~(episodes.terminated | episodes.truncated)).tolist()
        said = [actions[slot] for slot in running]
        if None in said:
            raise ConfigError(
                f"expected an action for slot {running[said.index(None)]}, got None; it has not finished"
            )
        rewards = np.zeros(num_envs, dtype=np.float64)
        if running:
            commands = CommandBatch(running, [action for action in said if action is not None])
            self._episodes = None  # until it is known what became of each member
            results = self._results_of(commands, commands.command_ids)
            episodes.take(results)
            rewards[results.slots] = results.rewards
            self._episodes = episodes
        return (
            list(episodes.observations),
            rewards,
            episodes.terminated.copy(),
            episodes.truncated.copy(),
            list(episodes.infos),
        )

    def _results_of(self, commands: Sequence[EnvCommand], command_ids: list[int]) -> ResultBatch:
        """Send commands and wait for all of their results."""
        self.send(commands)
        missing, batches = set(command_ids), list[ResultBatch]()
        while missing:
            results = self.recv(len(missing))
            batch = results if isinstance(results, ResultBatch) else ResultBatch.of(results)
            if not batch or not missing.issuperset(batch.command_ids):
                raise ConfigError(
                    "expected no other command under way beside `reset` and `step`; use either these, or `send` and "
                    "`recv`"
                )
            missing.difference_update(batch.command_ids)
            batches.append(batch)
        return ResultBatch.join(batches)

    def _look_at(self, results: ResultBatch) -> None:
        """Take note of states that members came to by other ways than `reset` and `step`."""
        if self._episodes is not None:
            self._episodes.take(results)

    def _forget_commands(self) -> None:
        """Wait for what is under way, and drop its results."""
        while self.recv(self.num_envs):
            pass

    @property
    def group_ids(self) -> NDArray[np.int64]:
        """int64[N]: episode group of each slot after `reset`; zeros before."""
        episodes = self._episodes
        return np.zeros(self.num_envs, dtype=np.int64) if episodes is None else episodes.group_ids

    @property
    def done(self) -> NDArray[np.bool_]:
        """bool[N]: True where the member has finished or failed."""
        episodes = self._seen()
        return episodes.terminated | episodes.truncated

    @property
    def errors(self) -> list[str | None]:
        """What failed in each slot since `reset`; None where nothing did."""
        return list(self._seen().errors)

    @property
    def final_observation(self) -> list[str | None]:
        """Last observation of each finished member; None where the episode goes on."""
        episodes = self._seen()
        return [
            text if over else None
            for over, text in zip(self.done, episodes.observations, strict=True)
        ]

    @property
    def final_info(self) -> list[dict[str, Any] | None]:
        """Last info of each finished member; None where the episode goes on."""
        episodes = self._seen()
        return [
            info if over else None for over, info in zip(self.done, episodes.infos, strict=True)
        ]

    def _seen(self) -> _Episodes:
        if self._episodes is None:
            raise ConfigError(
                "expected `reset` before this call; call reset(seeds, group_size=...)"
            )
        return self._episodes
