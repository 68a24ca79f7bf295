"""`check_env`: does an environment keep the rules that training relies on?

It plays the environment and judges what comes back: Gymnasium's five values, finite rewards, honest ends, seeds that
decide everything, members of a group that start alike and do not touch each other, identities of states that last,
values that can cross a process. Gymnasium's own checker runs at the end.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import gymnasium
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from longstep.arguments import check_callable, check_count
from longstep.defaults import find_max_steps
from longstep.env import LLMAgentEnv
from longstep.errors import ConfigError
from longstep.five_tuple import read_step
from longstep.play import Event, Player, Subject, broken, first_difference, record_play
from longstep.registration import make
from longstep.spaces import TextSpace

__all__ = ["EnvReport", "check_env"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReport:
    """What `check_env` saw of an environment that keeps the rules."""

    num_steps: int
    """Steps played before anything was repeated."""
    num_terminated: int
    """Episodes that ended in a terminal state. With none, the rules `ends` and `after-end` were not put to the test."""
    num_states: int
    """Different state keys seen."""
    warnings: tuple[str, ...]
    """What Gymnasium's checker warned about."""


def check_env(
    env: gymnasium.Env[Any, Any] | str | Callable[[], gymnasium.Env[Any, Any]],
    *,
    seed: int = 0,
    num_steps: int = 200,
    player: Player | None = None,
) -> EnvReport:
    """Play an environment and raise at the first rule it breaks.

    The rules, in the order in which they are put to the test:

    - `no-crash`: reset and step succeed for every admissible action, or any text where there is no list.
    - `global-rng`: the global generators of `random` and `numpy.random` are left alone.
    - `five-values`, `finite-reward`: as Gymnasium says.
    - `state-key`: every observation has a key, equal for its copy, and does not change after it was returned.
    - `plain-values`: observations and infos hold what msgpack can carry.
    - `admissible-actions`: they fit the action space.
    - `ends`: `terminated` and `truncated` mean what Gymnasium says.
    - `seed`: the same seed and actions give the same episode again.
    - `group`: two environments with the same seed and actions give the same episode, also when stepped in turn.
    - `after-end`: a step after a terminal state raises, or changes and pays nothing.
    - `gymnasium`: Gymnasium's own checker passes, on the environment and on LLMAgentEnv around it.

    Args:
        env: A registered id, or a class or function that gives the environment, or an instance. Of an instance without
            a spec, the second member of the group is made by its class where that takes no arguments, else by copying.
            An instance is left in the middle of an episode.
        seed: First seed to use.
        num_steps: Steps to play; enough for some episodes to end.
        player: Chooses actions, given the environment and its last info; None plays at random. Pass an expert where
            random play never reaches an end.

    Raises:
        EnvContractError: A rule is broken; the message names it and says what to do.
        ConfigError: A second member for the group could not be made.

    >>> check_env("longstep/KeyDoor-v0", num_steps=50).num_steps
    50
    """
    check_count("seed", seed, 0)
    check_count("num_steps", num_steps, 1)
    seed = int(seed)  # Gymnasium knows no numpy integers
    if player is not None:
        check_callable("player", player)
    created = isinstance(env, str) or (callable(env) and not isinstance(env, gymnasium.Env))
    wrapper = _wrap(env)
    try:
        subject = Subject(wrapper.env, wrapper.state_key)
        events = record_play(subject, seed=seed, num_steps=num_steps, player=player)
        _check_limit(wrapper, events)
        _check_seed(subject, events)
        _check_group(env, wrapper, seed, num_steps, player)
        _check_after_end(subject, events)
        found = _check_with_gymnasium(wrapper, events)
    finally:
        if created:
            wrapper.close()
    return EnvReport(
        num_steps=num_steps,
        num_terminated=sum(event.terminated for event in events),
        num_states=len({event.key for event in events}),
        warnings=found,
    )


def _wrap(env: Any) -> LLMAgentEnv:
    if isinstance(env, str):
        return make(env)
    if not isinstance(env, gymnasium.Env) and callable(env):
        try:
            env = env()
        except TypeError as error:
            raise ConfigError(
                f"expected a class or function of no arguments as `env`, got {env!r:.100}: {error}; pass a function that "
                "gives a new environment at each call"
            ) from error
    return env if isinstance(env, LLMAgentEnv) else LLMAgentEnv(cast(Any, env))


