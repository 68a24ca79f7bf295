"""How many steps a second cross to environments elsewhere: `longstep bench transport`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import gymnasium

from longstep.commands import (
    CommandBatch,
    EnvCommand,
    EnvResult,
    ResultBatch,
    VectorEnv,
    next_command_id,
)
from longstep.errors import EnvError
from longstep.spaces import TextSpace
from longstep.types import Task
from longstep.vector import GroupVectorEnv
from longstep_bindings.envs.client import RemoteVectorEnv
from longstep_bindings.envs.server import EnvServer
from longstep_bindings.envs.spec import EnvSpec

__all__ = ["TextEnv", "batched_steps_per_second", "measure", "steps_per_second"]

KEYDOOR = "longstep/KeyDoor-v0"


class TextEnv(gymnasium.Env[str, str]):
    """Does nothing and shows 600 characters: what is left is transport."""

    def __init__(self) -> None:
        self.observation_space = self.action_space = TextSpace()
        self._pages = [f"page {number} " + "x" * 592 for number in range(2)]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The first page."""
        return self._pages[0], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One of two pages, by the length of what was said."""
        return self._pages[len(action) % 2], 0.0, False, False, {}


def steps_per_second(
    envs: VectorEnv, env_id: str, seconds: float, choose: Callable[[EnvResult], str]
) -> float:
    """Steps taken, each environment again as soon as it has answered, after one round that is not counted."""

    def reset(slot: int) -> EnvCommand:
        return EnvCommand(slot=slot, command_id=next_command_id(), task=Task(env_id=env_id, seed=1))

    envs.send([reset(slot) for slot in range(envs.num_envs)])
    results, num_steps, start = envs.recv(envs.num_envs), 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        commands: list[EnvCommand] = []
        for result in results:
            if result.error is not None:
                raise EnvError(result.error)
            if result.terminated or result.truncated:
                commands.append(reset(result.slot))
            else:
                action = choose(result)
                command_id = next_command_id()
                commands.append(EnvCommand(slot=result.slot, command_id=command_id, action=action))
        envs.send(commands)
        results = envs.recv()
        num_steps += len(results)
    elapsed_s = time.perf_counter() - start
    envs.recv(envs.num_envs)
    return num_steps / elapsed_s


def batched_steps_per_second(envs: VectorEnv, seconds: float) -> float:
    """The same of environments that never end, by columns: a batch comes, a batch goes."""
    tasks = [Task(env_id="", seed=1)] * envs.num_envs
    starts = [
        EnvCommand(slot=slot, command_id=next_command_id(), task=task)
        for slot, task in enumerate(tasks)
    ]
    envs.send(starts)
    results, num_steps, start = _batch(envs.recv(envs.num_envs)), 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        if any(results.errors):
            raise EnvError(f"expected no error, got {set(results.errors)}")
        actions = ["go" if observation else "" for observation in results.observations]
        envs.send(CommandBatch(results.slots, actions))
        results = _batch(envs.recv())
        num_steps += len(results)
    elapsed_s = time.perf_counter() - start
    envs.recv(envs.num_envs)
    return num_steps / elapsed_s


def _batch(results: Sequence[EnvResult]) -> ResultBatch:
    return results if isinstance(results, ResultBatch) else ResultBatch.of(results)


def measure(num_envs: int, num_workers: int, seconds: float) -> Iterator[tuple[str, float]]:
    """What was measured and its steps per second, one after the other."""
    raw = EnvSpec(entry_point=f"{__name__}:TextEnv", wrap=False)
    agent = EnvSpec(env_id=KEYDOOR)

    def say(_: EnvResult) -> str:
        return "go"

    def obey(result: EnvResult) -> str:
        return result.info["allowed_completions"][0]

    def rates(kind: str, envs: VectorEnv) -> Iterator[tuple[str, float]]:
        if kind == "raw":
            yield "600 characters, by columns", batched_steps_per_second(envs, seconds)
            yield "600 characters, by records", steps_per_second(envs, "", seconds, say)
        else:
            yield "KeyDoor, prompts", steps_per_second(envs, KEYDOOR, seconds, obey)

    for kind, spec in (("raw", raw), ("agent", agent)):
        with RemoteVectorEnv(spec, num_envs, num_workers=num_workers) as envs:
            for name, rate in rates(kind, envs):
                yield f"{name}: ipc", rate
        with (
            EnvServer(spec, "tcp://127.0.0.1:*", num_workers=num_workers) as server,
            RemoteVectorEnv.connect(server.addresses, num_envs, wrap=False) as envs,
        ):
            for name, rate in rates(kind, envs):
                yield f"{name}: tcp", rate
    with closing(GroupVectorEnv(KEYDOOR, num_envs)) as envs:
        yield "KeyDoor, prompts: in process", steps_per_second(envs, KEYDOOR, seconds, obey)
