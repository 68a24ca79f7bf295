"""What runs inside vLLM's engine process: the sampler, the loading of weights, the end with the parent.

vLLM is told that every request is greedy. `LongstepSampler`, a logits processor, draws the token of each row as the
transformers engine does and leaves its log-probability at that token and minus infinity everywhere else: vLLM takes the
token, and with the sampler's mode `processed_logits` (set by `WorkerExtension.longstep_prepare`) gives back the value.

Shape letters: B rows, V vocabulary, K options of a constrained row.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import select
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from longstep_bindings.engines.sampling import sample, uniform
from longstep_bindings.engines.vllm_requests import EXTRA_ARG, PARENT_VARIABLE
from longstep_bindings.engines.weight_files import tensors_in

__all__ = ["LongstepSampler", "WorkerExtension"]

_MAX_KNOWN = 1 << 14


@dataclass(slots=True)
class _Choice:
    """One place in the choices of a request; no options where all is decided."""

    children: dict[int, _Choice] = field(default_factory=dict)
    options: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(slots=True)
class _Row:
    """One request of the batch."""

    told: dict[str, Any]
    output_ids: list[int]
    """vLLM's own list of what was sampled; it grows."""
    place: _Choice | None
    num_walked: int = 0

    def choice(self) -> _Choice:
        """Where the choices stand after what was sampled."""
        assert self.place is not None
        while self.num_walked < len(self.output_ids) and len(self.place.options):
            self.place = self.place.children[self.output_ids[self.num_walked]]
            self.num_walked += 1
        return self.place


