"""Images once per actor: a digest stands for a picture that the actor has, and the actor keeps the latest ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

__all__ = ["ImageShelf", "digest_of"]


def digest_of(image: NDArray[np.uint8]) -> bytes:
    """16 bytes that tell an image from others: of its shape and its pixels."""
    digest = xxh3_128(repr(image.shape).encode())
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()


class ImageShelf(Mapping[bytes, NDArray[np.uint8]]):
    """The images met latest, by digest, as many as fit."""

    def __init__(self, max_bytes: int) -> None:
        """Args:
        max_bytes: Bytes of pixels that are kept.
        """
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[bytes, NDArray[np.uint8]] = OrderedDict()

    def put(self, digest: bytes, image: NDArray[np.uint8]) -> None:
        """Keep an image; those met longest ago make room for it, and one that is larger than the shelf is not kept."""
        if digest in self._images or image.nbytes > self._max_bytes:
            return
        self._images[digest] = image
        self._num_bytes += image.nbytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._images.popitem(last=False)
            self._num_bytes -= oldest.nbytes

    def __getitem__(self, digest: bytes) -> NDArray[np.uint8]:
        """The image; it counts as met now."""
        self._images.move_to_end(digest)
        return self._images[digest]

    def __iter__(self) -> Iterator[bytes]:
        """Digests, those met longest ago first."""
        return iter(self._images)

    def __len__(self) -> int:
        """Number of images."""
        return len(self._images)
