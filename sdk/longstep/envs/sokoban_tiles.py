"""Pictures of Sokoban cells, drawn here from shapes; one colour per cell for the tiny ones.

Index of a tile: 0 wall, 1 floor, 2 target, 3 box on target, 4 box, 5 player, 6 player on target.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["TILE_SIZE", "TINY_TILES", "draw_tiles"]

TILE_SIZE = 16
"""Pixels on each side of a tile."""

WALL, FLOOR, TARGET, BOX_ON, BOX, PLAYER, PLAYER_ON = (
    (74, 68, 88),
    (238, 232, 216),
    (214, 92, 80),
    (96, 168, 88),
    (184, 128, 64),
    (52, 112, 188),
    (132, 84, 176),
)

TINY_TILES: NDArray[np.uint8] = np.array(
    [WALL, FLOOR, TARGET, BOX_ON, BOX, PLAYER, PLAYER_ON], dtype=np.uint8
).reshape(7, 1, 1, 3)
"""uint8[7, 1, 1, 3]: one pixel per cell."""


def draw_tiles() -> NDArray[np.uint8]:
    """uint8[7, 16, 16, 3]: a picture of each kind of cell."""
    tiles = np.empty((7, TILE_SIZE, TILE_SIZE, 3), dtype=np.uint8)
    tiles[:] = FLOOR
    row, column = np.mgrid[0:TILE_SIZE, 0:TILE_SIZE] - (TILE_SIZE - 1) / 2
    radius, reach = np.hypot(row, column), np.maximum(abs(row), abs(column))
    joints = (np.arange(TILE_SIZE)[:, None] % 4 == 3) | (
        (np.arange(TILE_SIZE)[None, :] + 4 * (np.arange(TILE_SIZE)[:, None] // 4 % 2)) % 8 == 7
    )
    tiles[0] = np.where(joints[..., None], np.uint8(110), np.array(WALL, dtype=np.uint8))
    for tile in (2, 6):
        tiles[tile][(abs(row) - abs(column) < 1.1) & (abs(column) - abs(row) < 1.1)] = TARGET
    for tile, colour in ((3, BOX_ON), (4, BOX)):
        tiles[tile][reach < 7] = tuple(part // 2 for part in colour)
        tiles[tile][reach < 6] = colour
        tiles[tile][(reach < 6) & (abs(row - column) < 1)] = tuple(part // 2 for part in colour)
    for tile, colour in ((5, PLAYER), (6, PLAYER_ON)):
        tiles[tile][radius < 6] = colour
        tiles[tile][(radius < 6) & (abs(abs(column) - 2) < 1) & (abs(row + 1.5) < 1.1)] = 255
    return tiles
