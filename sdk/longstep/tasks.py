"""What to train on and what to test on: panels and streams of tasks that never share a start.

A *panel* is a fixed list of tasks with a SHA-256; a *stream* gives training tasks without end. Three splits, `train`,
`eval` and `test`, are disjoint in two ways. Their seeds come from separate ranges. And each initial state belongs to one
split, by its state key: a seed whose environment starts in a state of another split is skipped. So a training task never
starts as an evaluation task does, whatever the sizes, also in small worlds where many seeds give the same start. Nothing
here draws random numbers: the same arguments give the same tasks on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from longstep.arguments import check_choice, check_count, check_flag, check_mapping, check_text
from longstep.errors import ConfigError, DataError
from longstep.types import Task

if TYPE_CHECKING:
    from longstep.env import LLMAgentEnv

__all__ = ["SPLITS", "Panel", "Split", "TaskStream", "assert_disjoint", "panel", "task_stream"]

Split = Literal["train", "eval", "test"]

SPLITS: dict[str, range] = {
    "train": range(0, 2**30),
    "eval": range(2**30, 2**30 + 2**29),
    "test": range(2**30 + 2**29, 2**31),
}
"""Seeds of each split; all fit in 31 bits."""

NUM_SHARES = 8
"""Initial states are dealt out in eighths: one to `eval`, one to `test`, the others to `train`."""
MAX_SKIPPED = 1000
"""Seeds skipped in a row before a world counts as too small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A fixed list of tasks of one environment. Iterating gives each task exactly once.

    >>> from longstep.types import Task
    >>> tasks = tuple(Task(env_id="longstep/KeyDoor-v0", seed=seed) for seed in (3, 4, 5))
    >>> mine = Panel(env_id="longstep/KeyDoor-v0", split="mine", tasks=tasks)
    >>> [len(batch) for batch in mine.batches(2)], mine.sha256[:12]
    ([2, 1], '68306cb21994')
    """

    env_id: str
    split: str
    """`train`, `eval`, `test`, or a name of your own."""
    tasks: tuple[Task, ...]
    env_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of `longstep.make` that the tasks are meant for; plain values."""

    def __post_init__(self) -> None:
        """Check the fields."""
        check_text("env_id", self.env_id)
        check_text("split", self.split)
        check_mapping("env_kwargs", self.env_kwargs)
        tasks: Any = self.tasks
        if not isinstance(tasks, tuple):
            raise ConfigError(f"expected a tuple of tasks as `tasks`, got {tasks!r:.100}")
        for index, task in enumerate(cast("tuple[Any, ...]", tasks)):
            if not isinstance(task, Task):
                raise ConfigError(f"expected a Task as `tasks[{index}]`, got {task!r:.100}")

    @property
    def sha256(self) -> str:
        """Hex digest of the canonical JSON of environment, arguments, split and tasks."""
        content = {
            "env_id": self.env_id,
            "env_kwargs": dict(self.env_kwargs),
            "split": self.split,
            "tasks": [
                [
                    task.env_id,
                    task.seed,
                    None if task.options is None else dict(task.options),
                    task.name,
                ]
                for task in self.tasks
            ],
        }
        try:
            text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"expected plain values in `env_kwargs` and `options` of a panel, got {error}; give memories, prompts "
                "and parsers to the environments that run the panel"
            ) from error
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    def batches(self, size: int) -> Iterator[tuple[Task, ...]]:
        """All tasks in order, `size` at a time; the last batch holds what is left."""
        check_count("size", size, 1)
        for start in range(0, len(self.tasks), size):
            yield self.tasks[start : start + size]

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


def panel(
    env_id: str,
    split: Split,
    num_tasks: int,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    split_states: bool = True,
) -> Panel:
    """The first `num_tasks` tasks of a split, all with different initial states.

    A smaller panel is the beginning of a larger one.

    Args:
        env_id: Registered id of the environment.
        split: `train`, `eval` or `test`.
        num_tasks: Length of the panel.
        env_kwargs: Arguments of `longstep.make`, plain values.
        split_states: False takes the seeds as they come, without a reset of the environment: for environments whose
            reset is slow. `assert_disjoint` then tells whether two panels share a start.

    Raises:
        ConfigError: Unknown split, or the world has too few initial states.
    """
    check_text("env_id", env_id)
    check_choice("split", split, tuple(SPLITS))
    check_count("num_tasks", num_tasks, 1, most=len(SPLITS[split]))
    check_mapping("env_kwargs", env_kwargs, optional=True)
    check_flag("split_states", split_states)
    arguments = dict(env_kwargs or {})
    seeds = SPLITS[split]
    if split_states:
        chosen = _distinct_starts(env_id, split, num_tasks, arguments)
    else:
        chosen = list(seeds[:num_tasks])
    tasks = tuple(Task(env_id=env_id, seed=seed) for seed in chosen)
    made = Panel(env_id=env_id, split=split, tasks=tasks, env_kwargs=arguments)
    _ = made.sha256  # arguments that cannot be hashed fail here, not at the end of a run
    return made


