"""Decoding for prompts with images: the model's own `generate`, with every token chosen by us.

Vision-language models differ in how they place images and count positions, and `generate` knows it for each of them.
What is sampled, from which options and with which random numbers stays the engine's: its `sample` is called for the
rows that need a token, and `generate` is made to take that token.

Shape letters: B rows, L prompt positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from longstep_bindings.engines.image_prompts import ImageInputs

if TYPE_CHECKING:
    import torch

__all__ = ["decode_with_images"]


class ImageRow(Protocol):
    """What decoding asks of an engine's row."""

    token_ids: list[int]
    num_fed: int
    inputs: ImageInputs | None

    @property
    def finish_reason(self) -> Any:
        """None while the row needs tokens."""
        ...


def decode_with_images(
    model: Any,
    rows: Sequence[Any],
    sample: Callable[[list[Any], torch.Tensor], None],
    *,
    pad_id: int,
) -> None:
    """Sample until every row is finished.

    Args:
        model: A transformers model with `generate`.
        rows: Rows whose `inputs` are set.
        sample: Gives each of some rows its next token, from their logits [B, V].
        pad_id: Id that fills up shorter prompts, and what follows a row's end.
    """
    from transformers import LogitsProcessorList, StoppingCriteriaList

    chooser = _Chooser(rows, sample, pad_id)
    inputs = _batch([row.inputs for row in rows], pad_id, model.device)
    with _plain_generation(model, max_new_tokens=max(row.max_new for row in rows), pad_id=pad_id):
        model.generate(
            **inputs,
            logits_processor=LogitsProcessorList([chooser.choose]),
            stopping_criteria=StoppingCriteriaList([chooser.is_over]),
        )


@contextmanager
def _plain_generation(model: Any, *, max_new_tokens: int, pad_id: int) -> Iterator[None]:
    """While this is open the model's own defaults are out of force, such as a repetition penalty.

    `generate` fills what it is not told from the model's defaults, and log-probabilities would then be those of a
    distribution that no trainer knows.
    """
    from transformers import GenerationConfig

    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    defaults = owner.generation_config
    owner.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=pad_id
    )
    try:
        yield
    finally:
        owner.generation_config = defaults


class _Chooser:
    """Puts the engine's choice of each row's next token into `generate`."""

    def __init__(
        self,
        rows: Sequence[Any],
        sample: Callable[[list[Any], torch.Tensor], None],
        pad_id: int,
    ) -> None:
        self._rows, self._sample, self._pad_id = rows, sample, pad_id

    def choose(self, _: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        """Logits under which the most probable token of each row is the engine's choice."""
        import torch

        open_rows = [
            i
            for i, row in enumerate(self._rows)
            if row.finish_reason is None and row.num_fed == len(row.token_ids)
        ]
        if open_rows:
            self._sample([self._rows[i] for i in open_rows], logits_BV[open_rows])
        chosen: list[int] = []
        for row in self._rows:
            is_behind = row.num_fed < len(row.token_ids)  # the constraint forced several at once
            chosen.append(row.token_ids[row.num_fed] if is_behind else self._pad_id)
            row.num_fed += is_behind
        one_hot_BV = torch.full_like(logits_BV, float("-inf"))
        return one_hot_BV.scatter(1, torch.tensor(chosen, device=logits_BV.device)[:, None], 0.0)

    def is_over(self, ids_BL: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[B], True for rows that need no further token."""
        import torch

        finished = [row.finish_reason is not None for row in self._rows]
        return torch.tensor(finished, device=ids_BL.device)


def _batch(inputs: Sequence[ImageInputs], pad_id: int, device: Any) -> dict[str, torch.Tensor]:
    """The inputs of several prompts as one batch, shorter prompts padded on the left."""
    import torch

    length = max(len(one.prompt_ids) for one in inputs)

    def padded(rows: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
        return torch.stack(
            [torch.nn.functional.pad(row, (length - len(row), 0), value=fill) for row in rows]
        )

    ids = [torch.from_numpy(one.prompt_ids).long() for one in inputs]
    batch = {
        "input_ids": padded(ids, pad_id),
        "attention_mask": padded([torch.ones_like(row) for row in ids], 0),
    }
    for name in inputs[0].by_token:
        batch[name] = padded([one.by_token[name][0] for one in inputs], 0)
    for name in inputs[0].by_image:
        batch[name] = torch.cat([one.by_image[name] for one in inputs])
    return {name: value.to(device) for name, value in batch.items()}
