"""Log-probabilities of completions that are given, by a plain forward of the model.

Shape letters: B rows, L positions of the longest row, C positions of the longest completion, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import DataError
from longstep_bindings.engines.served import ScoreRow

__all__ = ["check_rows", "score_rows"]

_MAX_LOGITS = 1 << 26
"""Logits that are held at once: 256 MiB in float32."""


def check_rows(rows: Sequence[ScoreRow], *, max_length: int) -> None:
    """Raise `DataError` for a row that is empty or longer than the context."""
    for index, row in enumerate(rows):
        num_prompt, num_new = len(row.prompt_token_ids), len(row.token_ids)
        if num_prompt < 1 or num_new < 1 or num_prompt + num_new > max_length:
            raise DataError(
                f"expected a prompt and a completion of at least 1 and together at most {max_length} tokens, got "
                f"{num_prompt} and {num_new} at `rows[{index}]`"
            )


def score_rows(
    model: Any, rows: Sequence[ScoreRow], *, max_tokens: int = 65536
) -> list[NDArray[np.float32]]:
    """For each row the log-probability [C] of each of its `token_ids`: temperature 1, no constraint.

    Args:
        model: A causal language model of transformers, in eval mode.
        rows: Rows that `check_rows` takes.
        max_tokens: Most positions that are computed at once.
    """
    import torch

    scores: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(rows)
    with torch.inference_mode():
        for batch in _batches(rows, _vocabulary(model), max_tokens):
            for index, logprobs in zip(batch, _score(model, [rows[i] for i in batch]), strict=True):
                scores[index] = logprobs
    return scores


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _batches(rows: Sequence[ScoreRow], vocabulary: int, max_tokens: int) -> list[list[int]]:
    """Indices of rows of about the same length, as many as fit."""
    length = [len(row.prompt_token_ids) + len(row.token_ids) for row in rows]
    batches: list[list[int]] = []
    longest = longest_new = 0
    for index in sorted(range(len(rows)), key=length.__getitem__):
        longest = length[index]
        longest_new = max(longest_new, len(rows[index].token_ids) + 1)
        size = len(batches[-1]) + 1 if batches else 1
        if (
            not batches
            or size * longest > max_tokens
            or size * longest_new * vocabulary > _MAX_LOGITS
        ):
            batches.append([])
            longest_new = len(rows[index].token_ids) + 1
        batches[-1].append(index)
    return batches


def _score(model: Any, rows: Sequence[ScoreRow]) -> list[NDArray[np.float32]]:
    import torch

    sequences = [np.concatenate([row.prompt_token_ids, row.token_ids]) for row in rows]
    lengths_B = np.array([len(sequence) for sequence in sequences])
    longest, longest_new = int(lengths_B.max()), max(len(row.token_ids) for row in rows)
    # Padded on the left, so that the completions, which alone need logits, stand at the end.
    real_BL = np.arange(longest) >= longest - lengths_B[:, None]
    ids_BL = np.zeros(real_BL.shape, dtype=np.int64)
    ids_BL[real_BL] = np.concatenate(sequences)
    positions_BL = (real_BL.cumsum(-1) - 1).clip(min=0)
    device = model.device
    tensor = torch.from_numpy
    logits_BCV = model(
        input_ids=tensor(ids_BL).to(device),
        attention_mask=None if real_BL.all() else tensor(real_BL).to(device),
        position_ids=tensor(positions_BL).to(device),
        use_cache=False,
        logits_to_keep=longest_new + 1,
    ).logits[:, :-1]
    chosen_BC = tensor(ids_BL[:, longest - longest_new :]).to(device)
    logprobs_BC = logits_BCV.float().log_softmax(-1).gather(-1, chosen_BC[..., None]).squeeze(-1)
    scores_BC = logprobs_BC.cpu().numpy()
    return [scores_BC[i, longest_new - len(row.token_ids) :] for i, row in enumerate(rows)]
