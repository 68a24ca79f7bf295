import json
import subprocess
import sys
from itertools import combinations, islice

import gymnasium
import numpy as np
import pytest

from longstep.env import LLMAgentEnv
from longstep.errors import ConfigError, DataError
from longstep.registration import make, register, registry
from longstep.spaces import TextSpace
from longstep.tasks import SPLITS, Panel, TaskStream, assert_disjoint, panel, task_stream
from longstep.types import Task

KEYDOOR, SOKOBAN = "longstep/KeyDoor-v0", "longstep/Sokoban-v0"
SMALL = {"size": 3, "num_rooms": 1}  # 9 * 8 * 7 initial states


def start_of(env: LLMAgentEnv, seed: int) -> str:
    return env.reset(seed=seed)[1]["observation"]


class AlwaysTheSame(gymnasium.Env):
    """One initial state for every seed; counts its resets."""

    num_resets = 0

    def __init__(self) -> None:
        self.observation_space = self.action_space = TextSpace()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        AlwaysTheSame.num_resets += 1
        return "a hall", {}

    def step(self, action):
        return "a hall", 0.0, False, False, {}


@pytest.fixture
def same_start():
    register("test/Same-v0", AlwaysTheSame)
    AlwaysTheSame.num_resets = 0
    yield "test/Same-v0"
    registry.remove("test/Same-v0")


def test_panels_are_the_same_everywhere():
    assert panel(KEYDOOR, "eval", 64).sha256 == (
        "b0224335d249a61cc0b99bb87954d6d4ee564228b589ebe15b1fa6f35b47c370"
    )
    assert panel(SOKOBAN, "eval", 32).sha256 == (
        "0e86a2b01d59e681542f033bca192a11b0dd34fa51d018dfd563820d24f348aa"
    )
    assert panel(KEYDOOR, "train", 8, env_kwargs=SMALL).sha256 == (
        "6cf7a7f2dc292894645ad300debbd90cd2c183ecdbcaf7452a8f05453dffd914"
    )


def test_panel_is_the_same_in_a_process_with_another_hash_seed():
    code = f"from longstep.tasks import panel; print(panel({KEYDOOR!r}, 'test', 16).sha256)"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    assert seen == {panel(KEYDOOR, "test", 16).sha256}


def test_hash_depends_on_tasks_arguments_and_split_but_not_on_the_order_of_arguments():
    tasks = (Task(env_id=KEYDOOR, seed=1), Task(env_id=KEYDOOR, seed=2, options={"a": 1}))
    first = Panel(env_id=KEYDOOR, split="mine", tasks=tasks, env_kwargs={"size": 3, "num_rooms": 1})
    same = Panel(env_id=KEYDOOR, split="mine", tasks=tasks, env_kwargs={"num_rooms": 1, "size": 3})
    others = [
        Panel(env_id=KEYDOOR, split="mine", tasks=tasks[::-1], env_kwargs=SMALL),
        Panel(env_id=KEYDOOR, split="mine", tasks=tasks[:1], env_kwargs=SMALL),
        Panel(env_id=KEYDOOR, split="mine", tasks=tasks, env_kwargs={"size": 4, "num_rooms": 1}),
        Panel(env_id=KEYDOOR, split="yours", tasks=tasks, env_kwargs=SMALL),
    ]
    assert first.sha256 == same.sha256
    assert len({made.sha256 for made in (first, *others)}) == 5


def test_tuples_and_lists_in_arguments_are_one():
    hashes = {
        panel(SOKOBAN, "eval", 2, env_kwargs={"dim_room": dim_room}).sha256
        for dim_room in ((6, 6), [6, 6])
    }
    assert len(hashes) == 1


def test_a_smaller_panel_is_the_beginning_of_a_larger_one():
    assert panel(KEYDOOR, "eval", 50).tasks == panel(KEYDOOR, "eval", 80).tasks[:50]


def test_seeds_of_the_splits_do_not_overlap_and_fit_in_31_bits():
    for first, second in combinations(SPLITS.values(), 2):
        assert first.stop <= second.start or second.stop <= first.start
    assert max(seeds.stop for seeds in SPLITS.values()) <= 2**31


@pytest.mark.parametrize(
    ("env_id", "env_kwargs", "num_tasks"), [(KEYDOOR, SMALL, 40), (SOKOBAN, {}, 40)]
)
def test_no_two_splits_share_an_initial_state_and_no_panel_holds_one_twice(
    env_id: str, env_kwargs: dict, num_tasks: int
):
    env = make(env_id, **env_kwargs)
    starts = {}
    for split in ("train", "eval", "test"):
        made = panel(env_id, split, num_tasks, env_kwargs=env_kwargs)
        assert [task.seed in SPLITS[split] for task in made] == [True] * num_tasks
        starts[split] = {start_of(env, task.seed) for task in made}
        assert len(starts[split]) == num_tasks
    for first, second in combinations(starts, 2):
        assert not starts[first] & starts[second]


