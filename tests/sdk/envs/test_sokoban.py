import random
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

from longstep.envs import SokobanEnv
from longstep.errors import ConfigError, DataError, EnvError, UnsupportedTypeError

msgpack = pytest.importorskip("msgpack", reason="needs the extra `bindings`")

CODES = "#_O*XPS"


def drawn(text: str, **arguments) -> SokobanEnv:
    """An environment in the state that is drawn with the symbols `# _ O * X P S`."""
    rows = text.split()
    cells = [CODES.index(symbol) for symbol in "".join(rows)]
    num_boxes = cells.count(3) + cells.count(4)
    dim_room = (len(rows), len(rows[0]))
    env = SokobanEnv(dim_room=dim_room, num_boxes=num_boxes, symbols=CODES, **arguments)
    player = next(cell for cell, code in enumerate(cells) if code >= 5)
    env.restore(
        {
            "dim_room": dim_room,
            "cells": cells,
            "player": player,
            "num_steps": 0,
            "over": False,
        }
    )
    return env


def rows(text: str) -> str:
    return "\n".join(text.split())


@pytest.mark.parametrize("observation", ["text", "rgb", "tiny_rgb"])
def test_gymnasium_checker_passes_without_warnings(observation: str):
    spec = EnvSpec(
        id="test/Sokoban-v0",
        entry_point=lambda **kwargs: SokobanEnv(**kwargs),
        kwargs={"observation": observation},
    )
    check_env(gymnasium.make(spec, disable_env_checker=True).unwrapped)


def test_walking_and_pushing_follow_the_rules_and_the_rewards():
    env = drawn("####### #PXO__# #_X___# #O____# #######")
    observation, reward, terminated, truncated, info = env.step("right")
    assert observation == rows("####### #_P*__# #_X___# #O____# #######")
    assert (round(reward, 6), terminated, truncated, info["success"]) == (0.9, False, False, False)
    observation, reward, *_ = env.step("right")  # off the target again
    assert observation == rows("####### #__SX_# #_X___# #O____# #######")
    assert round(reward, 6) == -1.1
    observation, reward, *_ = env.step("down")  # leaves the target behind
    assert observation == rows("####### #__OX_# #_XP__# #O____# #######")
    assert round(reward, 6) == -0.1
    observation, reward, *_ = env.step("left")
    assert observation == rows("####### #__OX_# #XP___# #O____# #######")


def test_solving_pays_ten_more_and_ends_the_episode():
    env = drawn("###### #PXO_# #____# ######")
    observation, reward, terminated, truncated, info = env.step("right")
    assert observation == rows("###### #_P*_# #____# ######")
    assert (round(reward, 6), terminated, truncated, info["success"]) == (10.9, True, False, True)
    with pytest.raises(EnvError, match="expected `reset` before"):
        env.step("left")


def test_pushing_from_target_to_target_pays_only_the_step():
    env = drawn("####### #P*OX_# #__O__# #######")
    assert round(env.step("right")[1], 6) == -0.1


@pytest.mark.parametrize(
    "drawing",
    [
        "###### #PX#O# #____# ######",  # a wall behind the box
        "####### #PXXO_# #O____# #######",  # a box behind the box
        "####### #_XO__# #____P# #######",  # a wall beside the player
    ],
)
def test_what_is_not_possible_costs_the_step_and_changes_nothing(drawing: str):
    env = drawn(drawing)
    observation, reward, terminated, truncated, info = env.step("right")
    assert observation == rows(drawing)
    assert (round(reward, 6), terminated, truncated) == (-0.1, False, False)
    assert "right" not in info["admissible_actions"]


def test_an_unknown_word_costs_the_step_and_another_type_is_an_error():
    env = drawn("###### #PXO_# #____# ######")
    observation, reward, *_ = env.step("jump")
    assert observation == rows("###### #PXO_# #____# ######")
    assert round(reward, 6) == -0.1
    with pytest.raises(UnsupportedTypeError, match="expected a word"):
        env.step(1)  # type: ignore[arg-type]


def test_admissible_actions_are_exactly_those_that_change_the_state():
    rng = random.Random(0)
    env = SokobanEnv(dim_room=(7, 7), num_boxes=2)
    for seed in range(20):
        observation, info = env.reset(seed=seed)
        for _ in range(20):
            before = env.snapshot()
            for action in ("up", "down", "left", "right"):
                env.restore(before)
                changed = env.step(action)[0] != observation
                assert changed == (action in info["admissible_actions"])
            env.restore(before)
            observation, _, terminated, _, info = env.step(rng.choice(info["admissible_actions"]))
            if terminated:
                break
    env = SokobanEnv(admissible="all")
    assert env.reset(seed=0)[1]["admissible_actions"] == ["up", "down", "left", "right"]


