"""Sokoban rooms by reverse play: start from the solved room and pull the boxes away, so that every room is solvable.

A room is a set of bitboards: bit `row * width + column` of an integer stands for a cell. The border is wall, so
shifting a bitboard by one cell never wraps around. A position is (boxes, region): the cells that hold a box, and all
cells the player can walk to; where in the region the player stands makes no difference to what can be solved.

The search is breadth first over pulls, as in reverse play of Racaniere et al. 2017 ("Imagination-Augmented Agents",
appendix on Sokoban), with a cap on the positions kept per layer. While no layer exceeds the cap, the layer of a
position is exactly the number of pushes that its shortest solution takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from longstep.arguments import check_count
from longstep.envs.draws import Draws
from longstep.errors import ConfigError, EnvError

__all__ = ["SokobanRoom", "cells_of", "flood", "make_room", "require_possible"]

MAX_TRIES = 64
"""Rooms drawn, at most, to find one that is far enough from solved; the farthest is taken then."""
MAX_LAYER = 32
"""Positions kept per layer of the search: those with fewest boxes on targets, ties drawn at random."""
MAX_SIDE, MAX_BOXES, MAX_PULLS = 40, 10, 1000
"""Beyond these a room takes minutes to make, and soon forever."""
WANTED_PULLS_PER_BOX = 3
"""Pulls per box that make a room far enough from solved."""
MAX_PULLS_PER_BOX = 10
"""Most pulls per box when no limit is asked for."""

Position = tuple[int, int]
"""(boxes, region) as bitboards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SokobanRoom:
    """A room at its start. Bitboards: bit `row * width + column`."""

    height: int
    width: int
    floor: int
    """Cells that are not wall, targets included."""
    targets: int
    boxes: int
    player: int
    """Index of the player's cell."""
    num_pulls: int
    """Pulls that led here from the solved room: the room can be solved with as many pushes or fewer."""
    pushes: tuple[tuple[int, int], ...]
    """A solution: (cell of the box, cell it is pushed to), in order."""


def cells_of(board: int) -> list[int]:
    """Indices of the bits that are set, in rising order."""
    cells: list[int] = []
    while board:
        lowest = board & -board
        cells.append(lowest.bit_length() - 1)
        board ^= lowest
    return cells


def flood(start: int, free: int, width: int) -> int:
    """The cells of `free` that can be reached from those of `start` (part of `free`), as a bitboard."""
    reached = start
    while True:
        grown = (reached | reached << 1 | reached >> 1 | reached << width | reached >> width) & free
        if grown == reached:
            return reached
        reached = grown


def require_possible(dim_room: tuple[int, int], num_boxes: int, max_pulls: int | None) -> None:
    """Raise `ConfigError` when the room is too small for its boxes, or an argument of `make_room` is out of range."""
    sides: Any = dim_room
    if not isinstance(sides, list | tuple) or len(cast("list[Any]", sides)) != 2:
        raise ConfigError(f"expected (height, width) as `dim_room`, got {dim_room!r:.60}")
    height, width = dim_room
    check_count("dim_room[0]", height, None, most=MAX_SIDE)
    check_count("dim_room[1]", width, None, most=MAX_SIDE)
    check_count("num_boxes", num_boxes, 1, most=MAX_BOXES)
    check_count("max_pulls", max_pulls, 1, most=MAX_PULLS, optional=True)
    num_inner = (height - 2) * (width - 2)
    if min(height, width) < 4 or num_inner < 4 * num_boxes:
        raise ConfigError(
            f"expected at least 4 inner cells per box and sides of at least 4, got {num_boxes} boxes in "
            f"{height} x {width} at `dim_room`; make the room larger or take fewer boxes"
        )


