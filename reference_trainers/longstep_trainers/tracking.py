"""What a run says while it trains: metrics in files, TensorBoard events, and a live view of the terminal.

`metrics.jsonl` holds one record per line and nothing that differs between two runs with the same seed: no wall-clock
time, no speed. Those go to `timings.jsonl`. A resumed run cuts both files back to the checkpoint's iteration and goes on
writing, so that `metrics.jsonl` ends byte-equal to that of a run which was never stopped. For this to hold, log
everything that belongs to an iteration before its checkpoint is saved.

Names of metrics are paths, `rollout/success_rate`; those that the live view shows are listed in `SHOWN`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from longstep.errors import ConfigError, DataError, require
from longstep_trainers.config_files import save_config

if TYPE_CHECKING:
    import numpy as np

    from longstep.types import StepRecord
    from longstep_trainers.config import RunConfig

    Number = float | int | np.floating[Any] | np.integer[Any]

__all__ = [
    "CONFIG_FILE",
    "METRICS_FILE",
    "SHOWN",
    "TIMINGS_FILE",
    "MetricsLogger",
    "ProgressView",
    "read_metrics",
]

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"

SHOWN = {
    "eval/success_rate": ("eval success", "{:.3f}"),
    "rollout/success_rate": ("success", "{:.3f}"),
    "rollout/return_mean": ("return", "{:.2f}"),
    "rollout/episode_length_mean": ("length", "{:.1f}"),
    "rollout/invalid_action_rate": ("invalid", "{:.3f}"),
    "credit/step_group_size_mean": ("step group", "{:.1f}"),
    "async/staleness_mean": ("staleness", "{:.1f}"),
    "time/generated_tokens_per_s": ("tokens/s", "{:.0f}"),
}
"""Metrics of the live view: the label and the format of each."""


class MetricsLogger:
    """Writes records to `metrics.jsonl`, `timings.jsonl` and TensorBoard events, and shows them on the terminal.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with MetricsLogger(folder, tensorboard=False) as logger:
    ...         logger.log(1, {"rollout/success_rate": 0.5, "env_steps": 64})
    ...     read_metrics(logger.metrics_path)
    [{'iteration': 1, 'env_steps': 64, 'rollout/success_rate': 0.5}]
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        resume_from: int = 0,
        config: RunConfig | None = None,
        tensorboard: bool = True,
        file: IO[str] | None = None,
    ) -> None:
        """Open the files, and write the settings to `config.yaml` beside them.

        Args:
            output_dir: Folder of the run; made when missing.
            resume_from: Iteration of the checkpoint the run goes on from; later records are cut off. 0 starts anew.
            config: Settings of the run; None means that they are not written and nothing is shown.
            tensorboard: Whether to write TensorBoard events, into the subfolder `tensorboard`.
            file: Where to show the run; None means the standard output.

        Raises:
            ConfigError: A run that does not resume would write over the metrics of another, or another run is writing.
            DataError: A file to go on with holds a line that is no record.
        """
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.metrics_path = folder / METRICS_FILE
        self.timings_path = folder / TIMINGS_FILE
        fresh = resume_from == 0 and (config is None or config.resume is None)
        self._metrics = self.metrics_path.open("a", encoding="utf-8", newline="\n")
        try:
            self._check_free(fresh)
            if config is not None:
                save_config(config, folder / CONFIG_FILE)
            kept = _cut_back(self.metrics_path, resume_from)
            _cut_back(self.timings_path, resume_from)
        except BaseException:
            self._metrics.close()
            raise
        self._last: dict[str, Any] = {}
        for record in kept:
            self._last.update(record)
        self._timings = self.timings_path.open("a", encoding="utf-8", newline="\n")
        env_steps = int(self._last.get("env_steps", 0))
        self._events = _event_writer(folder / "tensorboard", env_steps) if tensorboard else None
        self._view = None
        if config is not None:
            self._view = ProgressView(config.train.total_steps, file=file)

    def _check_free(self, fresh: bool) -> None:
        """Raise when another run writes to the folder, or when a fresh one would write over an old one."""
        folder = self.metrics_path.parent
        if not _claim(self._metrics):
            raise ConfigError(
                f"expected a folder that no other run writes to, got `{folder}` at `output_dir`, where one is at work; "
                "name another folder, or wait for its end"
            )
        if fresh and self.metrics_path.stat().st_size:
            raise ConfigError(
                f"expected a folder without `{METRICS_FILE}`, got `{folder}` at `output_dir`; "
                "name another folder, or go on with `--resume auto`"
            )

    def log(
        self,
        iteration: int,
        metrics: Mapping[str, Number],
        *,
        timings: Mapping[str, Number] | None = None,
    ) -> None:
        """Write one record, and its timings to their own file; both are handed to the operating system at once.

        Args:
            iteration: Iterations done, from 0 (an evaluation before training) on.
            metrics: Values that the seed decides; `env_steps`, the environment steps collected so far, is the
                horizontal axis of every curve and counts as the last one known when it is absent.
            timings: Values that the machine decides: seconds, tokens per second.
        """
        env_steps = int(metrics.get("env_steps", self._last.get("env_steps", 0)))
        head = {"iteration": iteration, "env_steps": env_steps}
        values = {name: value for name, value in metrics.items() if name not in head}
        times = {f"time/{name}": value for name, value in (timings or {}).items()}
        _write(self._metrics, head, values)
        if times:
            _write(self._timings, head, times)
        self._last |= {**head, **values}
        if self._events is not None:
            for name, value in {**values, **times}.items():
                self._events.add_scalar(name, float(value), env_steps)
            self._events.flush()
        if self._view is not None:
            self._view.update(iteration, env_steps, {**values, **times})

    def last(self, name: str) -> float | None:
        """The newest value of a metric, from before a resume too; None when there is none."""
        value = self._last.get(name)
        return None if value is None else float(value)

    def show_step(self, trajectory_id: str, step: StepRecord) -> None:
        """Show everything the model read and wrote at one step, where anything is shown."""
        if self._view is not None:
            self._view.show_step(trajectory_id, step)

    def message(self, text: str) -> None:
        """Show a line that stays; nothing when nothing is shown."""
        if self._view is not None:
            self._view.message(text)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._metrics.close()
        self._timings.close()
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> Self:
        """Itself, with the live view started."""
        if self._view is not None:
            self._view.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the live view and close the files."""
        if self._view is not None:
            self._view.stop()
        self.close()


class ProgressView:
    """The state of a run: a live panel on a terminal, one line per update anywhere else."""

    def __init__(self, total_steps: int, *, file: IO[str] | None = None) -> None:
        """Show nothing yet.

        Args:
            total_steps: Environment steps at which the run ends.
            file: Where to write; None means the standard output.
        """
        self._total_steps = total_steps
        self._file = file or sys.stdout
        self._latest: dict[str, float] = {}
        self._live: Any = None
        self._env_steps = self._iteration = 0

    def start(self) -> None:
        """Take the terminal, where there is one."""
        if self._file.isatty():
            require("rich", extra="trainers", needed_by="ProgressView")
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._file)
            self._live = Live(console=console, get_renderable=self._panel, refresh_per_second=4)
            self._live.start()

    def stop(self) -> None:
        """Leave the last state on the screen and give the terminal back; a second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, iteration: int, env_steps: int, values: Mapping[str, Number]) -> None:
        """Take over the state of the run.

        Args:
            iteration: Iterations done.
            env_steps: Environment steps collected so far.
            values: Metrics and timings under their full names; the view picks those of `SHOWN`.
        """
        self._iteration, self._env_steps = iteration, env_steps
        shown = {name: float(values[name]) for name in SHOWN if name in values}
        self._latest.update(shown)
        if self._live is None:
            cells = [f"{label} {form.format(shown[name])}" for name, label, form in _columns(shown)]
            place = f"[{iteration}] {env_steps}/{self._total_steps} steps"
            print("  ".join([place, *cells]), file=self._file, flush=True)

    def show_step(self, trajectory_id: str, step: StepRecord) -> None:
        """Show everything the model read and wrote at one step, and what came of it."""
        action = step.action
        verdict = "valid" if action.valid else f"invalid, {action.reason}"
        lines = [
            f"== {trajectory_id}, step {step.step}",
            *(f"[{message.role}]\n{message.content}" for message in step.prompt.messages),
            f"[completion]\n{step.completion.text}",
            f"[action] {action.text!r} ({verdict}), reward {step.raw_reward:g}",
        ]
        self.message("\n".join(lines))

    def message(self, text: str) -> None:
        """Write a line that stays, above the live panel."""
        if self._live is None:
            print(text, file=self._file, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False)

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        columns = _columns(self._latest)
        for label in ["iteration", "steps", *(label for _, label, _ in columns)]:
            table.add_column(label, justify="right")
        cells = [form.format(self._latest[name]) for name, _, form in columns]
        table.add_row(str(self._iteration), f"{self._env_steps}/{self._total_steps}", *cells)
        done = min(self._env_steps, self._total_steps)
        return Group(table, ProgressBar(total=self._total_steps, completed=done))


