"""Weights as safetensors files: what a file holds, whether it fits a model, and writing one.

A file is looked through by its header, which says names, number formats and shapes, and is held against the file's size
and against the model before any weight is touched. `write_weights` reserves the space of the whole file first, so a full
file system is an error before anything is written, and what is there under the final name is whole.

Format: 8 bytes of length, that many bytes of JSON `{name: {dtype, shape, data_offsets}}`, the bytes of the tensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longstep.errors import WeightsError, did_you_mean

if TYPE_CHECKING:
    import torch

__all__ = [
    "AdapterFile",
    "Stored",
    "check_shapes",
    "read_adapter",
    "read_headers",
    "tensors_in",
    "weight_files",
    "write_weights",
]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_WRITE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor of a file."""

    file: Path
    dtype: str
    """As safetensors writes it: `F32`, `BF16` ..."""
    shape: tuple[int, ...]

    @property
    def is_floating_point(self) -> bool:
        """Whether its numbers are: all formats that begin with F, and BF16."""
        return self.dtype.startswith(("F", "BF"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """A peft adapter folder, looked through."""

    config: Mapping[str, Any]
    """What `adapter_config.json` says."""
    rank: int
    tensors: Mapping[str, Stored]
    """By name, such as `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`."""


def weight_files(path: Path) -> list[Path]:
    """The safetensors files at `path`, a file or a folder; of a folder with an index those that the index names.

    Raises:
        WeightsError: There is none, or one is missing.
    """
    files = (_indexed(path) or sorted(path.glob("*.safetensors"))) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise WeightsError(
            f"expected a .safetensors file or a folder of them, got `{path}` without one"
        )
    return files


def _indexed(folder: Path) -> list[Path]:
    """What the folder's index names; nothing when it has none. Some hold their weights a second time in other files."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        return sorted(
            folder / name for name in set(json.loads(index.read_text())["weight_map"].values())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"expected an index of safetensors files at `{index}`, but {type(error).__name__}: {error}"
        ) from None


def read_headers(path: Path) -> dict[str, Stored]:
    """The tensors at `path`, a file or a folder, by name.

    Raises:
        WeightsError: A file is missing, cut short or no safetensors file, or a name stands in two of them.
    """
    found: dict[str, Stored] = {}
    for file in weight_files(path):
        header = _read_header(file)
        twice = found.keys() & header.keys()
        if twice:
            raise WeightsError(
                f"expected each tensor once, got `{min(twice)}` twice at `{path}`; one file is left over"
            )
        found.update(header)
    return found


def _read_header(file: Path) -> dict[str, Stored]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes")
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
            end = 0
            stored: dict[str, Stored] = {}
            for name, entry in entries.items():
                start, stop = entry["data_offsets"]
                shape = tuple(int(size) for size in entry["shape"])
                if stop - start != _SIZES[entry["dtype"]] * math.prod(shape):
                    raise ValueError(f"`{name}` has {stop - start} bytes")
                stored[name] = Stored(file=file, dtype=entry["dtype"], shape=shape)
                end = max(end, stop)
            if 8 + length + end != file.stat().st_size:
                raise ValueError(f"it has {file.stat().st_size} bytes, not {8 + length + end}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise WeightsError(
            f"expected a whole safetensors file at `{file}`, but {type(error).__name__}: {error}"
        ) from None
    return stored


def check_shapes(
    stored: Mapping[str, Stored],
    expected: Mapping[str, tuple[int, ...]],
    *,
    may_lack: Iterable[str] = (),
    where: object,
) -> None:
    """Raise unless `stored` holds the tensors that a model has, in their shapes.

    Args:
        stored: What a file holds.
        expected: Shapes by name.
        may_lack: Names that the file may leave out, such as of tied weights.
        where: The file, for the message.

    Raises:
        WeightsError: A name is missing or unknown, or a shape differs.
    """
    for name, tensor in stored.items():
        shape = expected.get(name)
        if shape is None:
            raise WeightsError(
                f"expected weights of this model at `{where}`, got `{name}`, which it does not have; "
                f"{did_you_mean(name, expected)[:300]}"
            )
        if tuple(shape) != tensor.shape:
            raise WeightsError(
                f"expected shape {tuple(shape)} for `{name}`, got {tensor.shape} at `{where}`; "
                "they are weights of another model"
            )
    missing = sorted(expected.keys() - stored.keys() - set(may_lack))
    if missing:
        raise WeightsError(
            f"expected all weights of the model at `{where}`, got none for {len(missing)} of "
            f"{len(expected)}, such as `{missing[0]}`"
        )


def read_adapter(folder: Path, *, max_rank: int | None = None) -> AdapterFile:
    """A peft adapter's config and the headers of its weights, held against each other.

    Args:
        folder: Where `adapter_config.json` and `adapter_model.safetensors` are.
        max_rank: Largest rank that is taken; None takes any.

    Raises:
        WeightsError: A file is missing or damaged, it is no LoRA adapter, the rank is too large, or a tensor has another.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        rank, kind = config["r"], config["peft_type"]
        ranks = {rank, *(config.get("rank_pattern") or {}).values()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"expected a peft adapter with `{ADAPTER_CONFIG}` at `{folder}`, but "
            f"{type(error).__name__}: {error}"
        ) from None
    if kind != "LORA" or not all(isinstance(each, int) and each > 0 for each in ranks):
        raise WeightsError(f"expected a LoRA adapter at `{folder}`, got {kind!r} of rank {rank!r}")
    if max_rank is not None and max(ranks) > max_rank:
        raise WeightsError(
            f"expected an adapter of rank {max_rank} at most, got rank {max(ranks)} at `{folder}`; "
            "open the engine with a larger `max_adapter_rank`"
        )
    tensors = _read_header(folder / ADAPTER_WEIGHTS)
    for name, tensor in tensors.items():
        got = tensor.shape[0] if ".lora_A." in name else tensor.shape[1:2] or (rank,)
        got = got if isinstance(got, int) else got[0]
        if (".lora_A." in name or ".lora_B." in name) and got not in ranks:
            raise WeightsError(
                f"expected rank {rank} as `{ADAPTER_CONFIG}` says, got {got} in `{name}` at `{folder}`"
            )
    return AdapterFile(config=config, rank=rank, tensors=tensors)


def tensors_in(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything at `path`, read as it is asked for; all files are open before the first is given."""
    from safetensors import safe_open

    with ExitStack() as stack:
        readers = [
            stack.enter_context(safe_open(file, framework="pt")) for file in weight_files(path)
        ]
        for reader in readers:
            for name in reader.keys():  # noqa: SIM118  # not a mapping
                yield name, reader.get_tensor(name)


def write_weights(
    path: Path, tensors: Mapping[str, torch.Tensor], *, dtype: str | None = None
) -> int:
    """Write a safetensors file; gives its size in bytes.

    Args:
        path: Where; it is there once it is whole, and not before.
        tensors: By name, on any device; in their order, so that a reader gets layer after layer.
        dtype: Number format to store floating-point tensors in, as `bfloat16`; None keeps each one's own.

    Raises:
        WeightsError: A tensor's format cannot be stored.
        OSError: There is no room (`ENOSPC`), or `path` cannot be written. Nothing is left there.
    """
    import torch

    goal = getattr(torch, dtype) if dtype else None
    formats = {
        name: goal if goal is not None and tensor.is_floating_point() else tensor.dtype
        for name, tensor in tensors.items()
    }
    entries: dict[str, dict[str, Any]] = {}
    position = 0
    # Larger elements first, so that every tensor stands at a multiple of its element size.
    order = sorted(tensors, key=lambda name: -formats[name].itemsize)
    for name in order:
        kind = _DTYPES.get(str(formats[name]).removeprefix("torch."))
        if kind is None:
            raise WeightsError(
                f"expected a number format that safetensors has for `{name}`, got {formats[name]}"
            )
        size = tensors[name].numel() * formats[name].itemsize
        shape = list(tensors[name].shape)
        entries[name] = {
            "dtype": kind,
            "shape": shape,
            "data_offsets": [position, position + size],
        }
        position += size
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    total = 8 + len(header) + position
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb", buffering=0) as stream:
            os.posix_fallocate(stream.fileno(), 0, total)
            _write_all(stream.fileno(), struct.pack("<Q", len(header)) + header)
            for name in order:
                tensor = tensors[name].detach().to(device="cpu", dtype=formats[name]).contiguous()
                _write_all(stream.fileno(), tensor.reshape(-1).view(torch.uint8).numpy().data)
        unfinished.rename(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    return total


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:_WRITE_BYTES]) :]
