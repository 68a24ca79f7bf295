"""GiGPO: the relative return of the episode, plus that of the step among steps in the same state."""

from __future__ import annotations

from typing import Any, Literal

from numpy.typing import ArrayLike

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
from longstep.credit.relative import Normalization
from longstep.credit.returns import returns_of
from longstep.credit.rows import Rows
from longstep.credit.step import Repeats, given_or_grouped, step_term

__all__ = ["gigpo"]


def gigpo(
    rewards: ArrayLike,
    trajectory_ids: ArrayLike,
    group_ids: ArrayLike,
    state_keys: Any = None,
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    normalize: Literal["none", "std"] = "none",
    baseline: Baseline = "trajectory",
    valid: ArrayLike | None = None,
    invalid_action_penalty: float = 0.0,
    penalty_scope: PenaltyScope = "reward",
    inner_group_size: int = 2,
    epsilon: float = 1e-6,
    step_groups: StepGroups | None = None,
    ddof: int = 1,
    std_floor: float = 0.0,
    repeats: Repeats = "all",
    lone_episode: LoneEpisode = "zero",
    anchors: Anchors | None = None,
    history_length: int = 0,
    mask: ArrayLike | None = None,
) -> Advantages:
    """The advantage of each step: its episode's among the episode group, plus its own among steps in its state.

    GiGPO (arXiv 2505.10978), equations 3 and 5 to 8: `A = A_episode + omega * A_step`. Where no state repeats the
    second term is 0 and the result is GRPO's. Linear in the number of rows, but for one sort when the compiled
    kernels are not in use.

    >>> result = gigpo([0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], [0, 0, 0, 0], ["a", "b", "a", "c"], gamma=0.5)
    >>> result.episode.tolist(), result.step.tolist()
    ([0.5, 0.5, -0.5, -0.5], [0.25, 0.0, -0.25, 0.0])

    Args:
        rewards: [N] reward of each step.
        trajectory_ids: [N] integers or strings; rows of one trajectory in order of time.
        group_ids: [N] integers or strings; the episode group of each row's trajectory.
        state_keys: [N] the state each action was chosen in: 16-byte voids, integers [N] or [N, 2], or a sequence of
            str, bytes or int. Not read when `step_groups` is given.
        gamma: Discount per step of the returns that are compared within a state, in [0, 1].
        omega: Weight of the step term.
        normalize: `none` subtracts the mean, `std` also divides by the standard deviation, in both terms.
        baseline: `trajectory` counts each trajectory once in the episode group's mean (equation 3), `row` once for
            each of its rows, as verl-agent does: long trajectories then dominate.
        valid: [N] False where the action was invalid; None treats all as valid.
        invalid_action_penalty: Taken off for each invalid action. Leave it 0 when the rewards contain it already.
        penalty_scope: `reward` makes it part of the reward, so that earlier steps feel it; `row` takes it off the
            two scores of that row alone.
        inner_group_size: Smallest number of members of a step group that is compared, at least 2.
        epsilon: Added to the standard deviation.
        step_groups: Groups made elsewhere, such as by `group_similar`, instead of state keys.
        ddof: 1 for the unbiased standard deviation, 0 for the population's.
        std_floor: Smallest standard deviation to divide by.
        repeats: How visits of one trajectory to the same state count in that state's mean: `all` of them, the `first`
            alone, or their `mean` as one. Each visit is compared with the mean either way.
        lone_episode: Episode term of a group of one: `zero`, or `raw`, its return.
        anchors: Which states may form a group: [N] booleans, or a function called once with each distinct key. Rows
            in other states have step term 0. For messages such as "Nothing happens." that many states share.
        history_length: Number of earlier states of the trajectory that must be equal too for two rows to share a
            step group.
        mask: [N] False for padding rows, which count nowhere and get 0; None counts all rows.

    Returns:
        Advantages [N]. An empty batch gives empty arrays, an episode group of one the documented 0.

    Raises:
        DataError: Lengths differ, a reward is not finite, a trajectory is in two groups.
        UnsupportedTypeError: A state key is of a type without a fixed identity.
        ConfigError: An option has no such value.
    """
    check_episode_term(baseline, lone_episode)
    rows = Rows.read(rewards, trajectory_ids, group_ids, mask)
    penalty = Penalty.read(rows, valid, invalid_action_penalty, penalty_scope)
    how = Normalization(normalize=normalize, ddof=ddof, std_floor=std_floor, epsilon=epsilon)
    groups = given_or_grouped(rows, state_keys, step_groups, history_length, anchors)
    returns_T = episode_returns(rows, penalty.rewards)
    episode = episode_term(
        rows, returns_T, penalty.row, baseline=baseline, lone_episode=lone_episode, how=how
    )
    returns = returns_of(rows, penalty.rewards, gamma)
    if penalty.row is not None:
        returns = returns - penalty.row
    step = step_term(rows, returns, groups, how=how, min_size=inner_group_size, repeats=repeats)
    return two_terms(rows, returns_T, episode, step, omega, groups, penalty.valid)
