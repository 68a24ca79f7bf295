"""Calls between a client and a server: order, errors, deadlines, credits, sessions."""

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from rpc_service import Recorder

from longstep.errors import (
    ConfigError,
    DeadlineError,
    EnvError,
    LongstepError,
    ProtocolError,
    RegistryError,
    SessionLostError,
    UnsupportedTypeError,
)
from longstep_bindings.rpc import Client, Server, Terms

QUICK = Terms(heartbeat_s=0.1, lost_after_s=0.5)


@contextmanager
def serving(service=None, **options):
    service = service or Recorder()
    with Server(service, **options) as server:
        yield server, service


def connect(server, **options):
    options = {"service": "test.recorder", "version": 1, **options}
    return Client(server.address, **options)


def test_methods_get_values_and_give_values():
    with serving() as (server, _), connect(server) as client:
        image = np.arange(480 * 640 * 3, dtype=np.uint8).reshape(480, 640, 3)
        sent = {"image": image, "text": "x" * 1000, "pair": (1, {"a"})}
        received = client.call("echo", sent, timeout_s=10)
        assert (received.pop("image") == sent.pop("image")).all()
        assert received == sent
        assert client.server.methods == ("add", "echo", "fail", "hold", "note", "sleep", "spoil")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://[::1]:*", None])
def test_addresses_on_this_machine_need_no_keys(address):
    with serving(address=address) as (server, _), connect(server) as client:
        assert client.call("echo", 1, timeout_s=10) == 1


def test_a_session_runs_its_calls_in_order_whatever_their_number():
    with serving(num_threads=4) as (server, service), connect(server) as client:
        pendings = [client.submit("note", i, timeout_s=20) for i in range(300)]
        assert [pending.result() for pending in pendings] == list(range(300))
        assert service.notes == list(range(300))


def test_sessions_run_beside_each_other():
    with serving(num_threads=2) as (server, _), connect(server) as one, connect(server) as two:
        slow = one.submit("sleep", 1.0, timeout_s=10)
        two.call("echo", 0, timeout_s=10)
        assert not slow.is_done
        slow.result()


def test_deferred_calls_are_answered_out_of_order():
    with serving() as (server, service), connect(server) as client:
        done = queue.SimpleQueue()
        pendings = [client.submit("hold", i, timeout_s=10, on_done=done.put) for i in range(3)]
        assert client.call("echo", "passes", timeout_s=10) == "passes"
        for index in (2, 0, 1):
            service.held[index].reply(f"answer {index}")
            assert done.get(timeout=10) is pendings[index]
            assert pendings[index].result() == f"answer {index}"
        service.held[0].reply("again")  # without effect


def test_errors_are_raised_again_as_what_they_were():
    with serving() as (server, _), connect(server) as client:
        for kind in (EnvError, ConfigError, DeadlineError, UnsupportedTypeError):
            with pytest.raises(kind, match=r"told \(from rpc_service.py:\d+ in fail at ipc:"):
                client.call("fail", kind.__name__, timeout_s=10)
        with pytest.raises(LongstepError, match="ZeroDivisionError: told") as caught:
            client.call("fail", "ZeroDivisionError", timeout_s=10)
        assert type(caught.value) is LongstepError
        with pytest.raises(RegistryError, match=r"got `ech`; did you mean `echo`\?"):
            client.call("ech", timeout_s=10)
        with pytest.raises(UnsupportedTypeError, match=r"object at \$\.x|object \(at \$\.x"):
            client.call("spoil", timeout_s=10)
        with pytest.raises(UnsupportedTypeError, match=r"NaN at \$\.reward"):
            client.call("echo", {"reward": float("nan")}, timeout_s=10)
        assert client.call("echo", "still there", timeout_s=10) == "still there"


# ---- deadlines ----


def test_a_hanging_method_is_reported_at_its_deadline_and_its_session_is_lost():
    release = threading.Event()
    with serving(Recorder(hang=release), num_threads=2) as (server, service):
        client, other = connect(server), connect(server)
        began = time.monotonic()
        behind = None
        hanging = client.submit("sleep", None, timeout_s=0.4)
        behind = client.submit("note", "behind", timeout_s=20)
        with pytest.raises(DeadlineError, match="`sleep` still ran at its deadline"):
            hanging.result()
        assert time.monotonic() - began < 1.4
        for call in (behind.result, lambda: client.call("note", "later", timeout_s=10)):
            with pytest.raises(SessionLostError, match="an earlier call of `sleep`"):
                call()
        assert other.call("echo", "fine", timeout_s=10) == "fine"
        release.set()
        with pytest.raises(SessionLostError):
            client.call("note", "even later", timeout_s=10)
        assert service.notes == []
        client.close()
        other.close()


