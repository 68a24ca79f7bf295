"""The rollout without a barrier: episode groups come as they end, and new ones start as long as they may.

`Rollout.stream` gives a `RolloutStream`. It plays as `Rollout.collect` does, with the same ids, seeds, failures and
re-rolls, but takes its tasks from an iterator, one whenever a slot is free and `capacity` allows another group. So a
trainer can update while trajectories go on, and decide by `capacity` how far they may run ahead of it.

One thread drives a stream; `capacity` and the tasks are asked in that thread. See `longstep.collection` for the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from longstep.collection import Collection
from longstep.commands import VectorEnv
from longstep.member import Member, checked_task, trajectory_id_of
from longstep.policy import Policy
from longstep.types import StepRecord, Task, Trajectory

if TYPE_CHECKING:
    from longstep.rollout import RolloutSettings

__all__ = ["EpisodeGroup", "RolloutStream"]

_TICK_S = 0.02
"""Longest wait in one call: within it the stream sees that `capacity` has grown or that time is up."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodeGroup:
    """The trajectories of one task, all of them ended."""

    group_id: int
    """How many groups of the stream started before it."""
    task: Task
    trajectories: tuple[Trajectory, ...]
    """Ordered by member and attempt, failures too."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that made a completion of a usable trajectory; None when there is no such completion."""
        usable = (t for t in self.trajectories if not t.stop_reason.is_failure)
        versions = [t.oldest_version for t in usable]
        return min((version for version in versions if version is not None), default=None)


class RolloutStream(Collection):
    """Plays tasks from an iterator and gives each episode group when its last trajectory has ended.

    >>> from longstep import FunctionPolicy, Rollout, Task
    >>> policy = FunctionPolicy(lambda request: request.allowed[0])
    >>> tasks = (Task(env_id="longstep/KeyDoor-v0", seed=s) for s in range(3))
    >>> with Rollout("longstep/KeyDoor-v0", policy, group_size=2, max_steps=4, constrain=True) as rollout:
    ...     sorted((group.group_id, len(group.trajectories)) for group in rollout.stream(tasks))
    [(0, 2), (1, 2), (2, 2)]
    """

    def __init__(
        self,
        envs: VectorEnv,
        policy: Policy,
        settings: RolloutSettings,
        tasks: Iterator[Task],
        capacity: Callable[[], int] | None,
        iteration: int,
        stale: dict[int, int],
        on_step: Callable[[str, StepRecord], object] | None,
    ) -> None:
        """Args:
        capacity: Most groups that may have started by now, counted from the stream's beginning; None sets no bound.
        stale: This and the other arguments: see `Collection`.
        """
        super().__init__(envs, policy, settings, (), iteration, stale, on_step)
        self._tasks: Iterator[Task] | None = tasks  # None: used up
        self._capacity = capacity
        self._idle_s = _TICK_S
        self._open: dict[int, list[tuple[int, int, Trajectory]]] = {}  # group -> what has ended
        self._left: dict[int, int] = {}  # group -> members that have not ended
        self._ended: list[EpisodeGroup] = []
        self._is_closed = False
        self.num_started = 0
        """Groups that have started."""

    @property
    def is_over(self) -> bool:
        """True when no group will come any more: the tasks are used up, or the stream is closed."""
        return self._is_closed or (self._tasks is None and not self._left and not self._ended)

    def poll(self, timeout_s: float) -> list[EpisodeGroup]:
        """Play on until a group has ended, for up to `timeout_s` or the time that one call of an in-process engine takes.

        Returns:
            The groups that have ended since the last call, in order of their ends; often none.

        Raises:
            ConfigError: As in `Rollout.collect`. After this or any other exception the stream is closed.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while not self.is_over and not self._ended:
                self._step_environments()
                self._generate()
                left_s = deadline - time.monotonic()
                if left_s <= 0.0:
                    break
                if not self._live and not self._ended:  # waits for `capacity`
                    time.sleep(min(_TICK_S, left_s))
        except BaseException:
            self.close()
            raise
        groups, self._ended = self._ended, []
        return groups

    def close(self) -> None:
        """Withdraw requests and let the environments answer, so that both can be used again. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._abandon()

    def __iter__(self) -> Iterator[EpisodeGroup]:
        """Each group when it has ended; ends with the tasks, and closes the stream when it is left early."""
        try:
            while not self.is_over:
                yield from self.poll(1.0)
        finally:
            self.close()

    def __enter__(self) -> RolloutStream:
        """The stream itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _refill(self) -> None:
        """Start groups for slots that would stay empty."""
        while len(self._free) > len(self._queue) and self._tasks is not None:
            if self._capacity is not None and self.num_started >= self._capacity():
                return
            try:
                task = checked_task(next(self._tasks), f"tasks[{self.num_started}]")
            except StopIteration:
                self._tasks = None
                return
            self._start(task)

    def _start(self, task: Task) -> None:
        group, settings = self.num_started, self._settings
        self.num_started += 1
        self._open[group], self._left[group] = [], settings.group_size
        for index in range(settings.group_size):
            name = trajectory_id_of(settings.seed, self._iteration, task, group, index, 0)
            self._queue.append(Member(task, group, index, 0, name))

    def _keep(self, finished: tuple[int, int, int, Trajectory], *, is_last: bool) -> None:
        group, index, attempt, trajectory = finished
        self._open[group].append((index, attempt, trajectory))
        self._left[group] -= is_last
        if self._left[group]:
            return
        del self._left[group]
        ended = sorted(self._open.pop(group), key=lambda item: item[:2])
        trajectories = tuple(item[2] for item in ended)
        self._ended.append(
            EpisodeGroup(group_id=group, task=trajectory.task, trajectories=trajectories)
        )
