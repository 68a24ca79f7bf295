"""verl-agent's way to the same numbers, written anew from its description, as the baseline of `bench_credit.py`.

It keeps what makes that way slow: ids are Python strings in object arrays that are searched once per group and once per
row, observations become tuples of Python objects, statistics are dictionaries of zero-dimensional torch tensors, and
each row is normalised by itself. Where the original prints or pads over tokens this does nothing, which favours it.
"""

from __future__ import annotations

import difflib
import uuid
from collections import defaultdict
from typing import Any

import numpy as np
import torch


def discounted_returns(rewards: np.ndarray, trajectories: np.ndarray, gamma: float) -> torch.Tensor:
    """Each trajectory is found by a scan of all rows, and each row scans again for its place."""
    rewards = rewards.astype(np.float32)
    of_trajectory = {}
    for name in np.unique(trajectories):
        at = np.where(trajectories == name)[0]
        returns, carry = np.zeros_like(rewards[at]), 0.0
        for time in reversed(range(len(at))):
            carry = rewards[at][time] + gamma * carry
            returns[time] = carry
        of_trajectory[name] = returns
    result = np.zeros_like(rewards)
    for row, name in enumerate(trajectories):
        result[row] = returns_at(of_trajectory, trajectories, row, name)
    return torch.tensor(result)


def returns_at(
    of_trajectory: dict[str, np.ndarray], trajectories: np.ndarray, row: int, name: str
) -> float:
    """The return of one row, by a scan for the rows of its trajectory."""
    at = np.where(trajectories == name)[0]
    return of_trajectory[name][np.where(at == row)[0][0]]


def hashable(observation: Any) -> Any:
    """A key made of Python objects: one for each pixel of an image."""
    if isinstance(observation, (int, float, str, bool)):
        return observation
    if isinstance(observation, np.ndarray):
        return tuple(observation.flatten())
    raise TypeError(type(observation))


def equal_groups(observations: np.ndarray | list[Any], groups: np.ndarray) -> np.ndarray:
    """A random string for each set of equal observations of a group."""
    names = np.empty(len(groups), dtype=object)
    for group in np.unique(groups):
        rows_of = defaultdict(list)
        for row in np.where(groups == group)[0]:
            rows_of[hashable(observations[row])].append(row)
        for rows in rows_of.values():
            name = str(uuid.uuid4())
            for row in rows:
                names[row] = name
    return names


def similar_groups(observations: list[str], groups: np.ndarray, threshold: float) -> np.ndarray:
    """Greedy: each text joins the first cluster whose first member is similar enough."""
    names = np.empty(len(groups), dtype=object)
    for group in np.unique(groups):
        clusters: list[tuple[str, str]] = []
        for row in np.where(groups == group)[0]:
            for name, first in clusters:
                ratio = difflib.SequenceMatcher(None, observations[row], first).ratio()
                if ratio >= threshold:
                    names[row] = name
                    break
            else:
                clusters.append((str(uuid.uuid4()), observations[row]))
                names[row] = clusters[-1][0]
    return names


def relative(scores: torch.Tensor, groups: np.ndarray, alone: str) -> torch.Tensor:
    """Scores minus the mean of their group, one zero-dimensional tensor at a time."""
    scores = scores.clone()
    of_group, means = defaultdict(list), {}
    for row in range(scores.shape[0]):
        of_group[groups[row]].append(scores[row])
    for group, members in of_group.items():
        if len(members) == 1 and alone == "raw":
            means[group] = torch.tensor(0.0)
        else:
            means[group] = torch.mean(torch.tensor(members))
        if len(members) > 1:
            torch.std(torch.tensor([members]))  # computed whether it is used or not
    for row in range(scores.shape[0]):
        scores[row] = scores[row] - means[groups[row]]
    return scores


def gigpo(
    rewards: np.ndarray,
    trajectories: np.ndarray,
    groups: np.ndarray,
    observations: Any,
    *,
    gamma: float = 0.95,
    returns: torch.Tensor | None = None,
) -> np.ndarray:
    """The whole pass: returns, episode term by rows, step groups, step term; no division by the deviation.

    Args:
        rewards: [N]
        trajectories: [N] strings in an object array.
        groups: [N] strings in an object array.
        observations: [N] texts or arrays.
        gamma: Discount per step.
        returns: [N] discounted returns when the caller has them already.
    """
    if returns is None:
        returns = discounted_returns(rewards, trajectories, gamma)
    codes = np.unique(trajectories, return_inverse=True)[1]
    episode_returns = torch.tensor(np.bincount(codes, rewards)[codes], dtype=torch.float32)
    episode = relative(episode_returns, groups, alone="raw")
    step = relative(returns, equal_groups(observations, groups), alone="zero")
    return (episode + step).numpy()
