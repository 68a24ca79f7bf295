"""The `longstep` command: what it prints, and its exit codes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

import longstep
from longstep import cli
from longstep.errors import ConfigError, EnvError

SCRIPT = Path(sys.executable).with_name("longstep")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The finished command, in a process of its own."""
    return subprocess.run(
        [str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Makes a function the subcommand `probe`."""

    def install(function: cli.Command) -> None:
        monkeypatch.setattr(cli, "BUILT_IN", {"probe": f"{__name__}:probe"})
        monkeypatch.setattr(cli, "load_object", lambda place: function)

    return install


def raising(error: BaseException) -> cli.Command:
    def probe(arguments: Sequence[str]) -> int:
        raise error

    return probe


def test_help_lists_every_command_with_its_meaning() -> None:
    done = run("--help")
    assert done.returncode == 0
    for name in ("train", "eval", "models", "envs", "check-env"):
        assert f"\n  {name} " in done.stdout
    assert "cannot be loaded" not in done.stdout
    assert "List the registered environments" in done.stdout


def test_no_command_is_a_usage_error_that_shows_the_help() -> None:
    done = run()
    assert done.returncode == 2
    assert "commands:" in done.stdout


def test_version() -> None:
    assert run("--version").stdout == f"longstep {longstep.__version__}\n"


def test_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "longstep.cli", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"longstep {longstep.__version__}\n"


def test_unknown_command_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evns"]) == 2
    assert capsys.readouterr().err == (
        "longstep: expected a command, got `evns`; did you mean `envs`?\n"
    )


def test_arguments_reach_the_command_untouched(command) -> None:
    seen: list[Sequence[str]] = []

    def probe(arguments: Sequence[str]) -> int:
        seen.append(arguments)
        return 7

    command(probe)
    assert cli.main(["probe", "--help", "--a.b=1", "x"]) == 7
    assert seen == [["--help", "--a.b=1", "x"]]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("expected 1, got 2"), 2, "longstep: expected 1, got 2\n"),
        (
            EnvError("expected five values,\n  got four"),
            1,
            "longstep: expected five values, got four\n",
        ),
        (ValueError("bad"), 1, "longstep: ValueError: bad\n"),
        (ZeroDivisionError(), 1, "longstep: ZeroDivisionError\n"),
        (KeyboardInterrupt(), 130, "longstep: interrupted\n"),
    ],
)
def test_failure_is_one_line_and_a_code(
    command, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    command(raising(error))
    assert cli.main(["probe"]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    "arguments",
    [
        ["--log-level", "DEBUG", "probe"],
        ["--log-level=DEBUG", "probe"],
        ["probe", "--log_level", "DEBUG"],
        ["probe", "--log-level=DEBUG"],
    ],
)
def test_debug_level_shows_the_traceback(
    command, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    command(raising(ValueError("bad")))
    assert cli.main(arguments) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("longstep: ValueError: bad\n")


@pytest.mark.parametrize(("value", "shows"), [("1", True), ("0", False), ("", False)])
def test_debug_variable_shows_the_traceback(
    command, capsys, monkeypatch: pytest.MonkeyPatch, value: str, shows: bool
) -> None:
    monkeypatch.setenv("LONGSTEP_DEBUG", value)
    command(raising(ValueError("bad")))
    assert cli.main(["probe"]) == 1
    assert ("Traceback" in capsys.readouterr().err) is shows


def test_plug_in_that_cannot_be_loaded_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = metadata.EntryPoint("broken", "no_such_module:run", cli.ENTRY_POINT_GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [broken])
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "(cannot be loaded: ModuleNotFoundError: No module named 'no_such_module')" in shown
    assert "List the registered environments" in shown
    assert cli.main(["broken"]) == 1


def test_reader_that_closes_early_gets_no_traceback() -> None:
    done = subprocess.run(
        f"{SCRIPT} envs | true", shell=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_ctrl_c_ends_a_command_with_130(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom longstep import cli\n"
        "def probe(arguments):\n    print('ready', flush=True); time.sleep(60); return 0\n"
        "cli.BUILT_IN['probe'] = 'probe:probe'\ncli.load_object = lambda place: probe\n"
        "sys.exit(cli.main(['probe']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "longstep: interrupted\n"
        assert process.wait(timeout=30) == 130
