"""Where the trainer's batches come from: rollouts in turn with the updates, or beside them.

`CollectSource` plays one batch with the present weights, then waits for the update; every sample is made by the weights it
trains. `StreamSource` plays on in a thread of its own while the trainer updates, and bounds how old samples get:

- a group starts only while started <= (version + max_staleness + 1) * groups per iteration, so that no group can be
  more than `max_staleness` updates old at its turn (the capacity rule of Fu et al. 2025, AReaL);
- a batch waits for the groups that the next update would make too old, so that slow groups are paced, not thrown away:
  dropping them would train on short episodes alone;
- whatever is too old all the same is dropped at its turn, and counted. The capacity then grows by it.

Words: the *version* is the number of weight updates; a group is as old as the oldest version that made a completion in it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

import numpy as np

from longstep.errors import EnvError, PolicyError
from longstep.policy import Policy
from longstep.recording import RolloutBatch
from longstep.rollout import EpisodeGroup, Rollout
from longstep.tasks import TaskStream
from longstep.types import StepRecord, StopReason, Task
from longstep.vector import VectorEnv
from longstep_trainers.config import RunConfig

__all__ = ["BatchSource", "CollectSource", "StreamSource", "open_source"]

_log = logging.getLogger(__name__)
_POLL_S = 0.2
"""Longest time after which the rollout's thread sees that it is to end."""
_END_S = 60.0
"""Longest wait for the rollout's thread; a step of an environment may be under way."""


class BatchSource(Protocol):
    """Gives the batches of one iteration after another."""

    def next_batch(self) -> tuple[RolloutBatch, dict[str, float]]:
        """The trajectories of one iteration, and metrics of how they came to be.

        Raises:
            EnvError: Not one trajectory can be used.
            PolicyError: ... because the policy answered none.
        """
        ...

    def advance(self, version: int) -> None:
        """The policy has new weights: `version` updates have been made."""
        ...

    def close(self) -> None:
        """End what is under way. Idempotent."""
        ...


def open_source(
    config: RunConfig,
    envs: VectorEnv,
    policy: Policy,
    tasks: TaskStream,
    *,
    version: int,
    iteration: int,
    on_step: Callable[[str, StepRecord], object] | None = None,
) -> BatchSource:
    """What plays the run's tasks, from this iteration and version on: in turn with the updates, or beside them."""
    rollout = Rollout(
        envs,
        policy,
        group_size=config.env.rollout.n,
        max_steps=config.env.max_steps,
        max_tokens=config.generation.max_tokens,
        temperature=config.generation.temperature,
        top_p=config.generation.top_p,
        constrain=config.generation.constrain,
        seed=config.seed,
        on_step=on_step,
    )
    num_groups = config.env.rollout.groups_per_iteration
    if config.actor.max_staleness == 0:
        return CollectSource(rollout, tasks, num_groups, iteration)
    return StreamSource(
        rollout,
        tasks,
        groups_per_iteration=num_groups,
        max_staleness=config.actor.max_staleness,
        version=version,
        iteration=iteration,
    )


class CollectSource:
    """Each batch is one `Rollout.collect`, when it is asked for."""

    def __init__(
        self, rollout: Rollout, tasks: TaskStream, groups_per_iteration: int, iteration: int
    ) -> None:
        """Args:
        iteration: The next one; it enters the sampling seeds.
        """
        self._rollout, self._tasks = rollout, tasks
        self._num_groups = groups_per_iteration
        self._iteration = iteration

    def next_batch(self) -> tuple[RolloutBatch, dict[str, float]]:
        """Play one iteration."""
        tasks = list(islice(self._tasks, self._num_groups))
        batch = self._rollout.collect(tasks, iteration=self._iteration)
        self._iteration += 1
        check_usable(batch)
        return batch, {}

    def advance(self, version: int) -> None:
        """Nothing to do: the next batch is played by the weights there are."""

    def close(self) -> None:
        """Nothing is under way between batches."""


