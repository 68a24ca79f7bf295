"""An environment whose observation cannot travel, once it is told so."""

import threading

import gymnasium

from longstep.spaces import TextSpace


class OddEnv(gymnasium.Env):
    observation_space = action_space = TextSpace()

    def reset(self, *, seed=None, options=None):
        return "here", {}

    def step(self, action):
        shown = {"view": [1, threading.Lock()]} if action == "odd" else "here"
        return shown, 0.0, False, False, {}
