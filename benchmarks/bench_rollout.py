"""What lock-step rollouts cost, what the actor costs, and what asynchronous training gives; all in one run.

    python benchmarks/bench_rollout.py [--lines waste latency transfers actor training] [--rounds 3]

The baseline is our own version of how verl-agent rolls out: all environments step together, every step generates for
every environment, those that have finished too, until the last one has; and the weights go to the engine again before
each step. It is charitable: finished environments are not stepped, the weights are counted and not sent, and the engine is
the same. Against it `Rollout.collect`, with the engine in this process and through one actor: same model, same tasks, same
episodes. Environments run in threads and really sleep.

- waste: tokens of rows that are trained on / tokens generated, by success rate. Aim: at least 0.95.
- latency: rows per second when step times are lognormal, over lock step. Aim: 2, 4 and 5.5 for sigma 0.5, 1 and 1.5.
  16 groups of 8, which is verl-agent's batch, of at most 20 steps, on 32 environments: lock step plays them in four waves,
  a continuous rollout at once, each slot being taken again when it is free. "Wave by wave" is the continuous one with
  lock step's barriers between the waves. Beside it what the drawn times allow, were generation free: other draws allow
  2.7, 5.1 and 6.3 on average, and two waves of 10 steps no more than 2.2, 3.7 and 4.4.
- transfers: weight transfers per iteration. Aim: 1.
- actor: time that the actor adds to the same requests on the same engine in this process, by the clock and of
  processors, which other work on the machine changes less. Aim: under 5%.
- training: iterations per second, asynchronous (staleness 1) over synchronous, both through one actor.

On a shared machine noise only slows: of several rounds the best counts, and ways take turns.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import queue
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np

from longstep.actions import RegexParser
from longstep.commands import EnvCommand, EnvResult, next_command_id
from longstep.env import LLMAgentEnv
from longstep.memory import WindowMemory
from longstep.policy import EnginePolicy, Policy
from longstep.prompt import PromptTemplate
from longstep.rollout import Rollout
from longstep.spaces import TextSpace
from longstep.types import GenerationRequest, Message, Prompt, Task
from longstep_bindings.engines.transformers_engine import TransformersEngine
from longstep_trainers.model import build_embedded

MAX_STEPS, GROUP_SIZE, NUM_ENVS = 20, 8, 32
NUM_WAVES = 4
"""Trajectories for each environment."""
NUM_TASKS = NUM_WAVES * NUM_ENVS // GROUP_SIZE
MEDIAN_S = 0.08
"""Median of a step's time in the lines with latency; a web page or a simulator takes longer."""
MAX_TOKENS = 4
AIMS = {0.5: 2.0, 1.0: 4.0, 1.5: 5.5}
WORDS = [
    "a",
    "room",
    "with",
    "one",
    "door",
    "to",
    "the",
    "north",
    "and",
    "a",
    "key",
    "on",
    "the",
    "table",
    "near",
    "the",
    "red",
    "lamp",
]
SYSTEM = "Find the key, then the door."


@dataclass(frozen=True)
class World:
    """How episodes go."""

    success_rate: float
    sigma: float | None = None
    """Of the logarithm of step times; None: steps take no time."""


