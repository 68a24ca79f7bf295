"""Files that arrive in pieces over the wire, at the actor: checked, and handed over only when they are whole.

    begin   {transfer, files}: names and sizes; reserves the space
    chunk   {transfer, name, offset, data, checksum}: `data` uint8[N], `checksum` its xxh3_64; any order, each once
    drop    transfer: forget it

Files stand in shared memory if they fit there with room to spare, else in the temporary folder.
"""

from __future__ import annotations

import os
import re
import tempfile
from bisect import bisect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from longstep.errors import ProtocolError, WeightsError
from longstep_bindings.actors.folders import SHARED_MEMORY, ScratchFolder, has_room, no_room

__all__ = ["Inbox", "Transfer"]

_NAME = re.compile(r"\w[\w.-]{0,200}")


class Transfer:
    """One set of files on its way."""

    def __init__(self, files: Mapping[str, int], root: Path | None = None) -> None:
        """Reserve space for `files`, sizes by name.

        Raises:
            WeightsError: There is no room for them.
        """
        for name, size in files.items():
            if _NAME.fullmatch(name) is None or type(size) is not int or size < 0:
                raise ProtocolError(
                    f"expected a file's name and size, got {name!r:.80} and {size!r:.40}"
                )
        total = sum(files.values())
        fits = SHARED_MEMORY.is_dir() and has_room(SHARED_MEMORY, 2 * total)
        root = root or (SHARED_MEMORY if fits else Path(tempfile.gettempdir()))
        self._sizes = dict(files)
        self._taken: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
        """Where the pieces of each file that came begin and end, in order."""
        self._descriptors: dict[str, int] = {}
        try:
            self._folder = ScratchFolder(root)
        except OSError as error:
            raise no_room(root, total, error) from None
        self.path = self._folder.path
        """Where the files are, or will be."""
        try:
            for name, size in files.items():
                descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._descriptors[name] = descriptor
                if size:
                    os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            self.close()
            raise no_room(root, total, error) from None

    def write(self, name: str, offset: int, data: np.ndarray[Any, Any], checksum: int) -> None:
        """Take one piece.

        Raises:
            WeightsError: It is not what was sent.
        """
        if name not in self._descriptors or data.dtype != np.uint8 or data.ndim != 1:
            raise ProtocolError(f"expected a piece of a file that was announced, got {name!r:.80}")
        if xxh3_64_intdigest(data.data) != checksum:
            raise WeightsError(
                f"expected checksum {checksum:x} of {data.size} bytes at {offset} of `{name}`, got another; "
                "they were changed on the way"
            )
        self._note(name, offset, offset + data.size)
        view = data.data
        while view:
            written = os.pwrite(self._descriptors[name], view, offset)
            view, offset = view[written:], offset + written

    def _note(self, name: str, begin: int, end: int) -> None:
        size, taken = self._sizes[name], self._taken[name]
        if type(begin) is not int or not 0 <= begin < end <= size:
            raise ProtocolError(f"expected a piece within {size} bytes of `{name}`, got {begin!r}")
        place = bisect(taken, (begin, end))
        if (place and taken[place - 1][1] > begin) or (
            place < len(taken) and taken[place][0] < end
        ):
            raise ProtocolError(f"expected each byte of `{name}` once, got {begin} to {end} again")
        taken.insert(place, (begin, end))

    def finish(self) -> None:
        """Close the files.

        Raises:
            WeightsError: Some piece has not come.
        """
        for name, taken in self._taken.items():
            missing = self._sizes[name] - sum(end - begin for begin, end in taken)
            if missing:
                raise WeightsError(f"expected all of `{name}`, got {missing} bytes less")
        self._close_files()

    def _close_files(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def close(self) -> None:
        """Remove the files. Idempotent."""
        self._close_files()
        self._folder.close()


class Inbox:
    """The transfers of one session."""

    def __init__(self) -> None:
        """No transfer yet."""
        self._transfers: dict[str, Transfer] = {}

    def begin(self, order: Mapping[str, Any]) -> None:
        """Expect a transfer; one of the same name is dropped."""
        self.drop(order["transfer"])
        self._transfers[order["transfer"]] = Transfer(order["files"])

    def chunk(self, piece: Mapping[str, Any]) -> None:
        """Take a piece of a transfer."""
        transfer = self._transfers.get(piece["transfer"])
        if transfer is None:
            raise WeightsError(
                "expected a transfer that was begun, got a piece of another; begin it again"
            )
        transfer.write(piece["name"], piece["offset"], piece["data"], piece["checksum"])

    def take(self, name: str) -> Transfer:
        """Hand over a transfer that is whole; the caller closes it.

        Raises:
            WeightsError: It is not whole; it is dropped.
        """
        transfer = self._transfers.pop(name, None)
        if transfer is None:
            raise WeightsError("expected a transfer that was begun, got another; begin it again")
        try:
            transfer.finish()
        except BaseException:
            transfer.close()
            raise
        return transfer

    def drop(self, name: str) -> None:
        """Forget a transfer; one that is not there is passed over."""
        transfer = self._transfers.pop(name, None)
        if transfer is not None:
            transfer.close()

    def close(self) -> None:
        """Forget all."""
        for name in list(self._transfers):
            self.drop(name)