class StreamSource:
    """Batches out of a `Rollout.stream` that runs in a thread of its own, from the first `next_batch` on."""

    def __init__(
        self,
        rollout: Rollout,
        tasks: Iterator[Task],
        *,
        groups_per_iteration: int,
        max_staleness: int,
        version: int,
        iteration: int,
    ) -> None:
        """Args:
        rollout: Used by the thread alone from now on, with its environments and its policy.
        tasks: Read by the thread alone.
        groups_per_iteration: Groups of one batch.
        max_staleness: Updates by which a completion may lag, at least 1.
        version: Updates made so far. After a resume nothing is under way, whatever had been.
        iteration: Enters the sampling seeds of everything this source plays.
        """
        self._rollout, self._tasks = rollout, tasks
        self._num_groups = groups_per_iteration
        self._max_staleness = max_staleness
        self._version = self._first_version = version
        self._iteration = iteration
        self._changed = threading.Condition()  # guards everything below
        self._running: dict[int, int] = {}  # group -> version when it started
        self._ended: list[EpisodeGroup] = []
        self._num_started = self._num_dropped = 0
        self._is_closed = self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._play, name="longstep-rollout", daemon=True)

    def next_batch(self) -> tuple[RolloutBatch, dict[str, float]]:
        """Wait for the groups of one iteration, oldest first.

        Returns:
            The batch, with fewer groups only when the tasks are used up, with more when more would be too old at the
            next turn, and async/dropped_groups,
            async/dropped_env_steps, async/staleness_mean and async/staleness_max (over rows), async/waiting_groups (ended
            and left for later), async/running_groups.
        """
        if self._thread.ident is None:
            self._thread.start()
        with self._changed:
            dropped: list[EpisodeGroup] = []
            while True:
                dropped += self._drop_stale()
                if self._error is not None:
                    raise self._error
                if self._is_over or self._is_complete():
                    break
                self._changed.wait(1.0)
            self._ended.sort(key=self._age_of, reverse=True)  # stable: equal ages by their ends
            num_due = sum(self._age_of(group) == self._max_staleness for group in self._ended)
            size = max(self._num_groups, num_due)  # the next turn is too late for what is due now
            groups, self._ended = self._ended[:size], self._ended[size:]
            metrics = {
                "async/dropped_groups": float(len(dropped)),
                "async/dropped_env_steps": float(
                    sum(t.num_steps for group in dropped for t in group.trajectories)
                ),
                "async/waiting_groups": float(len(self._ended)),
                "async/running_groups": float(len(self._running)),
            }
            version = self._version
        groups.sort(key=lambda group: group.group_id)
        batch = RolloutBatch(trajectories=tuple(t for group in groups for t in group.trajectories))
        check_usable(batch)
        lags = np.array([version - row.completion.policy_version for row in batch.rows])
        metrics["async/staleness_mean"] = float(lags.mean())
        metrics["async/staleness_max"] = float(lags.max())
        return batch, metrics

    def advance(self, version: int) -> None:
        """Let as many groups start as the new version allows."""
        with self._changed:
            self._version = version

    def close(self) -> None:
        """End the thread: requests are withdrawn, and the environments can be closed afterwards. Idempotent."""
        with self._changed:
            self._is_closed = True
        if self._thread.is_alive():
            self._thread.join(_END_S)
            if self._thread.is_alive():
                _log.warning(
                    "the rollout did not end within %g s, a step of an environment hangs; it goes on until the process ends",
                    _END_S,
                )

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _age_of(self, group: EpisodeGroup) -> int:
        oldest = group.oldest_version
        return 0 if oldest is None else self._version - oldest

    def _drop_stale(self) -> list[EpisodeGroup]:
        """Take out the groups that are beyond the bound."""
        stale = [group for group in self._ended if self._age_of(group) > self._max_staleness]
        self._ended = [group for group in self._ended if self._age_of(group) <= self._max_staleness]
        self._num_dropped += len(stale)
        return stale

    def _is_complete(self) -> bool:
        """True when there are groups enough, and the next update makes none too old that is still being played."""
        last_turn = self._version - self._max_staleness
        is_due = any(started <= last_turn for started in self._running.values())
        return len(self._ended) >= self._num_groups and not is_due

    # -- in the rollout's thread --------------------------------------------------------------------------------------

    def _capacity(self) -> int:
        """Most groups that may have started by now; none once the source is closed."""
        with self._changed:
            num_updates = self._version - self._first_version
            allowed = (num_updates + self._max_staleness + 1) * self._num_groups
            return 0 if self._is_closed else allowed + self._num_dropped

    def _noted_tasks(self) -> Iterator[Task]:
        for task in self._tasks:
            with self._changed:
                self._running[self._num_started] = self._version
                self._num_started += 1
            yield task

    def _play(self) -> None:
        try:
            with self._rollout.stream(
                self._noted_tasks(), capacity=self._capacity, iteration=self._iteration
            ) as stream:
                while not stream.is_over and not self._is_closed:
                    groups = stream.poll(_POLL_S)
                    with self._changed:
                        for group in groups:
                            del self._running[group.group_id]
                        self._ended += groups
                        self._changed.notify_all()
        except BaseException as error:  # raised where the batch is asked for
            self._error = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()


def check_usable(batch: RolloutBatch) -> None:
    """Raise when not one trajectory came to its end: the next rollout would fare no better."""
    if batch.rows:
        return
    first = batch.errors[0] if batch.errors else "no trajectory took a step"
    told = (
        f"expected at least one usable trajectory, got {len(batch.errors)} failures at the rollout, the first being: "
        f"{first}"
    )
    reasons = {trajectory.stop_reason for trajectory in batch.trajectories}
    if reasons == {StopReason.POLICY_FAILURE}:
        raise PolicyError(f"{told}; what actors write is in `actors` of the output folder")
    raise EnvError(f"{told}; play the environment by itself with `longstep check-env`")
