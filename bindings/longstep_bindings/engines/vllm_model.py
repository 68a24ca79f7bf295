"""vLLM's `AsyncLLM` with what an engine needs of it: sampling, weights in place, adapters, weights from GPU memory."""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import PolicyError, WeightsError
from longstep_bindings.engines.vllm_images import image_prompt
from longstep_bindings.engines.vllm_start import open_llm, startup_folder

if TYPE_CHECKING:
    from vllm import RequestOutput

__all__ = ["VLLMModel"]

_FORGET_TRIES, _FORGET_S = 250, 0.02
_GRACE_S = 0.3


class VLLMModel:
    """A running vLLM. Everything here belongs to one event loop."""

    def __init__(self, llm: Any, folder: Path) -> None:
        """Args:
        llm: A started `AsyncLLM`.
        folder: Its private folder, removed at the end.
        """
        self._llm, self._folder = llm, folder
        self._adapter: Any = None
        self._num_adapters = self._num_requests = 0

    @classmethod
    async def open(cls, settings: Mapping[str, Any], *, num_threads: int | None) -> VLLMModel:
        """Start vLLM with `settings` of `engine_settings`.

        Raises:
            ConfigError: It did not start, and why.
        """
        with startup_folder() as folder:
            llm = await open_llm(settings, folder, num_threads=num_threads)
            model = cls(llm, folder)
            try:
                await llm.collective_rpc("longstep_prepare")
            except BaseException:
                model.close()
                raise
        return model

    @property
    def dtype(self) -> str:
        """Number format of the weights."""
        return str(self._llm.model_config.dtype).removeprefix("torch.")

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt with its completion."""
        return int(self._llm.model_config.max_model_len)

    @property
    def is_dead(self) -> bool:
        """True once vLLM's own process has ended or failed."""
        return bool(self._llm.errored)

    async def generate(
        self,
        ids: Sequence[int],
        settings: Mapping[str, Any],
        images: Sequence[NDArray[np.uint8]] = (),
    ) -> RequestOutput:
        """What vLLM makes of a prompt. Cancelling the caller's task aborts it.

        Args:
            ids: Tokens of the prompt, one for each image.
            settings: Arguments of `SamplingParams`.
            images: Images [H, W, 3], in the order of their tokens.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**settings, output_kind=RequestOutputKind.FINAL_ONLY)
        self._num_requests += 1
        name = f"longstep-{self._num_requests}"
        prompt: Any = image_prompt(ids, images) if images else tokens_input(list(ids))
        outputs = self._llm.generate(prompt, params, name, lora_request=self._adapter)
        found: RequestOutput | None = None
        async for output in outputs:
            found = output
        if found is None:
            raise PolicyError("vLLM gave no output")
        return found

    # ---- weights; nothing is being generated meanwhile ----

    async def load_weights(self, path: Path) -> None:
        """Load a safetensors file or a folder of them in place, take off any adapter, forget what was computed."""
        await self._llm.collective_rpc("longstep_load_weights", args=(str(path.resolve()),))
        await self._take_off_adapter()
        await self._forget()

    async def load_adapter(self, folder: Path) -> None:
        """Serve with this adapter in place of any other.

        Raises:
            WeightsError: vLLM refuses it; the adapter before, if any, is still on.
        """
        from vllm.lora.request import LoRARequest

        self._num_adapters += 1
        # vLLM keys what it caches by the name, so each version gets a new one.
        adapter = LoRARequest(
            f"longstep-{self._num_adapters}", self._num_adapters, str(folder.resolve())
        )
        try:
            await self._llm.add_lora(adapter)
        except Exception as error:
            if self.is_dead:
                raise
            raise WeightsError(
                f"expected an adapter that vLLM can serve at `{folder}`, got one that it refuses: {error}"
            ) from error
        await self._take_off_adapter()
        self._adapter = adapter
        await self._forget()

    async def _take_off_adapter(self) -> None:
        if self._adapter is not None:
            await self._llm.remove_lora(self._adapter.lora_int_id)
            self._adapter = None

    async def _forget(self) -> None:
        """Empty the prefix cache; requests that have just ended may hold it for a moment."""
        if self._llm.model_config.is_multimodal_model:
            await self._llm.reset_mm_cache()
            await self._llm.reset_encoder_cache()
        for _ in range(_FORGET_TRIES):
            if await self._llm.reset_prefix_cache():
                return
            await asyncio.sleep(_FORGET_S)
        raise PolicyError("expected vLLM to empty its prefix cache, but it is still in use")

    async def init_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Meet the sender of weights."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=dict(init_info))
        await self._llm.init_weight_transfer_engine(request)

    async def start_transfer(self) -> None:
        """Begin an update."""
        await self._llm.start_weight_update()

    async def receive(self, info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Receive some weights."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        told = dict(info) if isinstance(info, Mapping) else list(info)
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=told))

    async def finish_transfer(self) -> None:
        """End an update."""
        await self._llm.finish_weight_update()
        await self._take_off_adapter()
        await self._forget()

    def close(self) -> None:
        """End vLLM's process and remove its folder."""
        # Taking its modules apart takes the process seconds; it has nothing to save, so it is killed soon.
        log = logging.getLogger("vllm")
        level = log.level
        log.setLevel(logging.CRITICAL)
        try:
            self._llm.shutdown(timeout=_GRACE_S)
        finally:
            log.setLevel(level)
            shutil.rmtree(self._folder, ignore_errors=True)
