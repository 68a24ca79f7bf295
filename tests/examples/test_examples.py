"""The examples, run as a reader would run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from longstep.credit import gigpo

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_policy_gradient_loop_learns_in_at_most_eighty_lines() -> None:
    pytest.importorskip("torch", reason='needs torch: pip install "longstep[trainers]"')
    assert len((EXAMPLES / "policy_gradient_loop.py").read_text().splitlines()) <= 80
    done = run("policy_gradient_loop.py", "25")
    assert done.returncode == 0, done.stderr
    rates = re.search(r"success (\S+) at first, (\S+) at last", done.stdout)
    assert rates is not None
    assert float(rates[1]) < 0.3 < 0.9 < float(rates[2])


def write_logs(path: Path, trajectories: list[dict]) -> None:
    path.write_text("".join(json.dumps(trajectory) + "\n" for trajectory in trajectories))


def logged(task: str, observations: list[str], last_reward: float) -> dict:
    rewards = [0.0] * (len(observations) - 1) + [last_reward]
    steps = [
        {"observation": observation, "reward": reward, "action": "go on"}
        for observation, reward in zip(observations, rewards, strict=True)
    ]
    return {"task": task, "steps": steps}


TWO = [
    logged("egg", ["1. kitchen", "2. stove"], 1.0),
    logged("egg", ["3. kitchen", "4. hall"], 0.0),
]


def test_logs_get_an_advantage_for_each_step(tmp_path: Path) -> None:
    write_logs(tmp_path / "in.jsonl", TWO)
    args = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
    done = run("your_own_logs.py", *args, "--gamma", "0.5", "--drop-digits")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 trajectories, 4 steps, 1 tasks; 50% of steps alone")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    keys = ["kitchen", "stove", "kitchen", "hall"]
    expected = gigpo([0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], [0, 0, 0, 0], keys, gamma=0.5).total
    steps = [step for line in lines for step in line["steps"]]
    assert [step["advantage"] for step in steps] == expected.tolist()
    assert {step["action"] for step in steps} == {"go on"}


def test_similar_observations_can_be_grouped_instead(tmp_path: Path) -> None:
    write_logs(tmp_path / "in.jsonl", TWO)
    args = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
    done = run("your_own_logs.py", *args, "--similarity", "0.9")
    assert done.returncode == 0, done.stderr
    assert "50% of steps alone" in done.stdout


def test_a_step_counter_in_the_observation_is_warned_of(tmp_path: Path) -> None:
    many = [
        logged(f"task {number // 2}", [f"{number} {at}" for at in range(8)], number % 2)
        for number in range(4)
    ]
    write_logs(tmp_path / "in.jsonl", many)
    done = run("your_own_logs.py", *(str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")))
    assert done.returncode == 0, done.stderr
    assert "warning: 100% of steps are alone in their group" in done.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"task": "egg"}', "KeyError: 'steps'"),
        ('{"task": "egg", "steps": [{"reward": 1}]}', "KeyError: 'observation'"),
        ("not json", "JSONDecodeError"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(TWO[0]) + "\n" + line + "\n")
    done = run("your_own_logs.py", *(str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")))
    assert done.returncode == 1
    assert f"in.jsonl:2: expected a trajectory, got {message}" in done.stderr
