"""The graph estimator: equal states of an episode group merged into one graph, and values worked out on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstep.arguments import check_choice, check_count, check_number
from longstep.credit.advantages import Advantages, two_terms
from longstep.credit.episode import (
    Baseline,
    LoneEpisode,
    Penalty,
    PenaltyScope,
    check_episode_term,
    episode_returns,
    episode_term,
)
from longstep.credit.groups import Anchors, StepGroups
from longstep.credit.relative import GroupStatistics, Normalization
from longstep.credit.returns import check_discount, returns_of
from longstep.credit.rows import Rows
from longstep.credit.step import given_or_grouped
from longstep.errors import ConfigError
from longstep.kernels import segments
from longstep.kernels.partition import first_appearance_groups

__all__ = ["graph"]

Backup: TypeAlias = Literal["max", "mean"]


def graph(
    rewards: ArrayLike,
    trajectory_ids: ArrayLike,
    group_ids: ArrayLike,
    state_keys: Any = None,
    *,
    gamma: float = 0.95,
    lam: float = 0.95,
    omega: float = 1.0,
    backup: Backup = "max",
    normalize: Literal["none", "std"] = "none",
    baseline: Baseline = "trajectory",
    valid: ArrayLike | None = None,
    invalid_action_penalty: float = 0.0,
    penalty_scope: PenaltyScope = "reward",
    epsilon: float = 1e-6,
    step_groups: StepGroups | None = None,
    ddof: int = 1,
    std_floor: float = 0.0,
    lone_episode: LoneEpisode = "zero",
    anchors: Anchors | None = None,
    history_length: int = 0,
    tolerance: float = 1e-6,
    max_iterations: int = 10_000,
    mask: ArrayLike | None = None,
) -> Advantages:
    """The episode's advantage, plus the TD(lambda) advantage under values from the group's transition graph.

    Equal states of an episode group are one node; each step is an edge to the node of the next step, the last one to
    an end of value 0. Value iteration gives `V(s) = max over edges of (r + gamma V(s'))`, r being the mean reward on
    the edge, or with `backup="mean"` the mean over all steps out of s: the value of the behaviour, stitched together
    from all trajectories. Then `delta_t = r_t + gamma V(s_(t+1)) - V(s_t)` and the step term is
    `A_t = sum over k of (gamma lam)^k delta_(t+k)` (arXiv 1506.02438, equation 16; the graph as in GRAFT, GraphGPO
    arXiv 2605.26684 and G2PO arXiv 2606.22995). Where no state repeats it is exactly 0, and the episode term remains.
    Costs one pass over the edges per iteration; their number grows as 1 / (1 - gamma) where states form loops, and is
    about the longest detour where they do not.

    >>> rewards, states = [0.0, 1.0, 0.0, 0.0], ["a", "b", "a", "c"]
    >>> graph(rewards, [0, 0, 1, 1], [0, 0, 0, 0], states, gamma=0.5, lam=0.0).step.tolist()
    [0.0, 0.0, -0.5, 0.0]

    Args:
        rewards: [N] reward of each step.
        trajectory_ids: [N] integers or strings; rows of one trajectory in order of time.
        group_ids: [N] integers or strings; the episode group of each row's trajectory.
        state_keys: [N] the state each action was chosen in, as in `gigpo`. Not read when `step_groups` is given.
        gamma: Discount per step, in [0, 1]. At 1 a loop that pays a reward has no value under `max`.
        lam: Decay of later TD errors, in [0, 1]: 0 trusts the graph, 1 the trajectory's own rewards.
        omega: Weight of the step term.
        backup: `max` values the best known way on, `mean` the behaviour.
        normalize: `std` standardises both terms within the episode group, `none` centres the episode term alone.
        baseline: What the episode group's mean counts: each `trajectory` once, or each `row`.
        valid: [N] False where the action was invalid; None treats all as valid.
        invalid_action_penalty: Taken off for each invalid action.
        penalty_scope: `reward` or `row`, as in `gigpo`.
        epsilon: Added to the standard deviation.
        step_groups: Groups made elsewhere instead of state keys; rows in no group are nodes of their own.
        ddof: 1 for the unbiased standard deviation, 0 for the population's.
        std_floor: Smallest standard deviation to divide by.
        lone_episode: Episode term of a group of one: `zero`, or `raw`, its return.
        anchors: Which states may be merged, as in `gigpo`.
        history_length: Number of earlier states that must be equal too, as in `gigpo`.
        tolerance: Largest last change of a value at which the iteration stops.
        max_iterations: Most passes over the graph.
        mask: [N] False for padding rows, which count nowhere and get 0; None counts all rows.

    Returns:
        Advantages [N]: `total = episode + omega * step`.

    Raises:
        DataError: Lengths differ, a reward is not finite, a trajectory is in two groups.
        UnsupportedTypeError: A state key is of a type without a fixed identity.
        ConfigError: An option has no such value, or the values did not settle.
    """
    check_choice("backup", backup, ("max", "mean"))
    check_episode_term(baseline, lone_episode)
    check_count("max_iterations", max_iterations, 1)
    check_number("tolerance", tolerance)
    if not 0.0 <= tolerance < np.inf:
        raise ConfigError(f"expected `tolerance` of 0 or more, got {tolerance}; pass such as 1e-6")
    check_discount("gamma", gamma)
    check_discount("lam", lam)
    rows = Rows.read(rewards, trajectory_ids, group_ids, mask)
    penalty = Penalty.read(rows, valid, invalid_action_penalty, penalty_scope)
    how = Normalization(normalize=normalize, ddof=ddof, std_floor=std_floor, epsilon=epsilon)
    groups = given_or_grouped(rows, state_keys, step_groups, history_length, anchors)
    returns_T = episode_returns(rows, penalty.rewards)
    episode = episode_term(
        rows, returns_T, penalty.row, baseline=baseline, lone_episode=lone_episode, how=how
    )
    transitions = _Graph.of(rows, penalty.rewards, groups)
    first_guess = returns_of(rows, penalty.rewards, gamma)
    values = transitions.values(first_guess, float(gamma), backup, tolerance, max_iterations)
    deltas = (
        penalty.rewards + float(gamma) * values[transitions.next_node] - values[transitions.node]
    )
    step = rows.in_row_order(
        segments.discounted_returns(rows.in_time_order(deltas), rows.offsets, float(gamma * lam))
    )
    if penalty.row is not None:
        step = step - penalty.row
    if normalize == "std":
        step = GroupStatistics.of(step, rows.group, rows.num_groups).relative(step, rows.group, how)
    return two_terms(rows, returns_T, episode, step, omega, groups, penalty.valid)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Graph:
    """K nodes and their edges, those of all episode groups side by side. Node K is the end, of value 0."""

    num_nodes: int
    node: NDArray[np.int64]
    """[M] node of each row."""
    next_node: NDArray[np.int64]
    """[M] node of the row after it in its trajectory; K after the last."""
    edge_starts: NDArray[np.int64]
    """[K] first edge of each node; edges stand node by node."""
    edge_target: NDArray[np.int64]
    """[edges]"""
    edge_reward: NDArray[np.float64]
    """[edges] mean reward of the steps along it."""
    edge_weight: NDArray[np.float64]
    """[edges] share of its node's steps that took it."""

    @classmethod
    def of(cls, rows: Rows, rewards: NDArray[np.float64], groups: StepGroups) -> _Graph:
        """Merge the rows of each step group; a row of no group is a node of its own."""
        node = groups.ids.copy()
        apart = np.flatnonzero(node < 0)
        node[apart] = groups.num_groups + np.arange(len(apart))
        num_nodes = groups.num_groups + len(apart)
        previous = rows.previous
        followed = np.flatnonzero(previous >= 0)
        next_node = np.full(len(node), num_nodes, np.int64)
        next_node[previous[followed]] = node[followed]
        edges, edge_sizes = first_appearance_groups(next_node.view(np.uint64)[:, None], node)
        edge_node, edge_target = np.empty_like(edge_sizes), np.empty_like(edge_sizes)
        edge_node[edges], edge_target[edges] = node, next_node
        _, mean_rewards, _ = segments.group_statistics(rewards, edges, len(edge_sizes))
        order = np.argsort(edge_node, kind="stable")
        num_steps = np.bincount(node, minlength=num_nodes)
        return cls(
            num_nodes=num_nodes,
            node=node,
            next_node=next_node,
            edge_starts=np.searchsorted(edge_node[order], np.arange(num_nodes)),
            edge_target=edge_target[order],
            edge_reward=mean_rewards[order],
            edge_weight=(edge_sizes / num_steps[edge_node])[order],
        )

    def values(
        self,
        first_guess: NDArray[np.float64],
        gamma: float,
        backup: Backup,
        tolerance: float,
        max_iterations: int,
    ) -> NDArray[np.float64]:
        """[K + 1] value of each node, from a first guess for each row, which is right where nothing repeats."""
        values = np.zeros(self.num_nodes + 1)
        if not self.num_nodes:
            return values
        if backup == "max":
            values[:-1] = -np.inf
            np.maximum.at(values, self.node, first_guess)
        else:
            values[:-1] = segments.group_statistics(first_guess, self.node, self.num_nodes)[1]
        change = np.inf
        for _ in range(max_iterations):
            through = self.edge_reward + gamma * values[self.edge_target]
            if backup == "max":
                settled = np.maximum.reduceat(through, self.edge_starts)
            else:
                settled = np.add.reduceat(self.edge_weight * through, self.edge_starts)
            change = float(np.abs(settled - values[:-1]).max())
            values[:-1] = settled
            if change <= tolerance:
                return values
        raise ConfigError(
            f"expected values that settle within `max_iterations` {max_iterations}, got a change of {change:.3g} in the "
            f"last one at `gamma` {gamma}; pass a smaller `gamma` or a larger `tolerance`"
        )
