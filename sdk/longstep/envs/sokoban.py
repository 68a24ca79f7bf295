"""Sokoban: push every box onto a target; rooms are made by reverse play and can always be solved.

Rules and rewards are those of gym-sokoban: -0.1 a step, +1 for a box pushed onto a target, -1 for one pushed off, +10
when all are on. An action moves the player, and pushes a box that stands in the way when the cell behind it is free;
otherwise the step changes nothing. Cells have the codes 0 wall, 1 floor, 2 target, 3 box on target, 4 box, 5 player,
6 player on target, and the symbols `# _ O √ X P S`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
from numpy.typing import NDArray

from longstep.arguments import check_choice, check_count, check_text
from longstep.envs.draws import Draws
from longstep.envs.sokoban_rooms import SokobanRoom, cells_of, make_room, require_possible
from longstep.envs.sokoban_solver import DIRECTIONS, solve
from longstep.envs.sokoban_tiles import TINY_TILES, draw_tiles
from longstep.envs.words import WordSpace, require_word
from longstep.errors import ConfigError, DataError, EnvError
from longstep.spaces import TextSpace

__all__ = ["SokobanEnv"]

ACTIONS = tuple(DIRECTIONS)
WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
SYMBOLS = "#_O√XPS"
"""One character per code; `"#_O*XPS"` is plain ASCII, `"# .*$@+"` is the notation of Sokoban collections."""
MEANINGS = (
    "wall",
    "floor",
    "target",
    "box on target",
    "box",
    "you",
    "you on target",
)


class SokobanEnv(gymnasium.Env[Any, str]):
    """Sokoban as text or as images; actions are `up`, `down`, `left`, `right`.

    >>> env = SokobanEnv(dim_room=(6, 6), num_boxes=1, symbols="#_O*XPS")
    >>> observation, info = env.reset(seed=1)
    >>> print(observation)
    ######
    #PO__#
    #____#
    #_#X_#
    #____#
    ######
    >>> while not env.solved:
    ...     observation, reward, terminated, truncated, info = env.step(env.expert_action())
    >>> round(reward, 1), terminated, info["success"]
    (10.9, True, True)
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012 -- as Gymnasium declares it

    def __init__(
        self,
        *,
        dim_room: tuple[int, int] = (6, 6),
        num_boxes: int = 1,
        max_pulls: int | None = None,
        max_steps: int = 120,
        observation: Literal["text", "words", "rgb", "tiny_rgb"] = "text",
        symbols: str = SYMBOLS,
        separator: str = "",
        admissible: Literal["all", "changing"] = "changing",
        render_mode: str | None = None,
    ) -> None:
        """Args:
        dim_room: (height, width) of the room with its border of wall, 4 to 40 cells each.
        num_boxes: Boxes, and as many targets; at most 10.
        max_pulls: Most pulls of reverse play, and so an upper bound of the pushes a room needs; small numbers make
            easy rooms for training. At most 1,000; None makes rooms that are far from solved.
        max_steps: Steps after which an episode is truncated.
        observation: `text` (rows of symbols), `words` (cells named by row and column, what never moves first: for
            models that read words better than drawings), `rgb` (uint8 [16 * height, 16 * width, 3]) or `tiny_rgb` (one pixel
            per cell).
        symbols: Seven different characters for wall, floor, target, box on target, box, player, player on target.
        separator: What stands between the symbols of a row, such as a space for tokenizers that merge symbols.
        admissible: What `info["admissible_actions"]` lists: `all` four, or those that are `changing` the state.
        render_mode: None, `ansi` or `rgb_array`.
        """
        check_choice("observation", observation, ("text", "words", "rgb", "tiny_rgb"))
        check_choice("admissible", admissible, ("all", "changing"))
        check_choice("render_mode", render_mode, (None, "ansi", "rgb_array"))
        check_text("symbols", symbols)
        check_text("separator", separator)
        check_count("max_steps", max_steps, 1)
        if len(symbols) != 7 or len(set(symbols)) != 7 or "\n" in symbols:
            raise ConfigError(f"expected seven different characters, got {symbols!r} at `symbols`")
        require_possible(dim_room, num_boxes, max_pulls)
        height, width = dim_room
        self.dim_room = (int(height), int(width))
        self.num_boxes = num_boxes
        self.max_pulls = max_pulls
        self.max_steps = max_steps
        self.observation = observation
        self.admissible = admissible
        self.render_mode = render_mode
        self._symbols = symbols
        self._suffixes = ([separator] * (width - 1) + ["\n"]) * height
        self._suffixes[-1] = ""
        self._steps = {name: row * width + column for name, (row, column) in DIRECTIONS.items()}
        self._tiles = TINY_TILES if observation == "tiny_rgb" else draw_tiles()
        self.action_space = WordSpace(ACTIONS)
        self.observation_space: gymnasium.Space[Any] = TextSpace()
        if observation not in ("text", "words"):
            side = self._tiles.shape[1]
            shape = (height * side, width * side, 3)
            self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self._cells: list[int] = []
        self._text: list[str] = []
        self._fixed_words = ""
        self._player = self._num_steps = self._num_on_target = 0
        self._over = False
        self._plan: list[str] = []

    @property
    def solved(self) -> bool:
        """True when every box stands on a target."""
        return bool(self._cells) and self._num_on_target == self.num_boxes

    @property
    def task_description(self) -> str:
        """The goal in one sentence; for text, the meaning of the symbols in another."""
        goal = "Push every box (not pull) onto a target."
        if self.observation == "words":
            return (
                f"{goal} A cell is row column: down adds 1 to the row, right adds 1 to the column."
            )
        if self.observation != "text":
            return goal
        pairs = zip(self._symbols, MEANINGS, strict=True)
        return f"{goal} Symbols: {', '.join(f'{symbol} {meaning}' for symbol, meaning in pairs)}."

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """A new room; `options` are not used."""
        super().reset(seed=seed, options=options)
        room = make_room(
            Draws(self.np_random),
            dim_room=self.dim_room,
            num_boxes=self.num_boxes,
            max_pulls=self.max_pulls,
        )
        cells = [FLOOR if room.floor >> cell & 1 else WALL for cell in range(len(self._suffixes))]
        for cell in cells_of(room.targets):
            cells[cell] = TARGET
        for cell in cells_of(room.boxes):
            cells[cell] = BOX if cells[cell] == FLOOR else BOX_ON_TARGET
        self._place(cells, room.player, num_steps=0)
        return self._observe(), self._info() | {"task_description": self.task_description}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move or push; what is not possible, and an unknown word, costs the step and changes nothing."""
        word = require_word(action)
        if self._over or not self._cells:
            raise EnvError(
                f"expected `reset` before `step({word!r})`, got a finished or unstarted episode at SokobanEnv"
            )
        self._num_steps += 1
        before = self._num_on_target
        step = self._steps.get(word, 0)
        if step and self._can_move(step):
            self._move(step)
        solved = self._num_on_target == self.num_boxes
        truncated = not solved and self._num_steps >= self.max_steps
        self._over = solved or truncated
        reward = -0.1 + (self._num_on_target - before) + (10.0 if solved else 0.0)
        return self._observe(), reward, solved, truncated, self._info()

    def room(self) -> SokobanRoom:
        """The present state as a room, for `solve`; without the pulls that led to it."""
        boards = [0] * 7
        for cell, code in enumerate(self._cells):
            boards[code] |= 1 << cell
        height, width = self.dim_room
        return SokobanRoom(
            height=height,
            width=width,
            floor=sum(boards[FLOOR:]),
            targets=boards[TARGET] | boards[BOX_ON_TARGET] | boards[PLAYER_ON_TARGET],
            boxes=boards[BOX] | boards[BOX_ON_TARGET],
            player=self._player,
            num_pulls=0,
            pushes=(),
        )

    def expert_action(self) -> str:
        """The next action of a solution; planned when there is no plan for the present state.

        Raises:
            EnvError: The room is solved already, or cannot be solved any more.
        """
        if not self._plan:
            plan = solve(self.room()) if self._cells and not self.solved else None
            if plan is None:
                raise EnvError(
                    "expected a room that can be solved from here, got none at `expert_action`; call `reset`"
                )
            self._plan = plan
        return self._plan[0]

    def snapshot(self) -> dict[str, Any]:
        """The state as plain values, for `restore`; the random stream of later resets is not part of it."""
        return {
            "dim_room": list(self.dim_room),
            "cells": list(self._cells),
            "player": self._player,
            "num_steps": self._num_steps,
            "over": self._over,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Go back to a `snapshot`, also one of another instance of the same size; gives observation and info."""
        try:
            cells = [int(code) for code in snapshot["cells"]]
            player, num_steps = int(snapshot["player"]), int(snapshot["num_steps"])
            dim_room, over = tuple(snapshot["dim_room"]), bool(snapshot["over"])
            num_boxes = cells.count(BOX) + cells.count(BOX_ON_TARGET)
            if dim_room != self.dim_room or num_boxes != self.num_boxes:
                raise ValueError(f"{dim_room} with {num_boxes} boxes")
            self._check_cells(cells, player)
        except (LookupError, TypeError, ValueError) as error:
            raise DataError(
                f"expected a `snapshot` of a room of {self.dim_room} with {self.num_boxes} boxes, got "
                f"{snapshot!r:.200} at `restore` ({error}); make both environments with the same arguments"
            ) from error
        self._place(cells, player, num_steps=num_steps)
        self._over = over
        return self._observe(), self._info()

    def _check_cells(self, cells: list[int], player: int) -> None:
        """Raise a ValueError unless these are cells of such a room, with a border of wall and the player inside."""
        height, width = self.dim_room
        if len(cells) != height * width or not set(cells) <= set(range(7)):
            raise ValueError("cells of another room")
        board = np.array(cells).reshape(height, width)
        border = np.concatenate((board[0], board[-1], board[:, 0], board[:, -1]))
        if (border != WALL).any():
            raise ValueError("a room without a border of wall")
        movable = (FLOOR, TARGET, PLAYER, PLAYER_ON_TARGET)
        if not 0 <= player < len(cells) or cells[player] not in movable:
            raise ValueError(f"the player at {player}")
        others = [code for at, code in enumerate(cells) if at != player]
        if PLAYER in others or PLAYER_ON_TARGET in others:
            raise ValueError("two players")

    def render(self) -> Any:
        """The room as text (`ansi`) or as an image (`rgb_array`)."""
        if self.render_mode is None or not self._cells:
            return None
        return "".join(self._text) if self.render_mode == "ansi" else self._draw(draw_tiles())

    def _place(self, cells: list[int], player: int, *, num_steps: int) -> None:
        """Take over a state; in `cells` the player may be missing."""
        if cells[player] in (FLOOR, TARGET):
            cells[player] += PLAYER - FLOOR
        self._cells, self._player, self._num_steps = cells, player, num_steps
        self._num_on_target = cells.count(BOX_ON_TARGET)
        self._text = [
            self._symbols[code] + end for code, end in zip(cells, self._suffixes, strict=True)
        ]
        self._fixed_words = self._name("wall", (WALL,), inner=True) + self._name(
            "target", (TARGET, BOX_ON_TARGET, PLAYER_ON_TARGET)
        )
        self._over = False
        self._plan = []

    def _name(self, word: str, codes: tuple[int, ...], *, inner: bool = False) -> str:
        """`word row column .` for each cell with one of the codes; `inner` leaves out the border."""
        height, width = self.dim_room
        places = [divmod(cell, width) for cell, code in enumerate(self._cells) if code in codes]
        return "".join(
            f"{word} {row} {column} . "
            for row, column in places
            if not inner or (0 < row < height - 1 and 0 < column < width - 1)
        )

    def _can_move(self, step: int) -> bool:
        ahead = self._cells[self._player + step]
        if ahead in (FLOOR, TARGET):
            return True
        return ahead in (BOX, BOX_ON_TARGET) and self._cells[self._player + 2 * step] in (
            FLOOR,
            TARGET,
        )

    def _move(self, step: int) -> None:
        """Move the player, and the box ahead of it; the move must be possible."""
        here, ahead, beyond = self._player, self._player + step, self._player + 2 * step
        cells = self._cells
        code = cells[ahead]
        if code in (BOX, BOX_ON_TARGET):
            code = FLOOR if code == BOX else TARGET
            onto = BOX if cells[beyond] == FLOOR else BOX_ON_TARGET
            self._num_on_target += (onto == BOX_ON_TARGET) - (code == TARGET)
            self._set(beyond, onto)
        self._set(ahead, code + PLAYER - FLOOR)
        self._set(here, cells[here] - PLAYER + FLOOR)
        self._player = ahead
        if self._plan and self._steps[self._plan[0]] == step:
            del self._plan[0]
        else:
            self._plan = []

    def _set(self, cell: int, code: int) -> None:
        self._cells[cell] = code
        self._text[cell] = self._symbols[code] + self._suffixes[cell]

    def _info(self) -> dict[str, Any]:
        possible = [
            word
            for word, step in self._steps.items()
            if self.admissible == "all" or self._can_move(step)
        ]
        return {"admissible_actions": possible, "success": self.solved}

    def _observe(self) -> Any:
        if self.observation == "text":
            return "".join(self._text)
        if self.observation == "words":
            row, column = divmod(self._player, self.dim_room[1])
            boxes = self._name("box", (BOX, BOX_ON_TARGET))
            return f"{self._fixed_words}{boxes}you {row} {column} ."
        return self._draw(self._tiles)

    def _draw(self, tiles: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """uint8[height * side, width * side, 3]: the room in `tiles`."""
        (height, width), side = self.dim_room, tiles.shape[1]
        picture = tiles[np.array(self._cells).reshape(height, width)]
        return picture.transpose(0, 2, 1, 3, 4).reshape(height * side, width * side, 3)
