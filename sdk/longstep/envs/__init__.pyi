# ruff: noqa: TID252 -- lazy_loader reads relative imports only
from .keydoor import KeyDoorEnv
from .sokoban import SokobanEnv
from .sokoban_rooms import SokobanRoom, make_room
from .sokoban_solver import solve

__all__ = ["KeyDoorEnv", "SokobanEnv", "SokobanRoom", "make_room", "solve"]
