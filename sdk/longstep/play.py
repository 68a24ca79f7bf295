"""Playing an environment for `check_env`: a recorded play, and the same actions again on one or two of them.

Each rule that can break while playing is judged here, at the call that breaks it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import gymnasium
import numpy as np

from longstep.defaults import find_max_steps
from longstep.errors import ConfigError, EnvContractError, EnvError, UnsupportedTypeError
from longstep.five_tuple import read_reset, read_reward, read_step, read_success
from longstep.plain_data import complain
from longstep.spaces import TextSpace
from longstep.state_key import StateKey
from longstep.text_actions import admissible_texts, decode_action

__all__ = ["Event", "Player", "Subject", "broken", "first_difference", "record_play"]

Player = Callable[[gymnasium.Env[Any, Any], Mapping[str, Any]], str]
"""Gives the text of an action for an environment and its last info."""


def broken(rule: str, message: str) -> EnvContractError:
    """The error that names a rule and what to do."""
    return EnvContractError(f"rule `{rule}`: {message}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One reset or step, and what came back, in a form that two plays can be compared by."""

    seed: int | None
    """Seed of a reset; None for a step."""
    action: Any
    """What was given to the environment; None for a reset."""
    key: bytes
    reward: float
    terminated: bool
    truncated: bool
    admissible: tuple[str, ...] | None
    success: bool | None
    step: int
    """Steps since the reset."""


class Subject:
    """An environment under test: every call checks the rules that one call can break."""

    def __init__(self, env: gymnasium.Env[Any, Any], state_key: StateKey) -> None:
        """Args:
        env: The environment without an LLMAgentEnv around it.
        state_key: Gives the identity of its observations.
        """
        self.env = env
        self.info: Mapping[str, Any] = {}
        self._state_key = state_key
        self._held: tuple[Any, bytes] | None = None
        self._step = 0

    def reset(self, seed: int) -> Event:
        """Reset with a seed."""
        result = self._call("reset", lambda: self.env.reset(seed=seed))
        observation, info = _contract("five-values", lambda: read_reset(self.env, result))
        self._step = 0
        return self._event(seed, None, observation, 0.0, (False, False), info)

    def step(self, action: Any) -> Event:
        """Step with an element of the action space."""
        result = self._call("step", lambda: self.env.step(copy.deepcopy(action)), action)
        values = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else ()
        if len(values) == 5:
            _contract("finite-reward", lambda: read_reward(self.env, values[1]))
        read = _contract("five-values", lambda: read_step(self.env, result))
        self._step += 1
        ends = (read.terminated, read.truncated)
        event = self._event(None, action, read.observation, read.reward, ends, read.info)
        self._check_end(event, read.info)
        return event

    def _call(self, method: str, function: Callable[[], Any], action: Any = None) -> Any:
        before = _global_rng_states()
        try:
            result = function()
        except Exception as error:
            if method == "reset":
                given, advice = "", "it should take `seed` and `options`, and work at any time"
            else:
                given = f" at action {action!r:.80}"
                advice = (
                    "an action the environment does not know should change nothing, or its info should list "
                    "`admissible_actions`"
                )
            raise broken(
                "no-crash",
                f"expected `{method}` to succeed, got {type(error).__name__}: {error}{given}; {advice}",
            ) from error
        after = _global_rng_states()
        for name, state in before.items():
            if state != after[name]:
                raise broken(
                    "global-rng",
                    f"expected `{method}` to leave the global generator of `{name}` alone, got a changed state; draw "
                    "from `self.np_random`, which `super().reset(seed=seed)` seeds",
                )
        return result

    def _event(
        self, seed: int | None, action: Any, observation: Any, reward: float,
        ends: tuple[bool, bool], info: dict[str, Any],
    ) -> Event:  # fmt: skip
        place = f"step {self._step}" if seed is None else "reset"
        key = self._key(observation, place)
        if self._held is not None and self._state_key(self._held[0]) != self._held[1]:
            raise broken(
                "state-key",
                f"expected an observation to stay as it was returned, got one that changed at {place}; return a copy, "
                "not the environment's own buffer",
            )
        self._held = (observation, key)
        self.info = info
        for value, name in ((observation, "observation"), (info, "info")):
            problem = complain(value, name)
            if problem:
                raise broken(
                    "plain-values",
                    f"expected values that msgpack can carry, got {problem} after {place}; return numbers, strings, "
                    "bytes, lists, dicts with str or int keys, and numeric arrays",
                )
        admissible = _contract("admissible-actions", lambda: admissible_texts(self.env, info))
        return Event(
            seed=seed,
            action=action,
            key=key,
            reward=reward,
            terminated=ends[0],
            truncated=ends[1],
            admissible=None if admissible is None else tuple(admissible),
            success=read_success(info),
            step=self._step,
        )

    def _key(self, observation: Any, place: str) -> bytes:
        try:
            keys = {self._state_key(value) for value in (observation, copy.deepcopy(observation))}
        except UnsupportedTypeError as error:
            raise broken(
                "state-key",
                f"expected an observation with a state key, got {type(observation).__name__} at {place}: {error}; "
                "return text, numbers, arrays, lists or dicts, or give a `state_key` function",
            ) from error
        if len(keys) != 1:
            raise broken(
                "state-key",
                f"expected equal keys for an observation and its copy, got two at {place}; let `state_key` depend on "
                "the observation alone",
            )
        return keys.pop()

    def _check_end(self, event: Event, info: Mapping[str, Any]) -> None:
        limit = find_max_steps(self.env)
        if event.terminated and event.truncated and event.step != limit:
            raise broken(
                "ends",
                f"expected one of `terminated` and `truncated` at step {event.step}, got both; set `terminated` when "
                "the task is solved or lost, `truncated` when the episode is cut off before",
            )
        if event.success and event.truncated and not event.terminated:
            raise broken(
                "ends",
                f"expected `terminated` with a solved task, got `truncated` at step {event.step}; the two may be mixed "
                "up in what `step` returns",
            )
        if info.get("TimeLimit.truncated") and not event.truncated:
            raise broken(
                "ends",
                f"expected `truncated` at the time limit, got `terminated` at step {event.step}; return "
                "terminated=False, truncated=True there",
            )


