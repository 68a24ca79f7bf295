"""Advantages for trajectories that you have already: JSONL in, JSONL out.

    python examples/your_own_logs.py trajectories.jsonl advantages.jsonl --drop-digits

Each line of the input is one trajectory:

    {"task": "boil an egg", "steps": [{"observation": "...", "reward": 0.0, "valid": true}, ...]}

`task` says which trajectories started alike; `valid` may be missing, and whatever else a step holds is kept. The output
has the same lines, each step with its `advantage`. Trajectories may come from anywhere; only longstep and numpy are used.
"""

import argparse
import json
import sys
from pathlib import Path

from longstep.canonicalize import drop_digits
from longstep.credit import PRESETS, gigpo, group_similar
from longstep.state_key import state_keys


def read_trajectories(path):
    """The trajectories of a file; a malformed line ends the program with its number."""
    trajectories = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            trajectory = json.loads(line)
            for step in trajectory["steps"]:
                step.update(observation=step["observation"], reward=float(step["reward"]))
            trajectory["task"] = str(trajectory["task"])
        except (ValueError, KeyError, TypeError) as error:
            sys.exit(f"{path}:{number}: expected a trajectory, got {type(error).__name__}: {error}")
        trajectories.append(trajectory)
    return trajectories


def columns_of(trajectories):
    """Rewards, trajectory numbers, tasks, observations and validity, with a row for each step."""
    rows = [
        (step["reward"], number, trajectory["task"], step["observation"], step.get("valid", True))
        for number, trajectory in enumerate(trajectories)
        for step in trajectory["steps"]
    ]
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(5)]


def add_advantages(trajectories, options):
    """Write `advantage` into each step; the result of `gigpo`."""
    rewards, numbers, tasks, observations, valid = columns_of(trajectories)
    groups, keys = None, None
    if options.similarity is None:
        keys = state_keys(observations, canonicalize=drop_digits if options.drop_digits else None)
    else:
        groups = group_similar(observations, tasks, options.similarity)
    result = gigpo(
        rewards,
        numbers,
        tasks,
        keys,
        step_groups=groups,
        gamma=options.gamma,
        omega=options.omega,
        normalize=options.normalize,
        valid=valid,
        invalid_action_penalty=options.invalid_action_penalty,
        **PRESETS[options.preset],
    )
    advantages = iter(result.total.tolist())
    for trajectory in trajectories:
        for step in trajectory["steps"]:
            step["advantage"] = next(advantages)
    return result


def main():
    parser = argparse.ArgumentParser(description="Advantages for logged trajectories.")
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--gamma", type=float, default=0.95)
    parser.add_argument("--omega", type=float, default=1.0)
    parser.add_argument("--normalize", choices=("none", "std"), default="none")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="paper")
    parser.add_argument("--invalid-action-penalty", type=float, default=0.0)
    parser.add_argument("--drop-digits", action="store_true", help="ignore digits in observations")
    parser.add_argument("--similarity", type=float, help="group texts at least this similar")
    options = parser.parse_args()
    trajectories = read_trajectories(options.input)
    diagnostics = add_advantages(trajectories, options).diagnostics
    lines = (json.dumps(trajectory) + "\n" for trajectory in trajectories)
    options.output.write_text("".join(lines))
    print(
        f"{diagnostics.num_trajectories} trajectories, {diagnostics.num_rows} steps, "
        f"{diagnostics.num_episode_groups} tasks; {diagnostics.singleton_share:.0%} of steps alone in their group"
    )
    for warning in diagnostics.warnings:
        print(f"warning: {warning}")


if __name__ == "__main__":
    main()
