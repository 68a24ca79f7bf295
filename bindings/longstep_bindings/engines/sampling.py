"""Sampling of one token for each row of a batch, reproducible row by row.

The random number of a row is a hash of its request's seed and of the position in the completion, so a result does not
depend on what else is in the batch. Shape letters: B rows, V vocabulary or options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from longstep.errors import PolicyError

if TYPE_CHECKING:
    import torch

__all__ = ["sample", "uniform"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x_B = (x_B ^ (x_B >> np.uint64(30))) * _MIX_1
    x_B = (x_B ^ (x_B >> np.uint64(27))) * _MIX_2
    return x_B ^ (x_B >> np.uint64(31))


def uniform(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each pair of a seed and a position, the same on every machine.

    Two rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
    """
    state_B = _mix(seeds_B * _GOLDEN + _GOLDEN) + positions_B * _GOLDEN
    bits_B = _mix(state_B + _GOLDEN) >> np.uint64(12)
    return bits_B.astype(np.float64) * 2.0**-52


def sample(
    logits_BV: torch.Tensor,
    temperatures_B: NDArray[np.float32],
    top_ps_B: NDArray[np.float32],
    uniforms_B: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The sampled column of each row and its natural log-probability.

    Log-probabilities are those of the softmax of `logits / temperature`, in float32, before `top_p` cuts its tail; with
    temperature 0 (the most probable column is taken, the first of equals) those of temperature 1.

    Args:
        logits_BV: [B, V] logits; minus infinity forbids a column, and every row has one that is not forbidden.
        temperatures_B: [B] temperatures, 0 or larger.
        top_ps_B: [B] probability mass that is kept, in (0, 1].
        uniforms_B: [B] numbers in [0, 1).

    Raises:
        PolicyError: A row has no distribution to sample from.
    """
    import torch

    device = logits_BV.device
    greedy_B = temperatures_B == 0
    logits_BV = logits_BV.float()
    if not np.all((temperatures_B == 1) | greedy_B):
        divisors_B = np.where(greedy_B, np.float32(1), temperatures_B)
        logits_BV = logits_BV / torch.from_numpy(divisors_B).to(device)[:, None]
    logprobs_BV = logits_BV.log_softmax(-1)
    # The largest of a distribution is finite; NaN and infinite logits make it NaN.
    if not bool(logprobs_BV.amax(-1).isfinite().all()):
        raise PolicyError(
            "expected finite logits over temperature, got NaN or infinity; look at the weights, or raise the temperature"
        )
    chosen_B = None
    if not greedy_B.all():
        # Inverse of the cumulative distribution; columns of probability zero are never chosen.
        mass_BV = logprobs_BV.exp().double()
        if (top_ps_B < 1).any():
            mass_BV = _keep_top_p(mass_BV, torch.from_numpy(top_ps_B).to(device))
        cumulative_BV = mass_BV.cumsum(-1)
        uniforms_B1 = torch.from_numpy(uniforms_B).to(device)[:, None]
        chosen_B = torch.searchsorted(
            cumulative_BV, uniforms_B1 * cumulative_BV[:, -1:], right=True
        )
        chosen_B = chosen_B.squeeze(1)
    if greedy_B.any():
        best_B = logprobs_BV.argmax(-1)
        mask_B = torch.from_numpy(greedy_B).to(device)
        chosen_B = best_B if chosen_B is None else torch.where(mask_B, best_B, chosen_B)
    assert chosen_B is not None
    logprobs_B = logprobs_BV.gather(1, chosen_B[:, None]).squeeze(1)
    return chosen_B.cpu().numpy(), logprobs_B.cpu().numpy()


def _keep_top_p(mass_BV: torch.Tensor, top_ps_B: torch.Tensor) -> torch.Tensor:
    """`mass_BV` with zeros outside the smallest set of columns that holds `top_p` of each row's mass."""
    sorted_BV, order_BV = mass_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    top_ps_B1 = top_ps_B[:, None]
    kept_BV = sorted_BV.masked_fill((before_BV >= top_ps_B1) & (top_ps_B1 < 1), 0.0)
    kept_BV[:, 0] = sorted_BV[:, 0]
    return mass_BV.new_zeros(mass_BV.shape).scatter(1, order_BV, kept_BV)
