"""The maths of policy optimisation on loss tokens: log-probabilities, clipped ratio, importance weights, KL, entropy.

Pure functions.

Shape letters: M loss tokens, H hidden size, V vocabulary, A allowed ids (padded).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = [
    "clipped_policy_loss",
    "effective_sample_share",
    "kl_k3",
    "token_logprobs",
    "truncated_importance_weights",
]


def token_logprobs(
    hidden_MH: Tensor,
    lm_head_VH: Tensor,
    targets_M: Tensor,
    *,
    allowed_MA: Tensor | None = None,
    num_allowed_M: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy [M], float32, in nats, of each loss token under the sampling distribution.

    Logits exist for `chunk_size` tokens at a time and are computed again in the backward pass; with a constraint only
    for ids that are allowed somewhere in the batch.

    Args:
        hidden_MH: Output of the model's last norm at the positions that predict the tokens.
        lm_head_VH: Output embedding.
        targets_M: Ids of the tokens; with a constraint, their columns in `allowed_MA`.
        allowed_MA: Ids allowed at each position, padded on the right; None for the whole vocabulary.
        num_allowed_M: How many of `allowed_MA` are no padding.
        temperature: The temperature that was sampled with.
    """
    columns_MA = None
    if allowed_MA is not None:
        union, columns = allowed_MA.unique(return_inverse=True)
        lm_head_VH = lm_head_VH[union]
        columns_MA = columns.view_as(allowed_MA)
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for start in range(0, len(targets_M), chunk_size):
        part = slice(start, start + chunk_size)
        arguments = (
            hidden_MH[part],
            lm_head_VH,
            targets_M[part],
            None if columns_MA is None else columns_MA[part],
            None if num_allowed_M is None else num_allowed_M[part],
            temperature,
        )
        if torch.is_grad_enabled() and len(targets_M) > chunk_size:
            chunk = checkpoint(_chunk_logprobs, *arguments, use_reentrant=False)
        else:
            chunk = _chunk_logprobs(*arguments)
        logprobs.append(chunk[0])
        entropies.append(chunk[1])
    if not logprobs:
        empty = hidden_MH.new_zeros(0, dtype=torch.float32)
        return empty, empty
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(
    hidden_MH: Tensor,
    lm_head_VH: Tensor,
    targets_M: Tensor,
    columns_MA: Tensor | None,
    num_allowed_M: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    logits = (hidden_MH @ lm_head_VH.T).float() / temperature
    if columns_MA is not None and num_allowed_M is not None:
        logits = logits.gather(1, columns_MA)
        is_padding = torch.arange(logits.shape[1], device=logits.device) >= num_allowed_M[:, None]
        logits = logits.masked_fill(is_padding, float("-inf"))
    logprobs = logits.log_softmax(dim=-1)
    # Padding has probability 0 and log-probability -inf; their product must be 0, in the gradient too.
    finite = logprobs.masked_fill(logprobs.isinf(), 0.0)
    entropy_M = -(logprobs.exp() * finite).sum(dim=-1)
    return logprobs.gather(1, targets_M[:, None])[:, 0], entropy_M


def clipped_policy_loss(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and True where the clip was active. Both [M].

    PPO's clipped surrogate (Schulman et al. 2017, equation 7) with separate bounds below and above (clip-higher,
    Yu et al. 2025, DAPO equation 10) and, where `dual_clip` is given, a bound on the loss of tokens with negative
    advantage (Ye et al. 2020, equation 5).

    Args:
        logprobs_M: Log-probability under the policy that is trained.
        old_logprobs_M: Log-probability under the policy that sampled.
        advantages_M: Advantage of each token.
        clip_low: The ratio is not rewarded for falling below `1 - clip_low`.
        clip_high: ... nor for rising above `1 + clip_high`.
        dual_clip: Bound, above 1, on the ratio that multiplies a negative advantage.
    """
    ratio_M = (logprobs_M - old_logprobs_M).exp()
    unclipped_M = ratio_M * advantages_M
    clipped_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_M
    objective_M = torch.minimum(unclipped_M, clipped_M)
    if dual_clip is not None:
        bounded_M = torch.maximum(objective_M, dual_clip * advantages_M)
        objective_M = torch.where(advantages_M < 0, bounded_M, objective_M)
    return -objective_M, clipped_M < unclipped_M


def kl_k3(logprobs_M: Tensor, ref_logprobs_M: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference) at each token, in nats: never negative, unbiased (Schulman 2020)."""
    log_ratio_M = ref_logprobs_M - logprobs_M
    return log_ratio_M.exp() - log_ratio_M - 1.0


def truncated_importance_weights(
    proximal_logprobs_M: Tensor, behaviour_logprobs_M: Tensor, *, cap: float
) -> tuple[Tensor, Tensor]:
    """Weight of each token, and True where the cap was active. Both [M].

    The weight min(p_proximal / p_behaviour, cap) carries an expectation over the tokens of the policy that sampled to
    the policy that the update starts from. Truncation bounds its variance at the price of a bias towards the sampler
    (Ionides 2008; the rho of Espeholt et al. 2018, IMPALA). With the clipped ratio against the proximal policy it makes
    the decoupled objective of Hilton et al. 2022, as Fu et al. 2025, AReaL, train with.

    Args:
        proximal_logprobs_M: Log-probability under the trainer's weights before the update.
        behaviour_logprobs_M: Log-probability that the sampler reported: older weights, or another runtime's arithmetic.
        cap: Largest weight.
    """
    log_ratio_M = proximal_logprobs_M - behaviour_logprobs_M
    truncated_M = log_ratio_M > math.log(cap)
    return log_ratio_M.clamp(max=math.log(cap)).exp(), truncated_M


def effective_sample_share(weights_M: Tensor) -> Tensor:
    """Effective sample size of weighted samples over their number, (sum w)^2 / (M sum w^2), in (0, 1]; of none, 1.

    Kong 1992; 1 when all weights are equal.
    """
    if not weights_M.numel():
        return torch.ones(())
    weights_M = weights_M.double()
    return weights_M.sum() ** 2 / (len(weights_M) * (weights_M**2).sum())
