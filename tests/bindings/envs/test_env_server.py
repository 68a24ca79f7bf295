"""Servers for clients elsewhere: what they let in, what they tell, and how they go on after a loss."""

import os
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import reset, step
from worker_envs import task

from longstep import FunctionPolicy, GroupVectorEnv, Rollout, Task
from longstep.commands import EnvCommand
from longstep.errors import ConfigError, DeadlineError, EnvError, LongstepError, RegistryError
from longstep_bindings.curve import ClientKeys, KeyPair, ServerKeys, load_public, new_keys
from longstep_bindings.envs import EnvServer, EnvSpec, RemoteVectorEnv
from longstep_bindings.envs.messages import SERVICE, VERSION
from longstep_bindings.rpc import Client
from longstep_bindings.testing import wait_until

COUNTER = EnvSpec(entry_point="worker_envs:counter")
KEYDOOR = "longstep/KeyDoor-v0"


@pytest.fixture(scope="module")
def server():
    with EnvServer({"counter": COUNTER, KEYDOOR: EnvSpec(env_id=KEYDOOR)}, num_workers=2) as server:
        yield server


def test_a_rollout_at_a_server_gives_the_batch_of_the_group_vector_env(server):
    tasks = [Task(env_id=KEYDOOR, seed=seed) for seed in range(3)]
    settings = {"group_size": 2, "max_steps": 10, "constrain": True}
    policy = FunctionPolicy(lambda request: request.allowed[request.seed % len(request.allowed)])
    with RemoteVectorEnv.connect(server.addresses, 4, environment=KEYDOOR) as envs:
        assert envs.env_id == KEYDOOR
        ours = Rollout(envs, policy, **settings).collect(tasks).to_numpy()
    theirs = Rollout(GroupVectorEnv(KEYDOOR, 4), policy, **settings).collect(tasks).to_numpy()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_clients_share_a_server_and_each_has_slots_of_its_own(server):
    with (
        RemoteVectorEnv.connect(server.addresses[0], 2, environment="counter") as one,
        RemoteVectorEnv.connect(server.addresses[0], 2, environment="counter") as other,
    ):
        reset(one, {0: 1, 1: 1})
        reset(other, {0: 1})
        step(one, {0: "a"})
        assert step(other, {0: "a"})[0].info["observation"].endswith("count 1")
        assert step(one, {0: "a"})[0].info["observation"].endswith("count 2")


def test_a_killed_worker_of_a_server_is_replaced_and_its_clients_go_on(server):
    with RemoteVectorEnv.connect(server.addresses, 4, environment="counter") as envs:
        reset(envs, dict.fromkeys(range(4), 1))
        step(envs, dict.fromkeys(range(4), "a"))
        before = server.num_restarts
        os.kill(server.worker_pids[0], signal.SIGKILL)
        results = step(envs, dict.fromkeys(range(4), "a"))
        assert {result.info["observation"][-7:] for result in results.values()} == {"count 2"}
        assert server.num_restarts == before + 1
        assert envs.num_restarts == 1


def test_a_server_that_is_away_for_a_while_was_lost_once(tmp_path):
    address = f"ipc://{tmp_path}/s"
    with EnvServer(COUNTER, address):
        envs = RemoteVectorEnv.connect(address, 2, connect_timeout_s=0.3, max_restarts=1)
        reset(envs, {0: 1, 1: 1})
        step(envs, {0: "a", 1: "a"})
    with envs:
        time.sleep(2.0)  # several attempts to reach it
        with EnvServer(COUNTER, address):
            results = step(envs, {0: "a", 1: "a"})
            assert [results[slot].error for slot in range(2)] == [None, None]
            assert results[0].info["observation"].endswith("count 2")
            assert envs.num_restarts == 1


def test_a_server_that_does_not_come_back_is_an_error_after_a_time(tmp_path):
    address = f"ipc://{tmp_path}/s"
    with EnvServer(COUNTER, address):
        envs = RemoteVectorEnv.connect(
            address, 1, connect_timeout_s=0.3, reconnect_timeout_s=1.0, max_restarts=1
        )
        reset(envs, {0: 1})
    with envs, pytest.raises(EnvError, match=r"to be back within 1 s.*raise `reconnect_timeout_s`"):
        step(envs, {0: "a"})


def test_a_hanging_step_is_killed_by_the_server_and_reported_to_the_client_that_asked():
    with (
        EnvServer(COUNTER, step_timeout_s=3.0) as server,
        RemoteVectorEnv.connect(server.addresses, 2, max_retries=0) as envs,
    ):
        reset(envs, {0: 1, 1: 1})
        results = step(envs, {0: "hang", 1: "a"})
        assert "expected a step within 3 s" in results[0].error
        assert results[1].info["observation"].endswith("count 1")