def _check_limit(wrapper: LLMAgentEnv, events: Sequence[Event]) -> None:
    limit = find_max_steps(wrapper.env)
    at_limit = [event for event in events if event.step == limit and event.seed is None]
    if len(at_limit) > 1 and all(event.terminated and not event.success for event in at_limit):
        raise broken(
            "ends",
            f"expected `truncated` at the limit of {limit} steps, got `terminated` without success in each of "
            f"{len(at_limit)} episodes; return terminated=False, truncated=True there",
        )


def _check_seed(subject: Subject, events: Sequence[Event]) -> None:
    difference = first_difference([subject], events)
    if difference:
        raise broken(
            "seed",
            f"expected the same episode for the same seed and actions, got {difference}; begin `reset` with "
            "`super().reset(seed=seed)`, draw from `self.np_random`, keep time and counters out of observations",
        )


def _check_group(
    env: Any, wrapper: LLMAgentEnv, seed: int, num_steps: int, player: Player | None
) -> None:
    members = _members(env, wrapper)
    try:
        subjects = [Subject(member, wrapper.state_key) for member in members]
        events = record_play(subjects[0], seed=seed, num_steps=num_steps, player=player)
        difference = first_difference(subjects, events)
    finally:
        for member in members:
            if member is not wrapper.env:
                member.close()
    if difference:
        raise broken(
            "group",
            f"expected two environments with the same seed and actions to give the same episode, got {difference}; let "
            "an instance's state depend on its seed alone, and keep it in the instance, not in the class or the module",
        )


def _members(env: Any, wrapper: LLMAgentEnv) -> list[gymnasium.Env[Any, Any]]:
    """Two environments of the same kind."""
    if not isinstance(env, gymnasium.Env) and callable(env):
        return [wrapper.env, _wrap(env).env]
    raw, spec = wrapper.env, wrapper.spec
    known = wrapper.has_own_spec or raw.spec is not None
    try:
        if known and spec is not None:
            return [raw, cast(Any, spec.make().unwrapped).env]
        if _takes_no_arguments(type(raw)):
            return [cast(Any, type(raw))(), cast(Any, type(raw))()]
        return [raw, copy.deepcopy(raw)]
    except Exception as error:  # the environment's own constructor or copying may fail in any way
        raise ConfigError(
            f"expected a second environment like {raw}, got {type(error).__name__}: {error}; pass a function that "
            "gives a new one at each call"
        ) from error


def _takes_no_arguments(kind: Any) -> bool:
    parameters = inspect.signature(kind).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not p.empty or p.kind in variadic for p in parameters)


def _check_after_end(subject: Subject, events: Sequence[Event]) -> None:
    """Play the first episode that terminated once more, and one step further."""
    end = next((index for index, event in enumerate(events) if event.terminated), None)
    if end is None:
        return
    start = max(index for index in range(end) if events[index].seed is not None)
    first_difference([subject], events[start : end + 1])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = read_step(subject.env, subject.env.step(copy.deepcopy(events[end].action)))
    except Exception:  # refusing the step is the best answer
        return
    if not result.terminated or result.reward != 0.0:
        got = f"a reward of {result.reward}" if result.terminated else "an episode that goes on"
        raise broken(
            "after-end",
            f"expected a step after the end to raise, or to change and pay nothing, got {got}; remember in `step` that "
            "the episode is over",
        )


def _check_with_gymnasium(wrapper: LLMAgentEnv, events: Sequence[Event]) -> tuple[str, ...]:
    found: list[str] = []
    raw = wrapper.env.unwrapped
    space = getattr(raw, "action_space", None)
    any_action = space is not None and not isinstance(space, TextSpace | gymnasium.spaces.Text)
    restricted = any(event.admissible is not None for event in events) and not isinstance(
        space, gymnasium.spaces.Discrete
    )
    subjects: list[gymnasium.Env[Any, Any]] = [wrapper]
    if any_action and not restricted and hasattr(raw, "observation_space"):
        subjects.append(raw)
    for subject in subjects:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                gymnasium_check_env(subject, skip_render_check=True, skip_close_check=True)
            except Exception as error:  # it raises assertions, and whatever the environment raises
                raise broken(
                    "gymnasium",
                    f"expected Gymnasium's checker to pass on {subject}, got {type(error).__name__}: {error}",
                ) from error
        found.extend(str(warning.message) for warning in caught)
    return tuple(dict.fromkeys(found))