def record_play(
    subject: Subject, *, seed: int, num_steps: int, player: Player | None
) -> list[Event]:
    """What happened in `num_steps` steps: episodes one after another, each with the next seed.

    Args:
        subject: The environment.
        seed: Seed of the first episode and of the random player.
        num_steps: Steps to play in all.
        player: Chooses the actions; None plays at random.
    """
    rng = np.random.default_rng(seed)
    space = getattr(subject.env, "action_space", None) or TextSpace()
    space.seed(seed)
    events = [subject.reset(seed)]
    for _ in range(num_steps):
        last = events[-1]
        if last.terminated or last.truncated:
            seed += 1
            events.append(subject.reset(seed))
        events.append(subject.step(_choose(subject, events[-1], rng, space, player)))
    return events


def _choose(
    subject: Subject, last: Event, rng: np.random.Generator, space: Any, player: Player | None
) -> Any:
    if player is not None:
        text: Any = player(subject.env, subject.info)
        if not isinstance(text, str):
            raise ConfigError(
                f"expected a str from `player`, got {text!r:.100}; return the text of an action"
            )
    elif last.admissible:
        text = last.admissible[int(rng.integers(len(last.admissible)))]
    else:
        return space.sample()
    action, problem = decode_action(subject.env, subject.info, text)
    if problem:
        raise broken("admissible-actions", f"expected an action that can be taken, got {problem}")
    return action


def first_difference(subjects: Sequence[Subject], events: Sequence[Event]) -> str:
    """Where a repetition first differs from what was recorded; empty when nowhere.

    Args:
        subjects: Environments that all make each call, one after the other.
        events: The record to repeat.
    """
    for expected in events:
        for subject in subjects:
            if expected.seed is not None:
                seen = subject.reset(expected.seed)
                place = f"reset(seed={expected.seed})"
            else:
                seen = subject.step(expected.action)
                place = f"step {expected.step}"
            for name in ("key", "reward", "terminated", "truncated", "admissible", "success"):
                if getattr(seen, name) != getattr(expected, name):
                    what = "another observation" if name == "key" else f"another `{name}`"
                    return f"{what} at {place}"
    return ""


def _contract(rule: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except EnvError as error:
        raise broken(rule, str(error)) from error


def _global_rng_states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return {"random": random.getstate(), "numpy.random": (name, np.asarray(keys).tobytes(), *rest)}
