"""What an actor serves: an engine that takes requests at any time and answers each as soon as it is done.

`longstep.policy.Engine` answers a batch at once, in the caller's thread. A `ServedEngine` runs by itself: `start` hands a
request over, `on_done` brings its completion. `open_engine` (module `opening`) makes one by name.

Weights come as files: a safetensors file or folder with Hugging Face names, or a folder with a peft adapter. One
completion is made by one version of the weights, and says by which. `DeviceWeights` is for engines that also take weights
from a GPU's memory, without a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from longstep.types import Completion, GenerationRequest

__all__ = ["DeviceWeights", "EngineDescription", "EngineStats", "ScoreRow", "ServedEngine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What an engine is, for whoever is about to use it."""

    engine: str
    """Kind of engine: `transformers`, `vllm` or `openai`."""
    model: str
    """Path or name of the model as it was opened."""
    dtype: str
    """Number format of the weights, as `float32`; empty when it is not known."""
    max_length: int
    """Most tokens of a prompt with its completion."""
    takes_images: bool
    """True when prompts may hold images."""
    takes_adapters: bool
    """True when `load_adapter` works."""
    takes_weights: bool = True
    """True when `load_weights` works; a server of somebody else's does not take any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Load now, and what was done since the engine was opened."""

    num_waiting: int = 0
    """Requests that no computation has begun for."""
    num_running: int = 0
    """Requests that are being computed."""
    num_completions: int = 0
    """Requests answered, whatever the answer."""
    prompt_tokens: int = 0
    """Tokens of the prompts that were read."""
    cached_prompt_tokens: int = 0
    """How many of `prompt_tokens` were found computed in a cache."""
    generated_tokens: int = 0
    """Tokens sampled."""
    busy_s: float = 0.0
    """Seconds during which at least one request was there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One prompt and one completion whose log-probabilities are asked for."""

    prompt_token_ids: NDArray[np.int32]
    """[P] at least one."""
    token_ids: NDArray[np.int32]
    """[C] at least one."""
    images: tuple[NDArray[np.uint8], ...] = ()
    """Images [H, W, 3] of the prompt, in the order of their placeholders."""


class ServedEngine(Protocol):
    """An engine that takes requests at any time and answers each as soon as it is done. All methods from any thread."""

    @property
    def policy_version(self) -> int:
        """Number of weight updates that the serving weights have seen."""
        ...

    @property
    def description(self) -> EngineDescription:
        """What this engine is."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine answers nothing any more, as when its own process died; None while all is well.

        Set before the requests that it owed are answered with `FinishReason.ERROR`. An actor ends then, without passing
        these on, and its pool has them answered elsewhere.
        """
        ...

    def start(self, request: GenerationRequest, on_done: Callable[[Completion], None]) -> None:
        """Take a request and return at once; never raises for what the request holds.

        Args:
            request: Its id is unique among the requests under way.
            on_done: Called once, from any thread; quick, and it does not raise. A request that cannot be answered gives
                `FinishReason.ERROR` and the reason; one that was withdrawn `FinishReason.CANCELLED`.
        """
        ...

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Withdraw requests: each is answered soon, with `FinishReason.CANCELLED`. Unknown ids are passed over."""
        ...

    def load_weights(self, path: Path, *, version: int) -> None:
        """Serve new weights, once this returns.

        Running requests end under the old weights, new ones wait meanwhile. What had been computed with the old weights
        is forgotten.

        Args:
            path: A `.safetensors` file, or a folder with such files, with Hugging Face names; it can be removed after.
            version: The `policy_version` from then on.

        Raises:
            WeightsError: Names or shapes do not fit; the engine goes on with the weights that it had.
        """
        ...

    def load_adapter(self, folder: Path, *, version: int) -> None:
        """Serve the model with this adapter in place of any earlier one, once this returns; as `load_weights`.

        Args:
            folder: A peft adapter: `adapter_config.json` and `adapter_model.safetensors`; it can be removed after.
            version: The `policy_version` from then on.

        Raises:
            WeightsError: It is for another model, or of a rank that the engine does not take; nothing has changed.
        """
        ...

    def score(self, rows: Sequence[ScoreRow]) -> list[NDArray[np.float32]]:
        """For each row the log-probability [C] of each of its `token_ids`: temperature 1, no constraint.

        Raises:
            DataError: A row is empty or longer than the context.
        """
        ...

    def stats(self) -> EngineStats:
        """Load and counts."""
        ...

    def close(self) -> None:
        """Answer open requests with `FinishReason.CANCELLED` and free everything. Idempotent."""
        ...


@runtime_checkable
class DeviceWeights(Protocol):
    """An engine that can also take weights from another process's GPU memory, as vLLM's weight-transfer API does.

    The order is one `init_weight_transfer`, then for each update `start_weight_update`, one or more `update_weights`,
    `finish_weight_update`. From start to finish no token is sampled.
    """

    def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Meet the sender, with what its `TrainerWeightTransferEngine` gives as init info."""
        ...

    def start_weight_update(self) -> None:
        """Let running requests end, keep new ones waiting."""
        ...

    def update_weights(self, update_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Receive some weights."""
        ...

    def finish_weight_update(self, *, version: int) -> None:
        """Serve the new weights as `version`."""
        ...