class Errand(gymnasium.Env[str, str]):
    """Ends early with the world's success rate, else at the limit; whatever is said is an action.

    The k-th episode of a seed is the same in every run: its length and its step times are drawn from (seed, k).
    """

    observation_space = TextSpace()
    action_space = TextSpace()
    world = World(success_rate=0.5)
    _lock = threading.Lock()
    _played: ClassVar[Counter[int]] = Counter()

    @classmethod
    def enter(cls, world: World) -> None:
        cls.world = world
        cls._played = Counter()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        seed = seed or 0
        with self._lock:
            k = self._played[seed]
            self._played[seed] += 1
        rng = np.random.default_rng([seed, k])
        succeeds = rng.random() < self.world.success_rate
        self.length = int(rng.integers(2, MAX_STEPS * 4 // 5 + 1)) if succeeds else MAX_STEPS
        self.succeeds, self.num_steps = succeeds, 0
        sigma = self.world.sigma
        self.step_s = (
            np.zeros(MAX_STEPS)
            if sigma is None
            else MEDIAN_S * rng.lognormal(0.0, sigma, MAX_STEPS)
        )
        self.words = rng.choice(WORDS, (MAX_STEPS + 1, 18))
        return self._text(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.step_s[self.num_steps])
        self.num_steps += 1
        is_over = self.num_steps == self.length
        success = is_over and self.succeeds
        truncated = is_over and not self.succeeds
        return self._text(), float(success), success, truncated, {"success": success}

    def _text(self) -> str:
        return f"You see {' '.join(self.words[self.num_steps])}."


def make_env() -> LLMAgentEnv:
    return LLMAgentEnv(
        Errand(),
        memory=WindowMemory(0),
        prompt=PromptTemplate(SYSTEM, "{current_observation}"),
        parser=RegexParser(r"(?s)(.*)"),
    )


class ThreadedEnvs:
    """A `VectorEnv` whose environments run in threads, so that they sleep side by side."""

    def __init__(self, num_envs: int) -> None:
        self.envs = [make_env() for _ in range(num_envs)]
        self.pool = ThreadPoolExecutor(num_envs)
        self.results: queue.SimpleQueue[EnvResult] = queue.SimpleQueue()
        self.num_under_way = 0

    @property
    def num_envs(self) -> int:
        return len(self.envs)

    def send(self, commands: Sequence[EnvCommand]) -> None:
        for command in commands:
            self.num_under_way += 1
            self.pool.submit(self._run, command)

    def recv(self, min_ready: int = 1, timeout_s: float | None = None) -> list[EnvResult]:
        wanted = min(min_ready, self.num_under_way)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        results: list[EnvResult] = []
        try:
            while len(results) < self.num_under_way:
                if len(results) >= wanted:
                    results.append(self.results.get_nowait())
                else:
                    left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                    results.append(self.results.get(timeout=left_s))
        except queue.Empty:
            pass
        self.num_under_way -= len(results)
        return results

    def _run(self, command: EnvCommand) -> None:
        env = self.envs[command.slot]
        reward, terminated, truncated = 0.0, False, False
        if command.task is not None:
            text, info = env.reset(seed=command.task.seed)
        else:
            text, reward, terminated, truncated, info = env.step(command.action or "")
        self.results.put(
            EnvResult(
                slot=command.slot,
                command_id=command.command_id,
                observation=text,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                info=info,
                error=None,
                seconds=0.0,
            )
        )

    def close(self) -> None:
        self.pool.shutdown()


@dataclass
class Played:
    """One iteration of rollouts."""

    rows: int
    loss_tokens: int
    generated_tokens: int
    seconds: float
    transfers: int

    def __add__(self, other: Played) -> Played:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Played(*(mine + theirs for mine, theirs in pairs))

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds


TASKS = [Task(env_id="bench/Errand-v0", seed=seed) for seed in range(NUM_TASKS)]


def waves() -> list[list[Task]]:
    """The tasks, as many at a time as there are environments for."""
    size = NUM_ENVS // GROUP_SIZE
    return [TASKS[start : start + size] for start in range(0, NUM_TASKS, size)]


def play_in_lock_step(
    envs: ThreadedEnvs, engine: TransformersEngine, tasks: Sequence[Task]
) -> Played:
    """verl-agent's loop: reset all; until all are done: weights, one generation for all, one step for all."""
    began = time.monotonic()
    slots = range(NUM_ENVS)
    prompts: list[Prompt] = [Prompt(messages=())] * NUM_ENVS
    is_done = [False] * NUM_ENVS
    played = Played(0, 0, 0, 0.0, 0)

    def exchange(commands: list[EnvCommand]) -> None:
        envs.send(commands)
        for result in envs.recv(len(commands)):
            prompts[result.slot] = result.info["prompt"]
            is_done[result.slot] = result.terminated or result.truncated

    exchange(
        [
            EnvCommand(slot=s, command_id=next_command_id(), task=tasks[s // GROUP_SIZE])
            for s in slots
        ]
    )
    for step in range(MAX_STEPS):
        played.transfers += 1
        requests = [request_of(prompts[slot], f"{slot}:{step}") for slot in slots]
        completions = engine.generate(requests)
        played.generated_tokens += sum(len(completion.token_ids) for completion in completions)
        running = [slot for slot in slots if not is_done[slot]]
        played.rows += len(running)
        played.loss_tokens += sum(len(completions[slot].token_ids) for slot in running)
        exchange(
            [
                EnvCommand(slot=s, command_id=next_command_id(), action=completions[s].text)
                for s in running
            ]
        )
        if all(is_done):
            break
    played.seconds = time.monotonic() - began
    return played


def request_of(prompt: Prompt, name: str) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt=prompt, max_tokens=MAX_TOKENS)


def play_continuously(envs: ThreadedEnvs, policy: Policy, tasks: Sequence[Task]) -> Played:
    rollout = Rollout(envs, policy, group_size=GROUP_SIZE, max_tokens=MAX_TOKENS)
    began = time.monotonic()
    batch = rollout.collect(tasks, iteration=0)
    seconds = time.monotonic() - began
    assert not batch.errors, batch.errors[0]
    summary = batch.summary()
    return Played(
        rows=len(batch.rows),
        loss_tokens=int(summary["loss_tokens"]),
        generated_tokens=int(summary["generated_tokens"]),
        seconds=seconds,
        transfers=0,
    )


def small_model(hidden_size: int, num_layers: int) -> tuple[Any, Any]:
    corpus = [SYSTEM, f"You see {' '.join(WORDS)}."]
    return build_embedded(
        corpus, hidden_size=hidden_size, num_layers=num_layers, num_heads=hidden_size // 32
    )


@contextmanager
def one_actor(model: Any, tokenizer: Any) -> Iterator[Any]:
    """A policy of one actor that serves the model."""
    from longstep_bindings.actors import ActorPolicy, ActorPool, ActorSpec

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        with closing(ActorPool(ActorSpec(engine="transformers", model=folder), 1)) as pool:
            yield ActorPolicy(pool)


class Report:
    """Prints lines, and keeps the numbers."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def __call__(self, key: str, name: str, value: float, unit: str, aim: str = "") -> None:
        self.found[key] = value
        goal = f"   (aim {aim})" if aim else ""
        print(f"  {name:<66}{value:>9,.2f} {unit}{goal}", flush=True)


def ways(actor: Policy | None, engine: TransformersEngine) -> dict[str, Callable[..., Played]]:
    found: dict[str, Callable[..., Played]] = {
        "lock step": lambda envs: total(play_in_lock_step(envs, engine, w) for w in waves()),
        "in process, wave by wave": lambda envs: total(
            play_continuously(envs, EnginePolicy(engine), wave) for wave in waves()
        ),
        "in process": lambda envs: play_continuously(envs, EnginePolicy(engine), TASKS),
    }
    if actor is not None:
        found["one actor"] = lambda envs: play_continuously(envs, actor, TASKS)
    return found


def total(played: Iterable[Played]) -> Played:
    return sum(played, Played(0, 0, 0, 0.0, 0))


def measure_waste(report: Report, plays: dict[str, Callable[..., Played]]) -> None:
    print("tokens of trained rows / tokens generated")
    for success_rate in (0.3, 0.7, 0.9):
        for way, play in plays.items():
            Errand.enter(World(success_rate=success_rate))
            with closing(ThreadedEnvs(NUM_ENVS)) as envs:
                played = play(envs)
            share = played.loss_tokens / played.generated_tokens
            aim = "" if way == "lock step" else ">= 0.95"
            report(
                f"waste/{success_rate}/{way}", f"success {success_rate:g}, {way}", share, "", aim
            )


def measure_latency(report: Report, plays: dict[str, Callable[..., Played]], rounds: int) -> None:
    print(f"rows/s, {NUM_ENVS} environments, median step {MEDIAN_S * 1000:g} ms, success 0.5")
    for sigma, aim in AIMS.items():
        best: dict[str, float] = {}
        for _ in range(rounds):
            for way, play in plays.items():
                Errand.enter(World(success_rate=0.5, sigma=sigma))
                with closing(ThreadedEnvs(NUM_ENVS)) as envs:
                    best[way] = max(best.get(way, 0.0), play(envs).rows_per_s)
        for way, rate in best.items():
            report(f"latency/{sigma}/{way}", f"sigma {sigma:g}, {way}", rate, "rows/s")
        report(
            f"latency/{sigma}/bound",
            f"sigma {sigma:g}, what these step times allow / lock step",
            most_possible(World(success_rate=0.5, sigma=sigma)),
            "x",
        )
        for way in list(best)[1:]:
            ratio = best[way] / best["lock step"]
            name = f"sigma {sigma:g}, {way} / lock step"
            report(f"latency/{sigma}/{way}/ratio", name, ratio, "x", f">= {aim:g}")


def most_possible(world: World) -> float:
    """Ratio to lock step if generation took no time: each environment takes the next episode as soon as it is free."""
    Errand.enter(world)
    times: list[np.ndarray[Any, Any]] = []
    for task in TASKS:
        for _ in range(GROUP_SIZE):
            env = Errand()
            env.reset(seed=task.seed)
            times.append(np.where(np.arange(MAX_STEPS) < env.length, env.step_s, 0.0))
    in_lock_step = sum(
        np.max(times[first : first + NUM_ENVS], axis=0).sum()
        for first in range(0, len(times), NUM_ENVS)
    )
    free_at = [0.0] * NUM_ENVS
    for episode in times:
        heapq.heapreplace(free_at, free_at[0] + float(episode.sum()))
    return float(in_lock_step / max(free_at))


def measure_transfers(report: Report, engine: TransformersEngine) -> None:
    """Lock step counts what it would send in one wave; ours is what the pool sent in a training run."""
    print("weight transfers per iteration")
    Errand.enter(World(success_rate=0.5))
    with closing(ThreadedEnvs(NUM_ENVS)) as envs:
        played = play_in_lock_step(envs, engine, waves()[0])
    report("transfers/lock step", "lock step", played.transfers, "")
    report("transfers/ours", "longstep train with one actor", train(0).transfers, "", "1")


def measure_actor(report: Report, rounds: int) -> None:
    """The same requests to the same engine, here and behind the actor, in turn."""
    from longstep_bindings.engines.batched import BatchedEngine

    model, tokenizer = small_model(hidden_size=256, num_layers=2)
    rng = np.random.default_rng(0)
    texts = [f"You see {' '.join(rng.choice(WORDS, 18))}." for _ in range(128)]
    num_round = 0

    def requests() -> list[GenerationRequest]:
        nonlocal num_round
        num_round += 1
        messages = [(Message(role="user", content=text),) for text in texts]
        return [
            GenerationRequest(
                request_id=f"{num_round}:{index}",
                prompt=Prompt(messages=each),
                max_tokens=32,
                seed=index,
            )
            for index, each in enumerate(messages)
        ]

    def through_actor(policy: Any) -> None:
        asked = requests()
        policy.submit(asked)
        left = len(asked)
        while left:
            left -= len(policy.poll(1.0))

    def directly(engine: BatchedEngine) -> None:
        asked = requests()
        done: queue.SimpleQueue[object] = queue.SimpleQueue()
        for request in asked:
            engine.start(request, done.put)
        for _ in asked:
            done.get()

    with one_actor(model, tokenizer) as policy:
        (pid,) = policy.pool.actor_pids
        engine = BatchedEngine(TransformersEngine(model, tokenizer))
        with closing(engine):
            here: list[tuple[float, float]] = []
            there: list[tuple[float, float]] = []
            for _ in range(1 + 2 * rounds):
                here.append(timed(lambda: directly(engine), pid))
                there.append(timed(lambda: through_actor(policy), pid))
    print("one actor beside the same engine in this process: 128 requests of 32 tokens")
    for index, name in enumerate(("wall time", "processor time, both processes")):
        direct = min(times[index] for times in here[1:])
        served = min(times[index] for times in there[1:])
        report(f"actor/direct/{index}", f"engine called directly, {name}", direct * 1000, "ms")
        report(f"actor/actor/{index}", f"through the actor, {name}", served * 1000, "ms")
        added = (served / direct - 1.0) * 100
        report(f"actor/overhead/{index}", f"the actor adds, {name}", added, "%", "< 5")


def timed(work: Callable[[], None], pid: int) -> tuple[float, float]:
    """Seconds that `work` takes, by the clock and of processors, in this process and in another."""
    began, used = time.monotonic(), time.process_time() + processor_time(pid)
    work()
    return time.monotonic() - began, time.process_time() + processor_time(pid) - used


def processor_time(pid: int) -> float:
    """Seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_training(report: Report, rounds: int) -> None:
    """`longstep train`'s loop on KeyDoor: play and update in turn, and side by side."""
    print("training iterations/s through one actor")
    best: dict[str, float] = {}
    for _ in range(rounds):
        for way, max_staleness in (("in turn", 0), ("side by side", 1)):
            best[way] = max(best.get(way, 0.0), train(max_staleness).iterations_per_s)
    for way, rate in best.items():
        report(f"training/{way}", way, rate, "1/s")
    ratio = best["side by side"] / best["in turn"]
    report("training/ratio", "side by side / in turn", ratio, "x")


@dataclass(frozen=True)
class Trained:
    """One training run."""

    iterations_per_s: float
    """Of the iterations after the first two, evaluations left out."""
    transfers: float
    """Weight transfers per iteration, as the actors' pool counts them."""


def train(max_staleness: int) -> Trained:
    """A dozen iterations of GiGPO on KeyDoor."""
    from longstep_trainers import group
    from longstep_trainers.config import (
        ActorConfig,
        EmbeddedModelConfig,
        EnvConfig,
        GenerationConfig,
        MemoryConfig,
        PromptConfig,
        RolloutConfig,
        RunConfig,
        TrainConfig,
    )
    from longstep_trainers.config import ModelConfig as Model
    from longstep_trainers.tracking import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        group.train(
            RunConfig(
                model=Model(embedded=EmbeddedModelConfig(hidden_size=128, num_layers=2)),
                env=EnvConfig(
                    kwargs={"size": 4, "num_rooms": 1, "max_steps": 24},
                    prompt=PromptConfig(system="", user="{current_observation}"),
                    memory=MemoryConfig(name="window", window_size=0),
                    rollout=RolloutConfig(n=8, batch_size=64),
                ),
                train=TrainConfig(
                    total_steps=64 * 24 * 12,
                    num_epochs=2,
                    learning_rate=1e-6,  # episodes stay as long as they are
                    max_length=128,
                    eval_every=0,
                    eval_tasks=1,
                    save_every=0,
                ),
                generation=GenerationConfig(constrain=True, max_tokens=4),
                actor=ActorConfig(num_actors=1, max_staleness=max_staleness),
                log_level="ERROR",
                output_dir=folder,
            )
        )
        records = read_metrics(Path(folder) / "timings.jsonl")
    timed = records[2:-1]
    seconds = sum(record["time/rollout_s"] + record["time/update_s"] for record in timed)
    return Trained(
        iterations_per_s=len(timed) / seconds,
        transfers=records[-1]["time/weight_transfers"] / records[-1]["iteration"],
    )


LINES = ("waste", "latency", "transfers", "actor", "training")


def measure(lines: Sequence[str], rounds: int) -> dict[str, float]:
    report = Report()
    model, tokenizer = small_model(hidden_size=64, num_layers=1)
    engine = TransformersEngine(model, tokenizer)
    if {"waste", "latency"} & set(lines):
        with one_actor(model, tokenizer) as actor:
            plays = ways(actor, engine)
            if "waste" in lines:
                measure_waste(report, plays)
            if "latency" in lines:
                measure_latency(report, plays, rounds)
    if "transfers" in lines:
        measure_transfers(report, engine)
    if "actor" in lines:
        measure_actor(report, rounds)
    if "training" in lines:
        measure_training(report, rounds)
    return report.found


def test_a_rollout_without_lock_step_wastes_no_token() -> None:
    """The cheapest line, so that the benchmark keeps running."""
    found = measure(["waste"], rounds=1)
    for key, share in found.items():
        assert (share >= 0.95) == ("lock step" not in key), (key, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the numbers too")
    options = parser.parse_args()
    found = measure(options.lines, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