@pytest.mark.parametrize(("dim_room", "num_boxes"), [((6, 6), 1), ((7, 7), 2), ((10, 10), 4)])
def test_expert_solves_and_returns_add_up(dim_room: tuple[int, int], num_boxes: int):
    env = SokobanEnv(dim_room=dim_room, num_boxes=num_boxes, max_steps=1000)
    for seed in range(10):
        _, info = env.reset(seed=seed)
        total, num_steps, terminated = 0.0, 0, False
        while not terminated:
            _, reward, terminated, truncated, info = env.step(env.expert_action())
            total, num_steps = total + reward, num_steps + 1
            assert not truncated
        assert info["success"]
        assert total == pytest.approx(10 + num_boxes - 0.1 * num_steps)


def test_expert_plans_anew_when_others_acted_and_says_when_nothing_helps():
    env = drawn("####### #_____# #PX__O# #_____# #######")
    assert env.expert_action() == "right"
    env.step("up")
    actions = []
    while not env.solved:
        actions.append(env.expert_action())
        env.step(actions[-1])
    assert actions == ["down", "right", "right", "right"]
    env = drawn("###### #XP_O# #____# ######")
    with pytest.raises(EnvError, match="can be solved from here"):
        env.expert_action()


def test_episode_is_truncated_at_max_steps():
    env = SokobanEnv(max_steps=3)
    env.reset(seed=0)
    assert [env.step("jump")[2:4] for _ in range(3)] == [(False, False)] * 2 + [(False, True)]
    with pytest.raises(EnvError):
        env.step("up")


def test_text_images_and_codes_show_the_same_state():
    text, tiny, image = (
        SokobanEnv(dim_room=(6, 8), observation=kind) for kind in ("text", "tiny_rgb", "rgb")
    )
    for seed in range(5):
        drawing, _ = text.reset(seed=seed)
        pixels, picture = tiny.reset(seed=seed)[0], image.reset(seed=seed)[0]
        assert pixels.shape == (6, 8, 3)
        assert picture.shape == (96, 128, 3)
        assert pixels.dtype == picture.dtype == np.uint8
        looks: dict[str, tuple[bytes, bytes]] = {}
        for row, line in enumerate(drawing.splitlines()):
            for column, symbol in enumerate(line):
                tile = picture[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
                look = (pixels[row, column].tobytes(), tile.tobytes())
                assert looks.setdefault(symbol, look) == look
        assert len(set(looks.values())) == len(looks) == 5


def test_all_seven_tiles_look_different():
    env = drawn("######## #_OXP__# #_*____# ########", observation="rgb")
    frames = env.restore(env.snapshot())[0]
    standing = drawn("######## #_OX___# #_*S___# ########", observation="rgb")
    others = standing.restore(standing.snapshot())[0]
    tiles = {
        frames[16 * row : 16 * row + 16, 16 * column : 16 * column + 16].tobytes()
        for row, column in ((0, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 2))
    }
    tiles.add(others[32:48, 48:64].tobytes())
    assert len(tiles) == 7


def test_symbols_and_separator_can_be_chosen():
    env = SokobanEnv(symbols="# .*$@+", separator=" ")
    observation, info = env.reset(seed=1)
    lines = observation.split("\n")
    assert [len(line) for line in lines] == [11] * 6
    assert lines[1] == "# @ .     #"
    assert "$ box" in info["task_description"]
    default, _ = SokobanEnv().reset(seed=1)
    assert default.split("\n")[1] == "#PO__#"


def test_rooms_of_a_seed_never_change():
    assert SokobanEnv().reset(seed=1)[0] == rows("###### #PO__# #____# #_#X_# #____# ######")
    large = SokobanEnv(dim_room=(10, 10), num_boxes=4)
    assert large.reset(seed=0)[0] == rows(
        "########## ###PX_O__# ###_#X_#_# #__#__X_## #__OO____# "
        "########_# ##_______# #_#O__X_## #___#____# ##########"
    )


def test_snapshot_travels_as_msgpack_and_restores_in_another_instance():
    env = SokobanEnv(dim_room=(7, 7), num_boxes=2)
    other = SokobanEnv(dim_room=(7, 7), num_boxes=2)
    before, _ = env.reset(seed=3)
    for _ in range(4):
        before = env.step(env.expert_action())[0]
    assert other.restore(msgpack.unpackb(msgpack.packb(env.snapshot())))[0] == before
    while not env.solved:
        action = env.expert_action()
        assert env.step(action) == other.step(action)
    with pytest.raises(DataError, match="expected a `snapshot` of a room of"):
        SokobanEnv().restore(env.snapshot())


def test_global_random_state_is_neither_read_nor_changed():
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), repr(np.random.get_state())
    first = SokobanEnv(dim_room=(8, 8), num_boxes=3).reset(seed=2)
    assert (random.getstate(), repr(np.random.get_state())) == before
    np.random.seed(6)
    assert SokobanEnv(dim_room=(8, 8), num_boxes=3).reset(seed=2) == first


