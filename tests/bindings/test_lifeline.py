"""Signals that arrive faster than they are handled must not stop a process from ending."""

import os
import signal
import subprocess
import sys
import time

import pytest

FOLLOWER = """
import os, sys, threading, time
from longstep_bindings.lifeline import follow_parent
follow_parent(os.getppid(), lambda: None, before_exit=lambda: None, grace_s=0.0)
print(os.getpid(), flush=True)
while True:
    time.sleep(0.001)
"""
SERVER = """
from longstep_bindings.server import Server

class Nothing:
    name, version, methods = "test.nothing", 1, {}
    def close_session(self, session): pass

server = Server(Nothing())
print("ready", flush=True)
server.serve_forever()
print("ended", flush=True)
"""


def _storm(pid, number, count):
    """Send a signal again and again, so that handlers interrupt each other."""
    for _ in range(count):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's death")
def test_a_storm_of_signals_does_not_keep_a_process_from_following_its_parent():
    program = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {FOLLOWER!r}]); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        _storm(pid, signal.SIGRTMIN + 3, 20_000)
        parent.kill()
        _storm(pid, signal.SIGRTMIN + 3, 20_000)
        end_at = time.monotonic() + 30.0
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < end_at:
            time.sleep(0.05)
        try:
            assert not os.path.exists(f"/proc/{pid}")
        finally:
            if os.path.exists(f"/proc/{pid}"):
                os.kill(pid, signal.SIGKILL)


def test_a_storm_of_sigterm_ends_a_server():
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == b"ready\n"
        _storm(server.pid, signal.SIGTERM, 20_000)
        try:
            assert server.wait(30.0) in (0, -signal.SIGTERM)
        finally:
            server.kill()
