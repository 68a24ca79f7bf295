"""`OpenAIEngine`: a server with OpenAI's HTTP interface as a `ServedEngine`, for evaluation and judges.

The server's weights are its own: they cannot be replaced from here. What it says is taken as it comes: log-probabilities
are of the distribution that it reports (vLLM: before temperature and constraint, unless it was started with
`--logprobs-mode processed_logprobs`), so completions that are to be trained on are made by another engine.

With a tokenizer, prompts go as token ids, made as in the other engines, to `/completions`; without one as messages to
`/chat/completions`, where the server applies its own template. Token ids come back from servers that know
`return_token_ids`, as vLLM does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import ConfigError, DataError, PolicyError, did_you_mean, require
from longstep.types import Completion, FinishReason, GenerationRequest
from longstep_bindings.engines.counts import Counts
from longstep_bindings.engines.loop_thread import LoopThread
from longstep_bindings.engines.openai_messages import (
    completion_body,
    read_completion,
    read_scores,
    score_body,
)
from longstep_bindings.engines.prompts import PromptTokenizer, load_tokenizer
from longstep_bindings.engines.scoring import check_rows
from longstep_bindings.engines.served import EngineDescription, EngineStats, ScoreRow
from longstep_bindings.engines.vllm_requests import unanswered

__all__ = ["OpenAIEngine"]

OnDone = Callable[[Completion], None]
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
_MAX_SAID = 500


class OpenAIEngine:
    """A model behind an OpenAI-compatible server."""

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        tokenizer: Any | None = None,
        needs_token_ids: bool = True,
        max_length: int | None = None,
        max_concurrent: int = 64,
        timeout_s: float = 600.0,
        policy_version: int = 0,
    ) -> None:
        """Args:
        base_url: Where the interface is, as `http://localhost:8000/v1`.
        model: The server's name for the model; None takes the only one that it serves.
        api_key: Sent as a bearer token; None sends none.
        tokenizer: The model's tokenizer or its folder, to send token ids; None sends messages.
        needs_token_ids: False takes completions without token ids too (judges); theirs are empty then.
        max_length: Most tokens of a prompt with its completion; None takes what the server says, if it does.
        max_concurrent: Most requests that the server is given at once; others wait here.
        timeout_s: How long one answer may take.
        policy_version: What completions give as their version.

        Raises:
            ConfigError: There is no such server or model.
            MissingExtraError: httpx is not installed.
        """
        httpx = require("httpx", extra="openai", needed_by='engine "openai"')
        self._base_url, self._needs_token_ids = base_url.rstrip("/"), needs_token_ids
        self._version = policy_version
        self._prompts = None if tokenizer is None else PromptTokenizer(_loaded(tokenizer))
        self._lock = threading.Lock()
        self._is_closed = False
        self._open: dict[str, tuple[GenerationRequest, OnDone, asyncio.Task[None]]] = {}
        self._num_sent = 0
        self._counts = Counts()
        self._max_concurrent = max_concurrent
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._loop = LoopThread("longstep-openai")
        self._http = self._loop.call(_client(httpx, headers, max_concurrent, timeout_s))
        self._slots = self._loop.call(_semaphore(max_concurrent))
        try:
            self._model, told = self._loop.call(self._find(model))
        except BaseException:
            self._loop.call(self._close())
            self._loop.close()
            raise
        self._max_length = max_length or told or 1 << 62

    async def _find(self, model: str | None) -> tuple[str, int | None]:
        """The model's name and, if the server tells it, its longest context."""
        try:
            response = await self._http.get(f"{self._base_url}/models", timeout=30.0)
        except Exception as error:
            raise ConfigError(
                f"expected a server at `{self._base_url}`, but asking for its models failed with "
                f"{type(error).__name__}: {error}"
            ) from error
        if response.status_code == 404 and model is not None:
            return model, None  # some servers do not list their models
        if response.status_code != 200:
            raise ConfigError(
                f"expected a list of models at `{self._base_url}/models`, got {_said(response)}"
            )
        served = {entry["id"]: entry for entry in response.json()["data"]}
        name = model if model is not None or len(served) != 1 else next(iter(served))
        if name is None or name not in served:
            raise ConfigError(
                f"expected a model that `{self._base_url}` serves, got `{name}`; {did_you_mean(str(name), served)}"
            )
        return name, served[name].get("max_model_len")

    # ---- what it is ----

    @property
    def policy_version(self) -> int:
        """The version that was given at the start."""
        return self._version

    @property
    def failure(self) -> str | None:
        """None: a server that is gone may come back."""
        return None

    @property
    def description(self) -> EngineDescription:
        """The server's model."""
        return EngineDescription(
            engine="openai",
            model=self._model,
            dtype="",
            max_length=self._max_length,
            takes_images=self._prompts is None,
            takes_adapters=False,
            takes_weights=False,
        )

    def stats(self) -> EngineStats:
        """Load and counts; waiting are those beyond `max_concurrent`."""
        return self._counts.stats(num_waiting=max(0, len(self._open) - self._max_concurrent))

    # ---- requests ----

    def start(self, request: GenerationRequest, on_done: OnDone) -> None:
        """Take a request; see `ServedEngine`."""
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._loop.post(self._begin, request, on_done)
        if is_closed:
            on_done(unanswered(request, FinishReason.CANCELLED, self._version))

    def _begin(self, request: GenerationRequest, on_done: OnDone) -> None:
        self._counts.begin()
        task = asyncio.get_running_loop().create_task(self._serve(request))
        self._open[request.request_id] = (request, on_done, task)

    async def _serve(self, request: GenerationRequest) -> None:
        try:
            self._answer(request.request_id, await self._complete(request))
        except Exception as error:  # one request must not spoil the others
            text = str(error) if isinstance(error, (PolicyError, DataError)) else repr(error)
            self._answer(
                request.request_id,
                unanswered(request, FinishReason.ERROR, self._version, text),
            )

    async def _complete(self, request: GenerationRequest) -> Completion:
        prompt_ids: NDArray[np.int32] | None = None
        if self._prompts is not None:
            (encoded,) = self._prompts.encode([request.prompt])
            if isinstance(encoded, str):
                raise DataError(encoded)
            prompt_ids = encoded
        place = "chat/completions" if prompt_ids is None else "completions"
        body = completion_body(request, model=self._model, prompt_ids=prompt_ids)
        answer = await self._post(place, body)
        return read_completion(
            request,
            answer,
            prompt_ids=prompt_ids,
            needs_token_ids=self._needs_token_ids,
            policy_version=self._version,
        )

    async def _post(self, place: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The server's answer; asks again when it is busy or not there."""
        error = ""
        async with self._slots:
            for pause_s in (*_PAUSES_S, None):
                try:
                    response = await self._http.post(f"{self._base_url}/{place}", json=body)
                    if response.status_code == 200:
                        return response.json()
                    error = f"got {_said(response)}"
                    can_retry = response.status_code in _RETRIED
                except Exception as raised:
                    error = f"{type(raised).__name__}: {raised}"
                    can_retry = type(raised).__name__ in ("ConnectError", "RemoteProtocolError")
                if pause_s is None or not can_retry:
                    break
                await asyncio.sleep(pause_s)
        raise PolicyError(f"expected an answer from `{self._base_url}/{place}`, {error}")

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Answer these with `FinishReason.CANCELLED` and hang up on the server."""
        self._loop.post(self._withdraw, tuple(request_ids))

    def _withdraw(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._open:
                request, _, task = self._open[name]
                task.cancel()
                self._answer(name, unanswered(request, FinishReason.CANCELLED, self._version))

    def _answer(self, name: str, completion: Completion) -> None:
        entry = self._open.pop(name, None)
        if entry is not None:
            self._counts.end(completion)
            entry[1](completion)

    # ---- what it cannot, and scores ----

    def load_weights(self, path: Path, *, version: int) -> None:
        """Raises `ConfigError`: the server's weights are its own."""
        raise ConfigError(
            f"expected an engine that takes weights, got the server at `{self._base_url}`; train with the engine "
            "`vllm` or `transformers`"
        )

    def load_adapter(self, folder: Path, *, version: int) -> None:
        """Raises `ConfigError`, as `load_weights` does."""
        self.load_weights(folder, version=version)

    def score(self, rows: Sequence[ScoreRow]) -> list[NDArray[np.float32]]:
        """Log-probabilities of given completions, from servers that know `prompt_logprobs`; see `ServedEngine`."""
        check_rows(rows, max_length=self._max_length - 1)
        return self._loop.call(self._score(rows))

    async def _score(self, rows: Sequence[ScoreRow]) -> list[NDArray[np.float32]]:
        bodies = [score_body(row, model=self._model) for row in rows]
        answers = await asyncio.gather(*(self._post("completions", body) for body in bodies))
        return [read_scores(row, answer) for row, answer in zip(rows, answers, strict=True)]

    def close(self) -> None:
        """Answer what is open with `FinishReason.CANCELLED`. Idempotent; the server stays as it is."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._loop.call(self._close())
        self._loop.close()

    async def _close(self) -> None:
        tasks = [task for _, _, task in self._open.values()]
        self._withdraw(list(self._open))
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()
        await asyncio.sleep(0)  # sockets are closed in the loop's next turn


async def _client(httpx: Any, headers: Mapping[str, str], limit: int, timeout_s: float) -> Any:
    return httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(timeout_s, connect=10.0),
        limits=httpx.Limits(max_connections=limit + 1),
    )


async def _semaphore(limit: int) -> asyncio.Semaphore:
    return asyncio.Semaphore(limit)


def _said(response: Any) -> str:
    return f"status {response.status_code}: {' '.join(response.text.split())[:_MAX_SAID]}"


def _loaded(tokenizer: Any) -> Any:
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    return load_tokenizer(tokenizer, extra="trainers", needed_by='engine "openai"')
