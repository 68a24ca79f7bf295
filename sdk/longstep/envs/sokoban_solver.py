"""A solver for Sokoban rooms: best first over pushes, on the bitboards of `longstep.envs.sokoban_rooms`.

A position is (boxes, region of the player); its estimate is the sum, over the boxes, of the pushes to the nearest
target if nothing else stood in the way. Boxes are never pushed to a cell from which no target can be reached. With
`shortest` the search is A*, whose first solution has the fewest pushes; without, the estimate counts fourfold and
solutions of large rooms are found sooner.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from longstep.envs.sokoban_rooms import SokobanRoom, cells_of, flood

__all__ = ["DIRECTIONS", "solve", "solve_pushes", "walk_and_push"]

DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""(row, column) step of each action."""

Push = tuple[int, int]
"""(cell of the box, cell it is pushed to)."""


def solve(
    room: SokobanRoom, *, shortest: bool = False, max_positions: int = 200_000
) -> list[str] | None:
    """Actions that solve the room from its `boxes` and `player`; None when there are none.

    Args:
        room: The room; `num_pulls` and `pushes` are not looked at.
        shortest: True finds a solution with the fewest pushes.
        max_positions: Positions looked at before giving up, which also gives None.
    """
    pushes = solve_pushes(room, shortest=shortest, max_positions=max_positions)
    return None if pushes is None else walk_and_push(room, pushes)


def solve_pushes(
    room: SokobanRoom, *, shortest: bool = False, max_positions: int = 200_000
) -> list[Push] | None:
    """The pushes of a solution, in order; arguments and None as in `solve`."""
    distances = _push_distances(room)
    if any(box not in distances for box in cells_of(room.boxes)):
        return None
    weight = 1 if shortest else 4
    start = (room.boxes, flood(1 << room.player, room.floor & ~room.boxes, room.width))
    estimate = sum(distances[box] for box in cells_of(room.boxes))
    queue = [(weight * estimate, 0, 0, estimate, start)]
    came_from: dict[tuple[int, int], tuple[tuple[int, int], Push] | None] = {start: None}
    fewest = {start: 0}
    num_queued = 0
    while queue and len(fewest) <= max_positions:
        _, _, num_pushes, estimate, position = heapq.heappop(queue)
        if position[0] == room.targets:
            return _trace(came_from, position)
        if num_pushes > fewest[position]:
            continue
        for push, pushed in _pushes(position, room):
            if push[1] not in distances or fewest.get(pushed, num_pushes + 2) <= num_pushes + 1:
                continue
            fewest[pushed] = num_pushes + 1
            came_from[pushed] = (position, push)
            num_queued += 1
            left = estimate - distances[push[0]] + distances[push[1]]
            rank = num_pushes + 1 + weight * left
            heapq.heappush(queue, (rank, num_queued, num_pushes + 1, left, pushed))
    return None


def walk_and_push(room: SokobanRoom, pushes: list[Push] | tuple[Push, ...]) -> list[str]:
    """The actions that carry out `pushes` from the room's start, walking a shortest way in between."""
    names = {row * room.width + column: name for name, (row, column) in DIRECTIONS.items()}
    boxes, player = room.boxes, room.player
    actions: list[str] = []
    for box, goal in pushes:
        step = goal - box
        actions += _walk(player, box - step, room.floor & ~boxes, names)
        actions.append(names[step])
        boxes ^= 1 << box | 1 << goal
        player = box
    return actions


def _push_distances(room: SokobanRoom) -> dict[int, int]:
    """For each cell, the fewest pushes that bring a lone box to a target; cells without any are left out."""
    distances = dict.fromkeys(cells_of(room.targets), 0)
    queue = list(distances)
    for cell in queue:  # grows while it is walked
        for step in (-room.width, room.width, -1, 1):
            box, player = cell + step, cell + 2 * step
            free = room.floor >> box & 1 and room.floor >> player & 1 if player >= 0 else 0
            if free and box not in distances:
                distances[box] = distances[cell] + 1
                queue.append(box)
    return distances


def _pushes(position: tuple[int, int], room: SokobanRoom) -> Iterator[tuple[Push, tuple[int, int]]]:
    """Each possible push and the position it leads to."""
    boxes, region = position
    free = room.floor & ~boxes
    for box in cells_of(boxes):
        for step in (-room.width, room.width, -1, 1):
            if region >> (box - step) & 1 and free >> (box + step) & 1:
                moved = boxes ^ 1 << box ^ 1 << box + step
                region_after = flood(1 << box, room.floor & ~moved, room.width)
                yield (box, box + step), (moved, region_after)


def _trace(
    came_from: dict[tuple[int, int], tuple[tuple[int, int], Push] | None],
    position: tuple[int, int],
) -> list[Push]:
    pushes: list[Push] = []
    link = came_from[position]
    while link is not None:
        pushes.append(link[1])
        link = came_from[link[0]]
    return pushes[::-1]


def _walk(start: int, goal: int, free: int, names: dict[int, str]) -> list[str]:
    """A shortest walk over `free` from `start` to `goal`, as actions."""
    came_from: dict[int, int] = {goal: goal}
    queue = [goal]
    for cell in queue:  # grows while it is walked
        if cell == start:
            break
        for step in names:
            if free >> (cell + step) & 1 and cell + step not in came_from:
                came_from[cell + step] = cell
                queue.append(cell + step)
    actions: list[str] = []
    while start != goal:
        actions.append(names[came_from[start] - start])
        start = came_from[start]
    return actions
