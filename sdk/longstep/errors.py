"""The error tree. Every error longstep raises on purpose is a `LongstepError` and also the standard class it refines.

    LongstepError
    +-- ConfigError (ValueError)             a setting or an argument is wrong
    |   +-- PromptBudgetError            what may not be dropped from a prompt is longer than its budget
    +-- DataError (ValueError)               data handed in is malformed: lengths, ids, NaN
    +-- WeightsError (ValueError)            weights do not fit the model, or did not arrive whole
    +-- UnsupportedTypeError (TypeError)     a value of a type that has no meaning here
    +-- RegistryError (LookupError)          an id that is not registered, or registered twice
    +-- EnvError (RuntimeError)              an environment broke its contract
    +-- EnvContractError (EnvError)          ... seen by `check_env`, with the rule that was broken
    +-- PolicyError (RuntimeError)           a policy or an engine could not answer
    +-- MissingExtraError (ImportError)      an optional dependency is not installed
    +-- DeadlineError (TimeoutError)         nothing came within the time allowed
    +-- ProtocolError (ConnectionError)      a peer sent what the wire format forbids
    +-- SessionLostError (ConnectionError)   the other process is gone, or no longer knows our session

Messages read "expected X, got Y at Z; do W". Each error survives pickling: it takes its message and nothing else.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType

__all__ = [
    "ConfigError",
    "DataError",
    "DeadlineError",
    "EnvContractError",
    "EnvError",
    "LongstepError",
    "MissingExtraError",
    "PolicyError",
    "PromptBudgetError",
    "ProtocolError",
    "RegistryError",
    "SessionLostError",
    "UnsupportedTypeError",
    "WeightsError",
    "did_you_mean",
    "require",
]


class LongstepError(Exception):
    """Root of the errors raised by longstep."""


class ConfigError(LongstepError, ValueError):
    """A setting or an argument is wrong."""


class PromptBudgetError(ConfigError):
    """What may not be dropped from a prompt is longer than its token budget."""


class DataError(LongstepError, ValueError):
    """Data that was handed in is malformed."""


class WeightsError(LongstepError, ValueError):
    """New weights do not fit the model that they are for, or did not arrive as they were sent."""


class UnsupportedTypeError(LongstepError, TypeError):
    """A value has a type that has no meaning here."""


class RegistryError(LongstepError, LookupError):
    """An id is not registered, or is registered twice."""


class EnvError(LongstepError, RuntimeError):
    """An environment broke its contract while it was used."""


class EnvContractError(EnvError):
    """`check_env` found that an environment breaks its contract."""


class PolicyError(LongstepError, RuntimeError):
    """A policy or an engine could not answer."""


class MissingExtraError(LongstepError, ImportError):
    """An optional dependency is not installed."""


class DeadlineError(LongstepError, TimeoutError):
    """Nothing came within the time allowed."""


class ProtocolError(LongstepError, ConnectionError):
    """A peer sent what the wire format forbids."""


class SessionLostError(LongstepError, ConnectionError):
    """The other process died, restarted or fell silent: what it held for us, such as environments, is gone."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of an error message that names the nearest known spelling, or the known ones.

    >>> did_you_mean("sokban", ["sokoban", "keydoor"])
    'did you mean `sokoban`?'
    >>> did_you_mean("xyz", ["sokoban", "keydoor"])
    'known: `keydoor`, `sokoban`'
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return "known: " + (", ".join(f"`{known_name}`" for known_name in names) or "none")


def require(module: str, *, extra: str, needed_by: str) -> ModuleType:
    """The imported `module`, or a `MissingExtraError` that says what to install.

    Args:
        module: Dotted name of the module to import.
        extra: The extra of the distribution that brings it.
        needed_by: What needs it, as the user would name it: a module or a function.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top_level = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != top_level:
            raise
        raise MissingExtraError(
            f'`{needed_by}` needs {top_level}; run: pip install "longstep[{extra}]"'
        ) from error
