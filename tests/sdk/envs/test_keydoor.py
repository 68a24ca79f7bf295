import random
from collections import deque
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

from longstep.envs import KeyDoorEnv
from longstep.errors import ConfigError, DataError, EnvError, UnsupportedTypeError

msgpack = pytest.importorskip("msgpack", reason="needs the extra `bindings`")

SIZES = [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (5, 3)]


def solve_with_expert(env: KeyDoorEnv, seed: int) -> list[tuple[str, str, float, bool, bool]]:
    observation, _ = env.reset(seed=seed)
    steps = []
    while True:
        action = env.expert_action()
        following, reward, terminated, truncated, _ = env.step(action)
        steps.append((observation, action, reward, terminated, truncated))
        observation = following
        if terminated or truncated:
            return steps


def play_at_random(env: KeyDoorEnv, seed: int) -> bool:
    rng = random.Random(seed)
    _, info = env.reset(seed=seed)
    while True:
        _, _, terminated, truncated, info = env.step(rng.choice(info["admissible_actions"]))
        if terminated or truncated:
            return info["success"]


@pytest.mark.parametrize("style", ["terse", "plain"])
@pytest.mark.parametrize("reward", ["sparse", "dense"])
def test_gymnasium_checker_passes_without_warnings(style: str, reward: str):
    spec = EnvSpec(
        id="test/KeyDoor-v0",
        entry_point=lambda **kwargs: KeyDoorEnv(**kwargs),
        kwargs={"style": style, "reward": reward},
    )
    check_env(gymnasium.make(spec, disable_env_checker=True).unwrapped)


@pytest.mark.parametrize(("size", "num_rooms"), SIZES)
def test_expert_always_solves_within_the_smallest_horizon(size: int, num_rooms: int):
    env = KeyDoorEnv(
        size=size, num_rooms=num_rooms, max_steps=num_rooms * (4 * size - 3), style="plain"
    )
    for seed in range(200):
        steps = solve_with_expert(env, seed)
        assert env.solved
        assert [step[1] for step in steps].count("open") == num_rooms


def test_expert_is_as_short_as_a_breadth_first_search():
    env = KeyDoorEnv(size=3, num_rooms=2)
    for seed in range(20):
        length = len(solve_with_expert(env, seed))
        _, info = env.reset(seed=seed)
        start = env.snapshot()
        queue = deque([(start, info["admissible_actions"], 0)])
        seen = set()
        while True:
            state, actions, depth = queue.popleft()
            if not actions:
                break
            for action in actions:
                env.restore(state)
                _, _, _, _, info = env.step(action)
                after = env.snapshot()
                key = (after["room"], after["cell"], after["has_key"])
                if key not in seen:
                    seen.add(key)
                    queue.append((after, info["admissible_actions"], depth + 1))
        assert depth == length


def test_random_player_solves_under_five_percent_at_the_default_size():
    env = KeyDoorEnv()
    wins = sum(play_at_random(env, seed) for seed in range(1000))
    assert wins < 0.02 * 1000  # measured: 0.003; 0.05 is the limit that is promised


def test_random_player_solves_under_five_percent_of_one_room_of_24_steps():
    env = KeyDoorEnv(size=4, num_rooms=1)
    assert env.max_steps == 24
    wins = sum(play_at_random(env, seed) for seed in range(1000))
    assert 0.02 * 1000 < wins < 0.05 * 1000  # exact: 0.037


def test_rooms_of_a_seed_never_change():
    env = KeyDoorEnv(size=4, num_rooms=2)
    assert env.reset(seed=0)[0] == "room 1 . key 0 1 . door 0 0 . you 2 2 ."
    assert env.reset(seed=1)[0] == "room 1 . key 3 3 . door 2 0 . you 0 2 ."
    assert env.snapshot()["rooms"] == [[15, 2], [15, 4]]


def test_equal_states_have_equal_text_and_different_states_different_text():
    for env in (
        KeyDoorEnv(size=3, num_rooms=2, max_steps=10_000, style="terse"),
        KeyDoorEnv(size=3, num_rooms=2, max_steps=10_000, style="plain"),
    ):
        texts: dict[tuple, str] = {}
        rng = random.Random(0)
        _, info = env.reset(seed=4)
        for _ in range(3000):
            observation, _, terminated, _, info = env.step(rng.choice(info["admissible_actions"]))
            state = env.snapshot()
            key = (state["room"], state["cell"], state["has_key"])
            assert texts.setdefault(key, observation) == observation
            if terminated:
                break
        assert len(set(texts.values())) == len(texts) > 10


def test_observations_are_short():
    for env, most_words in (
        (KeyDoorEnv(size=5, num_rooms=3, style="terse"), 18),
        (KeyDoorEnv(size=5, num_rooms=3, style="plain"), 24),
    ):
        for seed in range(50):
            words = [len(step[0].split()) for step in solve_with_expert(env, seed)]
            assert max(words) <= most_words


def test_admissible_actions_are_exactly_those_that_change_the_state():
    env = KeyDoorEnv(size=3, num_rooms=2)
    rng = random.Random(1)
    for seed in range(30):
        observation, info = env.reset(seed=seed)
        for _ in range(15):
            before = env.snapshot()
            for action in ("north", "south", "east", "west", "take", "open", "fly"):
                env.restore(before)
                following, _, _, _, after = env.step(action)
                changed = following != observation
                assert changed == (action in info["admissible_actions"])
                assert (after["message"] == "") == changed
            env.restore(before)
            observation, _, terminated, truncated, info = env.step(
                rng.choice(info["admissible_actions"])
            )
            if terminated or truncated:
                break


