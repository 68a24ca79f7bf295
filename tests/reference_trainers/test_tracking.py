"""Metrics files, the live view and the learning curve."""

import io
import json
import os
import pty
import sys
from pathlib import Path

import numpy as np
import pytest

from longstep.errors import ConfigError, DataError
from longstep.types import Action, Completion, FinishReason, Message, Prompt, StepRecord
from longstep_trainers.config import RunConfig, TrainConfig
from longstep_trainers.config_files import load_config
from longstep_trainers.plots import plot_learning_curve
from longstep_trainers.tracking import MetricsLogger, ProgressView, read_metrics

pytest.importorskip("tensorboard", reason="needs longstep[trainers]")


def write(folder: Path, iterations: range, *, resume_from: int = 0) -> None:
    """What a trainer logs for these iterations; the timings differ every time."""
    with MetricsLogger(folder, resume_from=resume_from, tensorboard=False) as logger:
        for number in iterations:
            metrics = {"rollout/success_rate": number / 7, "env_steps": 64 * number}
            logger.log(
                number, metrics, timings={"rollout_s": float(np.random.default_rng().random())}
            )


def test_resumed_files_equal_those_of_a_run_that_never_stopped(tmp_path: Path) -> None:
    write(tmp_path / "whole", range(1, 7))
    write(tmp_path / "killed", range(1, 6))
    metrics = tmp_path / "killed" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"iteration": 6, "env_st')  # the kill came in the middle of a line
    write(tmp_path / "killed", range(4, 7), resume_from=3)
    assert metrics.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    timings = read_metrics(tmp_path / "killed" / "timings.jsonl")
    assert [record["iteration"] for record in timings] == [1, 2, 3, 4, 5, 6]


def test_resume_from_nothing_starts_the_files_anew(tmp_path: Path) -> None:
    write(tmp_path, range(0, 2))
    config = RunConfig(resume="auto", output_dir=str(tmp_path))
    with MetricsLogger(tmp_path, config=config, tensorboard=False, file=io.StringIO()) as logger:
        logger.log(0, {"eval/success_rate": 0.5})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"iteration": 0, "env_steps": 0, "eval/success_rate": 0.5}
    ]


def test_fresh_run_does_not_write_over_another(tmp_path: Path) -> None:
    write(tmp_path, range(1, 2))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"without `metrics\.jsonl`.*--resume auto"):
        MetricsLogger(tmp_path, config=RunConfig())
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "config.yaml").exists()


def test_damaged_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "env_steps": 1}\nnot json\n{}\n')
    with pytest.raises(DataError, match=r"not json.*line 2"):
        MetricsLogger(tmp_path, resume_from=5)


