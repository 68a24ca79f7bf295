"""A worker's environments: made from a spec, commanded by operation, each exception kept to its own slot."""

from __future__ import annotations

import contextlib
import copy
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gymnasium

from longstep.env import LLMAgentEnv
from longstep.errors import ConfigError, DataError, EnvError
from longstep.registration import make
from longstep_bindings.envs.board import Line
from longstep_bindings.envs.messages import Row, agent_row, failed_row
from longstep_bindings.envs.spec import EnvSpec

__all__ = ["Slot", "can_copy", "make_env", "steps"]

_SHARED = frozenset(("env", "prompt", "parser", "state_key", "observation_text", "_spec"))
"""Attributes of an LLMAgentEnv that are settings, equal in all environments of one spec."""

_now = time.monotonic  # the clock of the board


def make_env(spec: EnvSpec) -> gymnasium.Env[Any, Any]:
    """A new environment of `spec`.

    Raises:
        ConfigError: The entry point does not exist or gives something else.
    """
    for module in spec.imports:
        importlib.import_module(module)
    kwargs = dict(spec.kwargs)
    if spec.env_id is not None:
        agent = make(spec.env_id, **kwargs)
        return agent if spec.wrap else agent.env
    env = _entry_point(spec)(**kwargs)
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(
            f"expected `{spec.entry_point}` to give a gymnasium.Env, got {type(env).__name__}"
        )
    return LLMAgentEnv(env) if spec.wrap and not isinstance(env, LLMAgentEnv) else env


def _entry_point(spec: EnvSpec) -> Callable[..., Any]:
    assert spec.entry_point is not None
    module, _, attribute = spec.entry_point.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(
            f"expected `module:attribute` of a class or function that the worker can import, got "
            f"`{spec.entry_point}`: {error}"
        ) from error
    return found


def can_copy(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether one environment can stand where another stands by `snapshot` and `restore`.

    Not through wrappers that lie between, such as a time limit: their state is no part of a snapshot.
    """
    raw: Any = env.env if isinstance(env, LLMAgentEnv) else env
    return raw is raw.unwrapped and hasattr(raw, "snapshot") and hasattr(raw, "restore")


class Slot:
    """One place for an environment; it is made when first reset, and anew after it failed."""

    def __init__(
        self,
        number: int,
        spec: EnvSpec,
        line: Line,
        *,
        step_timeout_s: float,
        reset_timeout_s: float,
    ) -> None:
        """Args:
        number: Within its session.
        spec: How to make the environment.
        line: Of the board; written to before whatever may hang.
        step_timeout_s: Seconds that a step may take.
        reset_timeout_s: Seconds that making and resetting may take together.
        """
        self.number = number
        self.env: gymnasium.Env[Any, Any] | None = None
        self._spec, self._line = spec, line
        self._step_timeout_s, self._reset_timeout_s = step_timeout_s, reset_timeout_s
        self._is_agent = False
        self._last: Row | None = None

    def build(self) -> gymnasium.Env[Any, Any]:
        """Make the environment, if it is not there."""
        if self.env is None:
            self._line.begin(self.number, _now() + self._reset_timeout_s)
            self.env = make_env(self._spec)
            self._is_agent = isinstance(self.env, LLMAgentEnv)
        return self.env

    def execute(self, operation: str, argument: Any) -> Row:
        """The row of one command that is no copy."""
        if operation == "step":
            return next(steps([(self, argument)]))
        start = _now()
        try:
            if operation == "replay":
                return self._replay(argument, start)
            row = self._reset(argument, start)
            return agent_row(row) if self._is_agent else row
        except Exception as failure:
            return self._fail(failure, start)

    def copy(self, source: Slot) -> Row:
        """Stand where `source` stands, by its snapshot; the row is the last that it gave."""
        start = _now()
        try:
            self._last = row = self._copy(source)
            return agent_row(row) if self._is_agent else row
        except Exception as failure:
            return self._fail(failure, start)

    def _fail(self, failure: Exception, start: float) -> Row:
        self.discard()
        return failed_row(f"{type(failure).__name__}: {failure}", _now() - start)

    def discard(self) -> None:
        """Close the environment; a broken one may fail at that too, and there is nobody left to tell."""
        env, self.env, self._last = self.env, None, None
        if env is not None:
            with contextlib.suppress(Exception):
                env.close()

    def _reset(self, argument: Any, start: float) -> Row:
        seed, options = _reset_arguments(argument)
        env = self.build()
        self._line.begin(self.number, _now() + self._reset_timeout_s)
        observation, info = env.reset(seed=seed, options=options)
        self._last = row = observation, 0.0, False, False, dict(info), None, _now() - start
        return row

    def _replay(self, argument: Any, start: float) -> Row:
        if type(argument) is not list or len(argument) != 2 or type(argument[1]) is not list:
            raise DataError("expected [start, actions] as argument of `replay`")
        beginning, actions = argument
        told = [] if beginning is None else [self._key_of(self._reset(beginning, start))]
        for row in steps([(self, action) for action in actions], as_sent=False):
            if row[5] is not None:
                return row
            told.append(self._key_of(row))
        return told, 0.0, False, False, {}, None, _now() - start

    def _key_of(self, row: Row) -> Any:
        return row[4]["state_key"] if self._is_agent else row[0]

    def _copy(self, source: Slot) -> Row:
        theirs, ours = source.env, self.build()
        if theirs is None or source._last is None or not can_copy(theirs):
            raise EnvError(f"expected an environment with a snapshot in slot {source.number}")
        self._line.begin(self.number, _now() + self._reset_timeout_s)
        if isinstance(theirs, LLMAgentEnv) and isinstance(ours, LLMAgentEnv):
            _restore(ours.env, theirs.env)
            for name, value in vars(theirs).items():
                if name not in _SHARED:
                    setattr(ours, name, copy.deepcopy(value))
            ours.parser, ours.prompt = theirs.parser, theirs.prompt
        else:
            _restore(ours, theirs)
        return copy.deepcopy(source._last)


def steps(commands: Iterable[tuple[Slot, Any]], *, as_sent: bool = True) -> Iterator[Row]:
    """Step one slot after the other; what an environment raises is its row's error.

    All in one piece, for there are environments that take less time than a call.

    Args:
        commands: Slots, and what each is to do.
        as_sent: False gives an agent's row as the agent gave it.
    """
    now, start = _now, _now()
    for slot, action in commands:
        try:
            env = slot.env
            if env is None:
                raise EnvError("the environment of this slot was lost; reset it")
            slot._line.begin(slot.number, start + slot._step_timeout_s)
            observation, reward, terminated, truncated, info = env.step(action)
            if type(reward) is not float:
                reward = float(reward)
            if type(terminated) is not bool or type(truncated) is not bool:
                terminated, truncated = bool(terminated), bool(truncated)
            end = now()
            row = observation, reward, terminated, truncated, info, None, end - start
            slot._last, start = row, end
            if slot._is_agent and as_sent:
                row, start = agent_row(row), now()
            yield row
        except Exception as failure:
            yield slot._fail(failure, start)
            start = now()


def _restore(ours: Any, theirs: Any) -> None:
    ours.restore(theirs.snapshot())


def _reset_arguments(argument: Any) -> tuple[int | None, dict[str, Any] | None]:
    if type(argument) is not list or len(argument) != 2:
        raise DataError("expected [seed, options] as argument of `reset`")
    seed, options = argument
    if not isinstance(seed, int | None) or not isinstance(options, dict | None):
        raise DataError("expected an integer and a map, or nil, as seed and options of `reset`")
    return seed, options
