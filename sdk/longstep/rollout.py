"""The rollout loop's front: settings, environments and policy in, a `RolloutBatch` out.

`Rollout.collect` plays every task `group_size` times. Nothing waits for a step of another trajectory: whatever is ready
moves, a finished environment is neither stepped nor generated for, and a freed slot at once starts the next pending
member. Everything that is ready is gathered before the policy is asked, so an in-process engine sees large batches. The
loop itself is in `longstep.collection`. `Rollout.stream` plays on and on, and gives episode groups as they end.

Same seeds and same policy outputs give the same batch whatever the number of environments and the order of arrival: the
id and the seed of a request depend on the rollout's seed, the iteration, the task, the group, the member, the attempt
and the step, and on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast

from longstep.arguments import (
    check_callable,
    check_count,
    check_methods,
    check_number,
    check_text,
)
from longstep.collection import Collection
from longstep.errors import ConfigError
from longstep.member import checked_task
from longstep.policy import Policy
from longstep.recording import RolloutBatch
from longstep.streaming import EpisodeGroup, RolloutStream
from longstep.types import StepRecord, Task
from longstep.vector import GroupVectorEnv, VectorEnv

if TYPE_CHECKING:
    from longstep.env import LLMAgentEnv

__all__ = ["EpisodeGroup", "Rollout", "RolloutSettings", "RolloutStream"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How trajectories are played and sampled."""

    group_size: int
    """Trajectories for each task."""
    max_steps: int | None = None
    """Most steps of a trajectory, beside the environment's own limit; None leaves it to the environment."""
    max_tokens: int = 256
    """Most tokens of one completion."""
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    """Share of the probability mass that is sampled from, in (0, 1]."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    constrain: bool = False
    """Restrict each completion to the environment's `allowed_completions`, or to its `admissible_actions` where it
    does not say."""
    seed: int = 0
    """Root of all sampling seeds. Environments are seeded by their tasks."""
    max_invalid_in_row: int | None = None
    """Invalid actions in a row that are allowed; one more ends the trajectory. None allows any number."""
    max_total_tokens: int | None = None
    """Tokens read and sampled that one trajectory may use; it ends before the request after that. None: no limit."""
    failed_groups: Literal["reroll", "shrink"] = "reroll"
    """`reroll` plays a failed member again, on the same task with a fresh sampling seed; `shrink` leaves it out."""
    max_rerolls: int = 2
    """Times that one member is played again before its group shrinks."""
    policy_timeout_s: float | None = 600.0
    """A policy that owes completions and gives none for so long has failed those requests. None waits for ever."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        at_least = {
            "group_size": 1,
            "max_steps": 1,
            "max_tokens": 1,
            "max_invalid_in_row": 0,
            "max_total_tokens": 1,
        }
        may_be_none = ("max_steps", "max_invalid_in_row", "max_total_tokens")
        for name, least in {**at_least, "max_rerolls": 0, "seed": 0}.items():
            check_count(name, getattr(self, name), least, optional=name in may_be_none)
        for name in ("temperature", "top_p"):
            check_number(name, getattr(self, name))
        for text in self.stop:
            check_text("stop", text)
            if not text:
                raise ConfigError(
                    "expected texts that are not empty as `stop`, got ''; leave it out"
                )
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(
                f"expected a finite `temperature` of at least 0, got {self.temperature}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"expected `top_p` in (0, 1], got {self.top_p}")
        if self.policy_timeout_s is not None and not self.policy_timeout_s > 0.0:
            raise ConfigError(
                f"expected `policy_timeout_s` above 0 or None, got {self.policy_timeout_s}"
            )
        if self.failed_groups not in ("reroll", "shrink"):
            raise ConfigError(
                f"expected `failed_groups` to be `reroll` or `shrink`, got `{self.failed_groups}`"
            )


class Rollout:
    """Plays tasks with a policy.

    >>> from longstep import FunctionPolicy, Task
    >>> policy = FunctionPolicy(lambda request: request.allowed[0])
    >>> with Rollout("longstep/KeyDoor-v0", policy, group_size=2, max_steps=4, constrain=True) as rollout:
    ...     batch = rollout.collect([Task(env_id="longstep/KeyDoor-v0", seed=s) for s in range(3)])
    >>> len(batch.trajectories), [t.group_id for t in batch.trajectories]
    (6, [0, 0, 1, 1, 2, 2])
    """

    def __init__(
        self,
        envs: VectorEnv | str | Callable[..., LLMAgentEnv],
        policy: Policy,
        *,
        group_size: int,
        max_steps: int | None = None,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop: Iterable[str] = (),
        constrain: bool = False,
        seed: int = 0,
        max_invalid_in_row: int | None = None,
        max_total_tokens: int | None = None,
        failed_groups: Literal["reroll", "shrink"] = "reroll",
        max_rerolls: int = 2,
        policy_timeout_s: float | None = 600.0,
        on_step: Callable[[str, StepRecord], object] | None = None,
        num_envs: int = 64,
        env_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
            envs: Environments that the caller closes, or what `GroupVectorEnv` takes: an id or a function, whose
                environments this rollout closes.
            policy: What turns prompts into completions.
            on_step: Called with the trajectory's id and each step as it happens, in order of arrival. If it raises, a
                RuntimeWarning tells so and it is not called again.
            num_envs: Slots, when `envs` is an id or a function; environments are built as they are needed.
            env_kwargs: Arguments of the environments, when `envs` is an id or a function.
            group_size: This and the other arguments: see `RolloutSettings`.

        Raises:
            ConfigError: A setting is out of range, or `env_kwargs` came with environments that exist already.
        """
        self.settings = RolloutSettings(
            group_size=group_size,
            max_steps=max_steps,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            constrain=constrain,
            seed=seed,
            max_invalid_in_row=max_invalid_in_row,
            max_total_tokens=max_total_tokens,
            failed_groups=failed_groups,
            max_rerolls=max_rerolls,
            policy_timeout_s=policy_timeout_s,
        )
        check_methods("policy", policy, "a Policy such as EnginePolicy(engine)", ("submit", "poll"))
        if on_step is not None:
            check_callable("on_step", on_step)
        self.policy = policy
        self._on_step = on_step
        self._owned: GroupVectorEnv | None = None
        if isinstance(envs, VectorEnv):
            if env_kwargs is not None:
                raise ConfigError(
                    "expected no `env_kwargs` beside a VectorEnv, its environments exist already"
                )
            self.envs = envs
        else:
            self.envs = self._owned = GroupVectorEnv(envs, num_envs, env_kwargs=env_kwargs)
        self._iteration = 0
        self._stale: dict[int, int] = {}

    def collect(self, tasks: Iterable[Task], *, iteration: int | None = None) -> RolloutBatch:
        """Play every task `group_size` times.

        Args:
            tasks: One episode group each; the same task twice makes two groups that differ in their sampling seeds.
            iteration: Enters the sampling seeds. None counts the calls of this rollout, from 0; a number that is given
                also sets the counter, so that a resumed run goes on as before.

        Returns:
            Trajectories ordered by group (index in `tasks`), member and attempt. Failures are in it as records; with no
            task, or nothing but failures, it has no rows.

        Raises:
            ConfigError: An environment gives no prompt or, with `constrain`, nothing to restrict to; or the policy or
                the environments refuse a setting.
            KeyboardInterrupt: Passed on; the environments can be used afterwards.
        """
        tasks = _listed(tasks)
        current = self._next_iteration(iteration)
        collection = Collection(
            self.envs, self.policy, self.settings, tasks, current, self._stale, self._on_step
        )
        return RolloutBatch(trajectories=collection.run())

    def stream(
        self,
        tasks: Iterable[Task],
        *,
        capacity: Callable[[], int] | None = None,
        iteration: int | None = None,
    ) -> RolloutStream:
        """Play tasks one after another, without a barrier: episode groups come as they end.

        Ids and seeds of requests are those of `collect`, where a group's index counts on through the stream. A policy
        whose weights change meanwhile stamps each completion with its version; see `Trajectory.oldest_version`.

        Args:
            tasks: One episode group each; may be without end. The next one is taken when a slot is free.
            capacity: Most groups that may have started by now, counted from the stream's beginning; it is asked before a
                group starts. None sets no bound but the slots.
            iteration: Enters the sampling seeds, as in `collect`; the whole stream is one iteration.

        Raises:
            ConfigError: An argument is of another kind. What the environments or the policy refuse is raised by
                `RolloutStream.poll`.
        """
        if not isinstance(cast(Any, tasks), Iterable):
            raise ConfigError(f"expected tasks as `tasks`, got {tasks!r:.100}; put one into a list")
        if capacity is not None:
            check_callable("capacity", capacity)
        current = self._next_iteration(iteration)
        return RolloutStream(
            self.envs,
            self.policy,
            self.settings,
            iter(tasks),
            capacity,
            current,
            self._stale,
            self._on_step,
        )

    def _next_iteration(self, given: int | None) -> int:
        """The iteration that a call plays; counts on from it."""
        current = self._iteration if given is None else given
        check_count("iteration", current, 0)
        self._iteration = current + 1
        return current

    def close(self) -> None:
        """Close the environments that this rollout made. Idempotent."""
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Rollout:
        """The rollout itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def _listed(tasks: Any) -> list[Task]:
    """The tasks, each seen to be one."""
    if not isinstance(tasks, Iterable):
        raise ConfigError(f"expected tasks as `tasks`, got {tasks!r:.100}; put one into a list")
    listed = list(cast(Iterable[Any], tasks))
    return [checked_task(task, f"tasks[{index}]") for index, task in enumerate(listed)]