def test_record_holds_no_time_and_timings_hold_no_metric(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(1, {"env_steps": 8, "train/loss": 0.5}, timings={"rollout_s": 2.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "iteration": 1,
        "env_steps": 8,
        "train/loss": 0.5,
    }
    assert json.loads((tmp_path / "timings.jsonl").read_text()) == {
        "iteration": 1,
        "env_steps": 8,
        "time/rollout_s": 2.0,
    }


def test_numbers_of_any_kind_are_strict_json(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    values = {
        "a": np.float32(0.5),
        "b": np.int64(3),
        "c": float("nan"),
        "d": float("-inf"),
        "e": True,
    }
    with MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(1, values)
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=refuse)
    assert (record["a"], record["b"], record["e"]) == (0.5, 3, True)
    assert np.isnan(float(record["c"]))
    assert float(record["d"]) == -np.inf


def test_last_value_survives_a_resume(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(1, {"eval/success_rate": 0.25, "env_steps": 10})
        logger.log(2, {"train/loss": 1.0, "env_steps": 20})
        assert logger.last("eval/success_rate") == 0.25
    with MetricsLogger(tmp_path, resume_from=2, tensorboard=False) as logger:
        assert logger.last("eval/success_rate") == 0.25
        assert logger.last("train/loss") == 1.0
        assert logger.last("nothing") is None


def test_tensorboard_reads_the_curve_and_hides_what_a_resume_cut_off(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def play(iterations: range, resume_from: int, value: float) -> None:
        with MetricsLogger(tmp_path, resume_from=resume_from) as logger:
            for number in iterations:
                logger.log(number, {"train/loss": value, "env_steps": 10 * number})

    play(range(1, 5), 0, 1.0)
    play(range(3, 5), 2, 2.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = [(scalar.step, scalar.value) for scalar in events.Scalars("train/loss")]
    assert scalars == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]


def test_settings_are_written_beside_the_metrics(tmp_path: Path) -> None:
    config = RunConfig(seed=5)
    with MetricsLogger(tmp_path, config=config, tensorboard=False, file=io.StringIO()):
        pass
    assert load_config(tmp_path / "config.yaml") == config


def test_file_gets_one_line_for_each_update(tmp_path: Path) -> None:
    out = io.StringIO()
    config = RunConfig(train=TrainConfig(total_steps=100))
    with MetricsLogger(tmp_path, config=config, tensorboard=False, file=out) as logger:
        logger.log(
            3,
            {"rollout/success_rate": 0.5, "train/loss": 1.0, "env_steps": 60},
            timings={"generated_tokens_per_s": 1234.5},
        )
        logger.message("saved")
    assert out.getvalue().splitlines() == [
        "[3] 60/100 steps  success 0.500  tokens/s 1234",
        "saved",
    ]


def test_terminal_gets_a_panel_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    before = sys.stdout
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", encoding="utf-8") as terminal:
        view = ProgressView(100, file=terminal)
        view.start()
        view.update(3, 60, {"rollout/success_rate": 0.5, "rollout/episode_length_mean": 7.25})
        view.message("[saved] at 3")
        view.stop()
        view.stop()
        shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert sys.stdout is before
    for text in ("success", "0.500", "length", "7.2", "60/100", "[saved] at 3"):
        assert text in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_debug_shows_everything_the_model_read_and_wrote() -> None:
    nothing = np.empty(0, dtype=np.int32)
    step = StepRecord(
        step=4,
        prompt=Prompt(messages=(Message(role="user", content="You see a door.\n" * 200),)),
        completion=Completion(
            request_id="r",
            prompt_token_ids=nothing,
            token_ids=nothing,
            logprobs=np.empty(0, dtype=np.float32),
            text="<action>fly</action>",
            finish_reason=FinishReason.STOP,
            policy_version=0,
        ),
        action=Action(text="fly", valid=False, reason="not admissible"),
        observation="You see a door.",
        state_key=b"0" * 16,
        reward=-0.1,
        raw_reward=0.0,
        terminated=False,
        truncated=False,
    )
    out = io.StringIO()
    view = ProgressView(10, file=out)
    view.show_step("trajectory-1", step)
    assert out.getvalue().count("You see a door.") == 200
    for text in ("trajectory-1, step 4", "[user]", "<action>fly</action>", "not admissible"):
        assert text in out.getvalue()


def test_learning_curve_is_a_picture(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(0, {"eval/success_rate": 0.1})
        for number in range(1, 4):
            logger.log(number, {"rollout/success_rate": number / 4, "env_steps": 64 * number})
    path = plot_learning_curve(logger.metrics_path, tmp_path / "new" / "curve.png", title="a run")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_learning_curve_of_nothing_is_refused(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as logger:
        logger.log(1, {"train/loss": 0.5})
    with pytest.raises(DataError, match="rollout/success_rate"):
        plot_learning_curve(logger.metrics_path, tmp_path / "curve.png")


def test_two_runs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as first:
        first.log(1, {"env_steps": 8})
        with pytest.raises(ConfigError, match="where one is at work"):
            MetricsLogger(tmp_path, tensorboard=False, resume_from=1)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    MetricsLogger(tmp_path, tensorboard=False, resume_from=1).close()
