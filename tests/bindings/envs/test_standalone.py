"""The server in one file: its syntax, its bytes, and how it treats peers that speak well, badly, or not at all."""

import ast
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import foreign_envs
import gymnasium
import numpy as np
import pytest
from helpers import gather, is_running, reset, step
from raw_peer import RawPeer

import longstep_bindings.envs
from longstep.commands import EnvCommand, next_command_id
from longstep.env import LLMAgentEnv
from longstep.errors import ConfigError, DataError, DeadlineError, SessionLostError
from longstep.vector import GroupVectorEnv
from longstep_bindings.curve import ClientKeys, new_keys
from longstep_bindings.envs.client import RemoteVectorEnv
from longstep_bindings.envs.messages import REPLY_LIMITS, SERVICE, VERSION
from longstep_bindings.heads import Kind, pack_head
from longstep_bindings.rpc import Client
from longstep_bindings.testing import wait_until
from longstep_bindings.wire import decode, encode

HERE = Path(__file__).parent
FILE = Path(longstep_bindings.envs.__file__).parent / "standalone.py"
VECTORS = json.loads((HERE.parent / "vectors" / "protocol_v1.json").read_text())


@pytest.fixture(scope="module")
def standalone():
    spec = importlib.util.spec_from_file_location("standalone_under_test", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Serving:
    """The file as a process."""

    def __init__(self, entry_point, *arguments, address=None, **kwargs):
        place = ["--address", address] if address else []
        command = [sys.executable, str(FILE), f"foreign_envs:{entry_point}", *place, *arguments]
        self.process = subprocess.Popen(
            [*command, "--kwargs", json.dumps(kwargs), "--parent-pid", str(os.getpid())],
            cwd=HERE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self.process.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()  # so that it removes its socket
        self.process.communicate(timeout=60.0)


def client_of(serving, **changes):
    asked = {"service": SERVICE, "version": VERSION, "connect_timeout_s": 60.0, **changes}
    return Client(serving.address, limits=REPLY_LIMITS, **asked)


def connect(serving, num_envs, **settings):
    return RemoteVectorEnv.connect(serving.address, num_envs, connect_timeout_s=60.0, **settings)


def raw_peer_of(address):
    return RawPeer(address, service=SERVICE, version=VERSION)


def open_slots(client, num_slots, timeout_s=60.0):
    order = {"environment": None, "num_slots": num_slots, "owner": 1}
    return client.call("open", order, timeout_s=timeout_s)


# ---- the file -------------------------------------------------------------------------------------------------------


def test_it_is_python_3_8():
    ast.parse(FILE.read_text(), feature_version=(3, 8))


def test_it_imports_nothing_but_pyzmq_and_msgpack():
    imported = set()
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported - sys.stdlib_module_names == {"zmq", "msgpack"}


@pytest.mark.parametrize("vector", VECTORS["values"], ids=lambda vector: vector["name"])
def test_its_bytes_are_those_of_the_wire(standalone, vector):
    frames = [bytes.fromhex(frame) for frame in vector["frames"]]
    assert standalone.encode(standalone.decode(frames)) == frames
    assert repr(standalone.decode(frames)) == repr(decode(frames))


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda vector: vector["name"])
def test_it_refuses_what_the_wire_refuses(standalone, vector):
    with pytest.raises(standalone.Fault) as caught:
        standalone.decode([bytes.fromhex(frame) for frame in vector["frames"]])
    assert caught.value.kind == "ProtocolError"


@pytest.mark.parametrize("vector", VECTORS["refused_heads"], ids=lambda vector: vector["name"])
def test_it_refuses_bad_heads(standalone, vector):
    with pytest.raises(standalone.Fault):
        standalone.read_head(bytes.fromhex(vector["frame"]))


def test_random_bytes_are_protocol_errors_and_nothing_else(standalone):
    draw = random.Random(0)
    good = [bytes.fromhex(vector["frames"][0]) for vector in VECTORS["values"]]
    num_refused = 0
    for _ in range(3000):
        body = bytearray(draw.choice(good))
        for _ in range(draw.randrange(1, 4)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        try:
            standalone.decode([bytes(body)])
        except standalone.Fault:
            num_refused += 1
    assert num_refused > 300


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, object()]}, r"got object at \$\.a\[1\]"),
        ({"a": float("nan")}, r"got NaN at \$\.a"),
        ([1 << 64], r"at most 64 bits, got 1\.84e\+19 at \$\[0\]"),
        ({(1, 2): 1}, "expected a key that is a scalar, got tuple"),
        ("\ud800", "expected text that UTF-8 can encode"),
        (np.array(["x"]), "expected an array of booleans or numbers"),
    ],
)
def test_a_value_that_cannot_travel_is_named_with_its_place(standalone, value, said):
    with pytest.raises(standalone.Fault, match=said) as caught:
        standalone.encode(value)
    assert caught.value.kind == "UnsupportedTypeError"