def _columns(values: Mapping[str, float]) -> list[tuple[str, str, str]]:
    return [(name, label, form) for name, (label, form) in SHOWN.items() if name in values]


def _claim(file: IO[str]) -> bool:
    """Lock a file until it is closed; False when another run holds it. Where there is no such lock, always True."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have no locks
        return True
    return True


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order; a last line that a kill cut short is left out.

    Raises:
        DataError: Any other line is no record.
    """
    return [record for record, _ in _records(Path(path))]


def _records(path: Path) -> list[tuple[dict[str, Any], int]]:
    """Each record, with the offset in bytes of its line's end."""
    found: list[tuple[dict[str, Any], int]] = []
    end = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        try:
            record = json.loads(line)
            found.append(({**record, "iteration": int(record["iteration"])}, end))
        except (ValueError, TypeError, KeyError):
            raise DataError(
                f"expected a JSON object with an `iteration`, got {line[:60]!r} at `{path}`, line "
                f"{number}; restore the file or start a fresh run"
            ) from None
    return found


def _cut_back(path: Path, iteration: int) -> list[dict[str, Any]]:
    """Leave the records up to `iteration`, byte for byte as they were, and none for 0; gives those that stay."""
    if not path.exists():
        return []
    kept: list[dict[str, Any]] = []
    size = 0
    for record, end in _records(path):
        if iteration == 0 or record["iteration"] > iteration:
            break
        kept.append(record)
        size = end
    with path.open("r+b") as file:
        file.truncate(size)
    return kept


def _write(file: IO[str], head: Mapping[str, int], values: Mapping[str, Number]) -> None:
    record = {**head, **{name: _plain(value) for name, value in values.items()}}
    file.write(json.dumps(record, allow_nan=False) + "\n")
    file.flush()


def _plain(value: Number) -> float | int | str:
    """A number that JSON has; `nan` and `inf`, which it has not, as text that `float` reads back."""
    number = value if isinstance(value, int | float) else value.item()
    return number if math.isfinite(number) else str(number)


def _event_writer(folder: Path, env_steps: int) -> Any:
    """A writer whose first event tells TensorBoard to hide what was written beyond `env_steps`."""
    require("tensorboard", extra="trainers", needed_by="MetricsLogger")
    module = require("torch.utils.tensorboard", extra="trainers", needed_by="MetricsLogger")
    return module.SummaryWriter(str(folder), purge_step=env_steps + 1 if env_steps else None)
