"""New weights on their way to actors: written once, then told or sent.

A *parcel* is a folder of files with the weights of one version. By the route `shared_memory` it lies in shared memory and
actors of this machine are told its path; by `wire` its files travel in pieces with checksums, on a connection of their
own, so that requests never wait behind them. `auto` takes the first where it works. A parcel stays until the next one has
taken its place, because an actor that is restarted needs it.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from longstep.errors import ConfigError, LongstepError, WeightsError, did_you_mean
from longstep_bindings.actors.folders import ScratchFolder, has_room, no_room
from longstep_bindings.engines.model_weights import checkpoint_tensors
from longstep_bindings.engines.weight_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    read_adapter,
    read_headers,
    weight_files,
    write_weights,
)
from longstep_bindings.pending import Pending
from longstep_bindings.rpc import Client

__all__ = ["ROUTES", "Parcel", "Route", "pack_parcel", "send_files"]

Route = Literal["auto", "shared_memory", "wire", "cuda"]
ROUTES: tuple[Route, ...] = ("auto", "shared_memory", "wire", "cuda")
_BY_FILE = ("auto", "shared_memory", "wire")
Kind = Literal["weights", "adapter"]
_NUMBER_FORMATS = ("float32", "bfloat16", "float16", "float64")
_PIECE_BYTES = 4 << 20
_PIECES_UNDER_WAY = 8
_PIECE_TIMEOUT_S = 120.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Files with the weights of one version."""

    kind: Kind
    version: int
    path: Path
    """A folder, or a single safetensors file."""
    files: tuple[Path, ...]
    route: Route
    """How it was meant to travel when it was packed: `shared_memory` or `wire`."""
    folder: ScratchFolder | None
    """What it lies in; None when the files are the caller's."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Tells this parcel from any other, also one of the same version."""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.stat().st_size for file in self.files)

    def remove(self) -> None:
        """Remove the files, unless they are the caller's. Idempotent."""
        if self.folder is not None:
            self.folder.close()


def pack_parcel(
    source: Any,
    *,
    kind: Kind,
    version: int,
    route: Route,
    shared_memory: Path,
    dtype: str | None = None,
) -> Parcel:
    """The weights of `source` as files.

    Args:
        source: A transformers model (for an adapter one of peft), or the path of a folder or file that holds them.
        kind: Whole weights, or an adapter.
        version: The `policy_version` that they are.
        route: `shared_memory` insists on the shared memory; `auto` takes the temporary folder, with a warning and by
            the wire, when that is full; `wire` takes whichever has room.
        shared_memory: Where the shared memory is.
        dtype: Number format for floating-point weights; None keeps each one's own.

    Raises:
        WeightsError: There is no room, or `source` holds something else.
        ConfigError: `source` is no model or path, or there is no such route or number format.
    """
    if route not in _BY_FILE:
        raise ConfigError(f"expected a route for files, one of {_BY_FILE}, got {route!r}")
    if dtype is not None and dtype not in _NUMBER_FORMATS:
        raise ConfigError(
            f"expected a number format of torch, got `{dtype}`; {did_you_mean(dtype, _NUMBER_FORMATS)}"
        )
    if isinstance(source, str | Path):
        return _of_path(Path(source), kind, version, route)
    save, estimate = _saver(source, kind, dtype)
    shared = shared_memory, "shared_memory" if route == "auto" else route
    spooled = Path(tempfile.gettempdir()), "wire"
    places = {"shared_memory": [shared], "auto": [shared, spooled], "wire": [shared, spooled]}
    failure: WeightsError | None = None
    for root, way in places[route]:
        if failure is not None and route == "auto":
            warnings.warn(f"{failure}; they are sent over the wire", RuntimeWarning, stacklevel=4)
        if not has_room(root, estimate):
            failure = no_room(root, estimate)
            continue
        folder: ScratchFolder | None = None
        try:
            folder = ScratchFolder(root)
            files = save(folder.path)
        except BaseException as error:
            if folder is not None:
                folder.close()
            if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            failure = no_room(root, estimate, error)
            continue
        return Parcel(
            kind=kind,
            version=version,
            path=folder.path,
            files=tuple(files),
            route="wire" if way == "wire" else "shared_memory",
            folder=folder,
        )
    assert failure is not None
    raise failure


def _of_path(path: Path, kind: Kind, version: int, route: Route) -> Parcel:
    """A parcel of files that exist."""
    path = path.absolute()
    if kind == "adapter":
        read_adapter(path)
        files = [path / ADAPTER_CONFIG, path / ADAPTER_WEIGHTS]
    else:
        read_headers(path)
        files = weight_files(path)
    way: Route = "wire" if route == "wire" else "shared_memory"
    return Parcel(kind=kind, version=version, path=path, files=tuple(files), route=way, folder=None)