def test_values_nested_too_deep_are_not_sent(standalone):
    value = []
    for _ in range(32):
        value = [value]
    with pytest.raises(standalone.Fault, match="expected at most 32 nested containers"):
        standalone.encode(value)


# ---- driven by RemoteVectorEnv --------------------------------------------------------------------------------------


class Wrapped(gymnasium.Env):
    """The corridor as Gymnasium would have it, for the same run in process."""

    def __init__(self):
        self.inner = foreign_envs.Corridor(4)

    def reset(self, *, seed=None, options=None):
        return self.inner.reset(seed=seed, options=options)

    def step(self, action):
        return self.inner.step(action)


def play(envs):
    """Prompts, rewards, flags, state keys and actions of an episode in two slots, with invalid actions among them."""
    told = [reset(envs, {0: 0, 1: 1})]
    for completions in (
        ("right", "fly"),
        ("right", "Right"),
        ("left", "right"),
        ("right", "right"),
    ):
        told.append(step(envs, dict(enumerate(completions))))
    named = ("observation", "reward", "terminated", "truncated", "error")
    keys = ("state_key", "action", "action_valid", "action_reason", "success", "step", "raw_reward")
    return [
        [getattr(row[slot], name) for name in named] + [row[slot].info.get(key) for key in keys]
        for row in told
        for slot in (0, 1)
    ]


def test_agents_around_it_give_what_they_give_in_process():
    settings = {"invalid_action_penalty": 0.25}
    with Serving("Corridor", length=4) as serving:
        envs = connect(serving, 2, agent_kwargs=settings)
        remote = play(envs)
        envs.close()
    here = GroupVectorEnv(lambda: LLMAgentEnv(Wrapped(), **settings), num_envs=2)
    assert remote == play(here)
    assert any(row[2] for row in remote)


def test_an_environment_of_the_old_gym_is_seeded_and_its_actions_have_names():
    with Serving("OldCorridor", length=3) as serving, connect(serving, 1) as envs:
        first = reset(envs, {0: 1})[0]
        assert "You stand at 1 of 3." in first.observation
        assert first.info["admissible_actions"] == ["left", "right"]
        assert not step(envs, {0: "right"})[0].terminated
        last = step(envs, {0: "right"})[0]
        assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
        reset(envs, {0: 1})
        cut = step(envs, {0: "left"})[0]
        assert (cut.terminated, cut.truncated) == (False, True)


def test_arrays_travel_both_ways():
    with (
        Serving("Numbers") as serving,
        RemoteVectorEnv.connect(serving.address, 1, wrap=False) as envs,
    ):
        first = reset(envs, {0: 3})[0]
        assert first.observation.dtype == np.float32
        assert first.observation[:2].tolist() == [3.0, 4.0]
        action = np.full((2, 3), 7, dtype=np.int16)
        envs.send([EnvCommand(slot=0, command_id=next_command_id(), action=action)])
        result = gather(envs, 1)[0]
        assert np.array_equal(result.info["action"], action)
        assert (result.reward, result.observation[0]) == (0.5, 4.0)


def test_one_environments_exception_is_its_slots_error():
    with Serving("Corridor") as serving, connect(serving, 3, wrap=False) as envs:
        reset(envs, {0: 0, 1: 0, 2: 0})
        results = step(envs, {0: "right", 1: "boom", 2: "odd"})
        assert results[0].error is None
        assert results[1].error == "ValueError: no such door"
        assert "UnsupportedTypeError" in results[2].error
        assert "object at $" in results[2].error
        assert reset(envs, {1: 0, 2: 0})[1].error is None


def test_a_slot_can_stand_where_another_stands():
    with Serving("Corridor", length=9) as serving, client_of(serving) as client:
        assert open_slots(client, 2)["can_copy"] is True
        call = {"timeout_s": 60.0}
        client.call("run", [[0], ["replay"], [[[2, None], ["right", "right"]]]], **call)
        copied = client.call("run", [[1], ["copy"], [0]], **call)
        assert copied[0] == ["You stand at 4 of 9."]
        assert client.call("run", [[1], ["step"], ["right"]], **call)[0] == ["You stand at 5 of 9."]
        assert client.call("run", [[0], ["step"], ["left"]], **call)[0] == ["You stand at 3 of 9."]


# ---- deadlines, wrong calls, ends -----------------------------------------------------------------------------------


