"""The stored numbers of the reference implementation (verl-agent at its commit 20bd331)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longstep.credit import (
    PRESETS,
    StepGroups,
    discounted_returns,
    gigpo,
    group_similar,
    group_steps,
    hgpo,
)

TOLERANCE = 1e-4  # the stored numbers were computed in float32


@dataclass(frozen=True)
class Case:
    name: str
    gamma: float
    omega: float
    epsilon: float
    invalid_penalty: float
    similarity: float | None
    rewards: list[float]
    trajectory_ids: list[str]
    group_ids: list[int]
    states: list[str]
    valid: list[bool]
    returns: list[float]
    expected: dict[str, Any]

    def step_groups(self) -> StepGroups:
        labels = np.full(len(self.rewards), -1)
        for number, rows in enumerate(self.expected["step_groups"]):
            labels[rows] = number
        return StepGroups.from_labels(labels)


def read_case(item: dict[str, Any]) -> Case:
    rows = item["rows"]
    return Case(
        name=item["id"],
        gamma=item["gamma"],
        omega=item["omega"],
        epsilon=item["epsilon"],
        invalid_penalty=item["invalid_penalty"],
        similarity=item["similarity"],
        rewards=[row["reward"] for row in rows],
        trajectory_ids=[row["traj"] for row in rows],
        group_ids=[row["group"] for row in rows],
        states=[row["state"] for row in rows],
        valid=[row["valid"] for row in rows],
        returns=item["returns"],
        expected=item["expected"],
    )


FILE = Path(__file__).with_name("golden_advantages.json")
CASES = [read_case(item) for item in json.loads(FILE.read_text())]
EXACT = [case for case in CASES if case.similarity is None]
MODES = {"mean_norm": "none", "mean_std_norm": "std"}

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_exact_case = pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)


def keys_of(case: Case, prefix: str) -> list[str]:
    return [key for key in case.expected if key.startswith(prefix)]


def gigpo_of(case: Case, key: str, **groups: Any) -> np.ndarray:
    _, mode, baseline, penalty = key.split("/")
    preset = "verl_agent" if baseline == "row_baseline" else "paper"
    return gigpo(
        case.rewards,
        case.trajectory_ids,
        case.group_ids,
        gamma=case.gamma,
        omega=case.omega,
        normalize=MODES[mode],
        epsilon=case.epsilon,
        valid=case.valid,
        invalid_action_penalty=case.invalid_penalty if penalty == "penalty_row" else 0.0,
        **groups,
        **PRESETS[preset],
    ).total


def test_the_stored_cases_cover_both_presets() -> None:
    assert len(CASES) == 16
    assert all(len(keys_of(case, "gigpo/")) == 6 for case in CASES)


@every_case
def test_returns_are_the_stored_ones(case: Case) -> None:
    returns = discounted_returns(case.rewards, case.trajectory_ids, case.gamma)
    np.testing.assert_allclose(returns, case.returns, atol=TOLERANCE, rtol=0)


@every_exact_case
def test_equal_states_form_the_stored_groups(case: Case) -> None:
    groups = group_steps(case.states, case.group_ids)
    np.testing.assert_array_equal(groups.ids, case.step_groups().ids)


@every_exact_case
def test_gigpo_from_state_keys_gives_the_stored_advantages(case: Case) -> None:
    for key in keys_of(case, "gigpo/"):
        total = gigpo_of(case, key, state_keys=case.states)
        np.testing.assert_allclose(total, case.expected[key], atol=TOLERANCE, rtol=0, err_msg=key)


@every_case
def test_gigpo_from_given_step_groups_gives_the_stored_advantages(case: Case) -> None:
    for key in keys_of(case, "gigpo/"):
        total = gigpo_of(case, key, step_groups=case.step_groups())
        np.testing.assert_allclose(total, case.expected[key], atol=TOLERANCE, rtol=0, err_msg=key)


@every_exact_case
def test_hgpo_gives_the_stored_advantages(case: Case) -> None:
    keys = keys_of(case, "hgpo/")
    assert len(keys) == 4
    for key in keys:
        _, mode, history, base = key.split("/")
        total = hgpo(
            case.rewards,
            case.trajectory_ids,
            case.group_ids,
            case.states,
            gamma=case.gamma,
            normalize=MODES[mode],
            epsilon=case.epsilon,
            history_length=int(history.removeprefix("K")),
            episode_term=base == "base_true",
            baseline="row",
        ).total
        np.testing.assert_allclose(total, case.expected[key], atol=TOLERANCE, rtol=0, err_msg=key)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.similarity is not None], ids=lambda case: case.name
)
def test_similar_states_form_the_stored_groups_and_give_the_stored_advantages(case: Case) -> None:
    assert case.similarity is not None
    groups = group_similar(case.states, case.group_ids, case.similarity, method="difflib")
    np.testing.assert_array_equal(groups.ids, case.step_groups().ids)
    for key in keys_of(case, "gigpo/"):
        total = gigpo_of(case, key, step_groups=groups)
        np.testing.assert_allclose(total, case.expected[key], atol=TOLERANCE, rtol=0, err_msg=key)
