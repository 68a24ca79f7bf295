"""Rollout bookkeeping: microseconds a step beside a bare loop. Run: `pytest benchmarks/bench_rollout_loop.py`.

Environment and policy do next to nothing, so what differs is the loop. Baseline, in the same run: a `for` loop over the
same environments that asks the same policy one request at a time and keeps only the texts. pytest-benchmark's table has
the ratios in brackets, of processor time, so that other work on the machine counts little; `us_per_step` is in the
extra information.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from longstep.policy import FunctionPolicy
from longstep.rollout import Rollout
from longstep.types import GenerationRequest, Message, Prompt, Task

NUM_TASKS, GROUP_SIZE, LENGTH = 16, 8, 20
NUM_STEPS = NUM_TASKS * GROUP_SIZE * LENGTH
TASKS = [Task(env_id="count", seed=seed) for seed in range(NUM_TASKS)]


class Count:
    """A text environment of `LENGTH` steps with the info that `LLMAgentEnv` gives, all of it made beforehand."""

    infos = tuple(
        {
            "prompt": Prompt(messages=(Message(role="user", content=f"state {step}"),)),
            "observation": f"state {step}",
            "state_key": step.to_bytes(16, "little"),
            "action": "go",
            "action_valid": True,
            "action_reason": "",
            "raw_reward": 1.0,
            "success": step == LENGTH,
        }
        for step in range(LENGTH + 1)
    )
    num_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.num_steps = 0
        return "", self.infos[0]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        return "", 1.0, self.num_steps == LENGTH, False, self.infos[self.num_steps]

    def close(self) -> None:
        pass


def bare_loop(policy: FunctionPolicy) -> int:
    texts: list[str] = []
    env = Count()
    for task in TASKS:
        for _ in range(GROUP_SIZE):
            _, info = env.reset(seed=task.seed)
            done = False
            while not done:
                request = GenerationRequest(request_id=str(len(texts)), prompt=info["prompt"])
                policy.submit([request])
                (completion,) = policy.poll(0.0)
                texts.append(completion.text)
                _, _, terminated, truncated, info = env.step(completion.text)
                done = terminated or truncated
    return len(texts)


@pytest.mark.parametrize("loop", ["bare", "rollout_128_envs", "rollout_8_envs"])
@pytest.mark.benchmark(
    group="rollout loop", timer=time.process_time, min_rounds=5, warmup=True, warmup_iterations=1
)
def test_steps(benchmark: Any, loop: str) -> None:
    policy = FunctionPolicy(lambda request: "go")
    play: Callable[[], int]
    if loop == "bare":
        play = lambda: bare_loop(policy)  # noqa: E731
    else:
        num_envs = int(loop.split("_")[1])
        rollout = Rollout(Count, policy, group_size=GROUP_SIZE, num_envs=num_envs)  # type: ignore[arg-type]
        play = lambda: len(rollout.collect(TASKS).rows)  # noqa: E731
    assert benchmark(play) == NUM_STEPS
    if benchmark.stats is not None:  # None under --benchmark-disable
        benchmark.extra_info["us_per_step"] = benchmark.stats.stats.min / NUM_STEPS * 1e6
        benchmark.extra_info["unit"] = "microseconds per step, best round"