class TaskStream:
    """Training tasks without end; none starts in a state of `eval` or `test`.

    `position` counts the seeds looked at. A stream made with the position of another continues where that one stood.

    >>> with TaskStream("longstep/KeyDoor-v0", seed=0) as stream:
    ...     first, second = next(stream), next(stream)
    ...     with TaskStream("longstep/KeyDoor-v0", seed=0, position=stream.position) as resumed:
    ...         next(resumed) == next(stream)
    True
    """

    def __init__(
        self,
        env_id: str,
        seed: int,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        split_states: bool = True,
        position: int = 0,
    ) -> None:
        """Args:
        env_id: Registered id of the environment.
        seed: Streams of different seeds give the training seeds in different order.
        env_kwargs: Arguments of `longstep.make`.
        split_states: As in `panel`.
        position: Where to begin.
        """
        check_text("env_id", env_id)
        check_count("seed", seed, 0)
        check_mapping("env_kwargs", env_kwargs, optional=True)
        check_flag("split_states", split_states)
        check_count("position", position, 0)
        self.env_id = env_id
        self.seed = seed
        self.position = position
        self._starts = _Starts(env_id, env_kwargs or {}) if split_states else None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Task:
        for _ in range(MAX_SKIPPED):
            digest = hashlib.sha256(f"{self.seed}:{self.position}".encode("ascii")).digest()
            seed = SPLITS["train"][int.from_bytes(digest[:8], "big") % len(SPLITS["train"])]
            self.position += 1
            if self._starts is None or _split_of(self._starts.key(seed)) == "train":
                return Task(env_id=self.env_id, seed=seed)
        raise ConfigError(
            f"expected initial states of the `train` split, got none from {MAX_SKIPPED} seeds of `{self.env_id}`; pass "
            "split_states=False if all its episodes start in the same state"
        )

    def close(self) -> None:
        """Close the environment that initial states are looked up in."""
        if self._starts is not None:
            self._starts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def task_stream(
    env_id: str,
    seed: int,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    split_states: bool = True,
) -> TaskStream:
    """Training tasks without end, see `TaskStream`."""
    return TaskStream(env_id, seed, env_kwargs=env_kwargs, split_states=split_states)


def assert_disjoint(first: Panel, second: Panel) -> None:
    """Raise when a task of `first` starts in the state of a task of `second`; resets every task's environment.

    Raises:
        DataError: Two tasks start alike; the message names them.
    """
    for name, value in (("first", first), ("second", second)):
        if not isinstance(cast(Any, value), Panel):
            raise ConfigError(f"expected a Panel as `{name}`, got {value!r:.100}")
    starts: dict[bytes, Task] = {}
    for index, each in enumerate((first, second)):
        with _Starts(each.env_id, each.env_kwargs) as lookup:
            for task in each:
                key = lookup.key(task.seed, task.options)
                if index == 0:
                    starts[key] = task
                elif key in starts:
                    raise DataError(
                        f"expected panels without a common initial state, got one for `{starts[key].task_id}` of "
                        f"`{first.split}` and `{task.task_id}` of `{second.split}`; make both with `panel`"
                    )


class _Starts:
    """State keys of initial observations, from one environment that is built when first asked."""

    def __init__(self, env_id: str, env_kwargs: Mapping[str, Any]) -> None:
        self._env_id = env_id
        self._env_kwargs = env_kwargs
        self._env: LLMAgentEnv | None = None

    def key(self, seed: int, options: Mapping[str, Any] | None = None) -> bytes:
        """The state key that this seed starts in."""
        if self._env is None:
            from longstep.registration import make

            self._env = make(self._env_id, **self._env_kwargs)
        raw = self._env.env  # without the prompt, which plays no part in where an episode starts
        observation, _ = raw.reset(seed=seed, options=None if options is None else dict(options))
        return self._env.state_key(observation)

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _split_of(state_key: bytes) -> str:
    """The split an initial state belongs to."""
    return {0: "eval", 1: "test"}.get(state_key[0] % NUM_SHARES, "train")


def _distinct_starts(
    env_id: str, split: str, num_tasks: int, env_kwargs: Mapping[str, Any]
) -> list[int]:
    """The first seeds of a split that start in its own states, each state once."""
    chosen: dict[bytes, int] = {}
    num_skipped = 0
    with _Starts(env_id, env_kwargs) as lookup:
        for seed in SPLITS[split]:
            key = lookup.key(seed)
            if _split_of(key) == split and key not in chosen:
                chosen[key] = seed
                num_skipped = 0
            else:
                num_skipped += 1
            if len(chosen) == num_tasks:
                break
            if num_skipped == MAX_SKIPPED:
                raise ConfigError(
                    f"expected {num_tasks} different initial states for `{split}`, got {len(chosen)} from `{env_id}` "
                    f"after {MAX_SKIPPED} seeds without a new one; take a larger world or fewer tasks, or pass "
                    "split_states=False if tasks may start alike"
                )
    return list(chosen.values())
