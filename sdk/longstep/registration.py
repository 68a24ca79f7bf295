"""Ids of environments: `register` one, `make` one, list them in `registry`.

An id that is not in `registry` is looked up in Gymnasium's own. What makes an environment gets its arguments checked by
name first, so that a misspelt one is answered with the nearest.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from longstep.actions import ActionParser
from longstep.arguments import check_count, check_mapping, check_text
from longstep.defaults import find_max_steps, own_copy
from longstep.env import LLMAgentEnv
from longstep.env_registry import EntryPoint, EnvEntry, Registry, registry
from longstep.errors import ConfigError, RegistryError, did_you_mean
from longstep.memory import Memory
from longstep.prompt import PromptTemplate

__all__ = ["EnvEntry", "Registry", "make", "register", "registry"]

_WRAPPER_ARGUMENTS = frozenset(inspect.signature(LLMAgentEnv.__init__).parameters) - {"self", "env"}


def register(
    id: str,
    entry_point: EntryPoint,
    *,
    kwargs: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
    memory: Memory | Callable[[], Memory] | None = None,
    prompt: PromptTemplate | Callable[[], PromptTemplate] | None = None,
    parser: ActionParser | Callable[[], ActionParser] | None = None,
    **settings: Any,
) -> None:
    """Give an environment an id.

    Args:
        id: A free id in Gymnasium's form, such as `team/MyEnv-v0`.
        entry_point: A class or function that gives a gymnasium.Env, or `"module:attribute"` of one.
        kwargs: Arguments of the entry point; `make` can override them.
        max_steps: Steps after which an episode is truncated; None leaves it to the environment.
        memory: A memory, which is copied for each environment, or a class or function that gives one.
        prompt: The template of its prompts, or what gives it.
        parser: What reads its actions, or what gives it.
        settings: Further arguments of `LLMAgentEnv`, by name.

    Raises:
        RegistryError: The id is registered already.
    """
    unknown = sorted(set(settings) - _WRAPPER_ARGUMENTS)
    if unknown:
        raise ConfigError(
            f"expected arguments of LLMAgentEnv, got `{unknown[0]}`; "
            f"{did_you_mean(unknown[0], _WRAPPER_ARGUMENTS)}; arguments of the environment go into `kwargs`"
        )
    check_mapping("kwargs", kwargs, optional=True)
    registry.add(
        EnvEntry(
            id=id,
            entry_point=entry_point,
            kwargs=dict(kwargs or {}),
            max_steps=max_steps,
            memory=memory,
            prompt=prompt,
            parser=parser,
            settings=settings,
        )
    )


def make(id: str, **kwargs: Any) -> LLMAgentEnv:
    """A new environment by id.

    Args:
        id: Registered here or with Gymnasium.
        kwargs: Those that LLMAgentEnv knows by name go to it (a memory is copied, or made by the class or function
            given, so that no two environments share one); the others go to the environment. `max_steps` goes to both
            where the environment takes one too: it then replaces the environment's own limit, also upwards.

    Raises:
        RegistryError: The id is unknown.
        ConfigError: An argument is unknown, or `max_steps` is more than a limit of the environment that cannot be set.

    >>> make("longstep/KeyDoor-v0", max_steps=10).max_steps
    10
    """
    check_text("id", id)
    own = {name: value for name, value in kwargs.items() if name in _WRAPPER_ARGUMENTS}
    inner = {name: value for name, value in kwargs.items() if name not in _WRAPPER_ARGUMENTS}
    max_steps = kwargs.get("max_steps")
    check_count("max_steps", max_steps, 1, optional=True)
    if id in registry:
        raw, settings = _make_registered(registry[id], inner, max_steps)
    else:
        raw, settings = _make_known(id, inner, max_steps)
    _check_limit(id, raw, max_steps)
    settings |= {name: value for name, value in own.items() if value is not None}
    for name in ("memory", "prompt", "parser"):
        settings[name] = own_copy(settings.get(name))
    env = LLMAgentEnv(raw, **settings)
    env.spec = EnvSpec(
        id=id,
        entry_point=functools.partial(make, id),
        kwargs=copy.copy(kwargs),
        order_enforce=False,
        disable_env_checker=True,
    )
    return env


def _check_limit(id: str, raw: Any, max_steps: int | None) -> None:
    """Raise when the environment would end an episode before the limit that was asked for."""
    limit = find_max_steps(cast(Any, raw)) if isinstance(raw, gymnasium.Env) else None
    if max_steps is not None and limit is not None and limit < max_steps:
        raise ConfigError(
            f"expected `max_steps` of at most {limit}, at which `{id}` ends an episode itself, got {max_steps}; lower it, "
            "or let the environment take an argument `max_steps`"
        )


def _make_registered(
    entry: EnvEntry, kwargs: Mapping[str, Any], max_steps: int | None
) -> tuple[gymnasium.Env[Any, Any], dict[str, Any]]:
    """The environment of an entry, and the entry's arguments for the wrapper."""
    creator = entry.entry_point
    if isinstance(creator, str):
        module, _, attribute = creator.partition(":")
        creator = cast("Callable[..., gymnasium.Env[Any, Any]]", _load(entry, module, attribute))
    arguments = {**entry.kwargs, **kwargs}
    limits = (max_steps, entry.kwargs.get("max_steps"), entry.max_steps)
    limit = next((limit for limit in limits if limit is not None), None)
    if limit is not None and _takes(creator, "max_steps"):
        arguments["max_steps"] = limit
    _check_arguments(entry.id, creator, arguments)
    settings: dict[str, Any] = {
        **entry.settings,
        "max_steps": entry.max_steps,
        "memory": entry.memory,
        "prompt": entry.prompt,
        "parser": entry.parser,
    }
    return creator(**arguments), settings


