"""What an `LLMAgentEnv` uses where it is told nothing: the environment's own choice, else a plain one."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import gymnasium

from longstep.actions import ActionParser, ChoiceParser, TagParser
from longstep.memory import Memory
from longstep.prompt import PromptTemplate
from longstep.text_actions import action_hint

__all__ = ["default_parser", "default_prompt", "find_max_steps", "own_copy", "own_default"]


def own_default(env: gymnasium.Env[Any, Any], name: str) -> Any:
    """A copy of the environment's `default_<name>` (a value, a class or a function of no arguments), or None."""
    return own_copy(getattr(env.unwrapped, f"default_{name}", None))


def own_copy(value: Any) -> Any:
    """What a class or function gives; a copy of a memory; anything else as it is."""
    if isinstance(value, Memory):
        return copy.deepcopy(value)
    return value() if callable(value) else value


def find_max_steps(env: gymnasium.Env[Any, Any]) -> int | None:
    """The environment's own limit: of its Gymnasium spec, or its attribute `max_steps`."""
    limits: list[Any] = [env.spec.max_episode_steps if env.spec else None]
    if env.has_wrapper_attr("max_steps"):
        limits.append(env.get_wrapper_attr("max_steps"))
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(known, default=None)


def default_parser(admissible: Sequence[str] | None) -> ActionParser:
    """The plain parser: the completion is the action where there is a list to choose from, else it is in tags."""
    return TagParser() if admissible is None else ChoiceParser()


def default_prompt(
    env: gymnasium.Env[Any, Any], parser: ActionParser, admissible: Sequence[str] | None
) -> PromptTemplate:
    """The plain template: task, memory, observation, admissible actions if there are any, how to answer."""
    instruction = f"{getattr(parser, 'instruction', '')} {action_hint(env)}"
    literal = re.sub(r"\{(\w+)\}", r"{{\1}}", instruction)
    system = f"You act in an environment, step by step, to solve a task. {literal}".strip()
    now = "Current observation:\n{current_observation}"
    if admissible is not None:
        now += "\n\nAdmissible actions:\n{admissible_actions}"
    return PromptTemplate(
        system,
        "Task: {task_description}\n\nEarlier steps:\n{memory}\n\nSteps taken: {step} of {max_steps}. "
        + now,
        first_user="Task: {task_description}\n\n" + now,
    )
