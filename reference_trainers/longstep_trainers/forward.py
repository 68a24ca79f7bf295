"""Forward passes of the model that is trained: log-probabilities of loss tokens, and of whole completions.

Shape letters: M loss tokens, B rows of the packed layout, L their length, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from longstep.errors import ConfigError
from longstep_trainers.batching import MicroBatch
from longstep_trainers.losses import token_logprobs

__all__ = ["adapter_off", "completion_logprobs", "loss_token_logprobs", "reads_packed_rows"]


def loss_token_logprobs(
    model: Any, microbatch: MicroBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy [M] of each loss token; the output layer runs nowhere else."""
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    backbone = getattr(causal_lm, causal_lm.base_model_prefix)
    hidden_BLH = backbone(
        input_ids=microbatch.token_ids_BL,
        position_ids=microbatch.position_ids_BL,
        attention_mask=None if microbatch.mask_BLL is None else microbatch.mask_BLL[:, None],
        use_cache=False,
    ).last_hidden_state
    return token_logprobs(
        hidden_BLH.flatten(0, 1)[microbatch.sources_M],
        causal_lm.get_output_embeddings().weight,
        microbatch.targets_M,
        allowed_MA=microbatch.allowed_MA,
        num_allowed_M=microbatch.num_allowed_M,
        temperature=temperature,
    )


def completion_logprobs(
    model: Any, rows: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]]
) -> list[NDArray[np.float32]]:
    """Log-probability of each token of some completions: temperature 1, no constraint, one row at a time.

    Args:
        model: The model; it is put into eval mode.
        rows: Token ids of prompt and completion, neither of them empty.
    """
    model.eval()
    device = next(model.parameters()).device
    found: list[NDArray[np.float32]] = []
    with torch.inference_mode():
        for prompt, completion in rows:
            ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))
            logits = model(input_ids=ids[None].to(device), use_cache=False).logits[0]
            targets = ids[len(prompt) :].to(device)
            logprobs = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
            found.append(logprobs.gather(1, targets[:, None])[:, 0].cpu().numpy())
    return found


def adapter_off(model: Any) -> Any:
    """A context in which a LoRA model is the model it started from."""
    if not hasattr(model, "disable_adapter"):
        raise ConfigError(
            "expected a reference model or an adapter, got neither at `train.kl_coef`; use LoRA or keep a copy"
        )
    return model.disable_adapter()


def reads_packed_rows(model: nn.Module) -> bool:
    """True for attention kernels that find row starts by position ids and know no tree mask."""
    return "flash" in str(getattr(model.config, "_attn_implementation", ""))
