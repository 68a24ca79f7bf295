"""D1 and D2 on OpenEnv, over its websocket, run by an interpreter that has it; prints one line of JSON."""

import json
import socket
import subprocess
import sys
import time

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    wait_s: float = 0.0


class Seen(Observation):
    count: int = 0


class Counter(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.count = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = 0
        return Seen(count=0)

    def step(self, action, timeout_s=None, **kwargs):
        time.sleep(action.wait_s)
        self.count += 1
        return Seen(count=self.count)

    @property
    def state(self):
        return State(step_count=self.count)


def serve(port):
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app

    app = create_fastapi_app(Counter, Said, Seen, max_concurrent_envs=8)
    uvicorn.run(app, port=port, log_level="warning")


def count_of(result):
    seen = result.observation
    return seen["count"] if isinstance(seen, dict) else seen.count


def try_client(address):
    from openenv.core.generic_client import GenericEnvClient

    found = {}
    client = GenericEnvClient(address, message_timeout_s=1.0).sync()
    with client:
        client.reset()
        before = [count_of(client.step({})) for _ in range(2)][-1]
        try:
            client.step({"wait_s": 3.0})
            told = "answers"
        except Exception as error:
            told = type(error).__name__
        try:
            after = count_of(client.step({}))
            text = f"count {before}, then {told} after 1 s, then a step shows count {after}"
            found["D1"] = (after < before, text)
        except Exception as error:
            found["D1"] = (False, f"after {told} the next step raises {type(error).__name__}")
    client = GenericEnvClient(address, message_timeout_s=20.0).sync()
    with client:
        client.reset()
        began = time.monotonic()
        try:
            client.step({"wait_s": 6.0})
            told = "answers"
        except Exception as error:
            told = type(error).__name__
        took = time.monotonic() - began
        found["D2"] = (
            took > 2.0,
            f"no deadline can be set; a step that hangs for 6 s: {told} after {took:.1f} s",
        )
    return found


def main():
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
        print(json.dumps(try_client(f"http://127.0.0.1:{port}")))
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    serve(int(sys.argv[2])) if len(sys.argv) > 2 else main()
