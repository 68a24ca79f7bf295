"""Messages lost, doubled and shuffled, connections cut, processes killed: nothing is executed twice, nothing hangs."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from rpc_service import Recorder

from longstep.errors import ConfigError, DeadlineError, ProtocolError, SessionLostError
from longstep_bindings.rpc import Client, Server, Terms
from longstep_bindings.testing import Faults, FaultyLine, hang, is_gone, resume, wait_until

QUICK = Terms(heartbeat_s=0.05, lost_after_s=5.0, num_credits=8)
BAD = Faults(drop=0.15, duplicate=0.15, reorder=0.15)
SERVICE = str(Path(__file__).parent / "rpc_service.py")


@pytest.mark.parametrize("seed", range(3))
def test_every_call_is_executed_once_and_in_order_over_a_bad_line(seed):
    service = Recorder()
    with (
        Server(service, terms=QUICK) as server,
        FaultyLine(server.address, faults=BAD, seed=seed) as line,
        Client(line.address, service="test.recorder", version=1, connect_timeout_s=20) as client,
    ):
        pendings = [client.submit("note", i, timeout_s=60) for i in range(150)]
        assert [pending.result() for pending in pendings] == list(range(150))
        assert line.num_faults > 50
    assert service.notes == list(range(150))


def test_deferred_answers_survive_a_bad_line():
    service = Recorder()
    with (
        Server(service, terms=QUICK) as server,
        FaultyLine(server.address, faults=BAD, seed=5) as line,
        Client(line.address, service="test.recorder", version=1, connect_timeout_s=20) as client,
    ):
        for _ in range(10):
            pendings = [client.submit("hold", i, timeout_s=60) for i in range(8)]
            deadline = time.monotonic() + 30
            while len(service.held) < 8 and time.monotonic() < deadline:
                time.sleep(0.01)
            held, service.held = service.held, []
            for call in random.Random(0).sample(held, len(held)):
                call.reply(call.value)
            assert [pending.result() for pending in pendings] == list(range(8))


def test_a_cut_connection_resumes_the_session(tmp_path):
    service, address = Recorder(), f"ipc://{tmp_path}/line"
    with Server(service, terms=QUICK) as server:
        line = FaultyLine(server.address, address)
        with Client(address, service="test.recorder", version=1) as client:
            assert client.call("add", 1, timeout_s=20) == 1
            held = client.submit("hold", timeout_s=20)
            assert client.call("add", 1, timeout_s=20) == 2
            line.close()
            pending = client.submit("add", 1, timeout_s=20)
            service.held[0].reply("while nobody listened")
            time.sleep(0.3)
            with FaultyLine(server.address, address):
                assert pending.result() == 3
                assert held.result() == "while nobody listened"


# ---- processes ----


@contextmanager
def process(address, *arguments, command=(sys.executable, SERVICE)):
    child = subprocess.Popen([*command, address, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_killed_server_is_noticed_and_its_successor_not_mistaken_for_it(tmp_path):
    address = f"ipc://{tmp_path}/s"
    with process(address) as child:
        client = Client(address, service="test.recorder", version=1)
        client.call("add", 1, timeout_s=10)
        child.kill()
        child.wait()
        began = time.monotonic()
        with pytest.raises(SessionLostError, match="no sign of life"):
            client.call("add", 1, timeout_s=60)
        assert time.monotonic() - began < 5
    with process(address), Client(address, service="test.recorder", version=1) as fresh:
        assert fresh.call("add", 1, timeout_s=10) == 1
        with pytest.raises(SessionLostError, match="no sign of life"):
            client.call("add", 1, timeout_s=10)
    client.close()


def test_a_server_that_restarted_does_not_know_the_session(tmp_path):
    address = f"ipc://{tmp_path}/s"
    first = Server(Recorder(), address, terms=QUICK)
    first.start()
    with Client(address, service="test.recorder", version=1) as client:
        client.call("add", 1, timeout_s=10)
        first._hub._books.clear()  # a restart without the goodbye
        with pytest.raises(SessionLostError, match="does not know this session"):
            client.call("add", 1, timeout_s=10)
        with pytest.raises(SessionLostError, match="does not know this session"):
            client.submit("add", 1, timeout_s=10)
    first.stop()


def test_a_stopped_process_misses_its_deadline_and_continues_afterwards(tmp_path):
    address = f"ipc://{tmp_path}/s"
    with process(address) as child, Client(address, service="test.recorder", version=1) as client:
        client.call("add", 1, timeout_s=10)
        hang(child.pid)
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="no answer from"):
            client.call("add", 1, timeout_s=1.0)
        assert time.monotonic() - began < 2.0
        resume(child.pid)
        assert client.call("echo", 1, timeout_s=10) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_server_cleanly(tmp_path, number):
    with process(f"ipc://{tmp_path}/s") as child:
        with Client(f"ipc://{tmp_path}/s", service="test.recorder", version=1) as client:
            client.call("echo", timeout_s=10)
            child.send_signal(number)
            assert child.wait(10) == 0
        assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("hang", ["", "hang"])
def test_a_server_ends_when_its_parent_is_killed(tmp_path, hang):
    starter = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, sys.argv[1], sys.argv[2], str(os.getpid())])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = (sys.executable, "-c", starter, SERVICE)
    address = f"ipc://{tmp_path}/s"
    with subprocess.Popen([*command, address], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        with Client(address, service="test.recorder", version=1, connect_timeout_s=20) as client:
            if hang:
                client.submit("sleep", 30.0, timeout_s=60)
                client.submit("echo", timeout_s=60)
            else:
                client.call("echo", timeout_s=10)
            parent.kill()
            wait_until(lambda: is_gone(pid), 5.0)
    assert not (tmp_path / "s").exists()


def test_a_private_socket_left_by_a_killed_process_is_swept_up():
    program = (
        "import os, signal\n"
        "from longstep_bindings.transport import private_ipc_address\n"
        "print(private_ipc_address(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    folder = os.path.dirname(out.strip().removeprefix("ipc://"))
    assert os.path.isdir(folder)
    with Server(Recorder()):
        assert not os.path.exists(folder)


def test_two_servers_cannot_share_an_address(tmp_path):
    with (
        Server(Recorder(), "tcp://127.0.0.1:*") as server,
        pytest.raises(ConfigError, match="in use"),
    ):
        Server(Recorder(), server.address)


def test_corrupt_messages_are_lost_messages_or_errors_that_say_so():
    service = Recorder()
    with (
        Server(service, terms=QUICK) as server,
        FaultyLine(server.address, faults=Faults(corrupt=0.3), seed=1) as line,
        Client(line.address, service="test.recorder", version=1, connect_timeout_s=20) as client,
    ):
        pendings = [client.submit("echo", i, timeout_s=60) for i in range(150)]
        failed = 0
        for number, pending in enumerate(pendings):
            try:
                assert pending.result() == number
            except ProtocolError:
                failed += 1
        assert 0 < failed < 100
        assert line.counts["corrupt"] > failed


def test_a_slow_line_delays_and_loses_nothing():
    with (
        Server(Recorder(), terms=QUICK) as server,
        FaultyLine(server.address, faults=Faults(slow_s=0.2)) as line,
        Client(line.address, service="test.recorder", version=1) as client,
    ):
        began = time.monotonic()
        assert [client.call("add", 1, timeout_s=10) for _ in range(2)] == [1, 2]
        assert 0.8 <= time.monotonic() - began < 5.0
