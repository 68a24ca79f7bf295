"""Environments that workers make in these tests: they count, and misbehave when told to."""

import os
import signal
import subprocess
import time

import gymnasium
import numpy as np
from gymnasium import spaces

from longstep import LLMAgentEnv, Task, register
from longstep.spaces import TextSpace


class Counter(gymnasium.Env):
    """Counts its steps. What it is told is what it does: `die`, `hang`, `raise`, `sleep 0.1`, `info nan` and the like."""

    observation_space = TextSpace()
    action_space = TextSpace()

    def __init__(self, *, length=1000, noise=False, folder=None):
        self.length, self.noise, self.folder = length, noise, folder

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.start = 0, int(self.np_random.integers(1000))
        if options and options.get("raise"):
            raise ValueError("reset refused")
        return self._observe(), {"task_description": "count", "options": options}

    def _observe(self):
        noise = f" pid {os.getpid()}" if self.noise else ""
        return f"start {self.start} count {self.count}{noise}"

    def step(self, action):
        self.count += 1
        if self.folder is not None:
            with open(os.path.join(self.folder, f"{self.start}"), "a") as file:
                file.write(f"{self.count}\n")
        word, _, rest = action.partition(" ")
        info = {}
        if word == "die":
            os._exit(7)
        elif word == "die-once":
            self._once(rest, lambda: os._exit(7))
        elif word == "hang":
            time.sleep(1000)
        elif word == "hang-once":
            self._once(rest, lambda: time.sleep(1000))
        elif word == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif word == "raise":
            raise RuntimeError(rest)
        elif word == "sleep":
            time.sleep(float(rest))
        elif word == "spawn":
            child = subprocess.Popen(["sleep", "1000"])
            info["child"] = child.pid
        elif word == "info":
            info["deep"] = {"list": [1, INFOS[rest]]}
        over = self.count >= self.length
        return self._observe(), 0.5, over, False, info

    def _once(self, path, act):
        if not os.path.exists(path):
            open(path, "x").close()
            act()

    def snapshot(self):
        return {"count": self.count, "start": self.start}

    def restore(self, snapshot):
        self.count, self.start = snapshot["count"], snapshot["start"]
        return self._observe(), {}


INFOS = {"object": object(), "nan": float("nan"), "surrogate": "\ud800", "key": {(1, 2): 3}}


class Camera(gymnasium.Env):
    """Shows pictures."""

    observation_space = spaces.Box(0, 255, (48, 64, 3), np.uint8)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._picture(), {"map": np.arange(12, dtype=np.float32).reshape(3, 4)}

    def _picture(self):
        return self.np_random.integers(0, 256, (48, 64, 3), dtype=np.uint8)

    def step(self, action):
        reward = float(action == 1)
        return self._picture(), reward, False, False, {"level": np.int64(3), "tags": ("a", {"b"})}


def counter(**kwargs):
    """A counter that takes every completion as its action."""
    return LLMAgentEnv(Counter(**kwargs), parser=Everything())


class Everything:
    """Reads every completion as an action."""

    def parse(self, completion, admissible):
        from longstep.types import Action

        return Action(text=completion, valid=completion != "invalid", reason="told so")


def broken(**kwargs):
    raise OSError("no such game")


def not_an_environment():
    return 3


def never():
    time.sleep(1000)


def task(seed, env_id="test/Counter-v0", **options):
    return Task(env_id=env_id, seed=seed, options=options or None)


register("test/Counter-v0", counter)
