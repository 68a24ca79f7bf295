"""OpenEnv's websocket server and clients with the environment of `bench_transport`, run by an interpreter that has it.

    python openenv_transport.py NUM_ENVS SECONDS      prints steps per second

The server is one uvicorn process, as OpenEnv starts it; each environment is a session with a client and socket of its
own, and all clients run at once in one event loop.
"""

import asyncio
import socket
import subprocess
import sys
import time

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

PAGES = [f"page {number} " + "x" * 592 for number in range(2)]


class Said(Action):
    text: str = ""


class Page(Observation):
    text: str = ""


class TextEnv(Environment):
    """Does nothing and shows 600 characters."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Page(text=PAGES[0])

    def step(self, action, timeout_s=None, **kwargs):
        return Page(text=PAGES[len(action.text) % 2])

    @property
    def state(self):
        return self._state


def serve(port):
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app

    app = create_fastapi_app(TextEnv, Said, Page, max_concurrent_envs=4096)
    uvicorn.run(app, port=port, log_level="warning")


async def steps_per_second(address, num_envs, seconds):
    from openenv.core.generic_client import GenericEnvClient

    clients = [GenericEnvClient(address) for _ in range(num_envs)]
    for client in clients:
        await client.connect()
        await client.reset()
    end_at = time.perf_counter() + seconds

    async def run(client):
        num_steps = 0
        while time.perf_counter() < end_at:
            await client.step({"text": "go"})
            num_steps += 1
        return num_steps

    start = time.perf_counter()
    counts = await asyncio.gather(*map(run, clients))
    rate = sum(counts) / (time.perf_counter() - start)
    for client in clients:
        await client.close()
    return rate


def main(num_envs, seconds):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(port)])
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        print(asyncio.run(steps_per_second(f"http://127.0.0.1:{port}", num_envs, seconds)))
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(int(sys.argv[2]))
    else:
        main(int(sys.argv[1]), float(sys.argv[2]))
