"""Batches are sequences of the records they stand for; wrong commands are told from right ones alike in both forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from longstep.commands import (
    CommandBatch,
    EnvCommand,
    EnvResult,
    ResultBatch,
    check_commands,
    next_command_id,
)
from longstep.errors import ConfigError
from longstep.types import Task


def result(slot: int, **values: Any) -> EnvResult:
    given: dict[str, Any] = {
        "command_id": 10 + slot,
        "observation": f"room {slot}",
        "reward": float(slot),
        "terminated": slot == 1,
        "truncated": False,
        "info": {"slot": slot},
        "error": None,
        "seconds": 0.5,
    }
    return EnvResult(slot=slot, **(given | values))


def test_a_command_batch_is_the_sequence_of_its_commands() -> None:
    batch = CommandBatch([3, 1], ["north", "south"])
    commands = list(batch)
    assert [(command.slot, command.action, command.task) for command in commands] == [
        (3, "north", None),
        (1, "south", None),
    ]
    assert [command.command_id for command in commands] == batch.command_ids
    assert batch[-1] == commands[1]
    assert batch[:1] == commands[:1]
    assert len(batch) == 2
    assert len({*batch.command_ids, next_command_id()}) == 3


def test_a_command_batch_wants_an_action_for_each_slot() -> None:
    with pytest.raises(ConfigError, match="an action for each of 2 slots, got 1"):
        CommandBatch([0, 1], ["north"])


def test_a_command_batch_takes_the_slots_that_numpy_counts() -> None:
    batch = CommandBatch(np.flatnonzero([True, False, True]), ["north", "south"])
    assert batch.slots == [0, 2]
    assert [type(slot) for slot in batch.slots] == [int, int]
    with pytest.raises(ConfigError, match="integers as slots"):
        CommandBatch([0.5], ["north"])  # type: ignore[list-item]


def test_a_result_batch_gives_back_the_results_it_was_made_of() -> None:
    results = [result(slot) for slot in range(3)]
    batch = ResultBatch.of(results)
    assert batch == results
    assert list(batch) == results
    assert batch[1] == results[1]
    assert batch[1:] == results[1:]
    assert batch != results[:2]
    assert batch.rewards == [0.0, 1.0, 2.0]
    assert batch.infos == [{"slot": slot} for slot in range(3)]
    assert ResultBatch.join([batch[:1], batch[1:]]) == results
    assert ResultBatch.join([]) == []


def test_a_result_made_from_columns_is_a_frozen_result() -> None:
    made = ResultBatch.of([result(4)])[0]
    assert type(made) is EnvResult
    assert made == result(4)
    with pytest.raises(AttributeError, match="cannot assign to field"):
        made.slot = 5  # type: ignore[misc]


def test_infos_that_are_all_empty_are_made_once_and_are_the_callers_own() -> None:
    columns: list[Any] = [[0, 1], [5, 6], ["a", "b"], [0.0, 0.0], [False] * 2, [False] * 2]
    batch = ResultBatch(*columns, None, [None, None], [0.0, 0.0])
    batch.infos[0]["mine"] = 1
    assert [item.info for item in batch] == [{"mine": 1}, {}]


WRONG = {
    "a slot below 3, got 3": [(0, "a"), (3, "a")],
    "a slot below 3, got -1": [(-1, "a")],
    "one command at a time for slot 1": [(1, "a"), (1, "b")],
    "one command at a time for slot 2": [(2, "a")],
    "slot 0 to be in an episode": [(1, "a"), (0, "a")],
    "exactly one of .* got neither": [(1, None)],
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("as_batch", [False, True])
def test_a_wrong_step_is_told_alike_in_a_list_and_in_a_batch(message: str, as_batch: bool) -> None:
    slots = [slot for slot, _ in WRONG[message]]
    actions: list[Any] = [action for _, action in WRONG[message]]
    batch = CommandBatch(slots, actions)
    episodes = [message.startswith("slot 0") is False, True, True]
    with pytest.raises(ConfigError, match=message):
        check_commands(
            batch if as_batch else list(batch), busy={2}, in_episode=episodes, env_id=None
        )


def test_what_was_taken_is_busy() -> None:
    steps = CommandBatch([0, 1], ["a", "b"])
    told = {"in_episode": [True, True, False], "env_id": "an/env"}
    assert check_commands(steps, busy={2}, **told) == {0, 1, 2}
    start = EnvCommand(slot=2, command_id=1, task=Task(env_id="an/env", seed=1))
    assert check_commands([start], busy=set(), **told) == {2}
    other = EnvCommand(slot=2, command_id=1, task=Task(env_id="other", seed=1))
    with pytest.raises(ConfigError, match="expected tasks of `an/env`, got one of `other`"):
        check_commands([other], busy=set(), **told)
