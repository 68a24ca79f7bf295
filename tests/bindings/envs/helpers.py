"""Driving vector environments command by command."""

import time
from pathlib import Path

from worker_envs import task

from longstep.commands import EnvCommand, next_command_id


def commands(actions):
    return [
        EnvCommand(slot=slot, command_id=next_command_id(), action=action)
        for slot, action in actions.items()
    ]


def gather(envs, num, timeout_s=60.0):
    """`num` results by slot."""
    results, end_at = {}, time.monotonic() + timeout_s
    while len(results) < num:
        assert time.monotonic() < end_at, f"got {sorted(results)} of {num}"
        for result in envs.recv(num - len(results), 1.0):
            assert result.slot not in results
            results[result.slot] = result
    return results


def reset(envs, seeds, **options):
    """Reset slots to seeds."""
    envs.send(
        [
            EnvCommand(slot=slot, command_id=next_command_id(), task=task(seed, **options))
            for slot, seed in seeds.items()
        ]
    )
    return gather(envs, len(seeds))


def step(envs, actions):
    envs.send(commands(actions))
    return gather(envs, len(actions))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
