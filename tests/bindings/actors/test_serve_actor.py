"""`longstep serve-actor`, as a user runs it, and pools in front of actors that somebody else runs."""

import os
import signal
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
from actor_helpers import PLAIN, gather, parts, request, requests

from longstep.errors import ConfigError
from longstep.types import FinishReason
from longstep_bindings import cli
from longstep_bindings.actors import open_policy
from longstep_bindings.actors.link import ActorLink
from longstep_bindings.curve import ClientKeys, new_keys
from longstep_bindings.testing import wait_until

HERE = Path(__file__).parent


@contextmanager
def serving(*arguments, model="any"):
    """The address of an actor started from the command line, and its process."""
    program = "import sys; from longstep_bindings.cli import serve_actor; sys.exit(serve_actor(sys.argv[1:]))"
    with subprocess.Popen(
        [sys.executable, "-c", program, "--model", model, "--engine", PLAIN, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    ) as actor:
        try:
            yield actor.stdout.readline().strip().rpartition(" at ")[2], actor
        finally:
            actor.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(number, tmp_path):
    with serving("--bind", f"ipc://{tmp_path}/s") as (address, actor):
        assert address == f"ipc://{tmp_path}/s"
        with open_policy(addresses=address) as policy:
            policy.submit(requests("say x", 10))
            assert {parts(c)[1] for c in gather(policy, 10).values()} == {actor.pid}
        actor.send_signal(number)
        assert actor.wait(30.0) == 0
        assert os.listdir(tmp_path) == []


def test_it_lets_in_who_has_a_key(tmp_path):
    actor_keys, mine = new_keys(tmp_path, "actor"), new_keys(tmp_path, "me")
    arguments = ["--keys", f"{tmp_path}/actor.key_secret", "--allow", f"{tmp_path}/me.key"]
    with serving("--bind", "tcp://127.0.0.1:*", *arguments) as (address, _):
        keys = ClientKeys(own=mine, server_public=actor_keys.public)
        with open_policy(addresses=[address], keys=keys) as policy:
            policy.submit([request("a", "say x")])
            assert parts(gather(policy, 1)["a"])[0] == "x"
            weights = tmp_path / "w.safetensors"
            import numpy as np
            from safetensors.numpy import save_file

            save_file({"w": np.zeros((4, 2), np.float32)}, weights)
            policy.update_weights(weights, 1, route="wire")
            policy.submit([request("a", "say x")])
            assert gather(policy, 1)["a"].policy_version == 1


def test_an_actor_that_its_owner_restarts_is_found_again(tmp_path):
    bind = ("--bind", f"ipc://{tmp_path}/s")
    with (
        serving(*bind) as (address, first),
        open_policy(addresses=address, lost_after_s=2.0) as policy,
    ):
        policy.submit(requests("wait 30 x", 3))
        wait_until(lambda: policy.stats().num_in_flight == 3)
        first.kill()
        first.wait()
        with serving(*bind):
            policy.submit([request("a", "say x")])
            assert parts(gather(policy, 1)["a"])[0] == "x"
            assert policy.stats().num_resubmitted >= 3


def test_an_actor_elsewhere_may_be_away_for_longer_than_many_attempts(tmp_path, monkeypatch):
    """Its owner may load a model for minutes: one outage is one restart, however often it is looked for."""
    bind = ("--bind", f"ipc://{tmp_path}/s")
    attempts = []
    real = ActorLink._attempt
    monkeypatch.setattr(
        ActorLink, "_attempt", lambda *given: attempts.append(given) or real(*given)
    )
    with (
        serving(*bind) as (address, first),
        open_policy(addresses=address, lost_after_s=2.0, max_restarts=1) as policy,
    ):
        monkeypatch.setattr("longstep_bindings.actors.link._CONNECT_S", 0.1)
        monkeypatch.setattr("longstep_bindings.actors.link._ATTEMPT_S", 0.1)
        monkeypatch.setattr("longstep_bindings.actors.link._AGAIN_S", (0.05, 0.05))
        first.kill()
        first.wait()
        wait_until(lambda: len(attempts) > 10)
        with serving(*bind):
            monkeypatch.setattr("longstep_bindings.actors.link._ATTEMPT_S", 5.0)
            policy.submit([request("a", "say x")])
            assert parts(gather(policy, 1)["a"])[0] == "x"
            assert policy.stats().num_restarts == 1


def test_an_actor_elsewhere_that_stays_away_is_told(tmp_path, monkeypatch):
    with (
        serving("--bind", f"ipc://{tmp_path}/s", "--lost-after", "2") as (address, actor),
        open_policy(addresses=address, start_timeout_s=1.0) as policy,
    ):
        monkeypatch.setattr("longstep_bindings.actors.link._CONNECT_S", 0.1)
        monkeypatch.setattr("longstep_bindings.actors.link._ATTEMPT_S", 0.1)
        policy.submit([request("a", "hang")])
        actor.kill()
        actor.wait()
        assert "to be back within 1 s" in gather(policy, 1)["a"].error


def test_a_pool_of_two_goes_on_with_one(tmp_path):
    one, two = ("--bind", f"ipc://{tmp_path}/1"), ("--bind", f"ipc://{tmp_path}/2")
    with (
        serving(*one, "--lost-after", "2") as (first, victim),
        serving(*two, "--lost-after", "2") as (second, survivor),
        open_policy(addresses=[first, second]) as policy,
    ):
        policy.submit(requests("wait 0.5 x", 20))
        victim.kill()
        victim.wait()
        got = gather(policy, 20)
        assert {c.finish_reason for c in got.values()} == {FinishReason.STOP}
        assert {parts(c)[1] for c in got.values()} == {survivor.pid}


def test_its_engines_failure_ends_it_with_the_reason(tmp_path):
    with (
        serving("--bind", f"ipc://{tmp_path}/s", "--lost-after", "3") as (address, actor),
        open_policy(addresses=address, max_restarts=0) as policy,
    ):
        policy.submit([request("a", "break")])
        assert "at most 0 times" in gather(policy, 1)["a"].error
        assert actor.wait(30.0) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "m", "--bind", "tcp://0.0.0.0:1"], "CURVE keys"),
        (["--model", "m", "--bind", "nowhere"], "ipc://path or tcp://host:port"),
        (["--model", "m", "--engine", "vlm"], "did you mean `vllm`"),
        (["--model", "refused", "--engine", PLAIN], "expected a model"),
        (["--model", "m", "--allow", "x.key"], "expected `--keys` beside `--allow`"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        cli.serve_actor(arguments)


def test_an_address_that_is_in_use_is_refused():
    with (
        serving("--bind", "tcp://127.0.0.1:*") as (address, _),
        pytest.raises(ConfigError, match="to bind"),
    ):
        cli.serve_actor(["--model", "m", "--engine", PLAIN, "--bind", address])


def test_the_command_is_declared():
    project = tomllib.loads((HERE.parents[2] / "pyproject.toml").read_text())
    declared = project["project"]["entry-points"]["longstep.commands"]
    assert declared["serve-actor"] == "longstep_bindings.cli:serve_actor"
    assert cli.serve_actor.__doc__
