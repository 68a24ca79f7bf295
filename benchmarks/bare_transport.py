"""What ZeroMQ and msgpack alone allow: `bench_transport`'s environment with none of the duties of a transport.

    python benchmarks/bare_transport.py NUM_ENVS NUM_WORKERS SECONDS

Prints steps per second. Columns go out and come back in one message for each worker. Nothing is checked, remembered, timed
or sent again: no session, deadline, heartbeat, reply cache, history, and no result's id. So this is no transport that
anybody could use, but a bound of what one in Python can reach on a machine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

import msgpack
import zmq

from longstep_bindings.envs.transport_bench import TextEnv


def serve(address: str, num_envs: int) -> None:
    """Step environments until killed."""
    envs = [TextEnv() for _ in range(num_envs)]
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(address)
    while True:
        route, body = socket.recv_multipart()
        slots, actions = msgpack.unpackb(body)
        steps = [envs[slot].step(action) for slot, action in zip(slots, actions, strict=True)]
        columns = list(map(list, zip(*steps, strict=True)))
        socket.send_multipart([route, msgpack.packb(columns[:4])])


def drive(num_envs: int, num_workers: int, seconds: float) -> float:
    """Steps per second, each worker told again as soon as it has answered."""
    share = num_envs // num_workers
    workers: list[subprocess.Popen[bytes]] = []
    poller = zmq.Poller()
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        try:
            for number in range(num_workers):
                address = f"ipc://{folder}/{number}"
                command = [sys.executable, __file__, "serve", address, str(share)]
                workers.append(subprocess.Popen(command))
                socket = context.socket(zmq.DEALER)
                socket.linger = 0
                socket.connect(address)
                poller.register(socket, zmq.POLLIN)
                socket.send(msgpack.packb([list(range(share)), ["go"] * share]))
            for socket, _ in poller.sockets:  # the first answer says that its worker is there
                socket.poll(60_000)
            num_steps, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds:
                for socket, _ in poller.poll():
                    observations = msgpack.unpackb(socket.recv())[0]
                    num_steps += len(observations)
                    actions = ["go" if observation else "" for observation in observations]
                    socket.send(msgpack.packb([list(range(share)), actions]))
            return num_steps / (time.perf_counter() - start)
        finally:
            for socket, _ in poller.sockets:
                socket.close()
            for worker in workers:
                worker.kill()
                worker.wait()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        print(drive(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
