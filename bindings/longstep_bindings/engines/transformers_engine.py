"""In-process engine on Hugging Face transformers, with exact log-probabilities.

What makes it fast: the prompts of a batch that are equal are computed once, and so is the beginning that all of them
share; rows are sorted by length and split under a token budget; the output head runs on last positions only; positions
at which the constraint leaves one token cost nothing; finished rows leave the batch.

Shape letters: B rows, T positions in the cache, L new positions, V vocabulary, K options of a constrained row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import ConfigError, DataError
from longstep.types import Completion, FinishReason, GenerationRequest, Prompt
from longstep_bindings.engines.constraint import Constraints, TrieNode
from longstep_bindings.engines.context import Context
from longstep_bindings.engines.image_decoding import decode_with_images
from longstep_bindings.engines.image_prompts import ImageInputs, ImagePrompts
from longstep_bindings.engines.known_choices import KnownChoices
from longstep_bindings.engines.prompts import PromptTokenizer
from longstep_bindings.engines.sampling import sample, uniform
from longstep_bindings.engines.scoring import check_rows, score_rows
from longstep_bindings.engines.served import ScoreRow

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["TransformersEngine"]


@dataclass(slots=True, eq=False)
class _Row:
    """One request while it is being answered."""

    request: GenerationRequest
    prompt_ids: NDArray[np.int32]
    max_new: int
    """Most tokens to sample, the room in the context considered."""
    node: TrieNode | None
    """Where the constraint stands; None without a constraint."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    options: list[NDArray[np.int32]] = field(default_factory=list)
    num_fed: int = 0
    """Sampled tokens that the model has read."""
    finish_reason: FinishReason | None = None
    text: str | None = None
    inputs: ImageInputs | None = None
    """What the model reads beside the ids of a prompt with images."""

    @property
    def is_single_choice(self) -> bool:
        """True when the row's only choice of all is the next token."""
        return (
            self.node is not None
            and self.node.num_choices == 1
            and all(len(options) == 1 for options in self.options)
        )

    def take(self, token_id: int, logprob: float) -> None:
        """Append one sampled token and whatever the constraint then forces."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if self.node is not None:
            self.options.append(self.node.options)
            self.node = self.node.children[token_id]
            self.take_forced()

    def take_forced(self) -> None:
        """Append the tokens that the constraint leaves no choice about."""
        node = self.node
        assert node is not None
        while len(node.options) == 1:
            token_id = int(node.options[0])
            self.token_ids.append(token_id)
            self.logprobs.append(0.0)
            self.options.append(node.options)
            node = node.children[token_id]
        self.node = node
        if node.is_over:
            self.finish_reason, self.text = FinishReason.STOP, node.text


class TransformersEngine:
    """A transformers model as a `longstep.policy.Engine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        processor: Any | None = None,
        device: str | None = None,
        policy_version: int = 0,
        max_batch_tokens: int = 65536,
        max_length: int | None = None,
    ) -> None:
        """Args:
        model: A causal language model. It is shared, not copied: training it changes what the engine samples from.
        tokenizer: Its tokenizer, with a chat template.
        processor: Its processor (`image_prompts.load_processor`), for prompts with images; None refuses them.
        device: Where to move the model; None leaves it where it is.
        policy_version: Number of weight updates the model has seen; set the attribute after each update.
        max_batch_tokens: Most positions, padding and tokens to sample included, that are computed at once.
        max_length: Longest prompt with completion; None means the model's own limit.
        """
        if max_batch_tokens < 1:
            raise ConfigError(f"expected `max_batch_tokens` >= 1, got {max_batch_tokens}")
        self.model = model if device is None else model.to(device)  # pyright: ignore[reportArgumentType]
        self.tokenizer = tokenizer
        self.policy_version = policy_version
        self._max_batch_tokens = max_batch_tokens
        self._max_length = (
            max_length
            or getattr(model.config.get_text_config(), "max_position_embeddings", None)
            or 1 << 62
        )
        self._prompts = PromptTokenizer(tokenizer)
        self._image_prompts = None if processor is None else ImagePrompts(processor)
        self._end_ids = _end_of_turn_ids(model, tokenizer)
        eos_id = tokenizer.eos_token_id
        self._constraints = Constraints(tokenizer, eos_id if isinstance(eos_id, int) else None)
        self._known_choices = KnownChoices(self.model)
        pad_id = tokenizer.pad_token_id
        self._pad_id = (
            pad_id if isinstance(pad_id, int) else eos_id if isinstance(eos_id, int) else 0
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """One completion for each request, in the same order.

        A request that cannot be answered gives `FinishReason.ERROR` and leaves the others alone. With temperature 0 the
        log-probabilities are those of temperature 1. `top_p` does not change log-probabilities.
        """
        import torch

        prompts = self._encode([request.prompt for request in requests])
        rows = [self._row(request, ids) for request, ids in zip(requests, prompts, strict=True)]
        open_rows = [row for row in rows if isinstance(row, _Row) and row.finish_reason is None]
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            with torch.inference_mode():
                open_rows = self._decide_known(open_rows)
                for batch in self._batches([row for row in open_rows if row.inputs is None]):
                    self._decode(batch)
                for batch in self._batches([row for row in open_rows if row.inputs is not None]):
                    decode_with_images(self.model, batch, self._sample, pad_id=self._pad_id)
        finally:
            if was_training:
                self.model.train()
        return [
            self._completion(row) if isinstance(row, _Row) else self._failure(request, row)
            for request, row in zip(requests, rows, strict=True)
        ]

    def score(self, rows: Sequence[ScoreRow]) -> list[NDArray[np.float32]]:
        """For each row the log-probability [C] of each of its `token_ids`: temperature 1, no constraint.

        Raises:
            DataError: A row is empty or longer than the context.
        """
        check_rows(rows, max_length=self.max_length)
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            return score_rows(self.model, rows, max_tokens=self._max_batch_tokens)
        finally:
            if was_training:
                self.model.train()

    @property
    def max_length(self) -> int:
        """Longest prompt with completion."""
        return self._max_length

    def reset_cache(self) -> None:
        """Forget choices that were scored before. From here on the same calls give the same bytes as after any other reset;
        without it, what is remembered changes the batches and so the last bits of log-probabilities.
        """
        self._known_choices.clear()

    def _encode(self, prompts: Sequence[Prompt]) -> list[NDArray[np.int32] | ImageInputs | str]:
        """Each prompt as the model reads it, or the text of what is wrong with it."""
        image_prompts = self._image_prompts
        if image_prompts is None:
            return list(self._prompts.encode(prompts))
        of_text = iter(self._prompts.encode([prompt for prompt in prompts if not prompt.images]))
        return [image_prompts.encode(p) if p.images else next(of_text) for p in prompts]

    def _row(
        self, request: GenerationRequest, prompt: NDArray[np.int32] | ImageInputs | str
    ) -> _Row | str:
        """The row of a request, or what is wrong with the request."""
        if isinstance(prompt, str):
            return prompt
        inputs = prompt if isinstance(prompt, ImageInputs) else None
        prompt_ids = prompt.prompt_ids if isinstance(prompt, ImageInputs) else prompt
        if request.max_tokens < 1 or request.temperature < 0 or not 0 < request.top_p <= 1:
            return (
                "expected `max_tokens` >= 1, `temperature` >= 0 and 0 < `top_p` <= 1, got "
                f"{request.max_tokens}, {request.temperature} and {request.top_p}"
            )
        room = self._max_length - len(prompt_ids)
        if room < 1 or not len(prompt_ids):
            return (
                f"expected a prompt of 1 to {self._max_length - 1} tokens, got {len(prompt_ids)}; shorten the prompt "
                "(`PromptTemplate(max_tokens=...)`)"
            )
        max_new = min(request.max_tokens, room)
        if request.allowed is None:
            return _Row(
                request=request, prompt_ids=prompt_ids, max_new=max_new, node=None, inputs=inputs
            )
        try:
            trie = self._constraints.trie(request.allowed)
        except DataError as error:
            return str(error)
        if trie.depth > max_new:
            return (
                f"expected room for the longest of `allowed`, {trie.depth} tokens, got {max_new} (`max_tokens` is "
                f"{request.max_tokens}, the context leaves {room}); raise `max_tokens` or shorten the prompt"
            )
        row = _Row(
            request=request, prompt_ids=prompt_ids, max_new=trie.depth, node=trie, inputs=inputs
        )
        row.take_forced()
        return row

    def _batches(self, rows: list[_Row]) -> list[list[_Row]]:
        """`rows` by length, split so that no batch holds more than `max_batch_tokens` positions."""
        # Equal prompts stand side by side, in an order that is the same in every run.
        first = {id(row.prompt_ids): place for place, row in reversed(list(enumerate(rows)))}
        rows = sorted(rows, key=lambda row: (len(row.prompt_ids), first[id(row.prompt_ids)]))
        batches: list[list[_Row]] = []
        longest_new = 0
        for row in rows:
            longest_new = max(longest_new, row.max_new)
            size = len(batches[-1]) + 1 if batches else 1
            if not batches or size * (len(row.prompt_ids) + longest_new) > self._max_batch_tokens:
                batches.append([])
                longest_new = row.max_new
            batches[-1].append(row)
        return batches

    def _decide_known(self, rows: list[_Row]) -> list[_Row]:
        """Finish the rows whose one choice these weights have scored before; gives the other rows."""
        self._known_choices.forget_if_changed(self.policy_version)
        known: list[tuple[_Row, torch.Tensor]] = []
        unknown: list[_Row] = []
        for row in rows:
            # The ids of a prompt with images do not tell the images apart.
            has_images = row.inputs is not None
            logits_K = (
                None if has_images else self._known_choices.get(row.prompt_ids, row.request.allowed)
            )
            if logits_K is None:
                unknown.append(row)
            else:
                known.append((row, logits_K))
        if known:
            chosen = [row for row, _ in known]
            self._choose(chosen, *_padded_options(chosen, [logits for _, logits in known]))
        return unknown

    def _decode(self, rows: list[_Row]) -> None:
        """Sample until every row is finished."""
        contexts: dict[tuple[int, tuple[int, ...]], int] = {}
        index = [
            contexts.setdefault((id(row.prompt_ids), tuple(row.token_ids)), len(contexts))
            for row in rows
        ]
        sequences: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * len(contexts)
        for row, context in zip(rows, index, strict=True):
            sequences[context] = np.append(row.prompt_ids, np.array(row.token_ids, dtype=np.int32))
            row.num_fed = len(row.token_ids)
        state = Context(self.model, keep=any(row.max_new - row.num_fed > 1 for row in rows))
        logits_BV = state.prefill(sequences)[index]
        while True:
            self._sample(rows, logits_BV)
            still = [i for i, row in enumerate(rows) if row.finish_reason is None]
            if not still:
                return
            rows = [rows[i] for i in still]
            index = [index[i] for i in still]
            state.select(index)
            index = list(range(len(rows)))
            chunks = [np.array(row.token_ids[row.num_fed :], dtype=np.int32) for row in rows]
            for row in rows:
                row.num_fed = len(row.token_ids)
            logits_BV = state.extend(chunks)

    def _sample(self, rows: list[_Row], logits_BV: torch.Tensor) -> None:
        """Give each row its next token."""
        free = [i for i, row in enumerate(rows) if row.node is None]
        constrained = [i for i, row in enumerate(rows) if row.node is not None]
        if free:
            chosen = [rows[i] for i in free]
            part_BV = logits_BV[free] if constrained else logits_BV
            ids, logprobs = sample(part_BV, *_settings(chosen))
            for row, token_id, logprob in zip(chosen, ids.tolist(), logprobs.tolist(), strict=True):
                row.take(token_id, logprob)
            self._finish_free(chosen)
        if constrained:
            chosen = [rows[i] for i in constrained]
            options_BK, masked_BK = _gather_options(
                chosen, logits_BV[constrained] if free else logits_BV
            )
            for row, masked_K in zip(chosen, masked_BK, strict=True):
                if row.node is not None and row.is_single_choice and row.inputs is None:
                    logits_K = masked_K[: len(row.node.options)]
                    self._known_choices.put(row.prompt_ids, row.request.allowed, logits_K)
            self._choose(chosen, options_BK, masked_BK)

    def _choose(
        self, rows: list[_Row], options_BK: NDArray[np.int64], masked_BK: torch.Tensor
    ) -> None:
        """Give each constrained row one of its options."""
        columns, logprobs = sample(masked_BK, *_settings(rows))
        ids = options_BK[np.arange(len(rows)), columns]
        for row, token_id, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            row.take(token_id, logprob)

    def _finish_free(self, rows: list[_Row]) -> None:
        """Close the rows that ended their turn, wrote a stop string or used up their tokens."""
        for row in rows:
            if row.token_ids[-1] in self._end_ids or (row.request.stop and self._has_stop(row)):
                row.finish_reason = FinishReason.STOP
            elif len(row.token_ids) >= row.max_new:
                row.finish_reason = FinishReason.LENGTH

    def _has_stop(self, row: _Row) -> bool:
        """Look for a stop string, first in the last tokens only; cut the text before the earliest one."""
        reach = max(len(stop.encode()) for stop in row.request.stop) + 4
        tail = self._text(row.token_ids[-reach:])
        if not any(stop and stop in tail for stop in row.request.stop):
            return False
        text = self._text(row.token_ids)
        starts = [text.find(stop) for stop in row.request.stop if stop and stop in text]
        if starts:
            row.text = text[: min(starts)]
        return bool(starts)

    def _text(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _completion(self, row: _Row) -> Completion:
        assert row.finish_reason is not None
        return Completion(
            request_id=row.request.request_id,
            prompt_token_ids=row.prompt_ids,
            token_ids=np.array(row.token_ids, dtype=np.int32),
            logprobs=np.array(row.logprobs, dtype=np.float32),
            text=row.text if row.text is not None else self._text(row.token_ids),
            finish_reason=row.finish_reason,
            policy_version=self.policy_version,
            allowed_token_ids=tuple(row.options) if row.node is not None else None,
        )

    def _failure(self, request: GenerationRequest, error: str) -> Completion:
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=np.empty(0, np.int32),
            token_ids=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            text="",
            finish_reason=FinishReason.ERROR,
            policy_version=self.policy_version,
            error=error,
        )


def _settings(
    rows: list[_Row],
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float64]]:
    """Temperatures, top-p masses and random numbers of the rows' next tokens."""
    requests = [row.request for row in rows]
    seeds = np.array([request.seed & 0xFFFFFFFFFFFFFFFF for request in requests], dtype=np.uint64)
    positions = np.array([len(row.token_ids) for row in rows], dtype=np.uint64)
    return (
        np.array([request.temperature for request in requests], dtype=np.float32),
        np.array([request.top_p for request in requests], dtype=np.float32),
        uniform(seeds, positions),
    )


def _padded_options(
    rows: list[_Row], logits: list[torch.Tensor]
) -> tuple[NDArray[np.int64], torch.Tensor]:
    """Ids [B, K] that the rows may sample, and their logits, filled as in `_gather_options`."""
    import torch

    options = [row.node.options for row in rows if row.node is not None]
    width = max(len(ids) for ids in options)
    options_BK = np.zeros((len(rows), width), dtype=np.int64)
    for row, ids in enumerate(options):
        options_BK[row, : len(ids)] = ids
    padded = torch.nn.utils.rnn.pad_sequence(logits, batch_first=True, padding_value=float("-inf"))
    return options_BK, padded


def _gather_options(
    rows: list[_Row], logits_BV: torch.Tensor
) -> tuple[NDArray[np.int64], torch.Tensor]:
    """Ids [B, K] that the rows may sample, and their logits; rows with fewer options are filled with minus infinity."""
    import torch

    options = [row.node.options for row in rows if row.node is not None]
    sizes_B = np.array([len(ids) for ids in options])
    real_BK = np.arange(sizes_B.max()) < sizes_B[:, None]
    options_BK = np.zeros(real_BK.shape, dtype=np.int64)
    options_BK[real_BK] = np.concatenate(options)
    device = logits_BV.device
    picked_BK = logits_BV.gather(1, torch.from_numpy(options_BK).to(device)).float()
    return options_BK, picked_BK.masked_fill(torch.from_numpy(~real_BK).to(device), float("-inf"))


def _end_of_turn_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a turn, by the tokenizer or by the model's generation config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int))
