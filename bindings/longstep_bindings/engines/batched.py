"""`BatchedEngine`: the transformers engine as a `ServedEngine`.

One thread generates for whatever is pending, in one batch, and then for what came meanwhile. New weights go into the
model in place, between two batches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longstep.errors import ConfigError, PolicyError
from longstep.types import Completion, FinishReason, GenerationRequest
from longstep_bindings.engines.adapters import AdapterSlot
from longstep_bindings.engines.model_weights import load_in_place
from longstep_bindings.engines.served import EngineDescription, EngineStats, ScoreRow
from longstep_bindings.engines.transformers_engine import TransformersEngine

__all__ = ["BatchedEngine"]

OnDone = Callable[[Completion], None]
_JOIN_S = 5.0


class BatchedEngine:
    """A transformers model that answers requests as they come.

    It owns the engine's model: nobody else may write to its weights while it is open.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        *,
        model_name: str = "",
        takes_images: bool = False,
        max_batch: int | None = None,
        max_adapter_rank: int = 64,
        gather_s: float = 0.001,
    ) -> None:
        """Args:
        engine: What generates. Its model is put into eval mode.
        model_name: What `description` calls the model.
        takes_images: True when the engine has the model's processor.
        max_batch: Most requests of one batch; None takes all that are pending.
        max_adapter_rank: Largest rank of an adapter.
        gather_s: Seconds that an idle engine waits for the rest of a burst of requests before it begins, 0 to 1.

        Raises:
            ConfigError: An argument is out of range.
        """
        for name, value in (("max_batch", max_batch), ("max_adapter_rank", max_adapter_rank)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"expected `{name}` of at least 1, got {value!r}")
        if not 0.0 <= gather_s <= 1.0:
            raise ConfigError(f"expected `gather_s` from 0 to 1 s, got {gather_s!r}")
        self._engine = engine
        engine.model.eval()
        self._adapter = AdapterSlot(engine.model, max_rank=max_adapter_rank)
        self._max_batch, self._gather_s = max_batch, gather_s
        self._model_name, self._takes_images = model_name, takes_images
        self._changed = threading.Condition()
        self._pending: dict[str, tuple[GenerationRequest, OnDone]] = {}
        self._running: dict[str, tuple[GenerationRequest, OnDone]] = {}
        self._model_lock = threading.Lock()
        """Held by whoever computes with the weights or changes them."""
        self._num_waiting_for_model = 0
        self._failure: str | None = None
        self._is_closed = False
        self._num_completions = self._prompt_tokens = self._generated_tokens = 0
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="longstep-engine", daemon=True)
        self._thread.start()

    @property
    def policy_version(self) -> int:
        """Number of weight updates that the serving weights have seen."""
        return self._engine.policy_version

    @property
    def failure(self) -> str | None:
        """Why nothing is answered any more: the GPU failed for good, or the model holds half of some new weights."""
        return self._failure

    @property
    def description(self) -> EngineDescription:
        """The model's name, number format and limits."""
        model = self._engine.model
        return EngineDescription(
            engine="transformers",
            model=self._model_name,
            dtype=str(model.dtype).removeprefix("torch."),
            max_length=self._engine.max_length,
            takes_images=self._takes_images,
            takes_adapters=True,
        )

    # ---- requests ----

    def start(self, request: GenerationRequest, on_done: OnDone) -> None:
        """Take a request; see `ServedEngine`."""
        with self._changed:
            is_closed = self._is_closed
            if not is_closed:
                self._pending[request.request_id] = (request, on_done)
                self._changed.notify()
        if is_closed:
            on_done(self._unanswered(request, FinishReason.CANCELLED))

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Answer these with `FinishReason.CANCELLED`; what a running batch makes of them is dropped."""
        with self._changed:
            taken = [
                self._pending.pop(name, None) or self._running.pop(name, None)
                for name in request_ids
            ]
        self._answer(
            (self._unanswered(entry[0], FinishReason.CANCELLED), entry[1])
            for entry in taken
            if entry is not None
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                was_idle = not self._pending
                self._changed.wait_for(self._may_begin)
                if self._is_closed:
                    return
            if was_idle:
                time.sleep(self._gather_s)
            with self._model_lock:
                with self._changed:
                    names = list(self._pending)[: self._max_batch]
                    self._running = {name: self._pending.pop(name) for name in names}
                    requests = [request for request, _ in self._running.values()]
                began = time.monotonic()
                completions = self._generate(requests)
                self._busy_s += time.monotonic() - began
            with self._changed:
                still, self._running = self._running, {}
            self._answer(
                (completion, still[completion.request_id][1])
                for completion in completions
                if completion.request_id in still
            )

    def _may_begin(self) -> bool:
        return self._is_closed or bool(self._pending and not self._num_waiting_for_model)

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """A completion for each request; when the batch fails, each by itself, so that only those fail that must."""
        if not requests:
            return []
        if self._failure is not None:
            return [self._unanswered(each, FinishReason.ERROR, self._failure) for each in requests]
        try:
            return self._engine.generate(requests)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if _is_for_good(error):
                self._failure = said
            elif len(requests) > 1:
                return [self._generate([request])[0] for request in requests]
            return [self._unanswered(request, FinishReason.ERROR, said) for request in requests]

    def _answer(self, answers: Iterable[tuple[Completion, OnDone]]) -> None:
        for completion, on_done in answers:
            with self._changed:
                self._num_completions += 1
                self._prompt_tokens += len(completion.prompt_token_ids)
                self._generated_tokens += len(completion.token_ids)
            on_done(completion)

    def _unanswered(
        self, request: GenerationRequest, reason: FinishReason, error: str | None = None
    ) -> Completion:
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=np.empty(0, np.int32),
            token_ids=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            text="",
            finish_reason=reason,
            policy_version=self.policy_version,
            error=error,
        )

    # ---- weights ----

    def load_weights(self, path: Path, *, version: int) -> None:
        """Load weights in place, between two batches; an adapter is taken off. See `ServedEngine`."""
        with self._between_batches():
            # An adapter stands between the model and the names of its weights.
            try:
                self._adapter.replace_by(lambda: load_in_place(self._engine.model, path))
            except PolicyError as error:
                self._failure = str(error)
                raise
            self._serve(version)

    def load_adapter(self, folder: Path, *, version: int) -> None:
        """Put an adapter on the model, between two batches; see `ServedEngine`."""
        with self._between_batches():
            self._adapter.load(folder)
            self._serve(version)

    @contextmanager
    def _between_batches(self) -> Iterator[None]:
        """Let the running batch end and keep the next one waiting, however many requests there are.

        Raises:
            PolicyError: The model is of no use any more.
        """
        with self._changed:
            self._num_waiting_for_model += 1
        try:
            with self._model_lock:
                if self._failure is not None:
                    raise PolicyError(f"expected an engine that answers, but {self._failure}")
                yield
        finally:
            with self._changed:
                self._num_waiting_for_model -= 1
                self._changed.notify()

    def _serve(self, version: int) -> None:
        self._engine.policy_version = version
        self._engine.reset_cache()

    def score(self, rows: Sequence[ScoreRow]) -> list[NDArray[np.float32]]:
        """Log-probabilities of given completions; see `ServedEngine`."""
        with self._between_batches():
            return self._engine.score(rows)

    # ---- ends ----

    def stats(self) -> EngineStats:
        """Load and counts; cached tokens are not counted."""
        with self._changed:
            return EngineStats(
                num_waiting=len(self._pending),
                num_running=len(self._running),
                num_completions=self._num_completions,
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
                busy_s=self._busy_s,
            )

    def close(self) -> None:
        """Answer what is open with `FinishReason.CANCELLED` and end the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            names = [*self._pending, *self._running]
            self._changed.notify()
        self.cancel(names)
        self._thread.join(_JOIN_S)


def _is_for_good(error: Exception) -> bool:
    """True for errors of CUDA, of which all but a full memory leave the process without a GPU."""
    return "CUDA error" in str(error) and "out of memory" not in str(error)
