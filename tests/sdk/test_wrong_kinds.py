"""Arguments of every wrong kind, for what a user builds from: parsers, prompts, memories, keys, tasks, environments.

A table says what each argument takes. Everything else must be a `LongstepError` that names the argument: never another
exception, and never a result, which would be nonsense that nobody notices. `tests/sdk/credit` does the same for credit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import longstep
from longstep import canonicalize
from longstep.actions import ChoiceParser, JsonParser, RegexParser, TagParser, ToolCallParser
from longstep.checks import check_env
from longstep.env import LLMAgentEnv
from longstep.envs import KeyDoorEnv, SokobanEnv
from longstep.errors import ConfigError, LongstepError
from longstep.memory import (
    FrameMemory,
    KeyEventMemory,
    RetrievalMemory,
    SimpleMemory,
    SummaryMemory,
    WindowMemory,
)
from longstep.prompt import PromptTemplate
from longstep.recording import RolloutBatch
from longstep.registration import registry
from longstep.state_key import CheckedStateKey, fold_history, state_key, state_keys
from longstep.tasks import Panel, TaskStream, assert_disjoint, panel, task_stream
from longstep.types import GenerationRequest, Message, Prompt, Task

KEYDOOR = "longstep/KeyDoor-v0"
TOOL = {"name": "go", "parameters": {"type": "object", "properties": {}}}


class Anything:
    """Takes any arguments."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        return None


WRONG: dict[str, Any] = {
    "None": None,
    "flag": True,
    "text": "x",
    "number text": "1",
    "empty text": "",
    "bytes": b"x",
    "complex": 1j,
    "nan": float("nan"),
    "infinity": float("inf"),
    "negative": -1,
    "half": 0.5,
    "whole": 3,
    "numpy whole": np.int64(3),
    "huge": 2**70,
    "object": object(),
    "dict": {},
    "dict by number": {1: 2},
    "set": {"x"},
    "class": Anything,
    "empty list": [],
    "texts": ["x", "y"],
    "numbers": [1, 2],
    "text and None": ["x", None],
    "array": np.zeros((2, 2)),
    "image": np.zeros((2, 2, 3), np.uint8),
    "images": [np.zeros((2, 2, 3), np.uint8)],
    "iterator": None,  # a new one for each call
}
TEXT = {"text", "number text", "empty text"}
TEXTS = {"texts", "empty list"}
COUNT = {"whole", "numpy whole", "huge"}
SMALL_COUNT = {"whole", "numpy whole"}
NUMBER = COUNT | {"half", "negative"}
ANY_NUMBER = NUMBER | {"nan", "infinity"}
NONE = {"None"}
FLAG = {"flag"}
NOTHING: set[str] = set()


STEP = {"observation": "o", "action": "a", "reward": 0.0, "done": False, "info": {}}
TAKES_STEP = {"action": TEXT, "reward": ANY_NUMBER, "info": {"dict"}}
PARSE = {"completion": "x", "admissible": ["x"]}
TAKES_PARSE = {"completion": TEXT, "admissible": NONE | TEXTS}


def make_env(**arguments: Any) -> None:
    longstep.make(KEYDOOR, **arguments).close()


def make_by(id: Any) -> None:
    longstep.make(id).close()


def register(**arguments: Any) -> None:
    arguments = {"id": "test/Kind-v0", "entry_point": KeyDoorEnv, **arguments}
    longstep.register(**arguments)
    registry.remove(arguments["id"])


def play(**arguments: Any) -> None:
    env = longstep.make(KEYDOOR)
    try:
        env.reset(**{"seed": 1, **arguments})
    finally:
        env.close()


def act(action: Any) -> None:
    env = longstep.make(KEYDOOR)
    env.reset(seed=1)
    try:
        env.step(action)
    finally:
        env.close()


def look(**arguments: Any) -> None:
    PromptTemplate("s", "{current_observation}{memory}{admissible_actions}").build(**arguments)


def count_with(result: Any) -> None:
    PromptTemplate("", "x", max_tokens=9, count_tokens=lambda text: result).build()


def batches(size: Any) -> None:
    list(panel(KEYDOOR, "eval", 1, split_states=False).batches(size))


def next_task(env_id: Any = KEYDOOR, **arguments: Any) -> None:
    with TaskStream(env_id, **{"seed": 0, "split_states": False, **arguments}):
        pass


