"""A text world of locked rooms: find the key, open the door, room after room.

`num_rooms` rooms follow each other; each is a grid of `size` x `size` cells with one key and one locked door. The door of
a room opens only with the key of that room and leads to the same cell of the next room; opening the last one solves
the task. Cells are written `x y`: east adds 1 to x, north adds 1 to y. Equal states have equal text: an observation
names the room, the agent's cell, the key, the door and what is carried, and never the number of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import gymnasium

from longstep.arguments import check_choice, check_count
from longstep.envs.draws import Draws
from longstep.envs.words import WordSpace, require_word
from longstep.errors import DataError, EnvError
from longstep.spaces import TextSpace

__all__ = ["KeyDoorEnv"]

MOVES = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
ACTIONS = (*MOVES, "take", "open")
MAX_SIZE = MAX_ROOMS = 1000
"""A world with more cells or rooms is a slip of the pen, and would take minutes and gigabytes to make."""


class KeyDoorEnv(gymnasium.Env[str, str]):
    """Keys, doors and rooms that must be used in order; actions are single words.

    >>> env = KeyDoorEnv(size=4, num_rooms=1)
    >>> observation, info = env.reset(seed=3)
    >>> observation
    'room 1 . key 3 0 . door 0 3 . you 1 0 .'
    >>> info["admissible_actions"]
    ['north', 'east', 'west']
    >>> while not env.solved:
    ...     observation, reward, terminated, truncated, info = env.step(env.expert_action())
    >>> observation, reward, info["success"]
    ('the last door is open .', 1.0, True)
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 -- as Gymnasium declares it

    def __init__(
        self,
        *,
        size: int = 4,
        num_rooms: int = 2,
        max_steps: int | None = None,
        reward: Literal["sparse", "dense"] = "sparse",
        style: Literal["terse", "plain"] = "terse",
        render_mode: str | None = None,
    ) -> None:
        """Args:
        size: Cells on each side of a room, from 2 to 1,000.
        num_rooms: Rooms, each with a key and a door; at most 1,000.
        max_steps: Steps after which an episode is truncated. The expert needs at most
            `num_rooms * (4 * size - 3)`; None means `num_rooms * 6 * size`.
        reward: `sparse` gives 1 when the last door opens; `dense` shares that 1 out among all keys and doors.
        style: `terse` for models with a small vocabulary of their own, with absolute cells; `plain` is English that
            says how far away things are.
        render_mode: None or `ansi`, a map of the room.
        """
        check_count("size", size, 2, most=MAX_SIZE)
        check_count("num_rooms", num_rooms, 1, most=MAX_ROOMS)
        check_count("max_steps", max_steps, 1, optional=True)
        check_choice("reward", reward, ("sparse", "dense"))
        check_choice("style", style, ("terse", "plain"))
        check_choice("render_mode", render_mode, (None, "ansi"))
        self.size = size
        self.num_rooms = num_rooms
        self.max_steps = num_rooms * 6 * size if max_steps is None else max_steps
        self.reward = reward
        self.style = style
        self.render_mode = render_mode
        self.action_space = WordSpace(ACTIONS)
        self.observation_space = TextSpace()
        self._rooms: list[tuple[int, int]] = []
        self._room = self._cell = self._num_steps = 0
        self._has_key = self._over = False

    @property
    def solved(self) -> bool:
        """True when the last door is open."""
        return self._room == self.num_rooms

    @property
    def task_description(self) -> str:
        """The rules in two short sentences."""
        where = "in this room" if self.num_rooms == 1 else f"in each of {self.num_rooms} rooms"
        return (
            f"Walk to the key and take it, then walk to the door and open it, {where}. "
            "A cell is x y: east adds 1 to x, north adds 1 to y."
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """A new world; `options` are not used."""
        super().reset(seed=seed, options=options)
        draws = Draws(self.np_random)
        num_cells = self.size * self.size
        self._cell = draws.below(num_cells)
        entry = self._cell
        self._rooms = []
        for _ in range(self.num_rooms):
            key, door = draws.distinct(2, num_cells, but=(entry,))
            self._rooms.append((key, door))
            entry = door
        self._room = self._num_steps = 0
        self._has_key = self._over = False
        return self._observe(), self._info() | {"task_description": self.task_description}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do one action; one that is not possible now costs the step and changes nothing else."""
        word = require_word(action)
        if self._over or not self._rooms:
            raise EnvError(
                f"expected `reset` before `step({word!r})`, got a finished or unstarted episode at KeyDoorEnv"
            )
        self._num_steps += 1
        possible = word in self._admissible()
        if possible:
            self._apply(word)
        self._over = self.solved or self._num_steps >= self.max_steps
        info = self._info() | {"message": "" if possible else f"{word} is not possible here"}
        return self._observe(), self._reward(word, possible), self.solved, self._truncated, info

    def expert_action(self) -> str:
        """The next action of a shortest solution."""
        if self.solved or not self._rooms:
            raise EnvError(
                "expected an unsolved episode, got none at `expert_action`; call `reset`"
            )
        key, door = self._rooms[self._room]
        target = door if self._has_key else key
        (x, y), (target_x, target_y) = self._xy(self._cell), self._xy(target)
        if x != target_x:
            return "east" if x < target_x else "west"
        if y != target_y:
            return "north" if y < target_y else "south"
        return "open" if self._has_key else "take"

    def snapshot(self) -> dict[str, Any]:
        """The state as plain values, for `restore`; the random stream of later resets is not part of it."""
        return {
            "size": self.size,
            "rooms": [list(room) for room in self._rooms],
            "room": self._room,
            "cell": self._cell,
            "has_key": self._has_key,
            "num_steps": self._num_steps,
            "over": self._over,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Go back to a `snapshot`, also one of another instance of the same size; gives observation and info."""
        try:
            self._take_over(snapshot)
        except (LookupError, TypeError, ValueError) as error:
            raise DataError(
                f"expected a `snapshot` of {self.num_rooms} rooms of size {self.size}, got {snapshot!r:.200} at "
                f"`restore` ({error}); make both environments with the same arguments"
            ) from error
        return self._observe(), self._info()

    def _take_over(self, snapshot: Mapping[str, Any]) -> None:
        """Set the state to that of a snapshot; raises, and leaves it as it is, where there is none."""
        rooms = [(int(key), int(door)) for key, door in snapshot["rooms"]]
        room, cell = int(snapshot["room"]), int(snapshot["cell"])
        num_steps, ends = int(snapshot["num_steps"]), (snapshot["has_key"], snapshot["over"])
        num_cells = self.size * self.size
        if snapshot["size"] != self.size or len(rooms) != self.num_rooms:
            raise ValueError(f"{len(rooms)} rooms of size {snapshot['size']}")
        if not 0 <= room <= self.num_rooms:
            raise ValueError(f"room {room}")
        if any(not 0 <= at < num_cells for at in (cell, *(at for pair in rooms for at in pair))):
            raise ValueError("a cell that is not in its room")
        self._rooms, self._room, self._cell = rooms, room, cell
        self._num_steps, (self._has_key, self._over) = num_steps, map(bool, ends)

    def render(self) -> str | None:  # type: ignore[override]
        """A map of the room: `@` the agent, `k` the key, `D` the door, north at the top."""
        if self.render_mode is None:
            return None
        if self.solved or not self._rooms:
            return self._observe() if self._rooms else ""
        key, door = self._rooms[self._room]
        marks = {door: "D"} | ({} if self._has_key else {key: "k"}) | {self._cell: "@"}
        rows = [range(y * self.size, (y + 1) * self.size) for y in reversed(range(self.size))]
        return "\n".join(" ".join(marks.get(cell, ".") for cell in row) for row in rows)

    @property
    def _truncated(self) -> bool:
        return self._over and not self.solved

    def _xy(self, cell: int) -> tuple[int, int]:
        return cell % self.size, cell // self.size

    def _admissible(self) -> list[str]:
        if self.solved:
            return []
        x, y = self._xy(self._cell)
        key, door = self._rooms[self._room]
        edge = self.size - 1
        possible = (
            y < edge,
            y > 0,
            x < edge,
            x > 0,
            not self._has_key and self._cell == key,
            self._has_key and self._cell == door,
        )
        return [word for word, can in zip(ACTIONS, possible, strict=True) if can]

    def _apply(self, word: str) -> None:
        if word == "take":
            self._has_key = True
        elif word == "open":
            self._room += 1
            self._has_key = False
        else:
            step_x, step_y = MOVES[word]
            self._cell += step_x + step_y * self.size

    def _reward(self, word: str, possible: bool) -> float:
        if self.reward == "dense":
            return 0.5 / self.num_rooms if possible and word in ("take", "open") else 0.0
        return 1.0 if self.solved else 0.0

    def _info(self) -> dict[str, Any]:
        return {"admissible_actions": self._admissible(), "success": self.solved}

    def _observe(self) -> str:
        if self.solved:
            return "the last door is open ." if self.style == "terse" else "The last door is open."
        key, door = self._rooms[self._room]
        x, y = self._xy(self._cell)
        if self.style == "plain":
            carried = "the key" if self._has_key else "nothing"
            where_key = "" if self._has_key else f" The key is {self._way_to(key)}."
            return (
                f"Room {self._room + 1}. You are at {x} {y}.{where_key} The door is {self._way_to(door)}. "
                f"You carry {carried}."
            )
        key_x, key_y = self._xy(key)
        door_x, door_y = self._xy(door)
        where_key = "with you" if self._has_key else f"{key_x} {key_y}"
        # What changes most stands last: prompts of one group then share all that comes before, and are computed once.
        return f"room {self._room + 1} . key {where_key} . door {door_x} {door_y} . you {x} {y} ."

    def _way_to(self, cell: int) -> str:
        (x, y), (target_x, target_y) = self._xy(self._cell), self._xy(cell)
        east, north = target_x - x, target_y - y
        parts = [f"{abs(east)} {'east' if east > 0 else 'west'}"] if east else []
        parts += [f"{abs(north)} {'north' if north > 0 else 'south'}"] if north else []
        return ", ".join(parts) or "here"
