"""`GroupVectorEnv`: commands and results, and the Gymnasium-like surface."""

from __future__ import annotations

import signal
from typing import Any

import gymnasium
import pytest

from longstep.actions import ChoiceParser
from longstep.env import LLMAgentEnv
from longstep.errors import ConfigError, EnvError, LongstepError
from longstep.types import Task
from longstep.vector import EnvCommand, GroupVectorEnv, VectorEnv, next_command_id


class Corridor(gymnasium.Env[Any, Any]):
    """Walk right to the end; the seed draws the length. `raise` and `interrupt` do what they say."""

    action_space = gymnasium.spaces.Discrete(4)
    observation_space = gymnasium.spaces.Discrete(100)
    action_names = ("left", "right", "raise", "interrupt")

    def __init__(self) -> None:
        self.num_closed = 0
        self.num_stepped = 0
        self.position = self.length = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        if options and options.get("broken"):
            raise EnvError("broken on request")
        self.position, self.length = 0, int(self.np_random.integers(2, 6))
        return self.position, self._info()

    def step(self, action: int):
        name = self.action_names[action]
        self.num_stepped += 1
        if name == "raise":
            raise RuntimeError("fell over")
        if name == "interrupt":
            signal.raise_signal(signal.SIGINT)
        self.position = max(0, self.position + (1 if name == "right" else -1))
        solved = self.position == self.length
        return self.position, float(solved), solved, False, {**self._info(), "success": solved}

    def close(self) -> None:
        self.num_closed += 1

    def _info(self) -> dict[str, Any]:
        return {"task_description": f"{self.length} to go"}


class Maker:
    """Builds environments and remembers them."""

    def __init__(self) -> None:
        self.made: list[Corridor] = []

    def __call__(self) -> LLMAgentEnv:
        self.made.append(Corridor())
        return LLMAgentEnv(self.made[-1], parser=ChoiceParser())


def command(
    slot: int, *, seed: int | None = None, action: str | None = None, **task: Any
) -> EnvCommand:
    new_task = None if seed is None else Task(env_id="corridor", seed=seed, **task)
    return EnvCommand(slot=slot, command_id=next_command_id(), task=new_task, action=action)


@pytest.fixture
def maker() -> Maker:
    return Maker()


def test_group_vector_env_is_a_vector_env(maker: Maker) -> None:
    assert isinstance(GroupVectorEnv(maker, 1), VectorEnv)


def test_results_carry_the_ids_of_their_commands(maker: Maker) -> None:
    envs = GroupVectorEnv(maker, 3)
    commands = [command(2, seed=5), command(0, seed=6)]
    envs.send(commands)
    results = {result.slot: result.command_id for result in envs.recv(timeout_s=0.0)}
    assert results == {c.slot: c.command_id for c in commands}
    assert envs.recv(timeout_s=0.0) == []


def test_members_of_a_group_start_alike_and_groups_do_not(maker: Maker) -> None:
    envs = GroupVectorEnv(maker, 8)
    _, infos = envs.reset([3, 11], group_size=4)
    starts = [info["task_description"] for info in infos]
    assert len(set(starts[:4])) == 1
    assert len({env.length for env in maker.made}) == 2
    assert envs.group_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_same_seeds_and_actions_give_the_same_bytes(maker: Maker) -> None:
    def play() -> list[Any]:
        envs, seen = GroupVectorEnv(Maker(), 6), []
        seen.append(envs.reset([1, 2, 3], group_size=2)[0])
        for _ in range(6):
            observations, rewards, terminated, truncated, infos = envs.step(["right"] * 6)
            keys = [info["state_key"] for info in infos]
            flags = (terminated.tobytes(), truncated.tobytes())
            seen.append((observations, rewards.tobytes(), flags, keys))
        assert envs.done.all()
        return seen

    assert play() == play()


def test_finished_members_are_not_stepped_and_keep_what_was_last_seen(maker: Maker) -> None:
    envs = GroupVectorEnv(maker, 4)
    envs.reset([0, 1, 2, 3])
    lengths = [env.length for env in maker.made]
    assert len(set(lengths)) > 1
    assert envs.final_info == [None] * 4
    infos: list[dict[str, Any]] = []
    for step in range(1, max(lengths) + 1):
        *_, rewards, terminated, _, infos = envs.step(["right"] * 4)
        assert terminated.tolist() == [step >= length for length in lengths]
        assert rewards.tolist() == [float(step == length) for length in lengths]
    assert [env.num_stepped for env in maker.made] == lengths
    final = envs.final_info
    assert [info["observation"] for info in final if info] == lengths
    assert [info["success"] for info in infos] == [True] * 4
    assert all(text for text in envs.final_observation)


def test_finished_members_need_no_action(maker: Maker) -> None:
    envs = GroupVectorEnv(maker, 2)
    envs.reset([0, 1])
    envs.step(["raise", "left"])
    envs.step([None, "left"])
    with pytest.raises(ConfigError, match="expected an action for slot 1, got None"):
        envs.step(["right", None])