V16 = state_keys(["a", "b"])
ONE_TASK = (Task(env_id=KEYDOOR, seed=1),)
ONE_PANEL = panel(KEYDOOR, "eval", 1, split_states=False)

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, set[str]]]] = {
    "TagParser": (TagParser, {}, {"tag": TEXT - {"empty text"}, "think_tag": NONE | TEXT - {"empty text"}}),
    "JsonParser": (JsonParser, {}, {"key": TEXT}),
    "RegexParser": (RegexParser, {"pattern": "x"}, {"pattern": TEXT, "max_characters": COUNT}),
    "ToolCallParser": (ToolCallParser, {}, {"tools": NOTHING}),
    "ChoiceParser.parse": (ChoiceParser().parse, PARSE, TAKES_PARSE),
    "TagParser.parse": (TagParser().parse, PARSE, TAKES_PARSE),
    "JsonParser.parse": (JsonParser().parse, PARSE, TAKES_PARSE),
    "RegexParser.parse": (RegexParser("x").parse, PARSE, TAKES_PARSE),
    "ToolCallParser.parse": (ToolCallParser([TOOL]).parse, PARSE, TAKES_PARSE),
    "ChoiceParser.constraint": (ChoiceParser().constraint, {}, {"admissible": NONE | TEXTS}),
    "TagParser.constraint": (TagParser().constraint, {}, {"admissible": NONE | TEXTS}),
    "PromptTemplate": (
        PromptTemplate,
        {"system": "s", "user": "u"},
        {
            "system": NONE | TEXT,
            "user": TEXT,
            "first_user": NONE | TEXT,
            "max_tokens": NONE | COUNT,
            "count_tokens": NONE | {"class"},
            "drop_order": {"empty list"},
        },
    ),
    "PromptTemplate.build": (
        look,
        {},
        {
            "current_observation": TEXT,
            "task_description": TEXT,
            "memory": TEXT,
            "admissible_actions": NONE | TEXTS,
            "step": COUNT,
            "max_steps": NONE | COUNT,
            "images": {"empty list"},
            "memory_images": {"empty list"},
        },
    ),
    "count_tokens": (count_with, {}, {"result": SMALL_COUNT}),
    "WindowMemory": (WindowMemory, {}, {"window_size": SMALL_COUNT}),
    "FrameMemory": (FrameMemory, {}, {"window_size": SMALL_COUNT}),
    "RetrievalMemory": (RetrievalMemory, {}, {"top_k": SMALL_COUNT}),
    "SummaryMemory": (
        SummaryMemory,
        {"summarize": str},
        {"summarize": {"class"}, "every": SMALL_COUNT, "keep_last": SMALL_COUNT},
    ),
    "KeyEventMemory": (KeyEventMemory, {}, {"is_key": {"class"}}),
    "SimpleMemory.update": (SimpleMemory().update, STEP, TAKES_STEP),
    "WindowMemory.update": (WindowMemory().update, STEP, TAKES_STEP),
    "FrameMemory.update": (FrameMemory().update, STEP, TAKES_STEP),
    "RetrievalMemory.update": (RetrievalMemory().update, STEP, TAKES_STEP),
    "KeyEventMemory.update": (KeyEventMemory(lambda *step: True).update, STEP, TAKES_STEP),
    "SummaryMemory.update": (SummaryMemory(lambda *steps: "").update, STEP, TAKES_STEP),
    "state_key": (state_key, {"observation": "x"}, {"canonicalize": NONE | {"class"}}),
    "state_keys": (
        state_keys,
        {"observations": ["x"]},
        {
            "observations": TEXTS | {"numbers", "text and None", "array", "image", "images"},
            "canonicalize": NONE | {"class"},
        },
    ),
    "fold_history": (
        fold_history,
        {"keys": V16, "trajectory_ids": [0, 0], "k": 1},
        {"keys": NOTHING, "trajectory_ids": {"numbers", "texts"}, "k": SMALL_COUNT},
    ),
    "CheckedStateKey": (CheckedStateKey, {}, {"key": {"class"}, "canonicalize": NONE | {"class"}}),
    "chain": (lambda first: canonicalize.chain(first), {}, {"first": {"class"}}),
    "round_floats": (canonicalize.round_floats, {}, {"decimals": SMALL_COUNT | {"negative"}}),
    "crop_image": (
        canonicalize.crop_image,
        {},
        {"top": COUNT, "bottom": COUNT, "left": COUNT, "right": COUNT},
    ),
    "panel": (
        panel,
        {"env_id": KEYDOOR, "split": "eval", "num_tasks": 1, "split_states": False},
        {
            "env_id": TEXT,  # of an environment that is looked for when it is needed
            "split": NOTHING,
            "num_tasks": SMALL_COUNT,
            "env_kwargs": NONE | {"dict"},
            "split_states": FLAG,
        },
    ),
    "Panel": (
        Panel,
        {"env_id": KEYDOOR, "split": "mine", "tasks": ONE_TASK},
        {"env_id": TEXT, "split": TEXT, "tasks": NOTHING, "env_kwargs": {"dict"}},
    ),
    "Panel.batches": (batches, {}, {"size": COUNT}),
    "TaskStream": (
        next_task,
        {},
        {
            "env_id": TEXT,
            "seed": COUNT,
            "env_kwargs": NONE | {"dict"},
            "split_states": FLAG,
            "position": COUNT,
        },
    ),
    "task_stream": (
        task_stream,
        {"env_id": KEYDOOR, "seed": 0, "split_states": False},
        {"env_id": TEXT, "seed": COUNT, "env_kwargs": NONE | {"dict"}},
    ),
    "assert_disjoint": (
        assert_disjoint,
        {"first": ONE_PANEL, "second": ONE_PANEL},
        {"first": NOTHING, "second": NOTHING},
    ),
    "make": (make_by, {}, {"id": NOTHING}),
    "make with settings": (
        make_env,
        {},
        {
            "max_steps": NONE | COUNT,
            "memory": NONE,
            "prompt": NONE,
            "parser": NONE,
            "state_key": NONE | {"class"},
            "task_description": NONE | TEXT,
            "invalid_action_penalty": NONE | COUNT | {"half"},
            "reward_scale": NONE | NUMBER,
            "observation_text": NONE | {"class"},
        },
    ),
    "register": (
        register,
        {},
        {
            "id": {"text", "number text"},
            "entry_point": TEXT | {"class"},  # read when it is first made
            "kwargs": NONE | {"dict"},
            "max_steps": NONE | COUNT,
            "memory": NONE | {"class"},
            "prompt": NONE | {"class"},
            "parser": NONE | {"class"},
        },
    ),
    "registry.add": (registry.add, {}, {"entry": NOTHING}),
    "registry.remove": (registry.remove, {}, {"id": NOTHING}),
    "registry[]": (registry.__getitem__, {}, {"id": NOTHING}),
    "LLMAgentEnv": (LLMAgentEnv, {}, {"env": NOTHING}),
    "LLMAgentEnv.reset": (play, {}, {"seed": NONE | COUNT, "options": NONE | {"dict"}}),
    "LLMAgentEnv.step": (act, {}, {"action": TEXT}),
    "check_env": (
        check_env,
        {"env": KEYDOOR, "num_steps": 3},
        {"env": NOTHING, "seed": COUNT, "num_steps": SMALL_COUNT, "player": NONE | {"class"}},
    ),
    "KeyDoorEnv": (
        KeyDoorEnv,
        {},
        {
            "size": SMALL_COUNT,
            "num_rooms": SMALL_COUNT,
            "max_steps": NONE | COUNT,
            "reward": NOTHING,
            "style": NOTHING,
            "render_mode": NONE,
        },
    ),
    "KeyDoorEnv.restore": (KeyDoorEnv().restore, {}, {"snapshot": NOTHING}),
    "SokobanEnv": (
        SokobanEnv,
        {},
        {
            "dim_room": NOTHING,
            "num_boxes": SMALL_COUNT,
            "max_pulls": NONE | SMALL_COUNT,
            "max_steps": COUNT,
            "observation": NOTHING,
            "symbols": NOTHING,
            "separator": TEXT,
            "admissible": NOTHING,
            "render_mode": NONE,
        },
    ),
    "SokobanEnv.restore": (SokobanEnv().restore, {}, {"snapshot": NOTHING}),
    "RolloutBatch": (RolloutBatch, {}, {"trajectories": NOTHING}),
}  # fmt: skip
NAMED_AS = {
    "first": "`",
    "id": "",
    "env": "",
    "result": "tokens",
    "images": "",
    "memory_images": "",
}


