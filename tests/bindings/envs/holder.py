"""A parent for `test_clean_ends`: python holder.py HOW. It prints the ids of all processes it has, then ends as told."""

import os
import signal
import subprocess
import sys
import time

from helpers import reset, step
from worker_envs import counter

from longstep_bindings import launch
from longstep_bindings.envs import EnvServer, EnvSpec, RemoteVectorEnv


def rest():
    """Wait for a signal. One that comes just before a sleep is heard only after it, so that none may be long."""
    for _ in range(10_000):
        time.sleep(0.1)


if __name__ == "__main__":
    # ignored in what a shell started in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    how, *options = sys.argv[1:]
    if "serve" in options:
        held = EnvServer(EnvSpec(entry_point="worker_envs:counter"), num_workers=2)
        envs = RemoteVectorEnv.connect(held.addresses, 2)
    else:
        held = envs = RemoteVectorEnv(counter, 2, num_workers=2)
    reset(envs, {0: 1, 1: 1})
    child = step(envs, {0: "spawn"})[0].info["child"]
    if "hang" in options:
        from helpers import commands

        envs.send(commands({0: "hang", 1: "stop"}))
        time.sleep(1.0)
    reaper = launch._reapers._process.pid
    print(*held.worker_pids, reaper, child, flush=True)
    if how == "close":
        envs.close()
        held.close()
        left = subprocess.run(
            ["ps", "--ppid", str(os.getpid()), "-o", "comm="], capture_output=True
        )
        assert left.stdout.split() == [b"ps"], left.stdout
    elif how == "raise":
        raise RuntimeError("on purpose")
    elif how == "forget":
        pass
    elif how == "exit":
        os._exit(3)
    else:
        if how == "with":
            with envs:
                rest()
        rest()