def test_a_call_whose_deadline_passes_in_the_queue_is_not_executed():
    with serving() as (server, service), connect(server) as client:
        first = client.submit("sleep", 0.6, timeout_s=10)
        with pytest.raises(DeadlineError, match="`note` was not executed"):
            client.call("note", "too late", timeout_s=0.2)
        first.result()
        assert client.call("note", "next", timeout_s=10) == 1 - 1
        assert service.notes == ["next"]


def test_a_deferred_call_without_an_answer_fails_alone():
    with serving() as (server, service), connect(server) as client:
        with pytest.raises(DeadlineError, match="`hold` gave no answer within its deadline"):
            client.call("hold", timeout_s=0.3)
        assert service.held[0].cancelled
        assert client.call("echo", 1, timeout_s=10) == 1
        service.held[0].reply("too late")
        assert client.call("echo", 2, timeout_s=10) == 2


def test_the_server_sees_the_time_that_remains():
    with serving() as (server, service), connect(server) as client:
        client.submit("hold", timeout_s=5.0)
        client.call("echo", timeout_s=10)
        assert 3.0 < service.held[0].remaining_s <= 5.0


# ---- credits and cancellation ----


def test_a_request_beyond_the_credits_waits_for_an_answer():
    with serving(terms=Terms(num_credits=2)) as (server, service), connect(server) as client:
        client.submit("hold", timeout_s=10)
        client.submit("hold", timeout_s=10)
        with pytest.raises(DeadlineError, match=r"expected a free credit of 2 within 0\.2 s"):
            client.submit("echo", timeout_s=0.2)
        threading.Timer(0.2, lambda: service.held[0].reply(0)).start()
        assert client.call("echo", "through", timeout_s=10) == "through"


def test_answers_are_kept_until_acknowledged_and_no_longer():
    with serving() as (server, _), connect(server) as client:
        client.submit("hold", timeout_s=30)  # a hole in the acknowledged numbers
        for i in range(200):
            client.call("echo", i, timeout_s=10)
        (book,) = server._hub._books.values()
        assert len(book.here) <= 2


def test_answered_calls_are_not_kept_until_their_deadlines():
    with serving() as (server, _), connect(server) as client:
        client.submit("hold", timeout_s=600)
        for i in range(2000):
            client.call("echo", i, timeout_s=600)
        calls = [call for *_, call in server._hub._deadlines]
        assert 1 <= len(calls) < 600
        assert {call.value for call in calls} == {None}


def test_a_withdrawn_request_is_not_executed():
    with serving() as (server, service), connect(server) as client:
        client.submit("sleep", 0.3, timeout_s=10)
        pending = client.submit("note", "withdrawn", timeout_s=10)
        pending.cancel()
        with pytest.raises(LongstepError, match="`note` was withdrawn"):
            pending.result()
        client.call("note", "kept", timeout_s=10)
        assert service.notes == ["kept"]
        held = client.submit("hold", timeout_s=10)
        client.call("echo", timeout_s=10)
        held.cancel()
        client.call("echo", timeout_s=10)
        assert service.held[0].cancelled


# ---- sessions ----


def test_state_belongs_to_a_session():
    with serving() as (server, _), connect(server) as one, connect(server) as two:
        assert [one.call("add", 1, timeout_s=10) for _ in range(3)] == [1, 2, 3]
        assert two.call("add", 10, timeout_s=10) == 10


def test_a_closed_client_closes_its_session():
    with serving() as (server, service):
        with connect(server, name="one") as client:
            client.call("echo", timeout_s=10)
        assert service.closed.get(timeout=5) == "one"
        with pytest.raises(SessionLostError, match="closed"):
            client.submit("echo", timeout_s=1)
        connect(server, name="one").close()  # the name is free again


def test_stopping_the_server_closes_sessions_and_tells_clients():
    with serving() as (server, service):
        client = connect(server, name="one")
        pending = client.submit("hold", timeout_s=30)
        client.call("echo", timeout_s=10)
    assert service.closed.get(timeout=5) == "one"
    with pytest.raises(SessionLostError, match="the server stops"):
        pending.result()
    with pytest.raises(SessionLostError):
        client.call("echo", timeout_s=1)
    client.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "taken"}, "client name that is not in use, got `taken`"),
        ({"service": "test.other"}, "client of `test.recorder` version 1, got one of 'test.other'"),
        ({"version": 2}, "client of `test.recorder` version 1, .* version 2"),
        ({"name": "x" * 300}, "name of 1 to 200 characters"),
    ],
)
def test_clients_that_do_not_fit_are_refused_with_a_reason(options, said):
    with (
        serving() as (server, _),
        connect(server, name="taken"),
        pytest.raises((ConfigError, ProtocolError), match=said),
    ):
        connect(server, **options)


