"""`longstep serve-env`, `longstep keys new`, `longstep bench transport`, as a user runs them."""

import os
import signal
import stat
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import is_running, reset, step

from longstep.errors import ConfigError
from longstep_bindings import cli
from longstep_bindings.curve import ClientKeys, KeyPair
from longstep_bindings.envs import RemoteVectorEnv
from longstep_bindings.testing import wait_until

HERE = Path(__file__).parent


@contextmanager
def serving(*arguments):
    """The addresses of a server started from the command line, and its process."""
    program = (
        "import sys; from longstep_bindings.cli import serve_env; sys.exit(serve_env(sys.argv[1:]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    ) as server:
        try:
            name, _, addresses = server.stdout.readline().partition(" at ")
            assert name == arguments[0]
            yield addresses.split(), server
        finally:
            server.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_env_serves_until_it_is_told_to_end(number):
    arguments = ["worker_envs:counter", "--kwargs", '{"length": 2}', "--num-workers", "2"]
    with serving(*arguments) as (addresses, server):
        assert len(addresses) == 2
        with RemoteVectorEnv.connect(addresses, 2, connect_timeout_s=30.0) as envs:
            reset(envs, {0: 1, 1: 1})
            step(envs, {0: "a", 1: "a"})
            assert step(envs, {0: "a"})[0].terminated
            server.send_signal(number)
            assert server.wait(30.0) == 0
        assert not any(Path(address.removeprefix("ipc://")).exists() for address in addresses)


def test_serve_env_lets_in_who_has_a_key(tmp_path, capsys):
    for name in ("server", "friend"):
        assert cli.keys(["new", name, "--folder", str(tmp_path)]) == 0
    assert f"public: {tmp_path}/friend.key\n" in capsys.readouterr().out
    assert stat.S_IMODE((tmp_path / "friend.key_secret").stat().st_mode) == 0o600
    own, friend = (KeyPair.load(tmp_path / f"{name}.key_secret") for name in ("server", "friend"))
    arguments = ["--keys", f"{tmp_path}/server.key_secret", "--allow", f"{tmp_path}/friend.key"]
    address = ["--address", "tcp://0.0.0.0:*"]
    with serving("longstep/KeyDoor-v0", *address, *arguments) as (addresses, _):
        here = addresses[0].replace("0.0.0.0", "127.0.0.1")
        keys = ClientKeys(own=friend, server_public=own.public)
        with RemoteVectorEnv.connect(here, 1, keys=keys, connect_timeout_s=30.0) as envs:
            assert envs.env_id == "longstep/KeyDoor-v0"


def test_a_killed_serve_env_leaves_no_worker():
    with (
        serving("worker_envs:counter") as (addresses, server),
        RemoteVectorEnv.connect(addresses, 1, connect_timeout_s=30.0) as envs,
    ):
        reset(envs, {0: 1})
        child = step(envs, {0: "spawn"})[0].info["child"]
        server.kill()
        wait_until(lambda: not is_running(child), 5.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["longstep/KeyDoor-v0", "--address", "tcp://0.0.0.0:*"], "expected CURVE keys"),
        (["longstep/KeyDoor-v0", "--allow", "x.key"], "expected `--keys` beside `--allow`"),
        (["longstep/KeyDoor-v0", "--keys", "x.key_secret"], "expected `--allow`"),
        (["longstep/KeyDoor-v0", "--num-workers", "0"], "at least 1 worker"),
    ],
)
def test_wrong_settings_of_serve_env_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        cli.serve_env(arguments)


def test_keys_are_never_overwritten(tmp_path):
    cli.keys(["new", "me", "--folder", str(tmp_path)])
    with pytest.raises(ConfigError, match="expected a new name, got `me`"):
        cli.keys(["new", "me", "--folder", str(tmp_path)])


def test_bench_transport_prints_a_rate_for_each_way(capsys):
    arguments = ["transport", "--num-envs", "4", "--num-workers", "1", "--seconds", "0.1"]
    assert cli.bench(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 environments, 1 workers; steps/s"
    assert [line.rpartition(":")[2].split()[0] for line in lines[1:]] == [
        *("ipc", "ipc", "tcp", "tcp"),
        "ipc",
        "tcp",
        "in",
    ]
    assert all(float(line.split()[-1].replace(",", "")) > 0 for line in lines[1:])


def test_the_commands_are_declared():
    project = tomllib.loads((HERE.parents[2] / "pyproject.toml").read_text())
    declared = project["project"]["entry-points"]["longstep.commands"]
    for name, function in {"serve-env": "serve_env", "keys": "keys", "bench": "bench"}.items():
        assert declared[name] == f"longstep_bindings.cli:{function}"
        assert getattr(cli, function).__doc__
