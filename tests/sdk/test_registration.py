"""Ids of environments: registering, making, plug-ins, and errors that name the nearest id."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest

import longstep
from longstep import (
    EnvEntry,
    LLMAgentEnv,
    PromptTemplate,
    SimpleMemory,
    TagParser,
    TextSpace,
    WindowMemory,
    make,
    register,
    registry,
)
from longstep.errors import ConfigError, RegistryError


class Room(gymnasium.Env):
    """One room, with arguments to look at."""

    def __init__(self, size=1, color="red"):
        self.size, self.color = size, color
        self.observation_space = self.action_space = TextSpace()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"A {self.color} room.", {"admissible_actions": ["leave"]}

    def step(self, action):
        return "Outside.", 1.0, True, False, {"admissible_actions": []}


@pytest.fixture
def room():
    """Registers rooms under ids that are free again after the test."""
    known = set(registry)

    def add(id="test/Room-v0", entry_point=Room, **arguments):
        register(id, entry_point, **arguments)
        return id

    yield add
    for id in set(registry) - known:
        registry.remove(id)


def test_a_custom_environment_is_registered_by_one_line(room):
    longstep.register("test/Mine-v0", Room)
    env = longstep.make("test/Mine-v0")
    assert isinstance(env, LLMAgentEnv)
    env.reset(seed=0)
    assert env.step("leave")[1:3] == (1.0, True)
    registry.remove("test/Mine-v0")


@pytest.mark.parametrize("id", ["longstep/KeyDoor-v0", "longstep/Sokoban-v0"])
def test_the_built_in_environments_are_declared(id):
    assert id in registry
    env = make(id)
    text, info = env.reset(seed=0)
    assert text
    assert info["admissible_actions"]


def test_looking_ids_up_imports_no_environment():
    code = """
        import sys
        import longstep
        assert "longstep/KeyDoor-v0" in longstep.registry
        assert list(longstep.registry)
        assert not [name for name in sys.modules if name.startswith("longstep.envs")]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


@pytest.mark.parametrize(
    "entry_point", [Room, f"{__name__}:Room", lambda size=1, color="red": Room(size, color)]
)
def test_an_entry_point_is_a_class_a_function_or_a_name(room, entry_point, monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Room.__module__])
    env = make(room(entry_point=entry_point, kwargs={"size": 2}), color="blue")
    assert (env.size, env.color) == (2, "blue")


def test_arguments_go_to_the_wrapper_or_to_the_environment(room):
    env = make(room(), size=3, max_steps=7, reward_scale=2.0, task_description="Leave.")
    assert (env.size, env.max_steps, env.reward_scale, env.task_description) == (
        3,
        7,
        2.0,
        "Leave.",
    )


def test_what_is_registered_can_be_overridden(room):
    prompt = PromptTemplate(None, "registered")
    id = room(
        kwargs={"size": 5},
        max_steps=9,
        memory=WindowMemory(6),
        prompt=prompt,
        parser=TagParser,
        reward_scale=3.0,
    )
    env = make(id)
    assert (env.size, env.max_steps, env.memory.window_size, env.reward_scale) == (5, 9, 6, 3.0)
    assert (env.prompt, env.parser.tag) == (prompt, "action")
    env = make(id, size=1, max_steps=2, memory=SimpleMemory(), reward_scale=1.0)
    assert (env.size, env.max_steps, type(env.memory), env.reward_scale) == (
        1,
        2,
        SimpleMemory,
        1.0,
    )


@pytest.mark.parametrize("memory", [WindowMemory(6), WindowMemory, lambda: WindowMemory(1)])
def test_no_two_environments_share_a_memory(room, memory):
    name = room(memory=memory)
    made = [make(name) for _ in range(3)] + [make(name, memory=memory) for _ in range(3)]
    assert len({id(memory), *(id(env.memory) for env in made)}) == 7
    assert {type(env.memory) for env in made} == {WindowMemory}


def test_an_id_registered_twice_is_an_error(room):
    id = room()
    with pytest.raises(RegistryError, match=f"an id that is free, got `{id}`"):
        register(id, Room)
    with pytest.raises(RegistryError, match="got `longstep/KeyDoor-v0`"):
        register("longstep/KeyDoor-v0", Room)


