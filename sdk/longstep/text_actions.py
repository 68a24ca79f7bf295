"""Actions of a Gymnasium space as texts, and back.

A `Discrete` space shows its actions by name, and the names are the admissible actions. A space of texts takes the text
as it is. Any other space (Box, MultiDiscrete, Dict, ...) takes JSON of its elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces

from longstep.errors import EnvError
from longstep.reading import read_json, shorten

__all__ = ["action_hint", "admissible_texts", "decode_action"]


def admissible_texts(env: gymnasium.Env[Any, Any], info: Mapping[str, Any]) -> list[str] | None:
    """The texts of the actions that are admissible now; None when the environment does not say.

    From `info["admissible_actions"]`, or for a Discrete action space from the names of its actions, restricted to
    those that `info["action_mask"]` allows. The names come from `info["action_names"]` or the environment's attribute
    `action_names`, a sequence or a dict by action; without either they are the numbers.

    Args:
        env: The wrapped environment.
        info: What it returned last.

    Raises:
        EnvError: Names, mask and space do not fit together.
    """
    given = info.get("admissible_actions")
    if isinstance(given, str | bytes) or not (given is None or isinstance(given, Iterable)):
        raise EnvError(
            f"expected a list of texts as info['admissible_actions'] from {env.unwrapped}, got {given!r:.100}; "
            "put a single action into a list"
        )
    texts = None if given is None else [str(action) for action in cast(Iterable[Any], given)]
    space = _discrete(env)
    if space is None:
        return texts
    names = _names(env, space, info)
    if texts is not None:
        strange = next((text for text in texts if text not in names), None)
        if strange is not None:
            raise EnvError(
                f"expected names of actions in `admissible_actions`, got {strange!r} from {env.unwrapped} with "
                f"{len(names)} actions {shorten(str(names))}; name them in its attribute `action_names`"
            )
        return texts
    mask = info.get("action_mask")
    if mask is None:
        return names
    if len(mask) != len(names):
        raise EnvError(
            f"expected `action_mask` of {len(names)} entries, one for each action, got {len(mask)} from "
            f"{env.unwrapped}; mask every action of the space"
        )
    return [name for name, allowed in zip(names, mask, strict=True) if allowed]


def decode_action(
    env: gymnasium.Env[Any, Any], info: Mapping[str, Any], text: str
) -> tuple[Any, str]:
    """The element of the action space that a text stands for, and what is wrong with the text, empty when nothing is."""
    discrete = _discrete(env)
    if discrete is not None:
        names = _names(env, discrete, info)
        if text in names:
            return int(discrete.start) + names.index(text), ""
        return None, f"{shorten(text)!r} is not the name of an action"
    space = _in_json(env)
    if space is None:
        return text, ""
    try:
        action = _from_json(space, read_json(text))
        known = space.contains(action)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        known, action = False, None
    return (action, "") if known else (None, f"expected JSON of an element of {space}")


def action_hint(env: gymnasium.Env[Any, Any]) -> str:
    """What the default prompt says about actions that are given in JSON; empty for others."""
    space = _in_json(env)
    return "" if space is None else f"An action is JSON of an element of {space}."


def _discrete(env: gymnasium.Env[Any, Any]) -> spaces.Discrete[Any] | None:
    space = cast(Any, getattr(env, "action_space", None))
    return cast("spaces.Discrete[Any]", space) if isinstance(space, spaces.Discrete) else None


def _in_json(env: gymnasium.Env[Any, Any]) -> gymnasium.Space[Any] | None:
    space = cast(Any, getattr(env, "action_space", None))
    structured = (
        spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple,
    )  # fmt: skip
    return cast("gymnasium.Space[Any]", space) if isinstance(space, structured) else None


def _names(
    env: gymnasium.Env[Any, Any], space: spaces.Discrete[Any], info: Mapping[str, Any]
) -> list[str]:
    names: Any = info.get("action_names")
    if names is None and env.has_wrapper_attr("action_names"):
        names = env.get_wrapper_attr("action_names")
    actions = range(int(space.start), int(space.start) + int(space.n))
    if names is None:
        return [str(action) for action in actions]
    if isinstance(names, Mapping):
        by_action = cast(Mapping[Any, Any], names)
        names = [by_action[action] for action in actions if action in by_action]
    texts = [str(name) for name in cast(Iterable[Any], names)]
    if len(texts) != len(actions) or len(set(texts)) != len(texts):
        raise EnvError(
            f"expected `action_names` with {len(actions)} different names, one for each action, got "
            f"{shorten(str(texts))} from {env.unwrapped}; name every action of the space once"
        )
    return texts


def _from_json(space: Any, value: Any) -> Any:
    """The element of a space that a JSON value spells; ValueError or its kin when there is none."""
    if isinstance(space, spaces.Dict):
        inner = cast("dict[str, Any]", cast(Any, space).spaces)
        if set(value) != set(inner):
            raise KeyError("keys differ")
        return {key: _from_json(inner[key], value[key]) for key in inner}
    if isinstance(space, spaces.Tuple):
        inner = cast("tuple[Any, ...]", cast(Any, space).spaces)
        return tuple(_from_json(part, item) for part, item in zip(inner, value, strict=True))
    dtype, shape = space.dtype, space.shape
    if dtype is None or isinstance(value, str):
        return value
    array = np.asarray(value)
    element = array.astype(dtype).reshape(shape)
    if np.issubdtype(dtype, np.integer) and not np.array_equal(array.ravel(), element.ravel()):
        raise ValueError("expected integers")
    return element[()] if isinstance(space, spaces.Discrete) else element
