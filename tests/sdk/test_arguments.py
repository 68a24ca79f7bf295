"""Arguments of the wrong kind: each is one error that names the argument, not a failure deep inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import longstep
from longstep.actions import TagParser
from longstep.env import LLMAgentEnv
from longstep.errors import ConfigError, RegistryError
from longstep.memory import KeyEventMemory, SummaryMemory, WindowMemory
from longstep.policy import FunctionPolicy
from longstep.prompt import PromptTemplate
from longstep.registration import register
from longstep.rollout import Rollout
from longstep.tasks import TaskStream, panel
from longstep.types import Task
from longstep.vector import GroupVectorEnv

KEYDOOR = "longstep/KeyDoor-v0"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_steps", "5"),
        ("max_steps", 2.5),
        ("max_steps", True),
        ("prompt", "Look: {current_observation}"),
        ("parser", "action"),
        ("parser", TagParser),
        ("state_key", "md5"),
        ("observation_text", "text"),
        ("task_description", 5),
        ("invalid_action_penalty", "0.1"),
        ("reward_scale", None.__class__),
    ],
)
def test_a_wrapper_names_the_argument_of_the_wrong_kind(name: str, value: Any) -> None:
    env = longstep.make(KEYDOOR).env
    with pytest.raises(ConfigError, match=f"`{name}`"):
        LLMAgentEnv(env, **{name: value})


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: WindowMemory("2"), "whole number as `window_size`, got '2'"),  # type: ignore[arg-type]
        (lambda: SummaryMemory(5), "function as `summarize`, got 5"),  # type: ignore[arg-type]
        (lambda: KeyEventMemory(None), "function as `is_key`, got None"),  # type: ignore[arg-type]
        (lambda: PromptTemplate("", None), "str as `user`, got None"),  # type: ignore[arg-type]
        (lambda: PromptTemplate("", "x", max_tokens=5.5), "`max_tokens`, got 5.5"),  # type: ignore[arg-type]
        (lambda: PromptTemplate("", "x", count_tokens=0), "`count_tokens`, got 0"),  # type: ignore[arg-type]
        (lambda: GroupVectorEnv(KEYDOOR, "4"), "`num_envs`, got '4'"),  # type: ignore[arg-type]
        (lambda: panel(KEYDOOR, "eval", 2.5), "`num_tasks`, got 2.5"),  # type: ignore[arg-type]
        (lambda: TaskStream(KEYDOOR, None), "`seed`, got None"),  # type: ignore[arg-type]
        (lambda: longstep.make(5), "str as `id`, got 5"),  # type: ignore[arg-type]
        (lambda: register("team/Nothing-v0", None), "function as `entry_point`"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(call: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        call()


def test_a_count_may_be_a_number_of_numpy() -> None:
    assert WindowMemory(np.int64(3)).window_size == 3  # type: ignore[arg-type]


def test_more_tasks_than_a_split_has_seeds_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="at most 536870912"):
        panel(KEYDOOR, "eval", 2**31, split_states=False)


def test_an_entry_point_whose_module_is_absent_is_named() -> None:
    register("team/Absent-v0", "no_such_module_here:Env")
    try:
        with pytest.raises(RegistryError, match="no_such_module_here"):
            longstep.make("team/Absent-v0")
    finally:
        longstep.registry.remove("team/Absent-v0")


@pytest.mark.parametrize("policy", [None, lambda request: "look", FunctionPolicy])
def test_what_is_no_policy_is_a_wrong_call(policy: Any) -> None:
    with pytest.raises(ConfigError, match="expected a Policy"):
        Rollout(KEYDOOR, policy, group_size=1)


@pytest.mark.parametrize(
    ("tasks", "match"),
    [
        (Task(env_id=KEYDOOR, seed=1), "put one into a list"),
        (["maze"], r"`tasks\[0\]`"),
        ([Task(env_id=KEYDOOR, seed="x")], r"`tasks\[0\].seed`"),  # type: ignore[arg-type]
    ],
)
def test_what_are_no_tasks_is_a_wrong_call(tasks: Any, match: str) -> None:
    with (
        Rollout(KEYDOOR, FunctionPolicy(lambda request: "look"), group_size=1) as rollout,
        pytest.raises(ConfigError, match=match),
    ):
        rollout.collect(tasks)