class LongstepSampler(LogitsProcessor):
    """Draws the tokens of all requests that carry our extra argument."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Called by vLLM."""
        del vllm_config, device, is_pin_memory
        self._rows: dict[int, _Row] = {}
        self._known: dict[bytes, _Choice] = {}
        _end_with_parent()

    def is_argmax_invariant(self) -> bool:
        """False: greedy requests need it."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow vLLM's batch."""
        process_dict_updates(self._rows, batch_update, self._new_row)

    def _new_row(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> _Row | None:
        told = (params.extra_args or {}).get(EXTRA_ARG)
        if told is None:
            return None
        paths = told.get("paths")
        return _Row(told, output_ids, None if paths is None else self._choices(paths))

    def _choices(self, paths: bytes) -> _Choice:
        root = self._known.get(paths)
        if root is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            root = self._known[paths] = _read_choices(paths)
        return root

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave one token in each of our rows, with its log-probability in place of its logit."""
        free: list[int] = []
        choosing: list[int] = []
        forced: list[tuple[int, int, float | None]] = []
        for index, row in self._rows.items():
            force = row.told.get("force")
            if force is not None:
                # A row that is still reading its prompt is asked too; what it says then is dropped.
                forced.append((index, force[min(len(row.output_ids), len(force) - 1)], None))
            elif row.place is None:
                free.append(index)
            else:
                options = row.choice().options
                if len(options) > 1:
                    choosing.append(index)
                else:
                    forced.append(
                        (index, int(options[0]) if len(options) else row.told["end"], 0.0)
                    )
        picked = [*self._draw(free, logits), *self._choose(choosing, logits)]
        picked.extend(self._forced(forced, logits))
        if not picked:
            return logits
        indices, ids, values = zip(*picked, strict=True)
        device = logits.device
        rows_B = torch.tensor(indices, device=device)
        if len(indices) == len(logits):
            logits.fill_(float("-inf"))
        else:
            logits[rows_B] = float("-inf")
        logits[rows_B, torch.tensor(ids, device=device)] = torch.tensor(
            values, dtype=logits.dtype, device=device
        )
        return logits

    def _draw(self, indices: list[int], logits_BV: torch.Tensor) -> list[tuple[int, int, float]]:
        if not indices:
            return []
        whole = indices == list(range(len(logits_BV)))
        ids, values = sample(logits_BV if whole else logits_BV[indices], *self._settings(indices))
        return list(zip(indices, ids.tolist(), values.tolist(), strict=True))

    def _choose(self, indices: list[int], logits_BV: torch.Tensor) -> list[tuple[int, int, float]]:
        if not indices:
            return []
        options = [self._rows[index].choice().options for index in indices]
        sizes_B = np.array([len(ids) for ids in options])
        real_BK = np.arange(sizes_B.max()) < sizes_B[:, None]
        options_BK = np.zeros(real_BK.shape, dtype=np.int64)
        options_BK[real_BK] = np.concatenate(options)
        device = logits_BV.device
        picked_BK = logits_BV[indices].gather(1, torch.from_numpy(options_BK).to(device)).float()
        picked_BK = picked_BK.masked_fill(torch.from_numpy(~real_BK).to(device), float("-inf"))
        columns, values = sample(picked_BK, *self._settings(indices))
        ids = options_BK[np.arange(len(indices)), columns]
        return list(zip(indices, ids.tolist(), values.tolist(), strict=True))

    def _forced(
        self, forced: list[tuple[int, int, float | None]], logits_BV: torch.Tensor
    ) -> list[tuple[int, int, float]]:
        """Tokens without a choice: 0 by constraint, to be scored where None stands."""
        scored = [(index, token_id) for index, token_id, value in forced if value is None]
        found = {index: (token_id, value) for index, token_id, value in forced}
        if scored:
            indices, ids = zip(*scored, strict=True)
            logprobs_BV = logits_BV[list(indices)].float().log_softmax(-1)
            ids_B1 = torch.tensor(ids, device=logits_BV.device)[:, None]
            values = logprobs_BV.gather(1, ids_B1).squeeze(1).tolist()
            found |= {i: (t, v) for i, t, v in zip(indices, ids, values, strict=True)}
        return [(index, token_id, value or 0.0) for index, (token_id, value) in found.items()]

    def _settings(
        self, indices: list[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float64]]:
        rows = [self._rows[index] for index in indices]
        seeds = np.array([row.told["seed"] for row in rows], dtype=np.uint64)
        positions = [row.told["offset"] + len(row.output_ids) for row in rows]
        return (
            np.array([row.told["temperature"] for row in rows], dtype=np.float32),
            np.array([row.told["top_p"] for row in rows], dtype=np.float32),
            uniform(seeds, np.array(positions, dtype=np.uint64)),
        )


def _read_choices(paths: bytes) -> _Choice:
    """The choices that `vllm_requests.decisions` wrote."""
    numbers = np.frombuffer(paths, dtype=np.int32).tolist()
    root = _Choice()
    places = [root]
    start = 0
    while start < len(numbers):
        place = root
        for token_id in numbers[start + 1 : start + 1 + numbers[start]]:
            if token_id not in place.children:
                place.children[token_id] = _Choice()
                places.append(place.children[token_id])
            place = place.children[token_id]
        start += 1 + numbers[start]
    for place in places:
        place.options = np.array(sorted(place.children), dtype=np.int64)
    return root


class WorkerExtension:
    """Methods that `collective_rpc` calls in each of vLLM's workers."""

    model_runner: Any

    def longstep_prepare(self) -> None:
        """Make the sampler give back what `LongstepSampler` left, while prompts are still scored with a softmax."""
        sampler = self.model_runner.sampler
        if getattr(sampler, "logprobs_mode", None) != "processed_logprobs":
            raise RuntimeError(
                "expected vLLM's sampler with `logprobs_mode` `processed_logprobs`, got "
                f"{getattr(sampler, 'logprobs_mode', None)!r} in {type(self.model_runner)}; this version of vLLM is not "
                "known to work"
            )
        sampler.logprobs_mode = "processed_logits"

    def longstep_load_weights(self, path: str) -> None:
        """Load the weights at `path` in place."""
        # vLLM packs weights and drops the originals: writing to its parameters would change nothing.
        self.model_runner.reload_weights(weights_iterator=tensors_in(Path(path)))
        self._longstep_pack_heads()

    def _longstep_pack_heads(self) -> None:
        """Pack output heads anew: one that is tied to the embedding gets no weights of its own, so vLLM leaves it as it was
        and goes on multiplying with the old ones.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            UnquantizedEmbeddingMethod,
        )

        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead) and isinstance(
                module.quant_method, UnquantizedEmbeddingMethod
            ):
                module.quant_method.process_weights_after_loading(module)


def _end_with_parent() -> None:
    """Kill this engine once the process named by `PARENT_VARIABLE` is gone, however it went."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or not hasattr(os, "pidfd_open"):
        return
    # A worker of an engine with several has the engine's own process in between.
    engine = os.getpid() if os.getppid() == int(parent) else os.getppid()

    def watch() -> None:
        try:
            descriptor = os.pidfd_open(int(parent))
            select.select([descriptor], [], [])
        except ProcessLookupError:
            pass
        os.kill(engine, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="longstep-follow-parent", daemon=True).start()
