"""Built-in environments: steps per second, and milliseconds per Sokoban room. Run: `pytest benchmarks/bench_envs.py`.

Baselines, in the same run: for steps, Gymnasium's FrozenLake, whose observation is one integer, and Sokoban as it is
published elsewhere, on arrays, with its state told as text; for rooms, the published way of reverse play: depth first, on
arrays, over every walk and pull, up to 300,000 states and 300 moves deep. It is given floor and targets for nothing.
pytest-benchmark's table has the ratios in brackets; lower is better.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import gymnasium
import numpy as np
import pytest

from longstep.envs import KeyDoorEnv, SokobanEnv
from longstep.envs.draws import Draws
from longstep.envs.sokoban_rooms import SokobanRoom, cells_of, make_room

NUM_STEPS = 2000
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))


class ArraySokoban:
    """Sokoban's step on arrays: codes 0 wall, 1 floor, 2 target, 3 box on target, 4 box, 5 player."""

    def __init__(self, room: SokobanRoom) -> None:
        self.fixed = np.zeros((room.height, room.width), dtype=np.uint8)
        for cells, code in ((room.floor, 1), (room.targets, 2)):
            self.fixed.flat[cells_of(cells)] = code
        self.state = self.fixed.copy()
        for cell in cells_of(room.boxes):
            self.state.flat[cell] = 3 if self.fixed.flat[cell] == 2 else 4
        self.state.flat[room.player] = 5
        self.player = np.array(divmod(room.player, room.width))

    def step(self, move: tuple[int, int]) -> tuple[str, float]:
        ahead, beyond = self.player + move, self.player + 2 * np.array(move)
        on_target = np.sum(self.state == 3)
        code = self.state[tuple(ahead)]
        if code in (3, 4) and self.state[tuple(beyond)] in (1, 2):
            self.state[tuple(beyond)] = 3 if self.fixed[tuple(beyond)] == 2 else 4
            code = self.state[tuple(ahead)] = self.fixed[tuple(ahead)]
        if code in (1, 2):
            self.state[tuple(self.player)] = self.fixed[tuple(self.player)]
            self.state[tuple(ahead)] = 5
            self.player = ahead
        text = "\n".join("".join("#_O√XP"[code] for code in row) for row in self.state)
        return text, -0.1 + float(np.sum(self.state == 3)) - float(on_target)


def play_back_depth_first(room: SokobanRoom) -> int:
    """Score of the farthest room found: displacement of the boxes times changes from one box to another."""
    floor = set(cells_of(room.floor))
    start = np.zeros(room.height * room.width, dtype=np.uint8)
    start[list(floor)] = 1
    start[cells_of(room.targets)] = 4
    explored: set[bytes] = set()
    best = 0

    def visit(
        state: np.ndarray,
        player: int,
        homes: dict[int, int],
        swaps: int,
        last: int | None,
        left: int,
    ) -> None:
        nonlocal best
        key = state.tobytes() + bytes([player])
        if left == 0 or len(explored) >= 300_000 or key in explored:
            return
        explored.add(key)
        if all(state[home] != 4 for home in homes.values()):
            apart = sum(
                sum(
                    abs(a - b)
                    for a, b in zip(divmod(box, room.width), divmod(home, room.width), strict=True)
                )
                for box, home in homes.items()
            )
            best = max(best, apart * swaps)
        for (row, column), pull in itertools.product(MOVES, (True, False)):
            step = row * room.width + column
            after, behind = player + step, player - step
            if state[after] != 1:
                continue
            if pull and state[behind] == 4:
                pulled, moved = state.copy(), dict(homes)
                pulled[player], pulled[behind] = 4, 1
                home = moved[player] = moved.pop(behind)
                visit(pulled, after, moved, swaps + (home != last), home, left - 1)
            elif not pull:
                visit(state.copy(), after, dict(homes), swaps, last, left - 1)

    visit(start, room.player, {cell: cell for cell in cells_of(room.targets)}, 0, None, 300)
    return best


def room_of(seed: int, dim_room: tuple[int, int], num_boxes: int) -> SokobanRoom:
    draws = Draws(np.random.Generator(np.random.PCG64(seed)))
    return make_room(draws, dim_room=dim_room, num_boxes=num_boxes)


def run_steps(benchmark, step: Callable[[int], object], name: str) -> None:
    def play() -> None:
        for number in range(NUM_STEPS):
            step(number)

    benchmark.extra_info["unit"] = f"{NUM_STEPS} steps"
    benchmark.group = f"{NUM_STEPS} {name}"
    benchmark.pedantic(play, rounds=10, warmup_rounds=1)
    benchmark.extra_info["steps_per_s"] = round(NUM_STEPS / benchmark.stats.stats.median)


def endless(env: gymnasium.Env, actions: list) -> Callable[[int], object]:
    """Steps of an environment that begins again where it began when an episode is over."""
    env.reset(seed=1)
    start = env.snapshot() if hasattr(env, "snapshot") else None  # type: ignore[attr-defined]

    def step(number: int) -> object:
        result = env.step(actions[number % len(actions)])
        if result[2] or result[3]:
            _ = env.reset(seed=1) if start is None else env.restore(start)  # type: ignore[attr-defined]
        return result

    return step


@pytest.mark.parametrize(
    "name", ["frozenlake baseline", "array sokoban baseline", "sokoban", "keydoor"]
)
def test_text_steps(benchmark, name: str) -> None:
    rng = random.Random(0)
    words = ["up", "down", "left", "right"]
    if name == "frozenlake baseline":
        env = gymnasium.make("FrozenLake-v1").unwrapped
        step = endless(env, [rng.randrange(4) for _ in range(997)])
    elif name == "array sokoban baseline":
        plain = ArraySokoban(room_of(1, (6, 6), 1))
        moves = [rng.choice(MOVES) for _ in range(997)]
        step = lambda number: plain.step(moves[number % 997])  # noqa: E731
    elif name == "sokoban":
        step = endless(SokobanEnv(), [rng.choice(words) for _ in range(997)])
    else:
        words = ["north", "south", "east", "west", "take", "open"]
        step = endless(KeyDoorEnv(), [rng.choice(words) for _ in range(997)])
    run_steps(benchmark, step, "text steps")


@pytest.mark.parametrize("observation", ["text", "tiny_rgb", "rgb"])
def test_sokoban_observations(benchmark, observation: str) -> None:
    rng = random.Random(0)
    words = [rng.choice(["up", "down", "left", "right"]) for _ in range(997)]
    run_steps(benchmark, endless(SokobanEnv(observation=observation), words), "sokoban steps")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["depth-first baseline", "longstep"])
@pytest.mark.parametrize(("dim_room", "num_boxes"), [((6, 6), 1), ((7, 7), 2), ((10, 10), 4)])
def test_rooms(benchmark, dim_room: tuple[int, int], num_boxes: int, name: str) -> None:
    seeds = range(1 if num_boxes == 4 else 3)
    rooms = [room_of(seed, dim_room, num_boxes) for seed in seeds]

    def make_all() -> None:
        for seed, room in zip(seeds, rooms, strict=True):
            if name == "longstep":
                room_of(seed, dim_room, num_boxes)
            else:
                play_back_depth_first(room)

    benchmark.extra_info["unit"] = f"{len(seeds)} rooms"
    benchmark.group = f"{len(seeds)} rooms of {dim_room[0]}x{dim_room[1]} with {num_boxes} boxes"
    benchmark.pedantic(make_all, rounds=1 if num_boxes == 4 else 5)
