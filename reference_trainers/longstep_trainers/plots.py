"""The picture of a run: how success and return grew over the environment steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longstep.errors import DataError, require
from longstep_trainers.tracking import read_metrics

__all__ = ["plot_learning_curve"]

_PANELS = (
    ("success rate", {"rollout/success_rate": "rollouts", "eval/success_rate": "held-out tasks"}),
    ("return", {"rollout/return_mean": "rollouts", "eval/return_mean": "held-out tasks"}),
)


def plot_learning_curve(
    metrics_path: str | Path, image_path: str | Path, *, title: str = ""
) -> Path:
    """Draw the success rate and the return of a run over its environment steps; gives the path of the PNG.

    Args:
        metrics_path: The run's `metrics.jsonl`.
        image_path: The PNG to write; its folder is made when missing.
        title: Heading of the picture.

    Raises:
        DataError: The file holds none of the metrics that are drawn.
    """
    require("matplotlib", extra="trainers", needed_by="plot_learning_curve")
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    records = read_metrics(metrics_path)
    figure = Figure(figsize=(9, 3.6), dpi=120, layout="constrained")
    drawn = 0
    for axes, (label, curves) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        drawn += _draw(axes, records, curves)
        axes.set_xlabel("environment steps")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if label == "success rate":
            axes.set_ylim(-0.02, 1.02)
    if not drawn:
        names = ", ".join(f"`{name}`" for _, curves in _PANELS for name in curves)
        raise DataError(f"expected records with one of {names}, got none at `{metrics_path}`")
    if title:
        figure.suptitle(title)
    image_path = Path(image_path)
    image_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image_path)
    return image_path


def _draw(axes: Any, records: Sequence[Mapping[str, Any]], curves: Mapping[str, str]) -> int:
    """Draw each curve that has records, evaluations with markers; gives the number of curves."""
    drawn = 0
    for name, label in curves.items():
        points = [
            (record["env_steps"], float(record[name])) for record in records if name in record
        ]
        if points:
            marker = "o" if name.startswith("eval/") else None
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=4)
            drawn += 1
    if drawn:
        axes.legend(frameon=False)
    return drawn
