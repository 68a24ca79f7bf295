"""The optimizer's side of an update: AdamW with float32 weights behind half-precision ones, and the learning rate.

A bfloat16 weight has eight bits of precision: a step of 1e-5 would be rounded away. So each trained half-precision
parameter has a float32 copy that AdamW moves, and the model gets the rounded result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from longstep_trainers.config import TrainConfig

__all__ = ["MasterAdamW", "learning_rate"]


class MasterAdamW:
    """AdamW on the trainable parameters of a model, with float32 copies where the model's own are narrower.

    >>> layer = nn.Linear(2, 1, dtype=torch.bfloat16)
    >>> optimizer = MasterAdamW(layer, betas=(0.9, 0.999), weight_decay=0.0)
    >>> layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    >>> optimizer.step(learning_rate=1e-3, max_grad_norm=1.0) > 0
    True
    """

    def __init__(
        self, model: nn.Module, *, betas: tuple[float, float], weight_decay: float
    ) -> None:
        """Args:
        model: Its parameters with `requires_grad` are trained.
        betas: Decay of the running means of gradient and squared gradient.
        weight_decay: Decoupled decay of matrices; vectors, such as norms and biases, are not decayed.
        """
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self._masters = [
            parameter
            if parameter.dtype == torch.float32
            else nn.Parameter(parameter.detach().float())
            for parameter in self._parameters
        ]
        groups = [
            {"params": [m for m in self._masters if m.ndim >= 2], "weight_decay": weight_decay},
            {"params": [m for m in self._masters if m.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW([group for group in groups if group["params"]], betas=betas)

    def step(self, *, learning_rate: float, max_grad_norm: float) -> float:
        """Apply the accumulated gradients and clear them; gives their norm before clipping.

        A norm that is not finite leaves the weights as they are.
        """
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
        norm = float(nn.utils.clip_grad_norm_(self._masters, max_grad_norm))
        if math.isfinite(norm):
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            with torch.no_grad():
                for parameter, master in self._pairs():
                    parameter.copy_(master)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.grad = None
            master.grad = None
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Running means and the float32 copies."""
        masters = [master.detach() for _, master in self._pairs()]
        return {"adamw": self._adamw.state_dict(), "masters": masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, for a model with the same parameters."""
        self._adamw.load_state_dict(state["adamw"])
        with torch.no_grad():
            for (parameter, master), saved in zip(self._pairs(), state["masters"], strict=True):
                master.copy_(saved)
                parameter.copy_(master)

    def _pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Parameters that have a float32 copy, with it."""
        pairs = zip(self._parameters, self._masters, strict=True)
        return [(parameter, master) for parameter, master in pairs if master is not parameter]


def learning_rate(config: TrainConfig, *, optimizer_steps: int, env_steps: int) -> float:
    """The rate of the next optimizer step.

    Args:
        config: Peak, warm-up (in optimizer steps) and schedule.
        optimizer_steps: Optimizer steps taken so far.
        env_steps: Environment steps collected so far; the schedule ends at `total_steps` of them.
    """
    warmup = min(1.0, (optimizer_steps + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    left = max(0.0, 1.0 - env_steps / config.total_steps)
    decay = {
        "constant": 1.0,
        "linear": left,
        "cosine": 0.5 * (1.0 - math.cos(math.pi * left)),
    }[config.lr_schedule]
    return config.learning_rate * warmup * decay