def test_too_many_clients_are_refused():
    with (
        serving(terms=Terms(max_sessions=1)) as (server, _),
        connect(server),
        pytest.raises(ConfigError, match="at most 1 clients"),
    ):
        connect(server)


def test_a_server_that_is_not_there_is_one_clear_error():
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"a server at tcp://127\.0\.0\.1:1 within 0\.3 s"):
        Client("tcp://127.0.0.1:1", service="x", version=1, connect_timeout_s=0.3)
    assert time.monotonic() - began < 1.3


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("tcp://0.0.0.0:5555", "CURVE keys for `tcp://0.0.0.0:5555`"),
        ("tcp://*:5555", "CURVE keys"),
        ("tcp://example.org:5555", "CURVE keys"),
        ("127.0.0.1:5555", "expected ipc://path or tcp://host:port"),
        ("inproc://x", "expected ipc://path or tcp://host:port"),
        ("ipc:///no/such/folder/s", "expected an address to bind"),
        ("tcp://127.0.0.1:99999", "with a port below 65536"),
        ("tcp://127.0.0.1", "with a port below 65536"),
    ],
)
def test_addresses_that_cannot_serve_are_refused(address, said):
    with pytest.raises(ConfigError, match=said):
        Server(Recorder(), address)


def test_a_server_takes_nobodys_place_at_an_ipc_address(tmp_path):
    address = f"ipc://{tmp_path}/s"
    with serving(address=address) as (server, _):
        with pytest.raises(ConfigError, match="which is in use"):
            Server(Recorder(), address)
        with connect(server) as client:
            assert client.call("echo", 1, timeout_s=10) == 1
    text = tmp_path / "text"
    text.write_text("mine")
    with pytest.raises(ConfigError, match="which is something else"):
        Server(Recorder(), f"ipc://{text}")
    assert text.read_text() == "mine"


def test_a_dead_servers_ipc_address_is_taken_over(tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/s")
    with serving(address=f"ipc://{tmp_path}/s") as (server, _), connect(server) as client:
        assert client.call("echo", 1, timeout_s=10) == 1


def test_nothing_is_left_behind():
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with serving() as (server, _), connect(server) as client:
            client.call("echo", timeout_s=10)
        folder = os.path.dirname(server.address.removeprefix("ipc://"))
        assert not os.path.exists(folder)
        with pytest.raises(DeadlineError):
            Client(server.address, service="x", version=1, connect_timeout_s=0.05)
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= files


def test_several_threads_share_a_client():
    with serving(terms=Terms(num_credits=4)) as (server, _service), connect(server) as client:
        results = queue.SimpleQueue()

        def work(number):
            for i in range(50):
                results.put(client.call("echo", (number, i), timeout_s=30) == (number, i))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [results.get_nowait() for _ in range(300)] == [True] * 300


def test_a_client_that_falls_silent_is_given_up():
    with serving(terms=QUICK) as (server, service):
        client = connect(server, name="silent")
        client.call("echo", timeout_s=10)
        client._loop._keep_time = lambda now: None  # no more heartbeats
        assert service.closed.get(timeout=5) == "silent"
        client.close()


def test_heartbeats_keep_an_idle_session():
    with serving(terms=QUICK) as (server, _service), connect(server) as client:
        client.call("add", 1, timeout_s=10)
        time.sleep(1.5)
        assert client.call("add", 1, timeout_s=10) == 2


SERVING = """
import signal, sys, threading, time
from longstep_bindings.rpc import Server

class Nothing:
    name, version, methods = "example.nothing", 1, {}
    def close_session(self, session):
        pass

def signal_this_thread():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=signal_this_thread, daemon=True).start()
Server(Nothing(), num_threads=int(sys.argv[1])).serve_forever()
print("ended")
"""


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_signal_that_does_not_interrupt_the_main_threads_wait_ends_the_server_too(num_threads):
    """As one that another thread gets, or that comes just before the wait: its handler runs only once the wait ends."""
    told = subprocess.run(
        [sys.executable, "-c", SERVING, str(num_threads)],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=True,
    )
    assert told.stdout == "ended\n"
