"""Interpreters of their own: real ones, with packages of the configured index."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import reset, step

from longstep.errors import ConfigError, DeadlineError, EnvError
from longstep_bindings.curve import ClientKeys, ServerKeys, new_keys
from longstep_bindings.envs import EnvServer, EnvSpec, RemoteVectorEnv
from longstep_bindings.envs.interpreter import build_interpreter, cache_folder, find_python

HERE = Path(__file__).parent
PATIENCE_S = 1200.0
UV = ("uv",)


def spec_of(entry_point="foreign_envs:Corridor", **changes):
    return EnvSpec(entry_point=entry_point, environ={"PYTHONPATH": str(HERE)}, **changes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder for the tests of this module."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGSTEP_CACHE", str(folder))
        yield folder


@pytest.fixture
def uv(cache, monkeypatch):
    """Puts uv on PATH, and gives the interpreter it comes from."""
    python = build_interpreter(spec_of(requirements=UV), timeout_s=PATIENCE_S)
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("UV_CACHE_DIR", str(cache / "uv"))
    return python


def need(version):
    try:
        find_python(version)
    except ConfigError as error:
        pytest.skip(f"needs a Python {version}: {error}")


def test_contradicting_pins_and_pythons_3_10_and_3_11_run_side_by_side(cache):
    need("3.10")
    need("3.11")
    old = spec_of("foreign_envs:Numbers", python="3.10", requirements=("numpy<2",))
    new = spec_of("foreign_envs:Numbers", python="3.11", requirements=("numpy>=2",))
    settings = {"num_workers": 1, "start_timeout_s": PATIENCE_S}
    settings["agent_kwargs"] = {"observation_text": str}
    with RemoteVectorEnv(old, 1, **settings) as olds, RemoteVectorEnv(new, 1, **settings) as news:
        results = [reset(envs, {0: 3})[0] for envs in (olds, news, olds, news)]
        assert {result.error for result in results} == {None}
        assert [result.info["python"] for result in results[:2]] == [[3, 10], [3, 11]]
        versions = [int(result.info["numpy"].partition(".")[0]) for result in results[:2]]
        assert versions[0] == 1
        assert versions[1] >= 2
        assert len({result.info["state_key"] for result in results}) == 1
        moved = [step(envs, {0: "<action>on</action>"})[0] for envs in (olds, news)]
        assert moved[0].observation == moved[1].observation
        assert {result.info["action"] for result in moved} == {"on"}


def test_a_second_use_takes_what_the_first_one_built(cache):
    first = build_interpreter(spec_of(requirements=UV), timeout_s=PATIENCE_S)
    ready = first.parents[1] / "ready"
    built_at = first.lstat().st_ctime_ns, ready.stat().st_ctime_ns
    assert build_interpreter(spec_of(requirements=(" uv",)), timeout_s=0.001) == first
    assert (first.lstat().st_ctime_ns, ready.stat().st_ctime_ns) == built_at
    assert first.is_relative_to(cache)
    assert json.loads(ready.read_text())["requirements"][0] == "uv"
    code = "import uv, zmq, msgpack, sys; print(sys.prefix)"
    ran = subprocess.run([first, "-c", code], capture_output=True, text=True, check=True)
    assert Path(ran.stdout.strip()) == first.parents[1]


def test_uv_builds_where_it_is_on_path_and_an_interrupted_build_is_done_again(uv):
    spec = spec_of(requirements=("toolz",))
    python = build_interpreter(spec, timeout_s=PATIENCE_S)
    assert "uv = " in (python.parents[1] / "pyvenv.cfg").read_text()
    (python.parents[1] / "ready").unlink()
    (python.parents[1] / "leftover").touch()
    assert build_interpreter(spec, timeout_s=PATIENCE_S) == python
    assert not (python.parents[1] / "leftover").exists()
    code = "import toolz, zmq, msgpack; print(toolz.__name__)"
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "toolz\n"


def test_who_comes_while_another_builds_waits_for_it(cache):
    python = build_interpreter(spec_of(requirements=UV), timeout_s=PATIENCE_S)
    ready = python.parents[1] / "ready"
    hold = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    lock = cache_folder() / f"{python.parents[1].name}.lock"
    ready.rename(ready.with_name("kept"))
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(DeadlineError, match="expected another process to be done with"):
        build_interpreter(spec_of(requirements=UV), timeout_s=2.0)
    got = []
    waiting = threading.Thread(
        target=lambda: got.append(build_interpreter(spec_of(requirements=UV), timeout_s=60.0))
    )
    waiting.start()
    (python.parents[1] / "kept").rename(ready)  # what the holder would do
    built_at = ready.stat().st_mtime_ns
    holder.communicate()
    waiting.join(60.0)
    assert got == [python]
    assert ready.stat().st_mtime_ns == built_at


NO_SUCH = ("longstep-no-such-distribution==9.9",)


def test_a_requirement_that_does_not_exist_gives_pips_output_in_full(cache, monkeypatch):
    hide_uv(monkeypatch)
    with pytest.raises(EnvError, match=r"-m pip install .*exit status 1.*It said:") as caught:
        build_interpreter(spec_of(requirements=NO_SUCH), timeout_s=PATIENCE_S)
    assert "No matching distribution found for longstep-no-such-distribution" in str(caught.value)
    assert not [folder for folder in cache_folder().iterdir() if is_half_built(folder)]


def test_a_requirement_that_does_not_exist_gives_uvs_output_in_full(uv):
    with pytest.raises(EnvError, match="uv pip install") as caught:
        build_interpreter(spec_of(requirements=NO_SUCH), timeout_s=PATIENCE_S)
    said = str(caught.value).partition("It said:")[2]
    assert "longstep-no-such-distribution" in said
    assert not [folder for folder in cache_folder().iterdir() if is_half_built(folder)]


def hide_uv(monkeypatch):
    """Take the folders with uv off PATH."""
    folders = [folder for folder in os.get_exec_path() if not (Path(folder) / "uv").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))


def is_half_built(folder):
    return folder.is_dir() and not (folder / "ready").exists()


def test_the_standalone_server_runs_on_python_3_8(cache):
    need("3.8")
    play_in("3.8")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.9", "3.12", "3.13", "3.14"])
def test_the_standalone_server_runs_on_every_python_at_hand(cache, version):
    need(version)
    play_in(version)


def play_in(version):
    settings = {"num_workers": 1, "start_timeout_s": PATIENCE_S}
    with RemoteVectorEnv(spec_of(python=version), 2, **settings) as envs:
        first = reset(envs, {0: 0, 1: 1})
        assert first[0].info["python"] == [int(part) for part in version.split(".")]
        assert "You stand at 1 of 3." in first[1].observation
        results = step(envs, {0: "right", 1: "fly"})
        assert [results[slot].info["action_valid"] for slot in (0, 1)] == [True, False]
        assert step(envs, {1: "boom"})[1].info["action_valid"] is False
        os.kill(envs.worker_pids[0], 9)
        assert "You stand at 2 of 3." in step(envs, {0: "right"})[0].observation
        assert envs.num_restarts == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"python": "3.4"}, r"expected a Python 3\.4 on PATH, got none; found: .*3\.\d+\.\d+ at /"),
        ({"python": "/no/such/python"}, "got `/no/such/python`, which cannot be executed"),
        ({"requirements": ("--index-url=x",)}, "expected a requirement such as `numpy<2`"),
        ({"requirements": (" ",)}, "expected a requirement such as `numpy<2`"),
    ],
)
def test_a_wrong_spec_is_told(cache, changes, said):
    with pytest.raises(ConfigError, match=said):
        build_interpreter(spec_of(**changes))


def test_a_program_that_is_no_python_is_told(cache):
    with pytest.raises(ConfigError, match="expected a Python at /bin/true"):
        build_interpreter(spec_of(python="/bin/true"))


def test_the_environment_variable_moves_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGSTEP_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path / "interpreters"
    monkeypatch.delenv("LONGSTEP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "longstep" / "interpreters"


def test_an_interpreter_of_its_own_serves_with_keys(cache, tmp_path):
    pairs = {name: new_keys(tmp_path, name) for name in ("server", "friend", "stranger")}
    keys = ServerKeys(own=pairs["server"], allowed=frozenset([pairs["friend"].public]))
    server_public = pairs["server"].public
    spec = spec_of(python=sys.executable)
    settings = {"keys": keys, "start_timeout_s": PATIENCE_S}
    with EnvServer(spec, "tcp://127.0.0.1:*", **settings) as server:
        friend = ClientKeys(own=pairs["friend"], server_public=server_public)
        with RemoteVectorEnv.connect(server.addresses, 1, keys=friend) as envs:
            assert reset(envs, {0: 1})[0].error is None
        stranger = ClientKeys(own=pairs["stranger"], server_public=server_public)
        with pytest.raises(DeadlineError, match="does not know this client's key"):
            RemoteVectorEnv.connect(server.addresses, 1, keys=stranger, connect_timeout_s=1.0)
