"""Sockets and addresses: where a server may listen, how a message is read within limits, what is cleaned up after.

Addresses are `ipc://path` and `tcp://host:port`. Without CURVE keys only ipc and loopback are allowed. The socket file
of an ipc server lives in a folder of its own that only this user can enter, named after the server's process, so that
a later start can sweep up what a killed process left behind.
"""

from __future__ import annotations

import ipaddress
import math
import os
import select
import shutil
import socket
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import zmq
from zmq.backend import Socket as _BackendSocket

from longstep.errors import ConfigError, ProtocolError
from longstep_bindings.limits import Limits
from longstep_bindings.waker import Waker

__all__ = [
    "check_address",
    "check_free",
    "is_loopback",
    "private_ipc_address",
    "receive",
    "send",
    "tidy_ipc",
]

ZERO_COPY_BYTES = 256 * 1024
"""Frames from this size are handed over to libzmq without a copy; below it the copy is cheaper."""
_VIEW_BYTES = 16 * 1024
"""Frames from this size are read where libzmq put them."""
_NOW = int(
    zmq.DONTWAIT
)  # plain integers: an operation on zmq's enums costs as much as receiving a frame
_NOW_AND_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
_IN = int(zmq.POLLIN)
_send_frame = _BackendSocket.send
"""What `zmq.Socket.send` ends in, once it has looked at options that are not used here."""
_FOLDER_PREFIX = "longstep-ipc-"
_MAX_IPC_PATH = 100


def is_loopback(address: str) -> bool:
    """True for ipc and for tcp on this machine's loopback interface."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return True
    host = rest.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def check_address(address: str, *, has_keys: bool) -> None:
    """Raise `ConfigError` for an address of another kind, or one off this machine without CURVE keys."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("ipc", "tcp") or not rest:
        raise ConfigError(f"expected ipc://path or tcp://host:port, got `{address}`")
    port = rest.rpartition(":")[2]
    if scheme == "tcp" and port != "*" and not (port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(
            f"expected tcp://host:port with a port below 65536 or `*`, got `{address}`"
        )
    if not has_keys and not is_loopback(address):
        raise ConfigError(
            f"expected CURVE keys for `{address}`, which other machines can reach; "
            "make some with `longstep keys new`, or use ipc:// or tcp://127.0.0.1"
        )


def check_free(address: str) -> None:
    """Raise `ConfigError` when a server at an ipc address would take another's place, or a file's; libzmq does not ask."""
    path = Path(address.removeprefix("ipc://"))
    if not address.startswith("ipc://") or not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(
            f"expected a path for a socket, got `{address}`, which is something else; choose another"
        )
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1.0)
        with suppress(OSError):
            probe.connect(str(path))
            raise ConfigError(
                f"expected an address that nobody serves at, got `{address}`, which is in use"
            )


def private_ipc_address() -> str:
    """An ipc address in a new folder that only this user can enter; `tidy_ipc` removes it."""
    sweep_ipc()
    folder = tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-")
    if len(folder) + 2 > _MAX_IPC_PATH:  # sockaddr_un holds 107 bytes
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-", dir="/tmp")
    return f"ipc://{folder}/s"


def tidy_ipc(address: str) -> None:
    """Remove the socket file of `address`, and its folder if `private_ipc_address` made it."""
    if not address.startswith("ipc://"):
        return
    path = Path(address.removeprefix("ipc://"))
    path.unlink(missing_ok=True)
    if path.parent.name.startswith(_FOLDER_PREFIX):
        with suppress(OSError):
            path.parent.rmdir()


def sweep_ipc() -> None:
    """Remove this user's private ipc folders whose process is gone."""
    for root in {tempfile.gettempdir(), "/tmp"}:
        for folder in Path(root).glob(f"{_FOLDER_PREFIX}*-*"):
            pid = folder.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
            with suppress(OSError):
                if pid.isdigit() and folder.stat().st_uid == os.getuid() and not _alive(int(pid)):
                    shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def prepare(socket: zmq.Socket[bytes], address: str, limits: Limits, *, queue_length: int) -> None:
    """Set what both ends share: bounded frames and queues, nothing kept back when the socket closes."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, queue_length)
    socket.setsockopt(zmq.RCVHWM, queue_length)
    # libzmq closes the connection of a peer that announces a larger frame, before it allocates
    largest = max(limits.max_head_bytes, limits.max_body_bytes, limits.max_frame_bytes)
    socket.setsockopt(zmq.MAXMSGSIZE, largest)
    socket.setsockopt(zmq.IPV6, int("[" in address))


def receive(
    socket: zmq.Socket[bytes], limits: Limits, *, routed: bool
) -> tuple[bytes, list[bytes | memoryview]]:
    """The peer's address within the socket (empty unless `routed`) and the frames of one waiting message.

    Raises:
        zmq.Again: No message is waiting.
        OversizeError: The message exceeds the limits; it has been read and dropped.
    """
    frames: list[bytes | memoryview] = []
    route, num_frames, total, more = b"", 0, 0, True
    if routed:
        frame = socket.recv(_NOW, False)
        route, more = frame.bytes, frame.more
    while more:
        frame = socket.recv(_NOW, False)
        more = frame.more
        size = len(frame)
        num_frames += 1
        total += size
        if num_frames <= limits.max_frames + 2 and total <= limits.max_message_bytes:
            frames.append(frame.bytes if size < _VIEW_BYTES or num_frames == 1 else frame.buffer)
        else:
            frames.clear()
    if num_frames > limits.max_frames + 2 or total > limits.max_message_bytes:
        raise OversizeError(route, f"got {num_frames} frames of {total} bytes, more than allowed")
    if not frames or len(frames[0]) > limits.max_head_bytes:
        raise OversizeError(route, "got no head, or one that is too long")
    return route, frames


class OversizeError(ProtocolError):
    """A message exceeded the limits and was dropped; `route` is where it came from."""

    def __init__(self, route: bytes, message: str) -> None:
        super().__init__(message)
        self.route = route


def send(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    """Queue one message; raises `zmq.Again` or `zmq.ZMQError(EHOSTUNREACH)` and then has queued none of it."""
    last = frames[-1]
    for frame in frames[:-1]:
        _send_frame(socket, frame, _NOW_AND_MORE, len(frame) < ZERO_COPY_BYTES)
    _send_frame(socket, last, _NOW, len(last) < ZERO_COPY_BYTES)


class Poller:
    """Waits until a message may be there, or a waker was woken; touches neither, so no lock is needed meanwhile.

    libzmq's descriptor tells of changes: whoever has used the socket has to look for messages before it lets go of it,
    since a change that it took note of on the way is not told again.
    """

    def __init__(self, waker: Waker, *sockets: int) -> None:
        """Args:
        waker: Cleared by whoever waits.
        sockets: Descriptors of sockets, see `descriptor`.
        """
        self._waker, self._waker_fd = waker, waker.fileno()
        self._poll = select.poll()
        for fd in (self._waker_fd, *sockets):
            self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float | None) -> list[int]:
        """Wait until then at most; None is for ever. The waker is clear afterwards.

        Returns:
            Descriptors of the sockets that may have a message.
        """
        timeout_ms = None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))
        ready: list[int] = []
        for fd, _ in self._poll.poll(timeout_ms):
            if fd == self._waker_fd:
                self._waker.clear()
            else:
                ready.append(fd)
        return ready


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """What to wait on for messages of `socket`."""
    return int(socket.get(zmq.FD))


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """True when a message can be received without waiting."""
    return bool(zmq.zmq_poll([(socket, _IN)], 0))  # faster than asking for the option
