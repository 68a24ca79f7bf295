"""D6 to D9 on GEM, run by an interpreter that has it; prints one line of JSON."""

import json
import logging
import random
import threading
import time

from gem.core import Env, EnvWrapper
from gem.vector.async_vector_env import AsyncVectorEnv


class Counter(Env):
    """Shows its number of steps and a draw of the global generator that `reset` seeds; ends after `length` steps."""

    def __init__(self, length=1000):
        self.length, self.count = length, 0

    def reset(self, seed=None):
        super().reset(seed)
        self.count = 0
        return "start", {}

    def step(self, action):
        if action == "raise":
            raise RuntimeError("no luck")
        self.count += 1
        time.sleep(0.001)
        shown = f"count {self.count} draw {random.random():.6f}"
        return shown, 0.0, self.count >= self.length, False, {"last": self.count}


def d6_terminal_observation():
    envs = AsyncVectorEnv(["a"], [lambda: Counter(2)])
    envs.reset(seed=1)
    envs.step(["a"])
    told = repr(envs.step(["a"]))
    return (
        "count 2" not in told,
        f"the last observation of an episode is in the result: {'count 2' in told}",
    )


def d7_same_seed_in_threads():
    seen = [None] * 4

    def play(number):
        env = Counter()
        env.reset(seed=7)
        seen[number] = [env.step("a")[0] for _ in range(20)]

    threads = [threading.Thread(target=play, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    num = len({tuple(one) for one in seen})
    return num > 1, f"4 threads with one seed: {num} different histories"


def d8_wrapper_attribute():
    env = EnvWrapperOf(Counter())
    env.reset(seed=1)
    env.step("a")
    return env.count != 1, f"after one step the wrapper's count is {env.count}"


class EnvWrapperOf(EnvWrapper):
    def reset(self, seed=None):
        return self.env.reset(seed)

    def step(self, action):
        return self.env.step(action)


def d9_one_raises():
    envs = AsyncVectorEnv(["a", "b"], [Counter, Counter])
    envs.reset(seed=1)
    try:
        envs.step(["a", "raise"])
        return False, "answers"
    except RuntimeError:
        moved = envs.envs[0].count
        return True, f"the whole step raises, the other environment is at count {moved}"


logging.disable(logging.CRITICAL)
CHECKS = {
    "D6": d6_terminal_observation,
    "D7": d7_same_seed_in_threads,
    "D8": d8_wrapper_attribute,
    "D9": d9_one_raises,
}

if __name__ == "__main__":
    print(json.dumps({name: check() for name, check in CHECKS.items()}))