def test_a_step_past_its_deadline_is_reported_and_nothing_follows_it(tmp_path):
    log = tmp_path / "log"
    with Serving("Corridor", log=str(log)) as serving, client_of(serving) as client:
        open_slots(client, 1)
        client.call("run", [[0], ["reset"], [[0, None]]], timeout_s=60.0)
        slow = client.submit("run", [[0], ["step"], ["sleep 8"]], timeout_s=2.0)
        waiting = client.submit("run", [[0], ["step"], ["right"]], timeout_s=60.0)
        start = time.monotonic()
        with pytest.raises(DeadlineError, match="`run` still ran at its deadline"):
            slow.result()
        assert time.monotonic() - start < 6.0
        with pytest.raises(SessionLostError, match="open a new session"):
            waiting.result()
        assert "right" not in log.read_text()


@pytest.mark.parametrize(
    ("method", "value", "kind", "said"),
    [
        ("open", {"num_slots": 0}, DataError, "expected `environment`"),
        ("run", [[0], ["step"], ["x"]], ConfigError, "expected `open` before `run`"),
    ],
)
def test_a_wrong_call_is_told(method, value, kind, said):
    serving = Serving("Corridor")
    with serving, client_of(serving) as client, pytest.raises(kind, match=said):
        client.call(method, value, timeout_s=60.0)


def test_without_keys_it_keeps_to_this_machine(standalone):
    service = standalone.Environments({})
    with pytest.raises(standalone.Fault, match=r"expected CURVE keys for `tcp://0\.0\.0\.0:5555`"):
        standalone.Server(service, "tcp://0.0.0.0:5555")
    server = standalone.Server(service, "tcp://127.0.0.1:*")
    assert server.address.startswith("tcp://127.0.0.1:")
    server.free()


def test_it_ends_with_its_parent_and_leaves_no_socket_file():
    parent = (
        "import subprocess, sys, os, time\n"
        f"command = [sys.executable, {str(FILE)!r}, 'foreign_envs:Corridor', '--parent-pid', str(os.getpid())]\n"
        "child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)\n"
        "print(child.pid, child.stdout.readline(), flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent], cwd=HERE, stdout=subprocess.PIPE, text=True
    )
    pid, address = process.stdout.readline().split()
    process.kill()
    process.communicate()
    wait_until(lambda: not is_running(int(pid)), 30.0)
    assert not Path(address.removeprefix("ipc://")).parent.exists()


def test_the_environments_of_a_silent_client_are_closed(tmp_path):
    log = tmp_path / "log"
    quick = ("--heartbeat", "0.2", "--lost-after", "1.5")
    with Serving("Corridor", *quick, log=str(log)) as serving, raw_peer_of(serving.address) as peer:
        peer.hello()
        peer.request(1, "open", {"environment": None, "num_slots": 1, "owner": 1})
        assert peer.hear()[0].kind is Kind.REPLY
        wait_until(lambda: log.exists() and "close" in log.read_text(), 30.0)
        peer.tell(Kind.PING, 1, 1, [])
        assert peer.hear()[0].kind is Kind.LOST


# ---- peers that speak the protocol badly ----------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def peer(log):
    """A raw peer with one slot that was reset: requests 1 and 2."""
    with (
        Serving("Corridor", length=9, log=str(log)) as serving,
        raw_peer_of(serving.address) as peer,
    ):
        peer.hello()
        peer.request(1, "open", {"environment": None, "num_slots": 1, "owner": 1})
        assert peer.hear()[0].fields == (1,)
        peer.request(2, "run", [[0], ["reset"], [[0, None]]])
        assert peer.hear()[0].fields == (2,)
        yield peer


def steps(log):
    return [line.split()[1] for line in log.read_text().splitlines() if line.startswith("step")]


def test_a_repeated_step_is_answered_again_and_taken_once(peer, log):
    answers = []
    for _ in range(3):
        peer.request(3, "run", [[0], ["step"], ["right"]])
        head, frames = peer.hear()
        assert head.kind is Kind.REPLY
        answers.append(frames)
    assert answers[0] == answers[1] == answers[2]
    assert steps(log) == ["right"]


def test_an_old_copy_of_a_settled_step_is_dropped(peer, log):
    for seq, action in ((3, "right"), (4, "left")):
        peer.request(seq, "run", [[0], ["step"], [action]])
        assert peer.hear()[0].fields == (seq,)
    peer.request(3, "run", [[0], ["step"], ["right"]])
    assert peer.hear(1.0) is None
    assert steps(log) == ["right", "left"]


def test_steps_that_overtook_each_other_run_in_their_order(peer, log):
    peer.request(5, "run", [[0], ["step"], ["e"]], open_seqs=[3, 4, 5])
    peer.request(4, "run", [[0], ["step"], ["d"]], open_seqs=[3, 4], upto=4)
    assert peer.hear(1.0) is None
    peer.request(3, "run", [[0], ["step"], ["c"]], open_seqs=[3], upto=3)
    assert [peer.hear()[0].fields[0] for _ in range(3)] == [3, 4, 5]
    assert steps(log) == ["c", "d", "e"]


