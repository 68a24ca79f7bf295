"""Log-probabilities of a completion that is given, computed by vLLM.

The completion is read as a part of the prompt, in one pass, but for its last id, which is sampled by force: so a sequence
may fill the context. Where vLLM has its layers for adapters, every id is sampled by force.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from longstep.errors import DataError, PolicyError
from longstep_bindings.engines.served import ScoreRow
from longstep_bindings.engines.vllm_images import collapse
from longstep_bindings.engines.vllm_requests import score_settings

if TYPE_CHECKING:
    from longstep_bindings.engines.vllm_model import VLLMModel

__all__ = ["score_row"]


async def score_row(
    model: VLLMModel, row: ScoreRow, *, model_path: str, takes_adapters: bool
) -> NDArray[np.float32]:
    """The log-probability [C] of each of a row's `token_ids`: temperature 1, no constraint.

    Args:
        model: A running vLLM.
        row: A row that `check_rows` takes.
        model_path: The model's folder, or its name on the Hub.
        takes_adapters: True when vLLM was started with its layers for adapters.

    Raises:
        DataError: Its prompt has images, and does not read as vLLM writes it for these.
        PolicyError: vLLM could not compute it.
    """
    prompt_ids = collapse(row, model_path).prompt_token_ids.tolist()
    token_ids = row.token_ids.tolist()
    # vLLM's layers for adapters do not score a prompt's ids.
    num_read = 0 if takes_adapters else len(token_ids) - 1
    settings = score_settings(token_ids[num_read:], scores_prompt=num_read > 0)
    read_ids = [*prompt_ids, *token_ids[:num_read]]
    try:
        output = await model.generate(read_ids, settings, row.images)
    except Exception as error:
        raise PolicyError(f"vLLM could not score a row: {error}") from error
    whole = [*row.prompt_token_ids.tolist(), *token_ids[:num_read]]
    if row.images and list(output.prompt_token_ids or ()) != whole:
        raise DataError(
            "expected a prompt that reads as vLLM writes it for these images, got other ids; this model's prompts "
            "with images can be scored with transformers"
        )
    before = output.prompt_logprobs.logprobs[-num_read:] if num_read else []
    return np.array([*before, *output.outputs[0].logprobs.logprobs], dtype=np.float32)
