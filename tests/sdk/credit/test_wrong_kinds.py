"""Every argument of every function of `longstep.credit`, with values of every wrong kind.

A table says what each argument takes. Everything else must be a `LongstepError` that names the argument: never another
exception, and never a result, which would be nonsense that nobody notices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from longstep import credit
from longstep.credit import StepGroups
from longstep.errors import LongstepError

COLUMNS: dict[str, Any] = {
    "rewards": [0.0, 1.0, 0.0],
    "trajectory_ids": [0, 0, 1],
    "group_ids": [0, 0, 0],
}
STATES = COLUMNS | {"state_keys": ["a", "b", "a"]}
EVERY: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "discounted_returns": (
        credit.discounted_returns,
        {"rewards": [0.0, 1.0, 0.0], "trajectory_ids": [0, 0, 1], "gamma": 0.9},
    ),
    "drop_uniform_groups": (credit.drop_uniform_groups, COLUMNS),
    "gigpo": (credit.gigpo, STATES),
    "graph": (credit.graph, STATES),
    "group_similar": (
        credit.group_similar,
        {"texts": ["a", "b", "a"], "group_ids": [0, 0, 0], "threshold": 0.9},
    ),
    "group_similar by cosine": (
        credit.group_similar,
        {
            "texts": None,
            "group_ids": [0, 0, 0],
            "threshold": 0.9,
            "method": "cosine",
            "vectors": [[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]],
        },
    ),
    "group_steps": (
        credit.group_steps,
        {"state_keys": ["a", "b", "a"], "group_ids": [0, 0, 0], "trajectory_ids": [0, 0, 1]},
    ),
    "grpo": (credit.grpo, COLUMNS),
    "hgpo": (credit.hgpo, STATES),
    "reinforce_plus_plus": (credit.reinforce_plus_plus, COLUMNS),
    "rloo": (credit.rloo, COLUMNS),
    "turn_gae": (
        credit.turn_gae,
        {
            "rewards": [0.0, 1.0, 0.0],
            "values": [0.1, 0.2, 0.3],
            "trajectory_ids": [0, 0, 1],
            "gamma": 0.9,
            "lam": 0.9,
            "terminated": [False, True, False],
            "bootstrap_values": [0.0, 0.0, 0.5],
        },
    ),
    "StepGroups.from_labels": (StepGroups.from_labels, {"labels": [0, 1, 0]}),
}

WRONG: dict[str, Any] = {
    "None": None,
    "a flag": True,
    "a text": "x",
    "a number in a text": "1",
    "bytes": b"1",
    "a complex number": 1j,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "minus one": -1,
    "a number": 0.5,
    "a whole number": 3,
    "a huge whole number": 10**400,
    "a fraction": Fraction(1, 2),
    "a decimal": Decimal(1),
    "a date": np.datetime64("2026-01-31"),
    "a flag of numpy": np.True_,
    "an object": object(),
    "a dict": {0: 1},
    "a set": {0, 1, 2},
    "a function": lambda *values: None,
    "nothing in a list": [],
    "a short list": [0],
    "numbers": [0.0, 1.0, 0.0],
    "whole numbers": [0, 1, 0],
    "big whole numbers": [2**70, 0, 0],
    "negative numbers": np.array([-1, -5, -1]),
    "texts": ["0", "1", "0"],
    "bytes in a list": [b"0", b"1", b"0"],
    "flags": [False, True, False],
    "flags of numpy": np.array([False, True, False]),
    "None in a list": [None, 1, 0],
    "NaN in a list": [float("nan"), 1, 0],
    "NaN among texts": ["a", float("nan"), "a"],
    "None among texts": ["a", None, "a"],
    "numbers among texts": ["a", 1, "a"],
    "complex numbers": np.array([1j, 0, 0]),
    "dates": np.array(["2026-01-31"] * 3, "datetime64[D]"),
    "objects": np.array([object()] * 3),
    "decimals": [Decimal(1)] * 3,
    "huge numbers": [1e300, -1e300, 0.0],
    "lists of unequal lengths": [0, [1], 2],
    "a column of two dimensions": np.zeros((3, 1)),
    "no dimension": np.array(1.0),
    "an iterator": None,  # a new one for each call
    "groups": StepGroups.from_labels([0, 1, 0]),
    "groups of other lengths": StepGroups.from_labels([0, 1]),
    "groups that count wrong": StepGroups(ids=np.array([0, 1, 7]), sizes=np.array([1, 1])),
    "groups of lists": StepGroups(ids=[0, 1, 0], sizes=[2, 1]),  # type: ignore[arg-type]
}

NUMBER_COLUMNS = {
    "numbers", "whole numbers", "big whole numbers", "negative numbers", "flags",
    "flags of numpy", "huge numbers",
}  # fmt: skip
ID_COLUMNS = {
    "whole numbers", "big whole numbers", "negative numbers", "texts", "bytes in a list",
    "numbers among texts",
}  # fmt: skip
FLAG_COLUMNS = {"None", "numbers", "whole numbers", "flags", "flags of numpy"}
COUNTS = {"a whole number"}
SHARE = {"a number", "a fraction", "no dimension"}
POSITIVE = SHARE | {"a whole number"}
KEYS = {
    "whole numbers", "big whole numbers", "negative numbers", "texts", "bytes in a list",
}  # fmt: skip

TAKES: dict[str, set[str]] = {
    "rewards": NUMBER_COLUMNS,
    "values": NUMBER_COLUMNS,
    "bootstrap_values": NUMBER_COLUMNS,
    "labels": {"nothing in a list", "a short list", "whole numbers", "negative numbers"},
    "trajectory_ids": ID_COLUMNS,
    "group_ids": ID_COLUMNS,
    "state_keys": KEYS,
    "texts": {"texts"},
    "vectors": set(),
    "valid": FLAG_COLUMNS,
    "mask": FLAG_COLUMNS,
    "anchors": FLAG_COLUMNS,
    "terminated": FLAG_COLUMNS - {"None"},
    "gamma": SHARE,
    "lam": SHARE,
    "threshold": SHARE,
    "omega": POSITIVE | {"minus one"},
    "length_weight_alpha": POSITIVE | {"minus one"},
    "invalid_action_penalty": POSITIVE,
    "epsilon": POSITIVE,
    "std_floor": POSITIVE,
    "tolerance": POSITIVE,
    "inner_group_size": COUNTS | {"a huge whole number"},
    "history_length": COUNTS | {"a huge whole number"},
    "max_iterations": COUNTS | {"a huge whole number"},
    "ddof": set(),
    "episode_ddof": set(),
    "episode_term": {"a flag", "a flag of numpy"},
    "step_groups": {"None", "groups"},
    "normalize": set(),
    "baseline": set(),
    "penalty_scope": set(),
    "repeats": set(),
    "lone_episode": set(),
    "backup": set(),
    "method": set(),
}
TAKES_ALSO = {
    ("reinforce_plus_plus", "group_ids"): {"None"},  # without a baseline
    ("group_steps", "trajectory_ids"): {"None"},
    ("turn_gae", "bootstrap_values"): {"NaN in a list"},  # at a row where none is read
    ("group_similar", "vectors"): {"None"},
    ("group_similar by cosine", "texts"): set(WRONG),  # not looked at
}
NAMED_AS = {
    "invalid_action_penalty": ("`valid`", "`invalid_action_penalty`"),
    "rewards": ("`rewards`", "`trajectory_ids`"),  # none in a list, and three of those
    "group_ids": ("`group_ids`", "`trajectory_ids`"),
    "vectors": ("`vectors`", "`texts`"),
}
TOGETHER = {
    "invalid_action_penalty": {"valid": [True, False, True]},
    "step_groups": {"state_keys": None},
}


def cases() -> Iterator[Any]:
    for function, (call, _) in EVERY.items():
        for argument in inspect.signature(call).parameters:
            yield pytest.param(function, argument, id=f"{function}-{argument}")


def test_the_table_names_every_function_of_the_module() -> None:
    functions = {name for name in credit.__all__ if inspect.isfunction(getattr(credit, name))}
    assert functions <= set(EVERY)


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize(("function", "argument"), list(cases()))
def test_a_value_of_the_wrong_kind_is_an_error_that_names_the_argument(
    function: str, argument: str
) -> None:
    call, good = EVERY[function]
    takes = TAKES[argument] | TAKES_ALSO.get((function, argument), set())
    names = NAMED_AS.get(argument, (f"`{argument}`",))
    for label, value in WRONG.items():
        given = iter([0, 1, 0]) if label == "an iterator" else value
        arguments = {**good, **TOGETHER.get(argument, {}), argument: given}
        error = None
        try:
            call(**arguments)
        except Exception as raised:
            error = raised
        assert error is None or isinstance(error, LongstepError), (label, error)
        if label not in takes:  # what is taken may still not go with the other arguments
            assert error is not None, f"{label} was taken"
            assert any(name in str(error) for name in names), (label, error)