def test_an_unknown_environment_is_named_with_those_that_are_there(server):
    with pytest.raises(RegistryError, match="did you mean `counter`"):
        RemoteVectorEnv.connect(server.addresses, 2, environment="conter")
    with pytest.raises(RegistryError, match="got `None`; known: `counter`, `longstep/KeyDoor-v0`"):
        RemoteVectorEnv.connect(server.addresses, 2)


def test_a_server_that_is_not_there_is_a_deadline(tmp_path):
    for address in ("tcp://127.0.0.1:9", f"ipc://{tmp_path}/nobody"):
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="expected a server at"):
            RemoteVectorEnv.connect(address, 1, connect_timeout_s=0.3)
        assert time.monotonic() - began < 10.0


def test_another_service_version_or_a_name_in_use_is_refused(server):
    address = server.addresses[0]
    with pytest.raises(ConfigError, match=r"a client of `longstep\.env` version 1"):
        Client(address, service="longstep.actor", version=1)
    with pytest.raises(ConfigError, match="install the same version on both sides"):
        Client(address, service=SERVICE, version=VERSION + 1)
    with (
        Client(address, service=SERVICE, version=VERSION, name="twin"),
        pytest.raises(ConfigError, match="a client name that is not in use, got `twin`"),
    ):
        Client(address, service=SERVICE, version=VERSION, name="twin")


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("run", [[0], ["step"], ["a"]], "expected `open` before `run`"),
        ("open", None, "at `open`"),
        ("open", {"environment": "counter", "num_slots": 0, "owner": 1}, "from 1 to 1024"),
        ("open", {"environment": "counter", "num_slots": 10**6, "owner": 1}, "from 1 to 1024"),
        ("open", {"environment": ["x"], "num_slots": 1, "owner": 1}, "at `open`"),
        ("call", 1, "expected a method of `longstep.env`"),
    ],
)
def test_a_wrong_first_call_is_an_error(server, method, value, message):
    with (
        Client(server.addresses[0], service=SERVICE, version=VERSION) as client,
        pytest.raises(LongstepError, match=message),
    ):
        client.call(method, value, timeout_s=30.0)


def test_wrong_commands_are_errors_and_the_session_goes_on(server):
    order = {"environment": "counter", "num_slots": 2, "owner": 1}
    with Client(server.addresses[0], service=SERVICE, version=VERSION) as client:
        assert client.call("open", order, timeout_s=60.0)["kind"] == "agent"
        for value in [
            None,
            [],
            [[0], ["step"]],
            [[0], ["step"], []],
            [[], [], []],
            [[2], ["step"], ["a"]],
            [[-1], ["step"], ["a"]],
            [["0"], ["step"], ["a"]],
            [[True], ["step"], ["a"]],
            [[0], ["steps"], ["a"]],
            [[0], [["step"]], ["a"]],
            [[0], ["copy"], [2]],
            [[0], ["copy"], [None]],
            [0, "step", "a"],
        ]:
            with pytest.raises(LongstepError, match=r"at `run`|argument of `copy`"):
                client.call("run", value, timeout_s=30.0)
        with pytest.raises(ConfigError, match="got a second one"):
            client.call("open", order, timeout_s=30.0)
        for operation, argument in [
            ("reset", None),
            ("reset", ["1", None]),
            ("reset", [1, [2]]),
            ("replay", [None]),
            ("replay", [3, []]),
            ("step", "before any reset"),
            ("copy", 1),
        ]:
            reply = client.call("run", [[0], [operation], [argument]], timeout_s=30.0)
            assert reply[5][0] is not None
        reply = client.call("run", [[0], ["reset"], [[1, None]]], timeout_s=30.0)
        assert reply[5] == [None]


def test_more_restarts_than_allowed_end_the_server():
    server = EnvServer(COUNTER, max_restarts=0)
    os.kill(server.worker_pids[0], signal.SIGKILL)
    wait_until(lambda: server.failure is not None)
    with pytest.raises(
        EnvError, match="at most 0 times, got one more: the worker was killed by SIGKILL"
    ):
        server.serve_forever()
    assert server.worker_pids == [None]


# ---- addresses and keys ----


def test_sockets_are_private_and_vanish(server):
    with EnvServer(COUNTER, num_workers=2) as server:
        paths = [Path(address.removeprefix("ipc://")) for address in server.addresses]
        assert len(set(paths)) == 2
        folder = paths[0].parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert all(path.is_socket() for path in paths)
    assert not folder.exists()


