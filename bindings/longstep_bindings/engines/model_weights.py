"""The weights of a transformers model under the names of its checkpoint, to be sent or to be overwritten in place.

In memory a model may name and arrange its weights otherwise than its file does: vision-language models since
transformers 5, mixtures of experts. transformers knows how to go back when it saves; where the tensors that it gives then
are views of the weights in memory, as when only names differ, writing into them loads the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longstep.errors import ConfigError, PolicyError, WeightsError
from longstep_bindings.engines.weight_files import check_shapes, read_headers, tensors_in

if TYPE_CHECKING:
    import torch

__all__ = ["checkpoint_tensors", "load_in_place"]


def checkpoint_tensors(model: Any) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """The model's tensors by their names in a checkpoint, and further names for some of them (tied weights).

    Raises:
        ConfigError: The model has an adapter, whose weights are not those of a checkpoint.
    """
    model = _bare(model)
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "expected a model without an adapter, got one with; send the adapter (`update_adapter`), or merge it first"
        )
    named = _as_saved(model, {name: _whole(tensor) for name, tensor in model.state_dict().items()})
    first: dict[tuple[Any, ...], str] = {}
    tied = getattr(model, "_tied_weights_keys", None) or ()
    # Of tied weights the one that is saved comes first.
    for name in sorted(named, key=lambda name: name in tied):
        tensor = named[name]
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        first.setdefault(place if tensor.numel() else (name,), name)
    kept = set(first.values())
    tensors = {name: tensor for name, tensor in named.items() if name in kept}
    return tensors, frozenset(named.keys() - kept)


def _bare(model: Any) -> Any:
    """The model inside what `torch.compile` and data parallelism put around it."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if inner is not None and hasattr(inner, "state_dict"):
            return _bare(inner)
    return model


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def _as_saved(model: Any, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not hasattr(model, "config"):  # it is not of transformers
        return named
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 keeps the names of the file
        return named
    return revert_weight_conversion(model, named)


def load_in_place(model: Any, path: Path) -> None:
    """Overwrite the model's weights with those at `path`, a safetensors file or a folder of them.

    Where the model does not hold its weights as its checkpoint does, they are loaded beside it first, as transformers
    does it, which takes their memory once more.

    Raises:
        WeightsError: A file is damaged, or a name or shape is not the model's; nothing has been changed.
        PolicyError: Reading failed on the way; some weights are new and some are old.
    """
    import torch

    tensors, others = checkpoint_tensors(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    stored = read_headers(path)
    known = {name: stored[name].shape for name in others & stored.keys()}
    check_shapes(stored, {**shapes, **known}, may_lack=others, where=path)
    for name, tensor in tensors.items():
        if name in stored and tensor.is_floating_point() and not stored[name].is_floating_point:
            raise WeightsError(
                f"expected floating-point numbers for `{name}`, got {stored[name].dtype} at `{path}`"
            )
    goals = tensors
    news = tensors_in(path)
    if not _are_views(model, tensors):
        goals, news = model.state_dict(), _converted(model, path)
    has_begun = False
    try:
        with torch.no_grad():
            for name, tensor in news:
                if name in goals:
                    has_begun = True
                    goals[name].copy_(tensor)
    except BaseException as error:
        if has_begun:
            raise PolicyError(
                f"expected to read the weights at `{path}` to their end, got {error!r}; the model holds some new ones "
                "and some old ones, and is of no use"
            ) from error
        raise


def _are_views(model: Any, tensors: Mapping[str, torch.Tensor]) -> bool:
    """True when writing into the tensors writes into the model."""
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    return all(
        tensor.untyped_storage().data_ptr() in own for tensor in tensors.values() if tensor.numel()
    )


def _converted(model: Any, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """What is at `path` as the model holds it in memory."""
    fresh, report = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=dict(tensors_in(path)),
        dtype=model.dtype,
        output_loading_info=True,
    )
    if report["missing_keys"] or report["unexpected_keys"]:
        raise WeightsError(
            f"expected weights that {type(model).__name__} can be loaded from at `{path}`, got "
            f"{sorted(report['missing_keys'])[:3]} missing and {sorted(report['unexpected_keys'])[:3]} unknown"
        )
    yield from fresh.state_dict().items()
