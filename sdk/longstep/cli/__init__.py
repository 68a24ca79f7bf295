"""The `longstep` command: it finds subcommands, runs one, and turns what happened into a line and an exit code.

A subcommand is a function from the arguments after its name to an exit code; the first line of its docstring is its
help. Those of the core are named in `BUILT_IN`; other packages add theirs by an entry point of the group
"longstep.commands", whose modules should be cheap to import, for `longstep --help` imports them all.

Exit codes: 0 done, 1 failed, 2 wrong arguments or settings, 130 interrupted. A failure is one line on the standard
error; its traceback is shown with `--log-level DEBUG` or `LONGSTEP_DEBUG=1`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, cast

from longstep._version import __version__
from longstep.errors import ConfigError, LongstepError, did_you_mean

__all__ = ["BUILT_IN", "ENTRY_POINT_GROUP", "Command", "load_object", "main"]

Command = Callable[[Sequence[str]], int]
"""A subcommand: takes the arguments after its name, gives the exit code."""

ENTRY_POINT_GROUP = "longstep.commands"
"""Group of the entry points by which packages add subcommands."""

BUILT_IN = {
    "envs": "longstep.cli.envs:envs",
    "check-env": "longstep.cli.envs:check_env",
}
"""Subcommands of the core: name and `module:attribute`."""

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code.

    Args:
        arguments: What follows `longstep`; None means those of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        print("longstep: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if _is_debugging(arguments):
            traceback.print_exc()
        print(f"longstep: {_one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _dispatch(arguments: list[str]) -> int:
    places = {**_plugins(), **BUILT_IN}
    parser = argparse.ArgumentParser(
        prog="longstep",
        usage="longstep [-h] [--version] [--log-level LEVEL] COMMAND ...",
        description="Environments and trainers for LLM agents over tens to hundreds of steps.",
        epilog="`longstep COMMAND --help` explains a command.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this and exit")
    parser.add_argument("--version", action="version", version=f"longstep {__version__}")
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default="WARNING",
        help="how much to say of what goes on; DEBUG shows tracebacks",
    )
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.help or options.command is None:
        print(parser.format_help() + "\n" + _list_commands(places))
        return 0 if options.help else 2
    if options.command not in places:
        raise ConfigError(
            f"expected a command, got `{options.command}`; {did_you_mean(options.command, places)}"
        )
    logging.basicConfig(level=options.log_level, format=LOG_FORMAT, handlers=[_StderrHandler()])
    return cast(Command, load_object(places[options.command]))(options.arguments)


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at the time: a live view puts its own stream there."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def _plugins() -> dict[str, str]:
    """Subcommands of the packages that are installed: name and `module:attribute`."""
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def load_object(place: str) -> Any:
    """What `module:attribute` names."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _list_commands(places: dict[str, str]) -> str:
    lines = ["commands:"]
    for name in sorted(places):
        try:
            summary = (inspect.getdoc(load_object(places[name])) or "").partition("\n")[0]
        except (ImportError, AttributeError) as error:
            summary = f"(cannot be loaded: {_one_line(error)})"
        lines.append(f"  {name:<12} {summary}")
    return "\n".join(lines)


def _is_debugging(arguments: Sequence[str]) -> bool:
    """True when a traceback is wanted, by the environment or by any spelling of the log level."""
    if os.environ.get("LONGSTEP_DEBUG", "0") not in ("", "0"):
        return True
    words = " ".join(arguments).replace("--log_level", "--log-level").replace("=", " ").split()
    return ("--log-level", "DEBUG") in itertools.pairwise(words)


def _one_line(error: BaseException) -> str:
    """The error as one line; its type too, where the message was not written for this."""
    text = " ".join(str(error).split())
    if isinstance(error, LongstepError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