def test_one_members_exception_is_its_own_failure(maker: Maker) -> None:
    envs = GroupVectorEnv(maker, 3)
    envs.reset([5, 5, 5])
    observations, rewards, _, truncated, infos = envs.step(["right", "raise", "right"])
    assert envs.errors[0] is None
    assert envs.errors[2] is None
    assert "RuntimeError: fell over" in (envs.errors[1] or "")
    assert truncated.tolist() == [False, True, False]
    assert "fell over" in infos[1]["error"]
    assert observations[0] == observations[2] != ""
    assert rewards[1] == 0.0
    assert [env.num_closed for env in maker.made] == [0, 1, 0]


def test_a_failed_environment_is_built_anew_at_the_next_reset(maker: Maker) -> None:
    envs = GroupVectorEnv(maker, 2)
    first = envs.reset([5], group_size=2)[0]
    envs.step(["raise", "left"])
    assert envs.reset([5], group_size=2)[0] == first
    assert len(maker.made) == 3
    assert envs.errors == [None, None]


def test_a_failed_reset_is_its_slots_error(maker: Maker) -> None:
    envs = GroupVectorEnv(maker, 2)
    envs.send([command(0, seed=1, options={"broken": True}), command(1, seed=1)])
    results = sorted(envs.recv(), key=lambda result: result.slot)
    assert "EnvError: broken on request" in (results[0].error or "")
    assert results[1].error is None
    with pytest.raises(ConfigError, match="slot 0 to be in an episode"):
        envs.send([command(0, action="left")])


def test_an_interrupt_passes_through_and_its_slot_answers_with_an_error(maker: Maker) -> None:
    envs = GroupVectorEnv(maker, 3)
    envs.send([command(slot, seed=1) for slot in range(3)])
    envs.recv()
    envs.send([command(slot, action=act) for slot, act in enumerate(["left", "interrupt", "left"])])
    with pytest.raises(KeyboardInterrupt):
        envs.recv()
    results = sorted(envs.recv(), key=lambda result: result.slot)
    assert [result.slot for result in results] == [0, 1, 2]
    assert "KeyboardInterrupt" in (results[1].error or "")
    assert results[0].error is results[2].error is None
    envs.send([command(1, seed=1)])
    assert envs.recv()[0].error is None


def test_reset_after_an_interrupt_starts_anew(maker: Maker) -> None:
    envs = GroupVectorEnv(maker, 2)
    first = envs.reset([1, 2])[0]
    with pytest.raises(KeyboardInterrupt):
        envs.step(["interrupt", "left"])
    assert envs.reset([1, 2])[0] == first
    envs.step(["left", "left"])
    assert envs.errors == [None, None]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: [command(3, seed=1)], "expected a slot below 2, got 3"),
        (lambda: [command(0, action="left")], "expected slot 0 to be in an episode"),
        (lambda: [command(0, seed=1), command(0, seed=1)], "one command at a time for slot 0"),
        (lambda: [command(0)], "exactly one of `task` and `action` .* got neither"),
        (lambda: [command(0, seed=1, action="left")], "got both"),
    ],
)
def test_a_wrong_command_raises_and_none_is_taken(maker: Maker, wrong: Any, message: str) -> None:
    envs = GroupVectorEnv(maker, 2)
    with pytest.raises(ConfigError, match=message):
        envs.send([command(1, seed=1), *wrong()])
    assert envs.recv(timeout_s=0.0) == []


def test_a_task_of_another_environment_is_refused() -> None:
    with_id = GroupVectorEnv("CartPole-v1", 1)
    with pytest.raises(ConfigError, match="expected tasks of `CartPole-v1`, got one of `corridor`"):
        with_id.send([command(0, seed=1)])
    with_id.close()


def test_wrong_construction_raises_at_once() -> None:
    with pytest.raises(ConfigError, match="`num_envs` of at least 1, got 0"):
        GroupVectorEnv(Maker(), 0)
    with pytest.raises(ConfigError, match="to be an environment id or a function"):
        GroupVectorEnv(Maker()(), 2)  # type: ignore[arg-type]
    with pytest.raises(LongstepError, match="no-such"):
        GroupVectorEnv("longstep/no-such-v0", 2)
    with pytest.raises(TypeError, match="unexpected keyword"):
        GroupVectorEnv(Maker(), 2, env_kwargs={"size": 3})


def test_one_environment_for_all_slots_is_refused() -> None:
    env = Maker()()
    envs = GroupVectorEnv(lambda: env, 2)
    envs.send([command(0, seed=1), command(1, seed=1)])
    errors = [result.error or "" for result in sorted(envs.recv(), key=lambda r: r.slot)]
    assert errors[0] == ""
    assert "a new environment at each call" in errors[1]


def test_the_surface_says_what_is_wrong_with_a_call(maker: Maker) -> None:
    envs = GroupVectorEnv(maker, 4)
    with pytest.raises(ConfigError, match="expected `reset` before"):
        envs.step(["left"] * 4)
    with pytest.raises(ConfigError, match=r"got 3 \* 2 and 4 environments"):
        envs.reset([1, 2, 3], group_size=2)
    envs.reset([1, 2], group_size=2)
    with pytest.raises(ConfigError, match="expected 4 actions, got 3"):
        envs.step(["left"] * 3)


def test_close_closes_every_environment_once(maker: Maker) -> None:
    envs = GroupVectorEnv(maker, 3)
    envs.reset([1, 2, 3])
    envs.close()
    envs.close()
    assert [env.num_closed for env in maker.made] == [1, 1, 1]
