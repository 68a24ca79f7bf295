"""`VLLMEngine`: vLLM as a `ServedEngine`.

vLLM runs in an event loop of its own thread, its model in a process of its own. All state of this class belongs to that
loop; the methods, called from any thread, hand their work over to it.

New weights: requests that run end under the old ones, those that come meanwhile wait, the weights go in place, what was
cached is forgotten, the waiting requests begin. When something fails once weights have begun to change, the engine has
failed: it answers nothing from half-new weights.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import DataError, PolicyError, WeightsError, require
from longstep.types import Completion, FinishReason, GenerationRequest
from longstep_bindings.engines.admission import admit
from longstep_bindings.engines.counts import Counts
from longstep_bindings.engines.loop_thread import LoopThread
from longstep_bindings.engines.scoring import check_rows
from longstep_bindings.engines.served import EngineDescription, EngineStats, ScoreRow
from longstep_bindings.engines.vllm_requests import Decisions, Plan, plan_request, unanswered
from longstep_bindings.engines.vllm_scoring import score_row
from longstep_bindings.engines.vllm_text import ModelText
from longstep_bindings.engines.vllm_weights import KnownShapes

__all__ = ["VLLMEngine"]

OnDone = Callable[[Completion], None]
_WATCH_S = 0.5
_DEAD = "vLLM's engine process died"


class _Open:
    """One request that is not answered yet."""

    __slots__ = ("num_cached", "on_done", "plan", "task")

    def __init__(self, plan: Plan, on_done: OnDone) -> None:
        self.plan, self.on_done = plan, on_done
        self.task: asyncio.Task[None] | None = None
        """None while it waits for new weights."""
        self.num_cached = 0


class VLLMEngine:
    """A model served by vLLM."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: str = "auto",
        max_length: int | None = None,
        max_num_seqs: int | None = None,
        max_adapter_rank: int = 0,
        kv_cache_gib: float | None = None,
        gpu_memory_utilization: float | None = None,
        tensor_parallel_size: int = 1,
        num_threads: int | None = None,
        enforce_eager: bool | None = None,
        weight_transfer: str | None = None,
        policy_version: int = 0,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
        model_path: A model folder in Hugging Face form, or a name on the Hub.
        dtype: Number format of the weights; `auto` is the model's own, but on a processor without bfloat16 `float32`.
        max_length: Most tokens of a prompt with its completion; None means the model's own limit.
        max_num_seqs: Most requests computed at once; None leaves it to vLLM.
        max_adapter_rank: Largest rank of an adapter; 0 takes no adapters, which is faster.
        kv_cache_gib: Room for keys and values; None means what vLLM finds on a GPU, and 1 on a CPU.
        gpu_memory_utilization: Share of the GPU's memory that vLLM may use; None leaves it to vLLM.
        tensor_parallel_size: GPUs that share the model.
        num_threads: Threads that compute, on a CPU; None leaves it to `OMP_NUM_THREADS`, or takes all cores.
        enforce_eager: False compiles the model and captures CUDA graphs; None means False on a GPU, True on a CPU.
        weight_transfer: vLLM's backend for weights from GPU memory, `nccl` or `ipc`; None takes files only.
        policy_version: Number of weight updates that the model has seen.
        engine_args: Further arguments of vLLM's `AsyncEngineArgs`.

        Raises:
            ConfigError: vLLM cannot serve this model, and why.
            MissingExtraError: vLLM is not installed.
        """
        require("vllm", extra="vllm", needed_by='engine "vllm"')
        from longstep_bindings.engines.vllm_model import VLLMModel
        from longstep_bindings.engines.vllm_start import check_model, engine_settings

        check_model(model_path)
        self._model_path, self._max_adapter_rank = str(model_path), max_adapter_rank
        self._text = ModelText(model_path)
        self._decisions: dict[tuple[str, ...], Decisions] = {}
        self._shapes = KnownShapes(model_path)
        settings = engine_settings(
            model_path,
            dtype=dtype,
            max_length=max_length,
            max_num_seqs=max_num_seqs,
            max_adapter_rank=max_adapter_rank,
            kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            tensor_parallel_size=tensor_parallel_size,
            enforce_eager=enforce_eager,
            weight_transfer=weight_transfer,
            others=engine_args or {},
        )
        self._version = policy_version
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._inbox: list[tuple[GenerationRequest, OnDone]] = []
        self._open: dict[str, _Open] = {}
        self._waiting: deque[_Open] = deque()
        self._num_running = self._num_holds = 0
        self._transfer: AsyncExitStack | None = None
        self._counts = Counts()
        self._loop = LoopThread("longstep-vllm")
        try:
            self._model = self._loop.call(VLLMModel.open(settings, num_threads=num_threads))
            self._loop.call(self._begin())
        except BaseException:
            self._loop.close()
            raise

    async def _begin(self) -> None:
        self._updates = asyncio.Lock()
        self._idle, self._released = asyncio.Event(), asyncio.Event()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Notice the death of vLLM's process also while nothing is asked of it."""
        while not self._model.is_dead:
            await asyncio.sleep(_WATCH_S)
        self._fail(_DEAD)

    def _fail(self, reason: str) -> None:
        if self._failure is None and not self._is_closed:
            self._failure = f"{reason}; open the engine again"
            for entry in list(self._open.values()):
                self._answer_without(entry, FinishReason.ERROR, self._failure)

    # ---- what it is ----

    @property
    def policy_version(self) -> int:
        """Number of weight updates that the serving weights have seen."""
        return self._version

    @property
    def failure(self) -> str | None:
        """Why nothing is answered any more: vLLM's process died, or weights were half loaded."""
        return self._failure

    @property
    def description(self) -> EngineDescription:
        """The model's name, number format and limits."""
        return EngineDescription(
            engine="vllm",
            model=self._model_path,
            dtype=self._model.dtype,
            max_length=self._model.max_length,
            takes_images=self._text.takes_images,
            takes_adapters=self._max_adapter_rank > 0,
        )

    def stats(self) -> EngineStats:
        """Load and counts. Waiting are those that wait for new weights; vLLM's own queue counts as running."""
        return self._counts.stats(num_waiting=len(self._waiting))

    # ---- requests ----

    def start(self, request: GenerationRequest, on_done: OnDone) -> None:
        """Take a request; see `ServedEngine`."""
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._inbox.append((request, on_done))
                if len(self._inbox) == 1:
                    self._loop.post(self._take)
        if is_closed:
            on_done(unanswered(request, FinishReason.CANCELLED, self._version))

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Answer these with `FinishReason.CANCELLED` and let vLLM abort them."""
        self._loop.post(self._withdraw, tuple(request_ids))

    def _take(self) -> None:
        with self._lock:
            entries, self._inbox = self._inbox, []
        prompts = self._text.encode([request.prompt for request, _ in entries])
        for (request, on_done), prompt in zip(entries, prompts, strict=True):
            self._counts.begin()
            plan = self._plan(request, prompt)
            if isinstance(plan, str):
                refused = unanswered(request, FinishReason.ERROR, self._version, plan)
                self._counts.end(refused)
                on_done(refused)
                continue
            entry = self._open[request.request_id] = _Open(plan, on_done)
            if self._num_holds:
                self._waiting.append(entry)
            else:
                self._launch(entry)

    def _plan(self, request: GenerationRequest, prompt: NDArray[np.int32] | str) -> Plan | str:
        """How to compute a request, or why it cannot be answered."""
        if self._failure is not None:
            return self._failure
        if isinstance(prompt, str):
            return prompt
        admitted = admit(
            request,
            len(prompt),
            max_length=self._model.max_length,
            constraints=self._text.constraints,
        )
        if isinstance(admitted, str):
            return admitted
        return plan_request(request, prompt, admitted, self._decisions)

    def _launch(self, entry: _Open) -> None:
        if entry.plan.is_decided:
            self._finish(entry, [], [], is_stopped=True)
        else:
            self._num_running += 1
            entry.task = asyncio.create_task(self._serve(entry))
            # Not in the task itself: one that is cancelled before its first turn never runs.
            entry.task.add_done_callback(lambda _: self._leave())

    async def _serve(self, entry: _Open) -> None:
        plan = entry.plan
        try:
            ids = [*plan.prompt_ids.tolist(), *plan.given]
            images = plan.request.prompt.images
            output = await self._model.generate(ids, plan.settings(self._text.end_ids), images)
            if images:  # vLLM has made room for them
                whole = np.array(output.prompt_token_ids, dtype=np.int32)
                plan.prompt_ids = whole[: len(whole) - len(plan.given)]
            entry.num_cached = output.num_cached_tokens or 0
            written = output.outputs[0]
            if written.finish_reason not in ("stop", "length"):
                raise PolicyError(f"vLLM ended it with {written.finish_reason!r}")
            is_stopped = written.finish_reason == "stop"
            self._finish(entry, written.token_ids, written.logprobs.logprobs, is_stopped=is_stopped)
        except Exception as error:  # one request must not spoil the others
            self._fail_if_dead()
            said = f"vLLM could not answer: {type(error).__name__}: {error}"
            self._answer_without(entry, FinishReason.ERROR, said)

    def _leave(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._idle.set()

    def _fail_if_dead(self) -> None:
        if self._model.is_dead:
            self._fail(_DEAD)

    def _finish(
        self,
        entry: _Open,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        is_stopped: bool,
    ) -> None:
        completion = entry.plan.completion(
            token_ids,
            logprobs,
            is_stopped=is_stopped,
            policy_version=self._version,
            decode=self._text.decode,
        )
        self._answer(entry, completion)

    def _withdraw(self, names: Sequence[str]) -> None:
        for name in names:
            entry = self._open.get(name)
            if entry is None:
                continue
            if entry.task is not None:
                entry.task.cancel()
            else:
                self._waiting.remove(entry)
            self._answer_without(entry, FinishReason.CANCELLED)

    def _answer_without(self, entry: _Open, reason: FinishReason, error: str | None = None) -> None:
        self._answer(entry, unanswered(entry.plan.request, reason, self._version, error))

    def _answer(self, entry: _Open, completion: Completion) -> None:
        name = entry.plan.request.request_id
        if self._open.get(name) is entry:  # not withdrawn meanwhile
            del self._open[name]
            self._counts.end(completion, num_cached=entry.num_cached)
            entry.on_done(completion)

    # ---- weights ----

    def load_weights(self, path: Path, *, version: int) -> None:
        """Load weights in place; an adapter is taken off. See `ServedEngine`."""
        self._require_open()
        self._shapes.check_weights(Path(path))
        self._loop.call(self._update(lambda: self._model.load_weights(Path(path)), version))

    def load_adapter(self, folder: Path, *, version: int) -> None:
        """Serve with this adapter in place of any earlier one; see `ServedEngine`."""
        self._require_open()
        if not self._max_adapter_rank:
            raise WeightsError(
                "expected an engine that takes adapters, got one without; open it with `max_adapter_rank`"
            )
        self._shapes.check_adapter(Path(folder), max_rank=self._max_adapter_rank)
        self._loop.call(self._update(lambda: self._model.load_adapter(Path(folder)), version))

    async def _update(self, change: Callable[[], Awaitable[None]], version: int) -> None:
        async with self._drained():
            await self._change(change)
            self._version = version

    async def _change(self, change: Callable[[], Awaitable[None]]) -> None:
        """Whatever fails while weights change ends the engine, unless nothing has changed yet."""
        try:
            await change()
        except WeightsError:
            raise
        except Exception as error:
            self._fail_if_dead()
            self._fail(f"new weights were half loaded: {type(error).__name__}: {error}")
            raise PolicyError(str(self._failure)) from error

    @asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """Hold what comes and let what runs end; afterwards let go what came."""
        self._num_holds += 1
        try:
            async with self._updates:
                while self._num_running:
                    self._idle.clear()
                    await self._idle.wait()
                self._require_alive()
                yield
        finally:
            self._num_holds -= 1
            if not self._num_holds:
                self._released.set()
            while self._waiting and not self._num_holds:
                entry = self._waiting.popleft()
                if self._open.get(entry.plan.request.request_id) is entry:
                    self._launch(entry)

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise PolicyError(self._failure)

    def _require_open(self) -> None:
        if self._is_closed:
            raise PolicyError("expected an open engine, got a closed one")
        self._require_alive()

    # ---- weights from a GPU's memory ----

    def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Meet the sender; see `DeviceWeights`."""
        self._require_open()
        self._loop.call(self._model.init_transfer(init_info))

    def start_weight_update(self) -> None:
        """Let running requests end, keep new ones waiting; see `DeviceWeights`."""
        self._require_open()
        self._loop.call(self._start_transfer())

    def update_weights(self, update_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Receive some weights; see `DeviceWeights`."""
        self._require_open()
        self._loop.call(self._in_transfer(lambda: self._model.receive(update_info)))

    def finish_weight_update(self, *, version: int) -> None:
        """Serve the new weights as `version`; see `DeviceWeights`."""
        self._require_open()
        self._loop.call(self._finish_transfer(version))

    async def _start_transfer(self) -> None:
        if self._transfer is not None:
            raise PolicyError("expected `finish_weight_update` before the next start")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._drained())
            await self._change(self._model.start_transfer)
            self._transfer = stack.pop_all()

    async def _in_transfer(self, act: Callable[[], Awaitable[None]]) -> None:
        if self._transfer is None:
            raise PolicyError("expected `start_weight_update` first")
        try:
            await self._change(act)
        except BaseException:
            await self._leave_transfer()
            raise

    async def _finish_transfer(self, version: int) -> None:
        await self._in_transfer(self._model.finish_transfer)
        self._version = version
        await self._leave_transfer()

    async def _leave_transfer(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            await transfer.aclose()

    # ---- scores ----

    def score(self, rows: Sequence[ScoreRow]) -> list[NDArray[np.float32]]:
        """Log-probabilities of given completions; see `ServedEngine`."""
        self._require_open()
        check_rows(rows, max_length=self._model.max_length)
        if not self._text.takes_images and any(row.images for row in rows):
            raise DataError("expected rows without images at a model that reads text, got images")
        return self._loop.call(self._score(rows))

    async def _score(self, rows: Sequence[ScoreRow]) -> list[NDArray[np.float32]]:
        while self._num_holds:
            self._released.clear()
            await self._released.wait()
        self._require_alive()
        self._num_running += 1
        try:
            return await asyncio.gather(*map(self._score_row, rows))
        finally:
            self._leave()

    async def _score_row(self, row: ScoreRow) -> NDArray[np.float32]:
        takes_adapters = self._max_adapter_rank > 0
        try:
            return await score_row(
                self._model, row, model_path=self._model_path, takes_adapters=takes_adapters
            )
        except PolicyError:
            self._fail_if_dead()
            raise

    # ---- the end ----

    def close(self) -> None:
        """Answer what is open with `FinishReason.CANCELLED` and end vLLM's process. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            entries, self._inbox = self._inbox, []
        for request, on_done in entries:
            on_done(unanswered(request, FinishReason.CANCELLED, self._version))
        try:
            self._loop.call(self._close())
        finally:
            self._loop.close()

    async def _close(self) -> None:
        self._watching.cancel()
        self._withdraw(list(self._open))
        self._model.close()