def cases() -> Iterator[Any]:
    for name, (_, _, takes) in CALLS.items():
        for argument in takes:
            yield pytest.param(name, argument, id=f"{name}-{argument}")


@pytest.mark.parametrize(("name", "argument"), list(cases()))
def test_a_value_of_the_wrong_kind_is_an_error_that_names_the_argument(
    name: str, argument: str
) -> None:
    call, good, takes = CALLS[name]
    for label, value in WRONG.items():
        if (name, label) == ("check_env", "huge"):  # it would play for ever, as it was told to
            continue
        given = iter(["x"]) if label == "iterator" else value
        error = None
        try:
            call(**{**good, argument: given})
        except Exception as raised:
            error = raised
        assert error is None or isinstance(error, LongstepError), (label, repr(error))
        if label not in takes[argument]:
            assert error is not None, f"{label} was taken"
            assert NAMED_AS.get(argument, f"`{argument}") in str(error), (label, error)
        elif label != "class":  # what a function gives is looked at when it was called
            assert error is None, (label, error)


@pytest.mark.parametrize("name", ["stop", "allowed"])
def test_one_text_is_not_taken_for_its_letters(name: str) -> None:
    prompt = Prompt(messages=(Message(role="user", content="go"),))
    with pytest.raises(ConfigError, match=rf"a tuple of texts as `{name}`, got the text 'room'"):
        GenerationRequest(request_id="a", prompt=prompt, **{name: "room"})  # type: ignore[arg-type]
