"""Losses against hand-computed numbers and plain autograd."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="needs the 'trainers' extra")

from longstep_trainers.losses import (  # noqa: E402
    clipped_policy_loss,
    effective_sample_share,
    kl_k3,
    token_logprobs,
    truncated_importance_weights,
)


def _logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def test_ratio_above_the_clip_is_not_rewarded_further() -> None:
    # ratios 1.5 and 1.1 with advantage 2: clipped to 1.2 * 2, and 1.1 * 2 as it is
    loss, clipped = clipped_policy_loss(
        _logs(0.75, 0.55), _logs(0.5, 0.5), torch.tensor([2.0, 2.0]), clip_low=0.2, clip_high=0.2
    )
    torch.testing.assert_close(loss, torch.tensor([-2.4, -2.2]))
    assert clipped.tolist() == [True, False]


def test_clip_higher_lets_rare_tokens_rise_further() -> None:
    loss, _ = clipped_policy_loss(
        _logs(0.75), _logs(0.5), torch.tensor([1.0]), clip_low=0.2, clip_high=0.28
    )
    torch.testing.assert_close(loss, torch.tensor([-1.28]))


def test_negative_advantage_is_clipped_below_and_bounded_by_dual_clip() -> None:
    # ratio 0.5, advantage -1: min(-0.5, -0.8) = -0.8. ratio 5: min(-5, -1.2) = -5, bounded at 3 * -1
    loss, clipped = clipped_policy_loss(
        _logs(0.25, 0.5),
        _logs(0.5, 0.1),
        torch.tensor([-1.0, -1.0]),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )
    torch.testing.assert_close(loss, torch.tensor([0.8, 3.0]))
    assert clipped.tolist() == [True, False]


def test_k3_is_zero_for_equal_policies_and_matches_the_divergence_in_expectation() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    assert kl_k3(policy.log(), policy.log()).abs().max() == 0
    expected = (policy * (policy / reference).log()).sum()
    estimate = (policy * kl_k3(policy.log(), reference.log())).sum()
    torch.testing.assert_close(estimate, expected)


@pytest.mark.parametrize("chunk_size", [3, 1000])
def test_token_logprobs_and_gradients_equal_a_plain_log_softmax(chunk_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 8, generator=generator, requires_grad=True)
    head = torch.randn(20, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 20, (10,), generator=generator)
    plain = ((hidden @ head.T) / 0.7).log_softmax(-1)
    plain_logprobs = plain.gather(1, targets[:, None])[:, 0]
    plain_entropy = -(plain.exp() * plain).sum(-1)
    logprobs, entropy = token_logprobs(
        hidden, head, targets, temperature=0.7, chunk_size=chunk_size
    )
    torch.testing.assert_close(logprobs, plain_logprobs)
    torch.testing.assert_close(entropy, plain_entropy)
    weights = torch.linspace(-1, 1, 10)
    expected = torch.autograd.grad((plain_logprobs * weights + plain_entropy).sum(), (hidden, head))
    actual = torch.autograd.grad((logprobs * weights + entropy).sum(), (hidden, head))
    torch.testing.assert_close(actual, expected)


def test_constraint_restricts_the_distribution_and_padding_has_no_gradient() -> None:
    hidden = torch.eye(3, 4, requires_grad=True)
    head = torch.arange(20.0).reshape(5, 4) / 10
    allowed = torch.tensor([[0, 3, 4], [1, 2, 1], [4, 4, 4]])
    counts = torch.tensor([3, 2, 1])
    logprobs, entropy = token_logprobs(
        hidden, head, torch.tensor([1, 0, 0]), allowed_MA=allowed, num_allowed_M=counts
    )
    logits = hidden.detach() @ head.T
    first = logits[0, [0, 3, 4]].log_softmax(0)
    second = logits[1, [1, 2]].log_softmax(0)
    torch.testing.assert_close(logprobs, torch.stack([first[1], second[0], torch.tensor(0.0)]))
    torch.testing.assert_close(entropy[1], -(second.exp() * second).sum())
    assert entropy[2] == 0
    (entropy.sum() + logprobs.sum()).backward()
    assert hidden.grad is not None
    assert all(math.isfinite(value) for value in hidden.grad.flatten().tolist())


def test_importance_weight_is_the_ratio_of_probabilities_up_to_the_cap() -> None:
    # 0.3 / 0.6 = 0.5, 0.6 / 0.4 = 1.5, 0.9 / 0.1 = 9 beyond the cap of 2
    weights, truncated = truncated_importance_weights(
        _logs(0.3, 0.6, 0.9), _logs(0.6, 0.4, 0.1), cap=2.0
    )
    torch.testing.assert_close(weights, torch.tensor([0.5, 1.5, 2.0]))
    assert truncated.tolist() == [False, False, True]


def test_importance_weights_of_hopeless_samples_stay_finite() -> None:
    weights, _ = truncated_importance_weights(
        torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]), cap=3.0
    )
    torch.testing.assert_close(weights, torch.tensor([0.0, 3.0]))


def test_weighted_samples_of_one_policy_estimate_the_other_without_truncation() -> None:
    behaviour, proximal = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    values = torch.tensor([1.0, 5.0, -2.0])
    weights, _ = truncated_importance_weights(proximal.log(), behaviour.log(), cap=100.0)
    torch.testing.assert_close((behaviour * weights * values).sum(), (proximal * values).sum())


def test_effective_sample_share_is_one_for_equal_weights_and_falls_with_their_spread() -> None:
    # weights 1 and 3: (1 + 3)^2 / (2 * (1 + 9)) = 0.8
    torch.testing.assert_close(
        effective_sample_share(torch.tensor([1.0, 3.0])).item(), 0.8, rtol=1e-6, atol=0
    )
    assert effective_sample_share(torch.full((7,), 0.3)) == pytest.approx(1.0)
    assert effective_sample_share(torch.tensor([0.0, 0.0, 0.0, 2.0])) == pytest.approx(0.25)
    assert effective_sample_share(torch.empty(0)) == 1.0