def _load(entry: EnvEntry, module: str, attribute: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ValueError, AttributeError, ImportError) as error:
        if isinstance(error, ImportError) and not _is_absent(module, error):
            raise  # the module is there and lacks a dependency, which its own error names
        raise RegistryError(
            f"expected `module:attribute` of a class or function as entry point of `{entry.id}`, got "
            f"`{entry.entry_point}`: {error}"
        ) from error


def _is_absent(module: str, error: ImportError) -> bool:
    """True when the module itself, or a package it should be in, was not found."""
    return error.name is not None and f"{module}.".startswith(f"{error.name}.")


def _parameters(creator: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of what gives an environment; None where they cannot be known."""
    try:
        return inspect.signature(creator).parameters
    except (TypeError, ValueError):  # some callables have no signature; they check for themselves
        return None


def _takes(creator: Callable[..., Any], name: str) -> bool:
    """True when an argument of this name is declared; `**kwargs` alone may be for anything."""
    parameters = _parameters(creator) or {}
    return name in parameters and parameters[name].kind is not inspect.Parameter.VAR_KEYWORD


def _check_arguments(id: str, creator: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise for an argument that neither the environment nor the wrapper knows."""
    parameters = _parameters(creator)
    if parameters is None or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        return
    for name in arguments:
        if name not in parameters:
            raise ConfigError(
                f"expected arguments of `{id}` or of LLMAgentEnv, got `{name}`; "
                f"{did_you_mean(name, {*parameters, *_WRAPPER_ARGUMENTS})}"
            )


def require_known(id: str) -> None:
    """Raise for an id that `make` does not know either; no environment is made.

    Raises:
        RegistryError: The id is unknown.
    """
    check_text("id", id)
    if id not in registry:
        _find_known(id)


def _find_known(id: str) -> EnvSpec:
    """The entry of Gymnasium's registry."""
    known = gymnasium.envs.registry
    module, _, name = id.rpartition(":")
    if module:
        _import_for_ids(id, module)
    if name not in known:
        hint = did_you_mean(name, [*registry, *known])
        if hint.startswith("known"):
            hint = did_you_mean(name, registry)
        raise RegistryError(f"expected a registered id, got `{id:.100}`; {hint}")
    return known[name]


def _make_known(
    id: str, kwargs: Mapping[str, Any], max_steps: int | None
) -> tuple[gymnasium.Env[Any, Any], dict[str, Any]]:
    """An environment of Gymnasium's registry without its time limit, which becomes the wrapper's."""
    spec, arguments = _find_known(id), dict(kwargs)
    creator = spec.entry_point
    if creator is not None:
        creator = load_env_creator(creator) if isinstance(creator, str) else creator
        _check_arguments(id, creator, {k: v for k, v in kwargs.items() if k != "render_mode"})
        if max_steps is not None and _takes(creator, "max_steps"):
            arguments["max_steps"] = max_steps
    raw = gymnasium.make(id, max_episode_steps=-1, disable_env_checker=True, **arguments)
    return raw, {"max_steps": spec.max_episode_steps}


def _import_for_ids(id: str, module: str) -> None:
    """Import what registers the ids of `module:id`, as Gymnasium does."""
    try:
        importlib.import_module(module)
    except (ImportError, TypeError, ValueError) as error:
        if isinstance(error, ImportError) and not _is_absent(module, error):
            raise
        raise RegistryError(
            f"expected `module:id` of a module that can be imported, got `{id}`: {error}"
        ) from error
