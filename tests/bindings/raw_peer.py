"""A peer that says whatever a test wants it to say, and hears what comes."""

import os

import zmq

from longstep_bindings.heads import Kind, pack_head, unpack_head
from longstep_bindings.wire import encode

__all__ = ["RawPeer"]


class RawPeer:
    """A DEALER socket and nothing more."""

    def __init__(self, address, *, service, version=1):
        self.address = address
        self.token = os.urandom(16)
        self._asked = {"name": "raw", "service": service, "service_version": version}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(linger=0)

    def send(self, *frames):
        self._socket.send_multipart(frames)

    def tell(self, kind, *fields, frames=()):
        self.send(pack_head(kind, self.token, *fields), *frames)

    def request(self, seq, method, value=None, *, open_seqs=None, upto=None, ms=60_000):
        open_seqs = [seq] if open_seqs is None else open_seqs
        fields = (seq, upto or max([seq, *open_seqs]), open_seqs, ms, method)
        self.tell(Kind.REQUEST, *fields, frames=encode(value))

    def hear(self, timeout_s=30.0):
        """Head and further frames of the next message; None when none comes in time."""
        if not self._socket.poll(timeout_s * 1000):
            return None
        head, *frames = self._socket.recv_multipart()
        return unpack_head(head), frames

    def hello(self, **changes):
        self.tell(Kind.HELLO, {**self._asked, **changes})
        return self.hear()[0]
