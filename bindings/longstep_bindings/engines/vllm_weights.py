"""Whether weights or an adapter fit the model that vLLM serves, told by the headers of the model's own files.

vLLM arranges weights otherwise than their files do, so that its parameters do not say what a file must hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longstep.errors import WeightsError
from longstep_bindings.engines.weight_files import check_shapes, read_adapter, read_headers

__all__ = ["KnownShapes"]

_PREFIX = "base_model.model."
_NO_WEIGHT = ".rotary_emb.inv_freq"
"""Constants that some old checkpoints hold and vLLM passes over."""


class KnownShapes:
    """Names and shapes of a model's weights in its files."""

    def __init__(self, model_path: str | Path) -> None:
        """Args:
        model_path: The model folder, or a name on the Hub; its files are looked at when they are first needed.
        """
        self._model_path = model_path
        self._found: dict[str, tuple[int, ...]] | None = None
        self._optional: frozenset[str] = frozenset()

    def check_weights(self, path: Path) -> None:
        """Raise `WeightsError` unless the file or folder holds this model's weights."""
        stored = read_headers(path)
        expected = self._shapes()
        # Tied weights may stand in one file and not in the other.
        optional = self._optional | {name for name in stored if name.endswith(_NO_WEIGHT)}
        extra = {name: stored[name].shape for name in optional & stored.keys()}
        check_shapes(stored, {**extra, **expected}, may_lack=self._optional, where=path)

    def check_adapter(self, folder: Path, *, max_rank: int) -> None:
        """Raise `WeightsError` unless the folder holds a LoRA adapter of this model, of rank `max_rank` at most."""
        adapter = read_adapter(folder, max_rank=max_rank)
        if not adapter.tensors:
            raise WeightsError(f"expected the weights of an adapter at `{folder}`, got none")
        shapes = self._shapes()
        for name, tensor in adapter.tensors.items():
            module, _, half = name.removeprefix(_PREFIX).rpartition(".lora_")
            shape = shapes.get(f"{module}.weight")
            if shape is None or half not in ("A.weight", "B.weight") or len(shape) != 2:
                raise WeightsError(
                    f"expected LoRA weights of linear layers of this model, got `{name}` at `{folder}`; "
                    "see `target_modules` in `adapter_config.json`"
                )
            axis = 1 if half == "A.weight" else 0
            if len(tensor.shape) != 2 or tensor.shape[axis] != shape[axis]:
                raise WeightsError(
                    f"expected {shape[axis]} at axis {axis} of `{name}`, got shape {tensor.shape} at "
                    f"`{folder}`; it is an adapter of another model"
                )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        if self._found is None:
            folder = _local_folder(self._model_path)
            self._found = {
                name: stored.shape
                for name, stored in read_headers(folder).items()
                if not name.endswith(_NO_WEIGHT)
            }
            self._optional = _tied_names(folder, self._found)
        return self._found


def _local_folder(model_path: str | Path) -> Path:
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(model_path), local_files_only=True))


def _tied_names(folder: Path, shapes: dict[str, Any]) -> frozenset[str]:
    """Names that stand for the embedding's weights a second time."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    heads = {name for name in shapes if name.endswith("lm_head.weight")}
    return frozenset(heads | {"lm_head.weight"}) if tied else frozenset()
