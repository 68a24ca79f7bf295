import numpy as np
import pytest

from longstep.envs.draws import Draws
from longstep.envs.sokoban_rooms import SokobanRoom, cells_of, flood, make_room
from longstep.envs.sokoban_solver import solve, solve_pushes, walk_and_push
from longstep.errors import ConfigError, EnvError

SMALL = [((6, 6), 1), ((6, 6), 2), ((7, 7), 2), ((5, 8), 1)]
LARGE = [((8, 8), 3), ((10, 10), 3), ((10, 10), 4)]
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def room_of(seed: int, dim_room: tuple[int, int], num_boxes: int, **arguments) -> SokobanRoom:
    draws = Draws(np.random.Generator(np.random.PCG64(seed)))
    return make_room(draws, dim_room=dim_room, num_boxes=num_boxes, **arguments)


def board(text: str) -> SokobanRoom:
    """A room from a drawing: `#` wall, `.` floor, `O` target, `X` box, `*` box on target, `P` player."""
    rows = text.split()
    width = len(rows[0])
    where = {
        symbol: sum(1 << i for i, cell in enumerate("".join(rows)) if cell in symbol)
        for symbol in (".OX*P", "O*", "X*", "P")
    }
    return SokobanRoom(
        height=len(rows),
        width=width,
        floor=where[".OX*P"],
        targets=where["O*"],
        boxes=where["X*"],
        player=where["P"].bit_length() - 1,
        num_pulls=0,
        pushes=(),
    )


def play(room: SokobanRoom, actions: list[str]) -> tuple[bool, int]:
    """The rules of Sokoban once more, on sets of coordinates: whether the room is solved, and the number of pushes."""
    coordinates = lambda cells: {divmod(cell, room.width) for cell in cells_of(cells)}  # noqa: E731
    floor, targets, boxes = map(coordinates, (room.floor, room.targets, room.boxes))
    row, column = divmod(room.player, room.width)
    num_pushes = 0
    for action in actions:
        down, right = STEPS[action]
        row, column = row + down, column + right
        assert (row, column) in floor
        if (row, column) in boxes:
            beyond = (row + down, column + right)
            assert beyond in floor
            assert beyond not in boxes
            boxes = boxes - {(row, column)} | {beyond}
            num_pushes += 1
    return boxes == targets, num_pushes


def test_flood_reaches_what_is_connected():
    room = board("##### #P#.# #..## ##### #####")
    assert cells_of(flood(1 << 6, room.floor, 5)) == [6, 11, 12]


@pytest.mark.parametrize(("dim_room", "num_boxes"), SMALL + LARGE)
def test_room_is_walled_in_connected_and_has_its_boxes_off_target(dim_room, num_boxes):
    for seed in range(40 if num_boxes < 3 else 8):
        room = room_of(seed, dim_room, num_boxes)
        height, width = dim_room
        for cell in cells_of(room.floor):
            assert 0 < cell // width < height - 1
            assert 0 < cell % width < width - 1
        assert flood(1 << room.player, room.floor, width) == room.floor
        assert room.boxes.bit_count() == room.targets.bit_count() == num_boxes
        assert room.boxes | room.targets | 1 << room.player | room.floor == room.floor
        assert room.boxes & (room.targets | 1 << room.player) == 0


@pytest.mark.parametrize(("dim_room", "num_boxes"), SMALL)
def test_solver_solves_every_small_room_and_the_pulls_are_its_fewest_pushes(dim_room, num_boxes):
    for seed in range(100):
        room = room_of(seed, dim_room, num_boxes)
        actions = solve(room)
        assert actions is not None
        assert play(room, actions)[0]
        shortest = solve(room, shortest=True)
        assert shortest is not None
        assert play(room, shortest) == (True, room.num_pulls)


@pytest.mark.parametrize(("dim_room", "num_boxes"), LARGE)
def test_large_rooms_are_solved_by_the_solver_and_by_the_pulls_undone(dim_room, num_boxes):
    for seed in range(8):
        room = room_of(seed, dim_room, num_boxes)
        assert play(room, walk_and_push(room, room.pushes)) == (True, room.num_pulls)
        actions = solve(room)
        assert actions is not None
        assert play(room, actions)[0]


@pytest.mark.parametrize("max_pulls", [1, 2, 4])
def test_max_pulls_bounds_the_pushes_that_are_needed(max_pulls: int):
    pulls = []
    for seed in range(50):
        room = room_of(seed, (6, 6), 1, max_pulls=max_pulls)
        pushes = solve_pushes(room, shortest=True)
        assert pushes is not None
        assert 1 <= len(pushes) <= max_pulls
        pulls.append(room.num_pulls)
    assert np.mean(pulls) > 0.7 * max_pulls


def test_fewer_pulls_than_boxes_leave_boxes_on_target():
    for seed in range(20):
        room = room_of(seed, (7, 7), 3, max_pulls=1)
        assert (room.boxes & room.targets).bit_count() == 2
        assert solve(room) is not None


def test_the_same_seed_makes_the_same_room_and_seeds_differ():
    rooms = [room_of(seed, (6, 6), 1) for seed in range(100)]
    assert rooms == [room_of(seed, (6, 6), 1) for seed in range(100)]
    assert len({(room.floor, room.targets, room.boxes, room.player) for room in rooms}) > 95


def test_solver_knows_rooms_without_solution():
    assert solve(board("###### #X..O# #P...# ######")) is None  # a box in a corner
    assert solve(board("####### #OX..P# #.###.# #.....# #######")) == ["left"] * 3
    assert solve(board("###### #O#XP# #.#..# ######")) is None  # the target is walled off
    assert solve(board("##### #P*.# #####")) == []


def test_solver_gives_up_after_the_positions_allowed():
    room = room_of(0, (10, 10), 4)
    assert solve(room, shortest=True, max_positions=10) is None


def test_solver_finds_the_shortest_pushes_of_a_known_room():
    room = board("####### #P....# #.XX..# #..OO.# #######")
    pushes = solve_pushes(room, shortest=True)
    assert pushes is not None
    assert len(pushes) == 4


@pytest.mark.parametrize(
    ("dim_room", "num_boxes", "max_pulls", "message"),
    [
        ((3, 6), 1, None, "sides of at least 4"),
        ((6, 6), 0, None, "`num_boxes` of at least 1, got 0"),
        ((6, 6), 5, None, "4 inner cells per box"),
        ((6, 6), 1, 0, "`max_pulls` of at least 1 or None, got 0"),
    ],
)
def test_wrong_arguments_are_named(dim_room, num_boxes, max_pulls, message):
    with pytest.raises(ConfigError, match=message):
        room_of(0, dim_room, num_boxes, max_pulls=max_pulls)


def test_a_room_that_cannot_be_played_is_an_error_not_an_endless_search():
    with pytest.raises(EnvError, match="got none in 64 tries"):
        room_of(0, (4, 4), 1)