def test_given_addresses_count_up(tmp_path):
    with EnvServer(COUNTER, f"ipc://{tmp_path}/s", num_workers=2) as server:
        assert server.addresses == [f"ipc://{tmp_path}/s", f"ipc://{tmp_path}/s-1"]
    assert os.listdir(tmp_path) == []
    with EnvServer(COUNTER, "tcp://127.0.0.1:*") as server:
        address = server.addresses[0]
        port = int(address.rpartition(":")[2])
        with RemoteVectorEnv.connect(address, 1) as envs:
            reset(envs, {0: 1})
            os.kill(server.worker_pids[0], signal.SIGKILL)
            assert step(envs, {0: "a"})[0].error is None  # the successor has the same port
        with pytest.raises(ConfigError, match="an address to bind"):
            EnvServer(COUNTER, f"tcp://127.0.0.1:{port}")


def test_addresses_that_others_can_reach_need_keys():
    for address in ("tcp://0.0.0.0:*", "tcp://*:*", "tcp://192.0.2.1:5555"):
        with pytest.raises(ConfigError, match="expected CURVE keys"):
            EnvServer(COUNTER, address)
    with pytest.raises(ConfigError, match="expected CURVE keys"):
        RemoteVectorEnv.connect("tcp://192.0.2.1:5555", 1)
    for address in (
        "tcp://127.0.0.1:http",
        "tcp://127.0.0.1:65536",
        "http://127.0.0.1:80",
        "ipc://",
    ):
        with pytest.raises(ConfigError, match=r"expected (ipc|tcp)://"):
            EnvServer(COUNTER, address)


def test_only_clients_of_the_allow_list_get_in(tmp_path):
    for name in ("server", "friend", "stranger"):
        new_keys(tmp_path, name)
    pairs = {path.stem: KeyPair.load(path) for path in tmp_path.glob("*.key_secret")}
    keys = ServerKeys(own=pairs["server"], allowed=load_public([tmp_path / "friend.key"]))
    public = pairs["server"].public
    with EnvServer(COUNTER, "tcp://0.0.0.0:*", keys=keys) as server:
        address = server.addresses[0].replace("0.0.0.0", "127.0.0.1")
        friend = ClientKeys(own=pairs["friend"], server_public=public)
        for others in (
            None,
            ClientKeys(own=pairs["stranger"], server_public=public),
            ClientKeys(own=pairs["friend"], server_public=pairs["stranger"].public),
        ):
            with pytest.raises(DeadlineError, match="does not know this client's key"):
                RemoteVectorEnv.connect(address, 1, keys=others, connect_timeout_s=1.0)
        with RemoteVectorEnv.connect(address, 1, keys=friend) as envs:
            reset(envs, {0: 1})
            os.kill(server.worker_pids[0], signal.SIGKILL)
            assert step(envs, {0: "a"})[0].error is None


# ---- raw servers ----


def test_an_agent_is_put_around_what_a_server_gives_raw():
    raw = EnvSpec(entry_point="worker_envs:Counter", wrap=False, kwargs={"length": 3})
    with EnvServer(raw) as server:
        with RemoteVectorEnv.connect(server.addresses, 1, wrap=False) as envs:
            assert envs.kind == "raw"
            assert reset(envs, {0: 1})[0].observation.endswith("count 0")
        with RemoteVectorEnv.connect(
            server.addresses, 2, agent_kwargs={"max_steps": 5, "invalid_action_penalty": 0.25}
        ) as envs:
            twin = GroupVectorEnv(twin_of_raw, 2)
            for act in (
                lambda e: reset(e, {0: 1, 1: 1}),
                lambda e: step(e, {0: "<action>a</action>", 1: "no tags"}),
                lambda e: step(e, {0: "<action>raise it</action>", 1: "<action>a</action>"}),
                lambda e: step(e, {1: "no tags"}),
            ):
                ours, theirs = act(envs), act(twin)
                for slot in ours:
                    assert ours[slot].info == theirs[slot].info
                    assert ours[slot].observation == theirs[slot].observation
                    assert ours[slot].reward == theirs[slot].reward
                    assert ours[slot].error == theirs[slot].error
            branch = envs.fork(1, into=0, at_step=2)
            assert branch.info["observation"].endswith("count 1")
            os.kill(server.worker_pids[0], signal.SIGKILL)
            ours, theirs = (
                step(envs, {1: "<action>a</action>"}),
                step(twin, {1: "<action>a</action>"}),
            )
            assert ours[1].info == theirs[1].info
            envs.send([EnvCommand(slot=1, command_id=1, task=task(2))])
            assert envs.recv()[0].error is None


def twin_of_raw():
    from worker_envs import Counter

    from longstep import LLMAgentEnv

    return LLMAgentEnv(Counter(length=3), max_steps=5, invalid_action_penalty=0.25)