def test_render_gives_text_or_an_image():
    env = SokobanEnv(observation="tiny_rgb", render_mode="ansi")
    env.reset(seed=1)
    assert env.render().startswith("######\n#PO__#")
    env = SokobanEnv(render_mode="rgb_array")
    env.reset(seed=1)
    assert env.render().shape == (96, 96, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"observation": "rbg"}, "did you mean `rgb`"),
        ({"admissible": "some"}, "known: `all`, `changing`"),
        ({"symbols": "#_O"}, "seven different characters"),
        ({"symbols": None}, "a str as `symbols`, got None"),
        ({"separator": 1}, "a str as `separator`, got 1"),
        ({"max_steps": 0}, "`max_steps` of at least 1, got 0"),
        ({"max_steps": "9"}, "a whole number as `max_steps`, got '9'"),
        ({"dim_room": 6}, r"\(height, width\) as `dim_room`, got 6"),
        ({"dim_room": ("6", 6)}, r"a whole number as `dim_room\[0\]`, got '6'"),
        ({"dim_room": (6, 10**6)}, r"`dim_room\[1\]` of at most 40, got 1000000"),
        ({"dim_room": (40, 40), "num_boxes": 100}, "`num_boxes` of at most 10, got 100"),
        ({"num_boxes": 1.0}, "a whole number as `num_boxes`, got 1.0"),
        ({"max_pulls": 10**9}, "`max_pulls` of at most 1000"),
        ({"dim_room": (6, 6), "num_boxes": 9}, "4 inner cells per box"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        SokobanEnv(**arguments)


def test_words_name_the_same_state_as_the_drawing() -> None:
    drawn = SokobanEnv(max_pulls=2)
    named = SokobanEnv(max_pulls=2, observation="words")
    pairs: dict[str, str] = {}
    for seed in range(30):
        drawing, _ = drawn.reset(seed=seed)
        words, _ = named.reset(seed=seed)
        while not drawn.solved:
            rows = drawing.split("\n")
            targets = {
                (r, c) for r, row in enumerate(rows) for c, s in enumerate(row) if s in "O√S"
            }
            boxes = {(r, c) for r, row in enumerate(rows) for c, s in enumerate(row) if s in "√X"}
            you = {(r, c) for r, row in enumerate(rows) for c, s in enumerate(row) if s in "PS"}
            parts = [part.split() for part in words.removesuffix(" .").split(" . ")]
            for name, places in (("target", targets), ("box", boxes), ("you", you)):
                assert {(int(r), int(c)) for word, r, c in parts if word == name} == places
            assert pairs.setdefault(words, drawing) == drawing
            action = drawn.expert_action()
            drawing, *_ = drawn.step(action)
            words, *_ = named.step(action)
        assert named.solved


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cells", [1] * 36),
        ("cells", "x" * 36),
        ("cells", [0] * 35),
        ("player", 99),
        ("player", 0),
        ("num_steps", None),
        ("dim_room", 6),
    ],
)
def test_a_damaged_snapshot_is_an_error_that_changes_nothing(key: str, value: Any) -> None:
    env = SokobanEnv()
    env.reset(seed=1)
    before = env.snapshot()
    with pytest.raises(DataError, match="expected a `snapshot` of"):
        env.restore({**before, key: value})
    assert env.snapshot() == before


@pytest.mark.parametrize("snapshot", [None, {}, "room", []])
def test_what_is_no_snapshot_is_an_error(snapshot: Any) -> None:
    with pytest.raises(DataError, match="expected a `snapshot` of"):
        SokobanEnv().restore(snapshot)
