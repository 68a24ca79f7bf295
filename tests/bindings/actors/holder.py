"""A parent for `test_clean_ends`: python holder.py HOW [OPTION ...]. It prints its processes, then ends as told."""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from actor_helpers import gather, plain_pool, request, requests
from safetensors.numpy import save_file

from longstep_bindings import launch
from longstep_bindings.actors import ActorPolicy, ActorPool


def rest():
    """Wait for a signal. One that comes just before a sleep is heard only after it, so that none may be long."""
    for _ in range(10_000):
        time.sleep(0.1)


if __name__ == "__main__":
    # ignored in what a shell started in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    how, *options = sys.argv[1:]
    is_elsewhere = "elsewhere" in options
    pool = ActorPool.connect(os.environ["ADDRESS"]) if is_elsewhere else plain_pool(2)
    policy = ActorPolicy(pool)
    policy.submit(requests("say x", 4))
    gather(policy, 4)

    class Model:
        """As much of a model as is packed."""

        def state_dict(self):
            import torch

            return {"w": torch.zeros(4, 2)}

    if "update" in options:
        policy.update_weights(Model(), 1)
    else:
        path = Path(tempfile.mkdtemp()) / "model.safetensors"
        save_file({"w": np.zeros((4, 2), np.float32)}, path)
        policy.update_weights(path, 1)
        path.unlink()
        path.parent.rmdir()
    policy.submit([request("late", "stop" if "stop" in options else "hang")])
    time.sleep(0.3)
    reaper = launch._reapers._process
    print(*filter(None, pool.actor_pids), *([reaper.pid] if reaper else []), flush=True)
    if how == "close":
        policy.close()
    elif how == "raise":
        raise RuntimeError("on purpose")
    elif how == "exit":
        os._exit(3)
    elif how != "forget":
        rest()
