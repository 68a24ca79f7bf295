"""`longstep envs` and `longstep check-env`."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from longstep.errors import ConfigError

if TYPE_CHECKING:
    from longstep.env import LLMAgentEnv

__all__ = ["check_env", "envs"]


def envs(arguments: Sequence[str]) -> int:
    """List the registered environments, or show one and the first prompt it gives."""
    parser = argparse.ArgumentParser(prog="longstep envs", description=envs.__doc__)
    parser.add_argument("id", nargs="?", help="an environment to show; none lists all")
    _add_kwargs(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the reset that is shown")
    options = parser.parse_args(arguments)
    if options.id is None:
        _list()
    else:
        _show(options.id, options.kwargs, options.seed)
    return 0


def check_env(arguments: Sequence[str]) -> int:
    """Check that an environment keeps the contract: seeds, rewards, ends, state keys."""
    from longstep import checks

    parser = argparse.ArgumentParser(prog="longstep check-env", description=check_env.__doc__)
    parser.add_argument("id", help="a registered environment")
    _add_kwargs(parser)
    options = parser.parse_args(arguments)
    env = _make(options.id, options.kwargs)
    try:
        checks.check_env(env)
    finally:
        env.close()
    print(f"{options.id}: no fault found")
    return 0


def _add_kwargs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help="""arguments of the environment, such as '{"size": 5}'""",
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got `{text}`: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got `{text}`")
    return cast("dict[str, Any]", value)


def _make(name: str, kwargs: dict[str, Any]) -> LLMAgentEnv:
    from longstep.registration import make

    try:
        return make(name, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"expected arguments that `{name}` takes, got {kwargs}; {error}"
        ) from error


def _list() -> None:
    from longstep.registration import registry

    width = max(map(len, registry), default=0)
    for name in registry:
        print(f"{name:<{width}}  {_summary(name)}")


def _summary(name: str) -> str:
    """The first line of the docstring; of an environment that cannot be loaded, why."""
    from longstep.cli import load_object
    from longstep.registration import registry

    try:
        place = registry[name].entry_point
        target = load_object(place) if isinstance(place, str) else place
    except Exception as error:  # a plug-in of somebody else must not hide the others
        return f"(cannot be loaded: {type(error).__name__}: {error})"
    return (inspect.getdoc(target) or "").partition("\n")[0]


def _show(name: str, kwargs: dict[str, Any], seed: int) -> None:
    from longstep.registration import registry

    env = _make(name, kwargs)
    try:
        _, info = env.reset(seed=seed)
    finally:
        env.close()
    if name in registry:
        print(f"{name}: {_summary(name)}")
    print(f"limit: {env.max_steps} steps\n\nfirst prompt, seed {seed}:\n")
    for message in info["prompt"].messages:
        print(f"[{message.role}]\n{message.content}\n")
