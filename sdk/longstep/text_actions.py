"""Actions of a Gymnasium space as texts, and back.

A `Discrete` space shows its actions by name, and the names are the admissible actions. A space of texts takes the text
as it is. Any other space (Box, MultiDiscrete, Dict, ...) takes JSON of its elements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces

from longstep.errors import EnvError

__all__ = ["admissible_texts", "decode_action"]


def admissible_texts(env: gymnasium.Env[Any, Any], info: Mapping[str, Any]) -> list[str] | None:
    """The texts of the actions that are admissible now; None when the environment does not say.

    From `info["admissible_actions"]`, or for a Discrete action space from the names of its actions, restricted to
    those that `info["action_mask"]` allows.

    Args:
        env: The wrapped environment.
        info: What it returned last.
    """
    given = info.get("admissible_actions")
    if given is not None:
        return [str(action) for action in given]
    space = getattr(env, "action_space", None)
    if not isinstance(space, spaces.Discrete):
        return None
    names = _names(env, space, info)
    mask = info.get("action_mask")
    if mask is None:
        return names
    if len(mask) != len(names):
        raise EnvError(
            f"expected `action_mask` of {len(names)} entries, one for each action, got {len(mask)} "
            f"from {env.unwrapped}; mask every action of the space"
        )
    return [name for name, allowed in zip(names, mask, strict=True) if allowed]


def decode_action(
    env: gymnasium.Env[Any, Any], info: Mapping[str, Any], text: str
) -> tuple[Any, str]:
    """The element of the action space that a text stands for, and why there is none: one of the two is empty."""
    space = getattr(env, "action_space", None)
    if isinstance(space, spaces.Discrete):
        names = _names(env, space, info)
        if text in names:
            return space.start + names.index(text), ""
        return None, f"{text[:200]!r} is not the name of an action"
    if not isinstance(
        space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Dict | spaces.Tuple
    ):
        return text, ""  # fmt: skip
    try:
        action = _from_json(space, json.loads(text))
        known = space.contains(action)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        known, action = False, None
    return (action, "") if known else (None, f"expected JSON of an element of {space}")


def _names(
    env: gymnasium.Env[Any, Any], space: spaces.Discrete, info: Mapping[str, Any]
) -> list[str]:
    names = info.get("action_names")
    if names is None and env.has_wrapper_attr("action_names"):
        names = env.get_wrapper_attr("action_names")
    actions = range(int(space.start), int(space.start + space.n))
    if names is None:
        return [str(action) for action in actions]
    if isinstance(names, Mapping):
        by_action = cast(Mapping[Any, Any], names)
        names = [by_action[action] for action in actions if action in by_action]
    texts = [str(name) for name in cast(Sequence[Any], names)]
    if len(set(texts)) != len(actions):
        raise EnvError(
            f"expected `action_names` with {len(actions)} different names, one for each action, got "
            f"{texts} from {env.unwrapped}; name every action of the space once"
        )
    return texts


def _from_json(space: gymnasium.Space[Any], value: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _from_json(inner, value[key]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_from_json(i, v) for i, v in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(value)
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return np.asarray(value, dtype=space.dtype).reshape(space.shape)
    return value