@pytest.mark.parametrize(
    ("id", "near"),
    [
        ("longstep/KeyDor-v0", "longstep/KeyDoor-v0"),
        ("FrozenLak-v1", "FrozenLake-v1"),
        ("longstep/Sokoban", "longstep/Sokoban-v0"),
    ],
)
def test_an_unknown_id_is_an_error_with_the_nearest(id, near):
    with pytest.raises(RegistryError, match=f"got `{id}`; did you mean `{near}`"):
        make(id)
    with pytest.raises(LookupError):
        LLMAgentEnv(id)


def test_an_id_far_from_all_names_those_of_this_registry_only():
    # Other test modules register environments of their own.
    known = ", ".join(f"`{name}`" for name in registry)
    assert "`longstep/KeyDoor-v0`, `longstep/Sokoban-v0`" in known
    with pytest.raises(RegistryError, match=f"known: {known}$"):
        make("zzzz")


def test_the_registry_is_a_mapping(room):
    id = room()
    assert registry[id].entry_point is Room
    assert isinstance(registry[id], EnvEntry)
    assert registry.get("nothing") is None
    assert list(registry) == sorted(registry)
    assert len(registry) == len(list(registry))
    with pytest.raises(RegistryError, match="did you mean `test/Room-v0`"):
        registry["test/Rom-v0"]
    with pytest.raises(RegistryError):
        registry.remove("nothing")


@pytest.mark.parametrize("id", ["my env", "a/b/c-v0", "", "x-v1.5/"])
def test_an_id_has_gymnasiums_form(id):
    with pytest.raises(ConfigError, match="expected an id such as"):
        register(id, Room)


def test_an_unknown_argument_is_an_error_with_the_nearest(room):
    with pytest.raises(ConfigError, match="got `max_step`; did you mean `max_steps`"):
        make(room(), max_step=3)
    with pytest.raises(ConfigError, match="got `colour`; did you mean `color`"):
        make("test/Room-v0", colour="blue")
    with pytest.raises(ConfigError, match="got `reward_scal`; did you mean `reward_scale`"):
        register("test/Other-v0", Room, reward_scal=2.0)


@pytest.mark.parametrize("entry_point", ["longstep.errors", "longstep.errors:Nothing", ""])
def test_an_entry_point_that_names_nothing_is_an_error(room, entry_point):
    with pytest.raises(
        RegistryError, match="`module:attribute` of a class or function as entry point"
    ):
        make(room(entry_point=entry_point))


def test_gymnasiums_environments_are_made_with_their_limit_in_the_wrapper():
    env = make("MountainCar-v0")
    assert env.max_steps == 200
    assert make("MountainCar-v0", max_steps=500).max_steps == 500
    env = make("MountainCar-v0", max_steps=250)
    env.reset(seed=0)
    for _ in range(249):
        assert env.step("1")[3] is False
    assert env.step("1")[3] is True


def test_an_environment_can_be_made_again_from_its_spec(room):
    env = make(room(), size=4, max_steps=3)
    again = env.spec.make()
    assert isinstance(again, LLMAgentEnv)
    assert (again.size, again.max_steps, again.spec.id) == (4, 3, "test/Room-v0")


PLUGIN = """
    import gymnasium
    from longstep import EnvEntry, TextSpace, WindowMemory

    class Plugged(gymnasium.Env):
        observation_space = action_space = TextSpace()
        def __init__(self, size=1):
            self.size = size
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return "plugged", {}
        def step(self, action):
            return "plugged", 0.0, True, False, {}

    entry = EnvEntry(id="ignored", entry_point=Plugged, kwargs={"size": 8}, memory=WindowMemory(3))
"""

PLUGIN_CHECK = """
    import sys
    import longstep
    from longstep.errors import RegistryError
    assert "plugged_envs" not in sys.modules
    assert "plugged/Class-v0" in longstep.registry and "plugged/Entry-v0" in longstep.registry
    assert "plugged_envs" not in sys.modules, "ids are listed without loading"
    assert longstep.make("plugged/Class-v0").size == 1
    env = longstep.make("plugged/Entry-v0")
    assert (env.size, env.memory.window_size) == (8, 3)
    assert env.reset()[1]["observation"] == "plugged"
    def error(id):
        try:
            longstep.make(id)
        except RegistryError as error:
            return str(error)
    assert "to load, got ModuleNotFoundError" in error("plugged/Broken-v0"), error("plugged/Broken-v0")
    assert "expected one environment with the id `longstep/KeyDoor-v0`" in error("longstep/KeyDoor-v0")
    try:
        longstep.register("plugged/Class-v0", "x:y")
    except RegistryError as found:
        assert "an id that is free" in str(found)
    else:
        raise AssertionError
"""