def test_a_missing_step_that_is_given_up_holds_nobody_back(peer, log):
    peer.request(4, "run", [[0], ["step"], ["d"]], open_seqs=[3, 4])
    peer.tell(Kind.PING, 1, 4, [4])
    assert {peer.hear()[0].kind for _ in range(2)} == {Kind.PONG, Kind.REPLY}
    assert steps(log) == ["d"]


def test_garbage_changes_nothing(peer, log):
    draw = random.Random(1)
    for _ in range(300):
        peer.send(*[draw.randbytes(draw.randrange(60)) for _ in range(draw.randrange(1, 5))])
    peer.tell(Kind.WELCOME, {})
    peer.send(
        pack_head(Kind.REQUEST, peer.token, 3, 3, [3], 60_000, "run"), b"\xdd\xff\xff\xff\xff"
    )
    head, _ = peer.hear()
    assert (head.kind, head.fields[:2]) == (Kind.ERROR, (3, "ProtocolError"))
    peer.request(4, "run", [[0], ["step"], ["right"]])
    assert peer.hear()[0].fields == (4,)
    assert steps(log) == ["right"]


def test_more_requests_than_credits_are_not_taken(peer, log):
    peer.request(3, "run", [[0], ["step"], ["right"]], open_seqs=list(range(3, 68)))
    peer.tell(Kind.PING, 1, 2, [])
    assert peer.hear()[0].fields == (1, [])
    assert steps(log) == []


def test_others_are_refused_with_a_reason(peer):
    address = peer.address
    for changes, said in (
        ({"service": "test.other"}, "expected a client of `longstep.env` version 1"),
        ({"name": "raw"}, "expected a client name that is not in use"),
        ({"name": ""}, "expected a name of 1 to 200 characters"),
    ):
        with raw_peer_of(address) as other:
            head = other.hello(**changes)
            assert head.kind is Kind.REFUSED
            assert said in head.fields[1]
    with raw_peer_of(address) as other:
        other.send(encode([2, 1, other.token, {}])[0])
        head, _ = other.hear()
        assert head.fields[0] == "ProtocolError"
        assert "expected protocol version 1, got 2" in head.fields[1]


# ---- keys -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pairs(tmp_path):
    return {name: new_keys(tmp_path, name) for name in ("server", "friend", "stranger")}


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", None])
def test_a_client_whose_key_is_allowed_gets_in_and_no_other(tmp_path, pairs, address):
    options = ["--keys", f"{tmp_path}/server.key_secret", "--allow", f"{tmp_path}/friend.key"]
    with Serving("Corridor", *options, address=address) as serving:
        serving.address = serving.address.replace("0.0.0.0", "127.0.0.1")
        server_public = pairs["server"].public
        friend = ClientKeys(own=pairs["friend"], server_public=server_public)
        with connect(serving, 1, keys=friend) as envs:
            assert reset(envs, {0: 1})[0].error is None
        for wrong in (
            ClientKeys(own=pairs["stranger"], server_public=server_public),
            ClientKeys(own=pairs["friend"], server_public=pairs["stranger"].public),
            None,
        ):
            with pytest.raises(DeadlineError, match="does not know this client's key"):
                client_of(serving, keys=wrong, connect_timeout_s=1.0)
        with connect(serving, 1, keys=friend) as envs:
            assert reset(envs, {0: 1})[0].error is None


def test_an_address_off_this_machine_requires_keys_and_an_allow_list(tmp_path, pairs):
    secret = ["--keys", f"{tmp_path}/server.key_secret"]
    wrong = [
        ([], "expected CURVE keys for `tcp://0.0.0.0:*`"),
        (secret, "expected both --keys and --allow"),
        (["--allow", f"{tmp_path}/friend.key"], "expected both --keys and --allow"),
        (["--keys", f"{tmp_path}/server.key", "--allow", f"{tmp_path}/friend.key"], "public one"),
        ([*secret, "--allow", f"{tmp_path}/nobody.key"], "expected a key file at"),
    ]
    command = [sys.executable, str(FILE), "foreign_envs:Corridor", "--address", "tcp://0.0.0.0:*"]
    for options, said in wrong:
        done = subprocess.run([*command, *options], cwd=HERE, capture_output=True, text=True)
        assert done.returncode == 2
        assert said in done.stderr
    (tmp_path / "server.key_secret").chmod(0o644)
    options = [*secret, "--allow", f"{tmp_path}/friend.key"]
    done = subprocess.run([*command, *options], cwd=HERE, capture_output=True, text=True)
    assert "chmod 600" in done.stderr
