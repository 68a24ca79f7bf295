"""`longstep serve-env`, `longstep serve-actor`, `longstep keys` and `longstep bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from longstep.errors import ConfigError

__all__ = ["bench", "keys", "serve_actor", "serve_env"]


def serve_env(arguments: Sequence[str]) -> int:
    """Serve an environment to other processes or machines, until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(prog="longstep serve-env", description=serve_env.__doc__)
    parser.add_argument("env", help="a registered id, or `module:attribute` of what makes one")
    parser.add_argument(
        "--kwargs", type=_json_object, default={}, metavar="JSON", help="its arguments"
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module to import first, such as one that registers environments; may be repeated",
    )
    parser.add_argument(
        "--bind",
        "--address",
        dest="address",
        metavar="ADDRESS",
        help="ipc://path or tcp://host:port of the first worker, others count up; none makes private ipc addresses",
    )
    parser.add_argument("--num-workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="the server's own `name.key_secret`, see `longstep keys new`",
    )
    parser.add_argument(
        "--allow",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="clients' `name.key` files",
    )
    parser.add_argument(
        "--step-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="what a step may take; a worker past that is killed and replaced (default 60)",
    )
    parser.add_argument(
        "--reset-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="what making and resetting an environment may take (default 120)",
    )
    parser.add_argument(
        "--raw", action="store_true", help="give the environment's own observations, no prompts"
    )
    parser.add_argument(
        "--blocking", action="store_true", help="a thread for each environment: its steps wait"
    )
    parser.add_argument("--python", help="interpreter of its own: a version or a path")
    parser.add_argument(
        "--requirement",
        dest="requirements",
        action="append",
        default=[],
        help="what to install for it, in an interpreter of its own; may be repeated",
    )
    options = parser.parse_args(arguments)

    from longstep_bindings.envs.server import EnvServer
    from longstep_bindings.envs.spec import EnvSpec

    place = "entry_point" if _is_entry_point(options.env) else "env_id"
    spec = EnvSpec(
        **{place: options.env},
        kwargs=options.kwargs,
        imports=tuple(options.imports),
        wrap=not options.raw,
        blocking=options.blocking,
        python=options.python,
        requirements=tuple(options.requirements),
    )
    server = EnvServer(
        spec,
        options.address,
        num_workers=options.num_workers,
        keys=_server_keys(options.keys, options.allow),
        step_timeout_s=options.step_timeout,
        reset_timeout_s=options.reset_timeout,
    )
    print(f"{spec.name} at {' '.join(server.addresses)}", flush=True)
    server.serve_forever()
    return 0


def serve_actor(arguments: Sequence[str]) -> int:
    """Serve a model to trainers in other processes or on other machines, until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(prog="longstep serve-actor", description=serve_actor.__doc__)
    parser.add_argument("--model", required=True, help="a model folder in Hugging Face form")
    parser.add_argument(
        "--engine",
        default="transformers",
        help="transformers (default), vllm, openai, or `module:function` of another",
    )
    parser.add_argument(
        "--options", type=_json_object, default={}, metavar="JSON", help="the engine's options"
    )
    parser.add_argument(
        "--bind",
        metavar="ADDRESS",
        help="ipc://path or tcp://host:port, `*` for a free port; none makes a private ipc address",
    )
    parser.add_argument(
        "--max-in-flight", type=_count, default=256, help="requests under way (default 256)"
    )
    parser.add_argument(
        "--lost-after",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="silence after which a trainer counts as gone (default 30)",
    )
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="the actor's own `name.key_secret`, see `longstep keys new`",
    )
    parser.add_argument(
        "--allow",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="trainers' `name.key` files",
    )
    options = parser.parse_args(arguments)

    from longstep_bindings.actors.server import ActorServer
    from longstep_bindings.engines.opening import open_engine
    from longstep_bindings.transport import check_address, check_free

    server_keys = _server_keys(options.keys, options.allow)
    if options.bind is not None:  # before minutes are spent on loading the model
        check_address(options.bind, has_keys=server_keys is not None)
        check_free(options.bind)
    engine = open_engine(options.engine, options.model, **options.options)
    try:
        server = ActorServer(
            engine,
            options.bind,
            max_in_flight=options.max_in_flight,
            lost_after_s=options.lost_after,
            keys=server_keys,
        )
    except BaseException:
        engine.close()
        raise
    print(f"{options.model} ({options.engine}) at {server.address}", flush=True)
    server.serve_forever()
    return 0


def _is_entry_point(text: str) -> bool:
    """True for `module:attribute`; an id of Gymnasium's may have a module too, but has a version."""
    module, colon, attribute = text.partition(":")
    return bool(colon) and all(
        part.isidentifier() for part in (*module.split("."), *attribute.split("."))
    )


def _server_keys(own: Path | None, allowed: Sequence[Path]) -> Any:
    from longstep_bindings.curve import KeyPair, ServerKeys, load_public

    if own is None:
        if allowed:
            raise ConfigError("expected `--keys` beside `--allow`; the server needs a pair too")
        return None
    if not allowed:
        raise ConfigError("expected `--allow` with the public keys of clients beside `--keys`")
    return ServerKeys(own=KeyPair.load(own), allowed=load_public(allowed))


def keys(arguments: Sequence[str]) -> int:
    """Make key pairs for servers and clients that reach each other over a network."""
    parser = argparse.ArgumentParser(prog="longstep keys", description=keys.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser(
        "new", help="a new pair: NAME.key to hand out, NAME.key_secret to keep"
    )
    new.add_argument("name", help="of the pair's files, such as the machine's or the user's")
    new.add_argument("--folder", type=Path, default=Path(), help="where to write (default: here)")
    options = parser.parse_args(arguments)

    from longstep_bindings.curve import new_keys

    new_keys(options.folder, options.name)
    print(f"public: {options.folder / options.name}.key")
    print(f"secret: {options.folder / options.name}.key_secret")
    return 0


def bench(arguments: Sequence[str]) -> int:
    """Measure on this machine: `bench transport` counts the steps that cross to environments elsewhere."""
    parser = argparse.ArgumentParser(prog="longstep bench", description=bench.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    transport = commands.add_parser("transport", help="steps a second to environments elsewhere")
    transport.add_argument("--num-envs", type=int, default=256)
    transport.add_argument("--num-workers", type=int, default=2)
    transport.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    options = parser.parse_args(arguments)

    from longstep_bindings.envs.transport_bench import measure

    print(f"{options.num_envs} environments, {options.num_workers} workers; steps/s")
    for name, rate in measure(options.num_envs, options.num_workers, options.seconds):
        print(f"  {name:<32}{rate:>12,.0f}", flush=True)
    return 0


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected JSON, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return cast(dict[str, Any], value)


def _count(text: str) -> int:
    with suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0.0 < float(text) < 1e7:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text!r}")
