"""Reading what a Gymnasium environment returns, and saying clearly when it is something else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import gymnasium
import numpy as np

from longstep.errors import EnvError

__all__ = ["StepResult", "read_reset", "read_reward", "read_step", "read_success"]

_SUCCESS_KEYS = ("success", "is_success", "won")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The five values of a step, checked."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


def read_reset(env: gymnasium.Env[Any, Any], result: Any) -> tuple[Any, dict[str, Any]]:
    """Observation and info of a reset, or an EnvError that says what is wrong with them."""
    if not isinstance(result, tuple) or len(cast(tuple[Any, ...], result)) != 2:
        raise EnvError(
            f"expected two values (observation, info) from `reset` of {env.unwrapped}, got {_count(result)}; "
            "return both"
        )
    observation, info = cast(tuple[Any, Any], result)
    return observation, _read_info(env, "reset", info)


def read_step(env: gymnasium.Env[Any, Any], result: Any) -> StepResult:
    """The values of a step, or an EnvError that says what is wrong with them."""
    if not isinstance(result, tuple) or len(cast(tuple[Any, ...], result)) != 5:
        raise EnvError(
            f"expected five values (observation, reward, terminated, truncated, info) from `step` of {env.unwrapped}, "
            f"got {_count(result)}; `done` of the old Gym interface is two values now: terminated (the task is solved "
            "or lost) and truncated (cut off before)"
        )
    observation, reward, terminated, truncated, info = cast(tuple[Any, ...], result)
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool | np.bool_):
            raise EnvError(
                f"expected a bool as `{name}` from `step` of {env.unwrapped}, got {value!r:.100}; return True or False"
            )
    return StepResult(
        observation=observation,
        reward=read_reward(env, reward),
        terminated=bool(terminated),
        truncated=bool(truncated),
        info=_read_info(env, "step", info),
    )


def read_success(info: Mapping[str, Any]) -> bool | None:
    """Whether the task is solved, from `success`, `is_success` or `won`; None when the environment does not say.

    Raises:
        EnvError: It says so in something else than a bool or a number; any text would count as True.
    """
    for key in _SUCCESS_KEYS:
        value: Any = info.get(key)
        if value is None:
            continue
        kinds: Any = (bool, int, float, np.bool_, np.number, np.ndarray)
        if isinstance(value, kinds) and np.ndim(value) == 0:
            return bool(value)
        raise EnvError(
            f"expected a bool as info[{key!r}] from the environment, got {value!r:.100}; return True or False"
        )
    return None


def read_reward(env: gymnasium.Env[Any, Any], reward: Any) -> float:
    """The reward as a float, or an EnvError when it is no finite number."""
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvError(
            f"expected a finite number as reward from `step` of {env.unwrapped}, got {reward!r:.100}; "
            "look for a division by zero or a missing value in its reward"
        )
    return number


def _read_info(env: gymnasium.Env[Any, Any], method: str, info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise EnvError(
            f"expected a dict as info from `{method}` of {env.unwrapped}, got {type(info).__name__}; "
            "return {} when there is nothing to tell"
        )
    return cast(dict[str, Any], info)


def _count(result: Any) -> str:
    if isinstance(result, tuple):
        return f"{len(cast(tuple[Any, ...], result))} values"
    return f"a {type(result).__name__}"
