"""`longstep train`, `eval` and `models` as a user runs them: a real model, real files, real signals."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from longstep import kernels
from longstep.cli import main
from longstep_trainers.config_files import dump_config, load_config
from longstep_trainers.tracking import read_metrics

SCRIPT = Path(sys.executable).with_name("longstep")

TINY = """
env:
  name: longstep/KeyDoor-v0
  kwargs: {size: 3, num_rooms: 1}
  max_steps: 6
  rollout: {n: 4, batch_size: 8}
model:
  embedded: {hidden_size: 32, num_layers: 1, num_heads: 2}
generation: {constrain: true, max_tokens: 4}
train: {total_steps: 100, eval_tasks: 4, eval_every: 1, save_every: 1, max_length: 192, batch_size: 64}
"""
"""A run of a few seconds; its model learns nothing in them."""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=ENVIRONMENT,
        check=False,
    )


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def finished(config_file: Path, tmp_path_factory: pytest.TempPathFactory):
    """A finished run: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("run") / "out"
    done = run("train", "--config", config_file, "--output_dir", folder, "--seed", "3")
    assert done.returncode == 0, done.stderr
    return folder, done


def test_run_shows_its_settings_then_its_progress_then_what_it_wrote(finished) -> None:
    folder, done = finished
    config = load_config(folder / "config.yaml")
    assert (config.seed, config.env.rollout.n) == (3, 4)
    settings, _, rest = done.stdout.partition(dump_config(config))
    assert settings == "settings:\n\n"
    progress, brace, rest = rest.partition("\n{\n")
    assert "[0] 0/100 steps  eval success" in progress
    for word in ("success", "return", "length", "invalid", "step group", "tokens/s"):
        assert f"  {word} " in progress
    summary, _, written = (brace + rest).partition("\nwritten:\n")
    assert json.loads(summary) == json.loads((folder / "summary.json").read_text())
    paths = [Path(line.strip()) for line in written.splitlines()]
    assert paths == sorted(folder.iterdir())
    assert {path.name for path in paths} >= {"metrics.jsonl", "learning_curve.png", "model"}


def test_run_leaves_nothing_on_the_error_stream_but_our_own_lines(finished) -> None:
    _, done = finished
    lines = done.stderr.splitlines()
    assert [
        line for line in lines if not line.startswith(("INFO longstep", "WARNING longstep"))
    ] == []


def test_summary_agrees_with_the_metrics(finished) -> None:
    folder, _ = finished
    records = read_metrics(folder / "metrics.jsonl")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["env_steps"] == records[-1]["env_steps"] >= 100
    assert summary["eval_success_before"] == records[0]["eval/success_rate"]
    assert summary["eval_success_after"] == records[-1]["eval/success_rate"]


