"""Environments for interpreters without longstep: no imports but the standard library, in syntax of Python 3.8."""

import sys
import time


class Corridor:
    """Walk right to the end. Says which Python runs it; `log` is a file that tells each step as it is executed."""

    def __init__(self, length=3, log=None):
        self.length, self.log = length, log

    def reset(self, *, seed=None, options=None):
        self.place = 0 if seed is None else seed % self.length
        self.note(f"reset {seed}")
        info = {"task_description": "go to the end", "python": list(sys.version_info[:2])}
        info.update(options or {})
        return self.seen(), dict(info, admissible_actions=["left", "right"])

    def step(self, action):
        self.note(f"step {action}")
        if action == "boom":
            raise ValueError("no such door")
        if action.startswith("sleep"):
            time.sleep(float(action.split()[1]))
        self.place = max(0, self.place + {"left": -1, "right": 1}.get(action, 0))
        done = self.place >= self.length
        info = {"admissible_actions": ["left", "right"], "success": done}
        if action == "odd":
            info["odd"] = object()
        return self.seen(), float(done), done, False, info

    def seen(self):
        return f"You stand at {self.place} of {self.length}."

    def note(self, text):
        if self.log:
            with open(self.log, "a") as file:
                file.write(text + "\n")

    def snapshot(self):
        return self.place

    def restore(self, snapshot):
        self.place = snapshot

    def close(self):
        self.note("close")


class Discrete:
    """The old Gym's space of numbered actions."""

    n = 2


class OldCorridor(Corridor):
    """The same as an environment of the old Gym: a bare observation, four values, a method that seeds."""

    action_space = Discrete()
    action_names = ("left", "right")
    seeded = None

    def seed(self, seed=None):
        self.seeded = seed

    def reset(self):
        return super().reset(seed=self.seeded)[0]

    def step(self, action):
        observation, reward, done, _, info = super().step(self.action_names[action])
        if not done and self.place == 0:
            return observation, reward, True, dict(info, **{"TimeLimit.truncated": True})
        return observation, reward, done, info


class Numbers:
    """Observes an array; says which numpy made it."""

    def __init__(self):
        import numpy

        self.numpy = numpy

    def reset(self, seed=None):
        self.state = self.numpy.arange(5000, dtype="float32") + seed
        return self.state, {"numpy": self.numpy.__version__, "python": list(sys.version_info[:2])}

    def step(self, action):
        self.state += 1
        return (
            self.state,
            self.numpy.float32(0.5),
            self.numpy.bool_(False),
            False,
            {"action": action},
        )