def test_sparse_reward_is_one_at_success_and_dense_sums_to_one():
    sparse = solve_with_expert(KeyDoorEnv(num_rooms=2), 3)
    assert [step[2] for step in sparse] == [0.0] * (len(sparse) - 1) + [1.0]
    dense = solve_with_expert(KeyDoorEnv(num_rooms=2, reward="dense"), 3)
    assert [(step[1], step[2]) for step in dense if step[2]] == [
        ("take", 0.25),
        ("open", 0.25),
        ("take", 0.25),
        ("open", 0.25),
    ]


def test_episode_is_truncated_at_the_horizon_and_then_refuses_steps():
    env = KeyDoorEnv(size=2, num_rooms=1, max_steps=6)
    env.reset(seed=0)
    flags = [env.step("fly")[2:4] for _ in range(6)]
    assert flags == [(False, False)] * 5 + [(False, True)]
    with pytest.raises(EnvError, match="expected `reset` before `step"):
        env.step("north")


def test_solving_at_the_last_step_terminates_and_does_not_truncate():
    env = KeyDoorEnv(size=4, num_rooms=1)
    seed = next(seed for seed in range(5000) if len(solve_with_expert(env, seed)) == 13)
    env = KeyDoorEnv(size=4, num_rooms=1, max_steps=13)
    assert solve_with_expert(env, seed)[-1][2:] == (1.0, True, False)


def test_snapshot_travels_as_msgpack_and_restores_in_another_instance():
    env, other = KeyDoorEnv(), KeyDoorEnv()
    before, _ = env.reset(seed=11)
    for _ in range(5):
        before = env.step(env.expert_action())[0]
    packed = msgpack.packb(env.snapshot())
    assert other.restore(msgpack.unpackb(packed))[0] == before
    while not env.solved:
        action = env.expert_action()
        assert env.step(action) == other.step(action)
    with pytest.raises(DataError, match="expected a `snapshot` of 1 rooms"):
        KeyDoorEnv(num_rooms=1).restore(env.snapshot())


def test_restoring_a_finished_episode_stays_finished():
    env = KeyDoorEnv(size=2, num_rooms=1)
    solve_with_expert(env, 0)
    state = env.snapshot()
    env.reset(seed=1)
    assert env.restore(state)[1] == {"admissible_actions": [], "success": True}
    with pytest.raises(EnvError):
        env.step("north")


def test_global_random_state_is_neither_read_nor_changed():
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), repr(np.random.get_state())
    first = solve_with_expert(KeyDoorEnv(), 9)
    assert (random.getstate(), repr(np.random.get_state())) == before
    random.seed(6)
    np.random.seed(6)
    assert solve_with_expert(KeyDoorEnv(), 9) == first


def test_map_shows_agent_key_and_door():
    env = KeyDoorEnv(size=4, num_rooms=1, render_mode="ansi")
    env.reset(seed=3)  # you 1 0 . key 3 0 . door 0 3
    assert env.render() == "D . . .\n. . . .\n. . . .\n. @ . k"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 1}, "`size` of at least 2, got 1"),
        ({"num_rooms": 0}, "`num_rooms` of at least 1, got 0"),
        ({"max_steps": 0}, "`max_steps` of at least 1 or None, got 0"),
        ({"size": "4"}, "a whole number as `size`, got '4'"),
        ({"size": 2.5}, "a whole number as `size`, got 2.5"),
        ({"size": 10**6}, "`size` of at most 1000, got 1000000"),
        ({"num_rooms": 10**9}, "`num_rooms` of at most 1000"),
        ({"style": None}, "`style` to be one of .* got None"),
        ({"reward": "spars"}, "did you mean `sparse`"),
        ({"style": "long"}, "known: `plain`, `terse`"),
        ({"render_mode": "human"}, "known: `ansi`"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        KeyDoorEnv(**arguments)


def test_step_before_reset_and_an_action_that_is_no_text_are_errors():
    env = KeyDoorEnv()
    with pytest.raises(EnvError, match="expected `reset` before"):
        env.step("north")
    with pytest.raises(EnvError, match="call `reset`"):
        env.expert_action()
    env.reset(seed=0)
    with pytest.raises(UnsupportedTypeError, match="expected a word"):
        env.step(0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rooms", [[0, 99]] * 2),
        ("rooms", 5),
        ("cell", -1),
        ("cell", "x"),
        ("room", 7),
        ("num_steps", None),
    ],
)
def test_a_damaged_snapshot_is_an_error_that_changes_nothing(key: str, value: Any) -> None:
    env = KeyDoorEnv()
    env.reset(seed=1)
    before = env.snapshot()
    with pytest.raises(DataError, match="expected a `snapshot` of"):
        env.restore({**before, key: value})
    assert env.snapshot() == before


@pytest.mark.parametrize("snapshot", [None, {}, "room", []])
def test_what_is_no_snapshot_is_an_error(snapshot: Any) -> None:
    with pytest.raises(DataError, match="expected a `snapshot` of"):
        KeyDoorEnv().restore(snapshot)
