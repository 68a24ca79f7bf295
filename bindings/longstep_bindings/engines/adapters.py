"""A LoRA adapter on a transformers model that stays the same object: put on, replaced, taken off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from longstep.errors import WeightsError, require
from longstep_bindings.engines.weight_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    AdapterFile,
    read_adapter,
)

__all__ = ["AdapterSlot"]

_NAME = "served"
_PREFIX = "base_model.model."
_SHAPE_KEYS = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora")


class AdapterSlot:
    """At most one adapter on a model."""

    def __init__(self, model: Any, *, max_rank: int) -> None:
        """Args:
        model: The model; its linear layers are replaced in place while there is an adapter.
        max_rank: Largest rank that is taken.
        """
        self._model = model
        self._max_rank = max_rank
        self._tuner: Any = None
        self._shape: tuple[Any, ...] = ()

    def load(self, folder: Path) -> None:
        """Put the adapter in `folder` in place of any other.

        Raises:
            WeightsError: It does not fit; the model is as it was.
        """
        peft = require("peft", extra="trainers", needed_by="load_adapter")
        from safetensors.torch import load_file

        adapter = read_adapter(folder, max_rank=self._max_rank)
        self._check(adapter, folder)
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        shape = tuple(repr(adapter.config.get(key)) for key in _SHAPE_KEYS)
        if self._tuner is None or shape != self._shape:
            self._take_off()
            config = peft.PeftConfig.from_pretrained(str(folder))
            config.inference_mode = True
            self._put_on(config)
            self._shape = shape
        told = peft.set_peft_model_state_dict(self._model, tensors, _NAME)
        assert not told.unexpected_keys, told.unexpected_keys

    def replace_by(self, load: Callable[[], None]) -> None:
        """Take the adapter off and load something else into the model; when that fails, the adapter is put back."""
        if self._tuner is None:
            load()
            return
        import peft

        config = self._tuner.peft_config[_NAME]
        tensors = peft.get_peft_model_state_dict(self._model, adapter_name=_NAME)
        self._take_off()
        try:
            load()
        except BaseException:
            self._put_on(config)
            peft.set_peft_model_state_dict(self._model, tensors, _NAME)
            raise

    def _put_on(self, config: Any) -> None:
        import peft

        self._tuner = peft.LoraModel(self._model, config, _NAME)
        self._model.eval()

    def _take_off(self) -> None:
        if self._tuner is not None:
            self._tuner.unload()
            self._tuner = None

    def _check(self, adapter: AdapterFile, folder: Path) -> None:
        """Each tensor must be half of an update of one of the model's linear layers."""
        if not adapter.tensors:
            raise WeightsError(f"expected weights at `{folder / ADAPTER_WEIGHTS}`, got none")
        modules = dict(self._model.named_modules())
        for name, tensor in adapter.tensors.items():
            path, _, half = name.removeprefix(_PREFIX).rpartition(".lora_")
            weight = getattr(modules.get(path), "weight", None)
            if not path or half not in ("A.weight", "B.weight") or weight is None:
                raise WeightsError(
                    f"expected LoRA weights of linear layers of this model, got `{name}` at `{folder}`; "
                    f"see `target_modules` in `{ADAPTER_CONFIG}`"
                )
            axis = 1 if half == "A.weight" else 0
            if len(tensor.shape) != 2 or tensor.shape[axis] != weight.shape[axis]:
                raise WeightsError(
                    f"expected {weight.shape[axis]} at axis {axis} of `{name}`, got shape {tensor.shape} at "
                    f"`{folder}`; it is an adapter of another model"
                )
