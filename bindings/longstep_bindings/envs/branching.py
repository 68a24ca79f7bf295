"""Branching of trajectories: how a slot comes to stand where a trajectory stood, by doing again what was done.

The trajectory is told by its history (see `recovery`). Its keys are compared at every step, so that an environment that
does not depend on its seed and actions alone is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from longstep.commands import EnvCommand, EnvResult, next_command_id
from longstep.errors import ConfigError
from longstep_bindings.envs.recovery import History

__all__ = ["repeat", "up_to"]


def up_to(history: History, at_step: int | None) -> History:
    """What came before the branch.

    Args:
        history: Of the trajectory.
        at_step: Steps taken before the branch; None is all of them.

    Raises:
        ConfigError: The trajectory does not reach so far.
    """
    num_steps = len(history.actions)
    at_step = num_steps if at_step is None else at_step
    if not 0 <= at_step <= num_steps:
        raise ConfigError(f"expected `at_step` from 0 to {num_steps}, got {at_step}")
    return History(history.task, history.actions[:at_step], history.keys[: at_step + 1])


def repeat(
    history: History,
    slot: int,
    *,
    do: Callable[[EnvCommand], EnvResult],
    history_of: Callable[[int], History | None],
) -> EnvResult:
    """Do again, in `slot`, what was done.

    Args:
        history: What was done, and the keys of the states it led to.
        slot: Where.
        do: Gives the result of a command.
        history_of: Gives a slot's own history.

    Returns:
        The last result; its `error` says when a state was not reached.
    """
    command = EnvCommand(slot=slot, command_id=next_command_id(), task=history.task)
    result = do(command)
    for step, key in enumerate(history.keys):
        if step and result.error is None:
            action = history.actions[step - 1]
            result = do(EnvCommand(slot=slot, command_id=next_command_id(), action=action))
        reached = history_of(slot)
        if result.error is None and (reached is None or reached.keys[step] != key):
            text = (
                f"EnvError: the state after {step} steps differs from that of the trajectory; the environment "
                "does not depend on its seed and actions alone"
            )
            return replace(result, observation="", info={}, error=text)
    return result