def make_room(
    draws: Draws,
    *,
    dim_room: tuple[int, int],
    num_boxes: int,
    max_pulls: int | None = None,
) -> SokobanRoom:
    """A solvable room; the same draws give the same room.

    Args:
        draws: Where randomness comes from.
        dim_room: (height, width) with the border.
        num_boxes: Boxes, and as many targets.
        max_pulls: Most pulls away from the solved room; None looks for a far one. Few pulls make an easy room; with
            fewer pulls than boxes some boxes start on their targets.

    Raises:
        ConfigError: The room is too small for its boxes, or an argument is out of range.
        EnvError: No room was found in 64 tries.
    """
    require_possible(dim_room, num_boxes, max_pulls)
    height, width = dim_room
    num_inner = (height - 2) * (width - 2)
    limit = MAX_PULLS_PER_BOX * num_boxes if max_pulls is None else max_pulls
    wanted = min(limit, WANTED_PULLS_PER_BOX * num_boxes)
    farthest: SokobanRoom | None = None
    for _ in range(MAX_TRIES):
        floor = _draw_floor(draws, height, width, min_floor=num_inner // 2)
        room = _play_back(draws, floor, dim_room, num_boxes, limit)
        if room is not None and (farthest is None or room.num_pulls > farthest.num_pulls):
            farthest = room
            if room.num_pulls >= wanted:
                break
    if farthest is not None:
        return farthest
    raise EnvError(
        f"expected a room of {height} x {width} with {num_boxes} boxes, got none in {MAX_TRIES} tries; make the "
        "room larger or take fewer boxes"
    )


def _draw_floor(draws: Draws, height: int, width: int, *, min_floor: int) -> int:
    """Inner cells with walls put at random ones of them, as long as the floor stays in one piece."""
    inner = [row * width + column for row in range(1, height - 1) for column in range(1, width - 1)]
    floor = sum(1 << cell for cell in inner)
    num_walls = draws.below(len(inner) - min_floor + 1)
    draws.shuffle(inner)
    for cell in inner:
        if num_walls == 0:
            break
        rest = floor & ~(1 << cell)
        if flood(rest & -rest, rest, width) == rest:
            floor = rest
            num_walls -= 1
    return floor


def _play_back(
    draws: Draws, floor: int, dim_room: tuple[int, int], num_boxes: int, limit: int
) -> SokobanRoom | None:
    """A start some pulls away from a solved room on this floor; None when its boxes cannot all be moved off."""
    height, width = dim_room
    cells = cells_of(floor)
    draws.shuffle(cells)
    targets = sum(1 << cell for cell in cells[:num_boxes])
    came_from, layers = _search(draws, floor, targets, width, limit)
    position, num_pulls = _farthest(draws, layers, targets)
    if (position[0] & targets).bit_count() > max(0, num_boxes - limit):
        return None
    region = cells_of(position[1])
    return SokobanRoom(
        height=height,
        width=width,
        floor=floor,
        targets=targets,
        boxes=position[0],
        player=region[draws.below(len(region))],
        num_pulls=num_pulls,
        pushes=_solution(came_from, position),
    )


def _search(
    draws: Draws, floor: int, targets: int, width: int, limit: int
) -> tuple[dict[Position, Position | None], list[list[Position]]]:
    """Positions by number of pulls from the solved room, and the position each was first reached from."""
    layer = [(targets, region) for region in _regions(floor & ~targets, width)]
    came_from: dict[Position, Position | None] = dict.fromkeys(layer)
    layers = [layer]
    while len(layers) <= limit:
        found: list[Position] = []
        for position in layer:
            for pulled in _pulls(position, floor, width):
                if pulled not in came_from:
                    came_from[pulled] = position
                    found.append(pulled)
        if not found:
            break
        if len(found) > MAX_LAYER:
            draws.shuffle(found)
            found.sort(key=lambda position: (position[0] & targets).bit_count())
            del found[MAX_LAYER:]
        layers.append(found)
        layer = found
    return came_from, layers


def _regions(free: int, width: int) -> list[int]:
    """The connected parts of `free`."""
    regions: list[int] = []
    while free:
        region = flood(free & -free, free, width)
        regions.append(region)
        free &= ~region
    return regions


def _pulls(position: Position, floor: int, width: int) -> Iterator[Position]:
    """Positions one pull away: the player stands beside a box and walks off from it, the box follows."""
    boxes, region = position
    free = floor & ~boxes
    for shift in (1, width):
        forward = boxes & (region >> shift) & (free >> 2 * shift)
        while forward:
            box = forward & -forward
            forward ^= box
            moved = boxes ^ box ^ (box << shift)
            yield moved, flood(box << 2 * shift, floor & ~moved, width)
        backward = boxes & (region << shift) & (free << 2 * shift)
        while backward:
            box = backward & -backward
            backward ^= box
            moved = boxes ^ box ^ (box >> shift)
            yield moved, flood(box >> 2 * shift, floor & ~moved, width)


def _farthest(draws: Draws, layers: list[list[Position]], targets: int) -> tuple[Position, int]:
    """A position with the fewest boxes on targets, of those the most pulls away, and its number of pulls."""
    _, negative_pulls = min(
        (min((boxes & targets).bit_count() for boxes, _ in layer), -num_pulls)
        for num_pulls, layer in enumerate(layers)
    )
    layer = layers[-negative_pulls]
    fewest = min((boxes & targets).bit_count() for boxes, _ in layer)
    best = [position for position in layer if (position[0] & targets).bit_count() == fewest]
    return best[draws.below(len(best))], -negative_pulls


def _solution(
    came_from: dict[Position, Position | None], position: Position
) -> tuple[tuple[int, int], ...]:
    """The pulls that led to `position`, undone in reverse order."""
    pushes: list[tuple[int, int]] = []
    before = came_from[position]
    while before is not None:
        box = position[0] & ~before[0]
        goal = before[0] & ~position[0]
        pushes.append((box.bit_length() - 1, goal.bit_length() - 1))
        position, before = before, came_from[before]
    return tuple(pushes)