def test_training_stream_never_starts_in_a_state_of_another_split():
    env = make(KEYDOOR, **SMALL)
    held_out = {
        start_of(env, task.seed)
        for split in ("eval", "test")
        for task in panel(KEYDOOR, split, 45, env_kwargs=SMALL)
    }
    with task_stream(KEYDOOR, 0, env_kwargs=SMALL) as stream:
        started = [start_of(env, next(stream).seed) for _ in range(3000)]
    assert not held_out & set(started)
    assert len(set(started)) > 350  # nearly all of the about 378 that are left


def test_streams_follow_their_seed_and_continue_from_a_position():
    tasks = list(islice(task_stream(KEYDOOR, 1), 40))
    assert tasks == list(islice(task_stream(KEYDOOR, 1), 40))
    assert tasks != list(islice(task_stream(KEYDOOR, 2), 40))
    stream = TaskStream(KEYDOOR, 1)
    assert list(islice(stream, 25)) == tasks[:25]
    resumed = TaskStream(KEYDOOR, 1, position=stream.position)
    assert list(islice(resumed, 15)) == tasks[25:]


def test_assert_disjoint_finds_a_common_start_and_names_the_tasks():
    ours = panel(KEYDOOR, "eval", 40, env_kwargs=SMALL)
    assert_disjoint(ours, panel(KEYDOOR, "train", 100, env_kwargs=SMALL))
    env = make(KEYDOOR, **SMALL)
    held_out = {start_of(env, task.seed) for task in ours}
    leak = next(seed for seed in range(10_000) if start_of(env, seed) in held_out)
    careless = Panel(
        env_id=KEYDOOR,
        split="careless",
        tasks=(Task(env_id=KEYDOOR, seed=leak),),
        env_kwargs=SMALL,
    )
    with pytest.raises(DataError, match=rf"`{KEYDOOR}#{leak}` of `careless`"):
        assert_disjoint(ours, careless)


def test_seeds_alone_leak_in_a_small_world_which_is_what_the_states_prevent():
    by_seed = [
        panel(KEYDOOR, split, 100, env_kwargs=SMALL, split_states=False)
        for split in ("train", "eval")
    ]
    with pytest.raises(DataError, match="without a common initial state"):
        assert_disjoint(*by_seed)


@pytest.mark.parametrize("size", [1, 7, 64, 100, 1000])
def test_batches_hold_every_task_exactly_once(size: int):
    made = panel(KEYDOOR, "eval", 100)
    batches = list(made.batches(size))
    assert [task for batch in batches for task in batch] == list(made)
    assert all(len(batch) == size for batch in batches[:-1])
    assert len(made) == 100


def test_a_world_with_too_few_starts_is_an_error_that_says_how_many_there_are(same_start: str):
    with pytest.raises(
        ConfigError, match=r"expected 400 different initial states .* got \d\d from"
    ):
        panel(KEYDOOR, "eval", 400, env_kwargs=SMALL)
    splits_with_a_start = 0
    for split in ("train", "eval", "test"):
        try:
            panel(same_start, split, 1)
            splits_with_a_start += 1
        except ConfigError as error:
            assert "split_states=False" in str(error)  # noqa: PT017
    assert splits_with_a_start == 1


def test_without_state_check_the_environment_is_not_touched(same_start: str):
    made = panel(same_start, "test", 3, split_states=False)
    assert [task.seed for task in made] == list(SPLITS["test"][:3])
    assert len(list(islice(task_stream(same_start, 0, split_states=False), 5))) == 5
    assert AlwaysTheSame.num_resets == 0


def test_wrong_arguments_are_named():
    with pytest.raises(ConfigError, match="did you mean `eval`"):
        panel(KEYDOOR, "evl", 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected `num_tasks` of at least 1"):
        panel(KEYDOOR, "eval", 0)
    with pytest.raises(ConfigError, match="`size` of at least 1"):
        list(panel(KEYDOOR, "eval", 1).batches(0))
    with pytest.raises(ConfigError, match="expected plain values in `env_kwargs`"):
        panel(KEYDOOR, "eval", 1, env_kwargs={"invalid_action_penalty": np.float32(0.5)})


def test_seeds_of_a_panel_survive_json():
    made = panel(KEYDOOR, "eval", 5)
    seeds = json.loads(json.dumps([task.seed for task in made]))
    again = Panel(
        env_id=KEYDOOR,
        split="eval",
        tasks=tuple(Task(env_id=KEYDOOR, seed=seed) for seed in seeds),
    )
    assert again.sha256 == made.sha256
