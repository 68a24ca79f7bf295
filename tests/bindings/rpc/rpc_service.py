"""A service for tests, and a process that serves it: python rpc_service.py ADDRESS [PARENT_PID]."""

import queue
import sys
import time

from longstep import errors
from longstep_bindings.rpc import LATER, Server, Terms


class Recorder:
    """Remembers what was executed."""

    name, version = "test.recorder", 1

    def __init__(self, hang=None):
        self.notes = []
        self.held = []
        self.closed = queue.SimpleQueue()
        self._hang = hang
        self.methods = {
            "add": self.add,
            "echo": lambda call: call.value,
            "fail": self.fail,
            "hold": self.hold,
            "note": self.note,
            "sleep": self.sleep,
            "spoil": lambda call: {"x": object()},
        }

    def add(self, call):
        call.session.state = (call.session.state or 0) + call.value
        return call.session.state

    def fail(self, call):
        kind = getattr(errors, call.value, ZeroDivisionError)
        raise kind("told")

    def hold(self, call):
        self.held.append(call)
        return LATER

    def note(self, call):
        self.notes.append(call.value)
        return len(self.notes) - 1

    def sleep(self, call):
        if call.value is None:
            self._hang.wait()
        else:
            time.sleep(call.value)

    def close_session(self, session):
        self.closed.put(session.name)


if __name__ == "__main__":
    address, *parent = sys.argv[1:]
    server = Server(Recorder(), address, terms=Terms(heartbeat_s=0.1, lost_after_s=2.5))
    print(server.address, flush=True)
    server.serve_forever(parent_pid=int(parent[0]) if parent else None)