ENTRY_POINTS = """\
[longstep.envs]
plugged/Class-v0 = plugged_envs:Plugged
plugged/Entry-v0 = plugged_envs:entry
plugged/Broken-v0 = no_such_module_anywhere:Env
longstep/KeyDoor-v0 = plugged_envs:Plugged
"""


def test_plug_ins_are_found_by_entry_point_and_loaded_when_made(tmp_path):
    """A real distribution on the path of a real interpreter."""
    (tmp_path / "plugged_envs.py").write_text(textwrap.dedent(PLUGIN))
    info = tmp_path / "plugged_envs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged-envs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + textwrap.dedent(PLUGIN_CHECK)
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


class Walk(gymnasium.Env[str, str]):
    """Ends after `max_steps` steps of its own count."""

    def __init__(self, *, max_steps: int = 5) -> None:
        self.max_steps = max_steps
        self.observation_space = self.action_space = TextSpace()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.num_steps = 0
        return "here", {"admissible_actions": ["on"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        over = self.num_steps >= self.max_steps
        return "here", 0.0, False, over, {"admissible_actions": ["on"]}


class StubbornWalk(Walk):
    def __init__(self) -> None:
        super().__init__(max_steps=5)


def episode_length(env: LLMAgentEnv) -> int:
    env.reset(seed=0)
    for step in range(1, 100):
        if any(env.step("on")[2:4]):
            return step
    raise AssertionError("endless")


@pytest.fixture
def walks() -> Iterator[None]:
    longstep.register("test/Walk-v0", Walk)
    longstep.register("test/LongWalk-v0", Walk, max_steps=9)
    longstep.register("test/ShortWalk-v0", Walk, kwargs={"max_steps": 3})
    longstep.register("test/StubbornWalk-v0", StubbornWalk)
    gymnasium.register("test/GymWalk-v0", Walk, max_episode_steps=4)
    yield
    for name in ("Walk", "LongWalk", "ShortWalk", "StubbornWalk"):
        registry.remove(f"test/{name}-v0")
    del gymnasium.envs.registry["test/GymWalk-v0"]


@pytest.mark.usefixtures("walks")
@pytest.mark.parametrize(
    ("id", "own"),
    [
        ("test/Walk-v0", 5),
        ("test/LongWalk-v0", 9),
        ("test/ShortWalk-v0", 3),
        ("test/GymWalk-v0", 4),
    ],
)
def test_max_steps_replaces_the_limit_of_an_environment_that_takes_one(id: str, own: int) -> None:
    assert episode_length(make(id)) == own
    for max_steps in (2, 60):
        env = make(id, max_steps=max_steps)
        assert (env.max_steps, env.env.unwrapped.max_steps) == (max_steps, max_steps)
        assert episode_length(env) == max_steps


@pytest.mark.usefixtures("walks")
def test_max_steps_beyond_a_limit_that_cannot_be_set_is_refused() -> None:
    assert episode_length(make("test/StubbornWalk-v0", max_steps=3)) == 3
    with pytest.raises(ConfigError, match=r"`max_steps` of at most 5, at which .* got 60"):
        make("test/StubbornWalk-v0", max_steps=60)


def test_the_built_in_worlds_last_as_long_as_one_says() -> None:
    assert make("longstep/KeyDoor-v0", max_steps=1000).env.unwrapped.max_steps == 1000
    assert make("longstep/Sokoban-v0", max_steps=500).env.unwrapped.max_steps == 500


@pytest.mark.parametrize(
    "id", ["no_such_module:Env-v0", "::", ".:Env-v0", "math:Env-v0", "CartPole-v99", ""]
)
def test_an_id_that_leads_nowhere_is_one_error(id: str) -> None:
    with pytest.raises(RegistryError, match="expected"):
        make(id)


def test_an_argument_that_gymnasiums_environment_does_not_take_is_named() -> None:
    with pytest.raises(ConfigError, match="got `sutton_barto_rewar`; did you mean"):
        make("CartPole-v1", sutton_barto_rewar=True)