def _saver(source: Any, kind: Kind, dtype: str | None) -> tuple[Any, int]:
    """What writes the files of `source` into a folder, and about how many bytes they have."""
    if not hasattr(source, "state_dict"):
        raise ConfigError(f"expected a model or the path of one, got {source!r:.100}")
    if kind == "adapter":
        return lambda folder: _save_adapter(source, folder), _adapter_bytes(source)
    tensors, _ = checkpoint_tensors(source)

    def save(folder: Path) -> list[Path]:
        write_weights(folder / "model.safetensors", tensors, dtype=dtype)
        return [folder / "model.safetensors"]

    width = _width(dtype)
    sizes = (
        tensor.numel() * (width if width and tensor.is_floating_point() else tensor.element_size())
        for tensor in tensors.values()
    )
    return save, sum(sizes) + 256 * len(tensors)


def _width(dtype: str | None) -> int | None:
    if not dtype:
        return None
    import torch

    return getattr(torch, dtype).itemsize


def _adapter_bytes(source: Any) -> int:
    if not hasattr(source, "peft_config"):
        raise ConfigError(
            "expected a model with a LoRA adapter (peft), got one without; send its weights by `update_weights`"
        )
    return sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in source.named_parameters()
        if "lora_" in name
    )


def _save_adapter(source: Any, folder: Path) -> list[Path]:
    # "auto" would look the base model's vocabulary up, on a hub.
    source.save_pretrained(folder, save_embedding_layers=False)
    inner = folder / (
        source.active_adapter if isinstance(source.active_adapter, str) else "default"
    )
    files = [folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS]
    if not files[0].is_file() and inner.is_dir():  # peft puts adapters of other names into folders
        for file in inner.iterdir():
            shutil.move(file, folder / file.name)
    return files


def send_files(client: Client, parcel: Parcel, *, check: Callable[[], None]) -> str:
    """Send the files of a parcel over a connection of their own; gives the name of the transfer at the actor.

    Args:
        client: The connection.
        parcel: What to send.
        check: Called while waiting; raises when there is nothing to wait for any more.

    Raises:
        WeightsError: A file changed or went away meanwhile, or there is no room at the actor.
        DeadlineError: A piece was not taken in time.
        SessionLostError: The actor is gone.
    """
    sender = _Sender(client, check)
    name = f"{parcel.token}-{secrets.token_hex(4)}"
    with _told_as_weights(parcel.path), ExitStack() as stack:
        files = {file.name: _mapped(file, stack) for file in parcel.files}
        sender.send(
            "begin", {"transfer": name, "files": {each: data.size for each, data in files.items()}}
        )
        sender.wait_for_all()
        for file_name, data in files.items():
            for offset in range(0, data.size, _PIECE_BYTES):
                piece = {
                    "transfer": name,
                    "name": file_name,
                    "offset": offset,
                    "data": data[offset : offset + _PIECE_BYTES],
                }
                piece["checksum"] = xxh3_64_intdigest(piece["data"].data)
                sender.send("chunk", piece)
        sender.wait_for_all()
    return name


def _mapped(file: Path, stack: ExitStack) -> NDArray[np.uint8]:
    stream = stack.enter_context(file.open("rb"))
    if not os.fstat(stream.fileno()).st_size:
        raise WeightsError(f"expected a file that holds something, got `{file}` empty")
    return np.memmap(stream, np.uint8, mode="r")


@contextmanager
def _told_as_weights(path: Path) -> Iterator[None]:
    """Files that are gone, or cannot be read, are weights that did not arrive."""
    try:
        yield
    except LongstepError:  # some of these are OSErrors too
        raise
    except OSError as error:
        raise WeightsError(
            f"expected weights at `{path}` until the next update, got {error}"
        ) from None


class _Sender:
    """Requests of which a few are under way at a time."""

    def __init__(self, client: Client, check: Callable[[], None]) -> None:
        self._client, self._check = client, check
        self._under_way: deque[Pending] = deque()
        self._arrived = threading.Event()

    def send(self, method: str, value: Any) -> None:
        """Send a request, after waiting for the first of those under way if they are many."""
        if len(self._under_way) >= _PIECES_UNDER_WAY:
            self._wait_for_first()
        pending = self._client.submit(
            method, value, timeout_s=_PIECE_TIMEOUT_S, on_done=lambda _: self._arrived.set()
        )
        self._under_way.append(pending)

    def wait_for_all(self) -> None:
        """Wait for the answers of all."""
        while self._under_way:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        first = self._under_way.popleft()
        while not first.is_done:
            self._arrived.wait(_LOOK_S)
            self._arrived.clear()
            self._check()
        first.result()
