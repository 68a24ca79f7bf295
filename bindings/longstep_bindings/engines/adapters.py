"""A LoRA adapter on a transformers model that stays the same object: put on, replaced, taken off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
_OF_NO_EFFECT = frozenset(
    [
        "base_model_name_or_path",
        "inference_mode",
        "revision",
        "task_type",
        "auto_mapping",
        "peft_version",
    ]
)
"""Entries of an adapter's config that change nothing about what it computes."""


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
        self._config: dict[str, Any] = {}

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
        config = {key: value for key, value in adapter.config.items() if key not in _OF_NO_EFFECT}
        with self._kept():
            if self._tuner is None or config != self._config:
                self._take_off()
                self._put_on(_served_config(folder), config)
            told = peft.set_peft_model_state_dict(self._model, tensors, _NAME)
            missing = [name for name in told.missing_keys if ".lora_" in name]
            if missing or told.unexpected_keys:
                raise WeightsError(
                    f"expected the weights of all that `{ADAPTER_CONFIG}` names at `{folder}`, got none for "
                    f"{missing[:3]} and unknown ones for {list(told.unexpected_keys)[:3]}"
                )

    def replace_by(self, load: Callable[[], None]) -> None:
        """Take the adapter off and load something else into the model; when that fails, the adapter is put back."""
        with self._kept():
            self._take_off()
            load()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Put the adapter back that is on now, or none, when what is done here fails."""
        if self._tuner is None:
            try:
                yield
            except BaseException:
                self._take_off()
                raise
            return
        import peft

        lora_config, config = self._tuner.peft_config[_NAME], self._config
        # "auto" would look the base model's vocabulary up, on a hub
        state = peft.get_peft_model_state_dict(
            self._model, adapter_name=_NAME, save_embedding_layers=False
        )
        tensors = {name: tensor.clone() for name, tensor in state.items()}
        try:
            yield
        except BaseException:
            self._take_off()
            self._put_on(lora_config, config)
            peft.set_peft_model_state_dict(self._model, tensors, _NAME)
            raise

    def _put_on(self, lora_config: Any, config: dict[str, Any]) -> None:
        import peft

        self._tuner = peft.LoraModel(self._model, lora_config, _NAME)
        self._model.eval()
        self._config = config

    def _take_off(self) -> None:
        if self._tuner is not None:
            self._tuner.unload()
            self._tuner, self._config = None, {}

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


def _served_config(folder: Path) -> Any:
    import peft

    config = peft.PeftConfig.from_pretrained(str(folder))
    config.inference_mode = True
    return config