def test_eval_of_the_saved_model_repeats_the_last_evaluation(
    finished, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = finished
    config, model = folder / "config.yaml", folder / "model"
    assert main(["eval", f"--config={config}", f"--model.model_path={model}"]) == 0
    found = json.loads(capsys.readouterr().out)
    last = read_metrics(folder / "metrics.jsonl")[-1]
    for name in ("success_rate", "return_mean", "episode_length_mean"):
        assert found[name] == last[f"eval/{name}"]
    summary = json.loads((folder / "summary.json").read_text())
    assert found["panel_sha256"] == summary["panel_sha256"]


def test_second_run_does_not_write_over_the_first(
    finished, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = finished
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert main(["train", f"--config={config_file}", f"--output_dir={folder}"]) == 2
    shown = capsys.readouterr().err
    assert "--resume auto" in shown
    assert len(shown.splitlines()) == 1
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_interrupted_run_goes_on_and_ends_as_if_it_had_not_been(
    finished, config_file: Path, tmp_path: Path
) -> None:
    folder, _ = finished
    arguments = [
        "train",
        "--config",
        str(config_file),
        "--output_dir",
        str(tmp_path),
        "--seed",
        "3",
    ]
    with subprocess.Popen(
        [str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("[1]"):
                process.send_signal(signal.SIGINT)
                break
        shown, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "--resume auto" in shown
    resumed = run(*arguments, "--resume", "auto")
    assert resumed.returncode == 0, resumed.stderr
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_rollout_ends_the_run_in_one_line(
    config_file: Path, tmp_path: Path, number: signal.Signals
) -> None:
    arguments = ["train", "--config", str(config_file), "--output_dir", str(tmp_path / "out")]
    with subprocess.Popen(
        [str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "settings:\n"
        process.send_signal(number)  # torch or the model is being loaded
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


def test_debug_level_shows_prompts_and_completions(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"--config={config_file}", f"--output_dir={tmp_path}", "--log_level=DEBUG"]
    smaller = ["--train.total_steps=1", "--env.rollout.batch_size=4", "--train.eval_tasks=1"]
    assert main(["train", *arguments, *smaller]) == 0
    shown = capsys.readouterr().out
    assert "[user]\n" in shown
    assert "[completion]\n" in shown
    steps = read_metrics(tmp_path / "metrics.jsonl")[-1]["env_steps"]
    assert shown.count("\n[action] ") == steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env.rolout.n=4"], "did you mean `env.rollout.n`?"),
        (["--env.rollout.n=-4"], "expected at least 1, got -4 at `env.rollout.n`"),
        (["--env.rollout.n=3"], "multiple of `algorithm.gigpo.inner_group_size`, got 3 and 2"),
        (["--algorithm.name=gipo"], "did you mean `gigpo`?"),
        (["--config=dmo"], "did you mean `demo`?"),
        (["--model.model_path=no/such/folder"], "no/such/folder"),
    ],
)
def test_wrong_setting_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", f"--output_dir={tmp_path / 'out'}", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_unknown_environment_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", f"--output_dir={tmp_path / 'out'}", "--env.name=longstep/KeyDor-v0"]) == 1
    assert "did you mean `longstep/KeyDoor-v0`?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--env.name", "longstep/KeyDor-v0"], "did you mean `longstep/KeyDoor-v0`?"),
        (["eval", "--env.name", "longstep/KeyDor-v0"], "did you mean `longstep/KeyDoor-v0`?"),
        (["train", "--resume", "no/such/checkpoint"], "a checkpoint folder"),
        (["train", "--output_dir", "/dev/null/run"], "`/dev/null` at `output_dir`"),
    ],
)
def test_what_can_be_told_without_torch_is_told_without_it(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'peft'): sys.modules[name] = None\n"
        "from longstep.cli import main\n"
        f"sys.exit(main({arguments!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_run_does_not_go_on_with_the_settings_of_another(
    finished, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = finished
    arguments = [f"--config={config_file}", f"--output_dir={folder}", "--resume=auto"]
    assert main(["train", *arguments, "--seed=4"]) == 2
    assert "got 4 instead of 3 at `seed`" in capsys.readouterr().err


def test_kernels_are_compiled_beside_a_run_that_groups_by_similarity(
    config_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("numba", reason="needs the 'fast' extra")
    arguments = [f"--config={config_file}", f"--output_dir={tmp_path}", "--train.total_steps=1"]
    assert main(["train", *arguments, "--algorithm.gigpo.similarity_threshold=0.9"]) == 0
    for thread in threading.enumerate():
        if thread.name == "longstep-warm-up":
            thread.join(120)
    assert kernels.backend() == "numba"


def test_models_lists_what_can_be_pulled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    assert "smollm2-135m-instruct" in capsys.readouterr().out.split()


def test_pulling_an_unknown_model_names_the_nearest(
    capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    assert main(["models", "pull", "smollm2-135m", "--to", str(tmp_path / "m")]) == 2
    assert "did you mean `smollm2-135m-instruct`?" in capsys.readouterr().err
