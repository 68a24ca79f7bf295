"""LLMAgentEnv: the prompt is the observation, the completion is the action, and nothing wrong passes in silence."""

import copy
import pickle
import re
import warnings
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

import longstep
from longstep import (
    ChoiceParser,
    FrameMemory,
    JsonParser,
    LLMAgentEnv,
    Memory,
    PromptTemplate,
    SimpleMemory,
    TagParser,
    TextSpace,
    WindowMemory,
)
from longstep.errors import ConfigError, DataError, EnvError
from longstep.state_key import state_key


class Corridor(gymnasium.Env):
    """Rooms in a row; the last one is the goal. Says what its info should hold."""

    metadata: ClassVar = {"render_modes": ["ansi"], "render_fps": 4}

    def __init__(self, length=3, render_mode=None, tell=("admissible_actions", "success")):
        self.length, self.render_mode, self.tell = length, render_mode, tell
        self.observation_space = self.action_space = TextSpace()
        self.actions, self.closed = [], 0

    def _result(self):
        told = {
            "admissible_actions": ["go on", "wait"],
            "success": self.room == self.length,
            "room_number": self.room,
        }
        return f"You are in room {self.room}.", {k: v for k, v in told.items() if k in self.tell}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.room = (options or {}).get("room", 0)
        observation, info = self._result()
        return observation, info | {"task_description": "Reach the end."}

    def step(self, action):
        self.actions.append(action)
        self.room += action == "go on"
        observation, info = self._result()
        solved = self.room == self.length
        return observation, 2.0 if solved else -0.5, solved, False, info

    def render(self):
        return f"room {self.room}"

    def close(self):
        self.closed += 1


def test_an_episode_by_hand():
    raw = Corridor(length=2)
    env = LLMAgentEnv(
        raw,
        memory=SimpleMemory(),
        prompt=PromptTemplate(
            "{task_description}", "{memory}/{current_observation}/{admissible_actions}/{step}"
        ),
    )
    text, info = env.reset(seed=1)
    assert text == "Reach the end.\n\n/You are in room 0./go on\nwait/0"
    assert info["prompt"].text == text
    assert info["prompt"].messages[1]["content"].startswith("/You are in room 0.")
    assert info["observation"] == "You are in room 0."
    assert info["admissible_actions"] == ["go on", "wait"]
    assert info["allowed_completions"] == ("go on", "wait")
    assert info["state_key"] == state_key("You are in room 0.")
    assert (info["task_description"], info["step"]) == ("Reach the end.", 0)

    text, reward, terminated, truncated, info = env.step("go on")
    assert text.endswith("[Step 1] You are in room 0.\n> go on/You are in room 1./go on\nwait/1")
    assert (reward, terminated, truncated) == (-0.5, False, False)
    assert (info["action"], info["action_valid"], info["action_reason"]) == ("go on", True, "")
    assert (info["raw_reward"], info["success"], info["time_limit"], info["step"]) == (
        -0.5,
        False,
        False,
        1,
    )

    _, reward, terminated, truncated, info = env.step("go on")
    assert (reward, terminated, truncated, info["success"]) == (2.0, True, False, True)
    with pytest.raises(EnvError, match=r"expected `reset` before `step`"):
        env.step("go on")


def test_a_step_before_the_first_reset_is_an_error():
    with pytest.raises(EnvError, match="expected `reset` before `step`"):
        LLMAgentEnv(Corridor()).step("go on")


def test_a_completion_that_is_not_text_is_an_error():
    env = LLMAgentEnv(Corridor())
    env.reset()
    with pytest.raises(ConfigError, match="text as `action`, got int"):
        env.step(3)


@pytest.mark.parametrize("completion", ["", "fly", "x" * 100_000])
def test_an_invalid_action_is_counted_and_never_sent(completion):
    raw = Corridor()
    env = LLMAgentEnv(raw, invalid_action_penalty=0.1, memory=SimpleMemory())
    _, first = env.reset(seed=0)
    text, reward, terminated, truncated, info = env.step(completion)
    assert raw.actions == []
    assert (reward, terminated, truncated) == (-0.1, False, False)
    assert (info["raw_reward"], info["action_valid"], info["success"], info["step"]) == (
        0.0,
        False,
        False,
        1,
    )
    assert info["action_reason"]
    assert info["state_key"] == first["state_key"]
    assert info["observation"] == first["observation"]
    assert info["admissible_actions"] == ["go on", "wait"]
    assert f"(invalid: {info['action_reason']})" in text
    assert len(text) < 1200
    env.step("go on")
    assert raw.actions == ["go on"]


def test_info_keys_of_the_environment_are_kept_and_ours_win():
    raw = Corridor(tell=("admissible_actions", "room_number"))
    env = LLMAgentEnv(raw)
    _, info = env.reset()
    assert info["room_number"] == 0
    assert env.step("go on")[4]["room_number"] == 1
    invalid = env.step("fly")[4]
    assert "room_number" not in invalid

    class Colliding(Corridor):
        def _result(self):
            return "text", {"observation": "other", "prompt": "p", "step": -1, "action": "a"}

    _, info = LLMAgentEnv(Colliding()).reset()
    assert (info["observation"], info["step"]) == ("text", 0)
    assert info["prompt"].text != "p"


def test_the_reward_is_scaled_and_the_raw_one_stays():
    env = LLMAgentEnv(Corridor(length=1), reward_scale=10.0)
    env.reset()
    _, reward, _, _, info = env.step("go on")
    assert (reward, info["raw_reward"]) == (20.0, 2.0)


@pytest.mark.parametrize("completion", ["wait", "nonsense"])
def test_the_step_limit_truncates_and_says_so(completion):
    env = LLMAgentEnv(Corridor(), max_steps=3)
    env.reset()
    for _ in range(2):
        assert env.step(completion)[3] is False
    _, _, terminated, truncated, info = env.step(completion)
    assert (terminated, truncated, info["time_limit"]) == (False, True, True)
    with pytest.raises(EnvError):
        env.step("wait")


def test_a_task_solved_at_the_limit_is_terminated_not_truncated():
    env = LLMAgentEnv(Corridor(length=2), max_steps=2)
    env.reset()
    env.step("go on")
    _, _, terminated, truncated, info = env.step("go on")
    assert (terminated, truncated, info["time_limit"], info["success"]) == (
        True,
        False,
        False,
        True,
    )


@pytest.mark.parametrize("key", ["success", "is_success", "won"])
@pytest.mark.parametrize("value", [True, np.True_, 1])
def test_success_is_read_from_any_of_its_names(key, value):
    class Named(Corridor):
        def _result(self):
            return "text", {key: value if self.room else False}

    env = LLMAgentEnv(Named())
    env.reset()
    assert env.step("<action>wait</action>")[4]["success"] is False
    assert env.step("<action>go on</action>")[4]["success"] is True


def test_seed_and_options_reach_the_environment():
    env = LLMAgentEnv(Corridor())
    assert env.reset(seed=5, options={"room": 1})[1]["observation"] == "You are in room 1."
    assert env.np_random_seed == env.env.np_random_seed == 5


def test_a_given_task_description_wins():
    assert (
        LLMAgentEnv(Corridor(), task_description="Mine.").reset()[1]["task_description"] == "Mine."
    )
    assert "Reach the end." in LLMAgentEnv(Corridor()).reset()[0]


# -- memories --------------------------------------------------------------------------------------------------------


class Diary(Memory):
    """As the guides write it: three methods, no call of super().__init__()."""

    def __init__(self, name):
        self.name = name

    def reset(self):
        self.lines = []

    def update(self, observation, action, reward, done, info):
        self.lines.append((observation, action, reward, done, info["observation"], info["step"]))

    def get_memory_text(self):
        return f"{self.name}: {len(self.lines)}"


def test_a_users_memory_works_untouched_and_is_told_the_state_before_the_action():
    memory = Diary("diary")
    env = LLMAgentEnv(Corridor(length=2), memory=memory, prompt=PromptTemplate(None, "{memory}"))
    assert env.memory is memory
    env.reset()
    env.step("go on")
    env.step("fly")
    text, *_ = env.step("go on")
    assert text == "diary: 3"
    assert memory.lines == [
        ("You are in room 0.", "go on", -0.5, False, "You are in room 1.", 1),
        ("You are in room 1.", "fly", 0.0, False, "You are in room 1.", 2),
        ("You are in room 1.", "go on", 2.0, True, "You are in room 2.", 3),
    ]
    env.reset()
    assert memory.lines == []


@pytest.mark.parametrize("method", ["reset", "update", "get_memory_text", "get_images"])
def test_a_memory_that_raises_is_named_with_the_step(method):
    def fail(*arguments):
        raise KeyError("step_summary")

    memory = type("Broken", (SimpleMemory,), {})()
    env = LLMAgentEnv(Corridor(), memory=memory)
    if method == "update":
        env.reset()
        env.step("go on")
    fail.__name__ = method
    setattr(memory, method, fail)
    with pytest.raises(
        EnvError, match=rf"`{method}` of the memory Broken .* KeyError: 'step_summary' at step \d"
    ):
        env.step("go on") if method == "update" else env.reset()


def test_a_memory_whose_text_is_no_string_is_an_error_with_its_name():
    class Numbers(SimpleMemory):
        def get_memory_text(self):
            return [1, 2]

    with pytest.raises(
        DataError, match="str from `get_memory_text` of Numbers, got list after step 0"
    ):
        LLMAgentEnv(Corridor(), memory=Numbers()).reset()


@pytest.mark.parametrize("memory", [WindowMemory, "window", 3])
def test_what_is_no_memory_is_refused(memory):
    with pytest.raises(ConfigError, match="instance of a Memory as `memory`"):
        LLMAgentEnv(Corridor(), memory=memory)


def test_an_empty_memory_that_is_false_is_still_used():
    class Sized(SimpleMemory):
        def __len__(self):
            return 0

    memory = Sized()
    assert LLMAgentEnv(Corridor(), memory=memory).memory is memory


# -- what environments return ----------------------------------------------------------------------------------------


def returning(result):
    class Returning(Corridor):
        def step(self, action):
            return result

    env = LLMAgentEnv(Returning())
    env.reset()
    return env


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (("o", 0.0, False, {}), r"five values .* got 4 values; `done` of the old Gym interface"),
        (("o",), "got 1 values"),
        (None, "got a NoneType"),
        (["o", 0.0, False, False, {}], "got a list"),
        (("o", float("nan"), False, False, {}), "finite number as reward .* got nan"),
        (("o", np.inf, False, False, {}), "finite number as reward"),
        (("o", None, False, False, {}), "finite number as reward .* got None"),
        (("o", 0.0, 1, False, {}), "a bool as `terminated` .* got 1"),
        (("o", 0.0, False, {}, False), "a bool as `truncated`"),
        (("o", 0.0, False, False, None), "a dict as info from `step` .* got NoneType"),
    ],
)
def test_what_is_not_a_gymnasium_step_is_one_clear_error(result, match):
    env = returning(result)
    with pytest.raises(EnvError, match=match):
        env.step("go on")
    with pytest.raises(EnvError, match="expected `reset` before `step`"):
        env.step("go on")


@pytest.mark.parametrize(
    ("result", "match"),
    [
        ("o", "two values .* got a str"),
        (("o",), "got 1 values"),
        (("o", []), "a dict as info from `reset`"),
    ],
)
def test_what_is_not_a_gymnasium_reset_is_one_clear_error(result, match):
    class Returning(Corridor):
        def reset(self, *, seed=None, options=None):
            return result

    with pytest.raises(EnvError, match=match):
        LLMAgentEnv(Returning()).reset()


def test_an_exception_of_the_environment_comes_out_as_it_is():
    class Failing(Corridor):
        def step(self, action):
            raise ZeroDivisionError("in the environment")

    env = LLMAgentEnv(Failing())
    env.reset()
    with pytest.raises(ZeroDivisionError, match="in the environment"):
        env.step("go on")


@pytest.mark.parametrize("key", [b"short", "sixteen letters.", None])
def test_a_state_key_of_the_wrong_kind_is_an_error(key):
    with pytest.raises(DataError, match="expected 16 bytes from `state_key`"):
        LLMAgentEnv(Corridor(), state_key=lambda observation: key).reset()


def test_a_state_key_function_of_ones_own_is_used():
    env = LLMAgentEnv(Corridor(), state_key=lambda observation: state_key(observation[:7]))
    first = env.reset()[1]["state_key"]
    assert env.step("go on")[4]["state_key"] == first == state_key("You are")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_steps": 0}, "`max_steps` of at least 1"),
        ({"invalid_action_penalty": -0.1}, "`invalid_action_penalty` of at least 0"),
        ({"invalid_action_penalty": np.nan}, "`invalid_action_penalty`"),
        ({"reward_scale": np.inf}, "finite `reward_scale`"),
    ],
)
def test_wrong_settings_are_refused(arguments, match):
    with pytest.raises(ConfigError, match=match):
        LLMAgentEnv(Corridor(), **arguments)


def test_what_is_no_environment_is_refused():
    with pytest.raises(ConfigError, match=r"a gymnasium\.Env or the id of one"):
        LLMAgentEnv(Corridor)
    with pytest.raises(ConfigError, match="belong around the environment inside"):
        LLMAgentEnv(gymnasium.wrappers.RecordEpisodeStatistics(LLMAgentEnv(Corridor())))


# -- action spaces ---------------------------------------------------------------------------------------------------


class Spaced(gymnasium.Env):
    """An environment with any spaces, which remembers the actions it was given."""

    def __init__(
        self, action_space, observation_space=None, observation=0, info=None, **attributes
    ):
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Discrete(5)
        self.observation, self.info = observation, info or {}
        self.taken = []
        vars(self).update(attributes)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return copy.deepcopy(self.observation), copy.deepcopy(self.info)

    def step(self, action):
        assert action in self.action_space
        self.taken.append(action)
        return copy.deepcopy(self.observation), 0.0, False, False, copy.deepcopy(self.info)


@pytest.mark.parametrize(
    ("attributes", "info"),
    [
        ({"action_names": ["left", "right", "stay"]}, {}),
        ({"action_names": {4: "left", 5: "right", 6: "stay"}}, {}),
        ({}, {"action_names": ("left", "right", "stay")}),
    ],
)
def test_discrete_actions_go_by_name(attributes, info):
    raw = Spaced(spaces.Discrete(3, start=4), info=info, **attributes)
    env = LLMAgentEnv(raw)
    assert env.reset()[1]["admissible_actions"] == ["left", "right", "stay"]
    assert env.step("right")[4]["action_valid"]
    assert not env.step("5")[4]["action_valid"]
    assert raw.taken == [5]


def test_discrete_actions_without_names_go_by_number():
    raw = Spaced(spaces.Discrete(3, start=-1))
    env = LLMAgentEnv(raw)
    assert env.reset()[1]["admissible_actions"] == ["-1", "0", "1"]
    env.step("1")
    assert raw.taken == [1]


def test_an_action_mask_restricts_the_admissible_actions():
    raw = Spaced(
        spaces.Discrete(3), info={"action_mask": np.array([1, 0, 1], np.int8)}, action_names="abc"
    )
    env = LLMAgentEnv(raw)
    assert env.reset()[1]["admissible_actions"] == ["a", "c"]
    assert not env.step("b")[4]["action_valid"]
    assert env.step("c")[4]["action_valid"]
    assert raw.taken == [2]


@pytest.mark.parametrize(
    ("info", "attributes", "match"),
    [
        ({}, {"action_names": ["a", "b"]}, "`action_names` with 3 different names"),
        ({}, {"action_names": ["a", "b", "b"]}, "`action_names` with 3 different names"),
        ({"action_mask": [1, 0]}, {}, "`action_mask` of 3 entries.* got 2"),
        (
            {"admissible_actions": ["north"]},
            {},
            "names of actions in `admissible_actions`, got 'north'",
        ),
    ],
)
def test_names_masks_and_spaces_that_do_not_fit_are_errors(info, attributes, match):
    with pytest.raises(EnvError, match=match):
        LLMAgentEnv(Spaced(spaces.Discrete(3), info=info, **attributes)).reset()


NESTED = spaces.Dict(
    {"a": spaces.Discrete(3), "b": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Text(5)])}
)


@pytest.mark.parametrize(
    ("space", "text", "element"),
    [
        (spaces.Box(-1, 1, (2,)), "[0.5, -1]", np.array([0.5, -1.0], np.float32)),
        (spaces.MultiDiscrete([3, 4]), "[2, 3]", np.array([2, 3])),
        (spaces.MultiBinary(2), "[1, 0]", np.array([1, 0], np.int8)),
        (
            NESTED,
            '{"a": 2, "b": [[0, 1], "abc"]}',
            {"a": np.int64(2), "b": (np.array([0, 1], np.float32), "abc")},
        ),
    ],
)
def test_other_spaces_take_json(space, text, element):
    raw = Spaced(space)
    env = LLMAgentEnv(raw, parser=ChoiceParser())
    first, info = env.reset()
    assert info["admissible_actions"] is None
    assert "An action is JSON of an element of" in first
    assert env.step(text)[4]["action_valid"]
    assert state_key(raw.taken[0]) == state_key(element)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Box(-1, 1, (2,)), "[0.5, 3]"),
        (spaces.Box(-1, 1, (2,)), "[0.5]"),
        (spaces.Box(-np.inf, np.inf, (1,)), "[Infinity]"),
        (spaces.Box(-1, 1, (2,)), "[[[" * 5000),
        (spaces.MultiDiscrete([3, 4]), "[1.5, 2]"),
        (spaces.MultiDiscrete([3, 4]), "[1, 99999999999999999999999]"),
        (NESTED, '{"a": 2}'),
        (NESTED, '{"a": 2, "b": [[0, 1], "abc"], "c": 1}'),
        (NESTED, "7"),
    ],
)
def test_json_that_is_no_element_is_an_invalid_action(space, text):
    raw = Spaced(space)
    env = LLMAgentEnv(raw, parser=ChoiceParser())
    env.reset()
    info = env.step(text)[4]
    assert (info["action_valid"], raw.taken) == (False, [])
    assert info["action_reason"].startswith("expected JSON of an element")


def test_the_parser_is_chosen_by_what_the_environment_tells():
    free = LLMAgentEnv(Corridor(tell=()))
    text, info = free.reset()
    assert isinstance(free.parser, TagParser)
    assert (info["admissible_actions"], info["allowed_completions"]) == (None, None)
    assert "<action>" in text
    assert "Admissible" not in text
    assert free.step("<action>go on</action>")[4]["action_valid"]
    listed = LLMAgentEnv(Corridor())
    assert "Admissible actions:\ngo on\nwait" in listed.reset()[0]
    assert isinstance(listed.parser, ChoiceParser)


# -- observations ----------------------------------------------------------------------------------------------------


IMAGE = np.arange(8 * 9 * 3, dtype=np.uint8).reshape(8, 9, 3)
OBSERVATIONS = {
    "number": (3, spaces.Discrete(5)),
    "vector": (np.array([0.25, -1.0], np.float32), spaces.Box(-1, 1, (2,))),
    "grey image": (np.zeros((30, 40), np.uint8), spaces.Box(0, 255, (30, 40), np.uint8)),
    "image": (IMAGE, spaces.Box(0, 255, (8, 9, 3), np.uint8)),
    "dict": (
        {"at": np.array([1, 2]), "view": IMAGE},
        spaces.Dict(
            {"at": spaces.MultiDiscrete([4, 4]), "view": spaces.Box(0, 255, (8, 9, 3), np.uint8)}
        ),
    ),
    "tuple": (
        (1, np.array([1], np.int8)),
        spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(1)]),
    ),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
@pytest.mark.parametrize("memory", [SimpleMemory(), FrameMemory(2)], ids=["simple", "frames"])
def test_gymnasiums_checker_passes_without_a_warning_whatever_the_observation(name, memory):
    observation, space = OBSERVATIONS[name]
    env = LLMAgentEnv(Spaced(spaces.Discrete(2), space, observation), memory=memory)
    check_env(env)


@pytest.mark.parametrize("make", [
    Corridor,
    lambda: gymnasium.make("MountainCar-v0"),
    lambda: longstep.make("longstep/KeyDoor-v0"),
    lambda: longstep.make("Acrobot-v1", memory=WindowMemory(1)),
])  # fmt: skip
def test_gymnasiums_checker_passes_without_a_warning_on_real_environments(make):
    env = make()
    check_env(
        env if isinstance(env, LLMAgentEnv) else LLMAgentEnv(env),
        skip_render_check=not isinstance(env, Corridor),
    )


def test_an_image_goes_beside_the_text():
    env = LLMAgentEnv(
        Spaced(spaces.Discrete(2), observation={"note": "see <image>", "view": IMAGE})
    )
    text, info = env.reset()
    assert "note: see <image >\nview: <image>" in text
    assert len(info["prompt"].images) == 1
    assert np.array_equal(info["prompt"].images[0], IMAGE)
    assert np.array_equal(info["observation"]["view"], IMAGE)


def test_frames_of_earlier_steps_come_before_the_current_one():
    raw = Spaced(spaces.Discrete(2), observation=IMAGE)
    env = LLMAgentEnv(raw, memory=FrameMemory(2))
    env.reset()
    raw.observation = IMAGE + 1
    text, _, _, _, info = env.step("0")
    assert text.count("<image>") == len(info["prompt"].images) == 2
    assert np.array_equal(info["prompt"].images[0], IMAGE)
    assert np.array_equal(info["prompt"].images[1], IMAGE + 1)


def test_a_function_of_ones_own_gives_the_text_also_in_memory():
    env = LLMAgentEnv(
        Spaced(spaces.Discrete(2), observation=3),
        memory=SimpleMemory(),
        observation_text=lambda n: f"number {n}",
    )
    assert "Current observation:\nnumber 3" in env.reset()[0]
    assert "[Step 1] number 3" in env.step("0")[0]
    assert "number 3" not in SimpleMemory().observation_text(3)


def test_an_observation_kept_by_the_caller_is_never_handed_out_again():
    env = LLMAgentEnv(Spaced(spaces.Discrete(2), observation=np.zeros(3)))
    _, first = env.reset()
    second = env.step("invalid")[4]
    assert not np.shares_memory(first["observation"], second["observation"])
    assert first["admissible_actions"] is not second["admissible_actions"]


# -- wrapping --------------------------------------------------------------------------------------------------------


def test_wrapping_again_keeps_the_settings_unless_they_are_given():
    prompt, parser = PromptTemplate(None, "{memory}"), TagParser("do")
    inner = LLMAgentEnv(
        Corridor(), memory=WindowMemory(7), prompt=prompt, parser=parser, max_steps=9, task_description="T",
        invalid_action_penalty=0.5, reward_scale=3.0, observation_text=str.upper,
    )  # fmt: skip
    outer = LLMAgentEnv(inner, reward_scale=1.0, max_steps=4)
    assert outer.env is inner.env
    assert (outer.prompt, outer.parser, outer.task_description) == (prompt, parser, "T")
    assert (outer.max_steps, outer.reward_scale, outer.invalid_action_penalty) == (4, 1.0, 0.5)
    assert outer.observation_text is str.upper
    assert outer.memory is not inner.memory
    assert outer.memory.window_size == 7


def test_a_prompt_that_was_chosen_for_another_parser_is_chosen_anew():
    inner = LLMAgentEnv(Corridor())
    inner.reset()
    outer = LLMAgentEnv(inner, parser=JsonParser("act"))
    assert 'key "act"' in outer.reset()[0]


def test_attributes_are_read_from_the_environment_at_the_time_of_reading():
    raw = Corridor(render_mode="ansi")
    env = LLMAgentEnv(raw)
    env.reset()
    assert (env.room, env.render(), env.render_mode, env.metadata["render_fps"]) == (
        0,
        "room 0",
        "ansi",
        4,
    )
    env.step("go on")
    assert env.room == env.get_wrapper_attr("room") == 1
    assert env.has_wrapper_attr("room")
    assert not env.has_wrapper_attr("rooom")
    assert env.set_wrapper_attr("room", 2)
    assert (raw.room, env.room) == (2, 2)
    assert env.set_wrapper_attr("max_steps", 5)
    assert env.max_steps == 5
    assert not env.set_wrapper_attr("new", 1, force=False)
    assert env.set_wrapper_attr("new", 1)
    assert env.new == 1
    with pytest.raises(AttributeError, match="rooom"):
        _ = env.rooom
    assert str(env).startswith("<LLMAgentEnv<Corridor")
    env.close()
    assert raw.closed == 1


def test_copies_are_independent_and_pickling_works():
    env = LLMAgentEnv(Corridor(), memory=SimpleMemory())
    env.reset()
    env.step("go on")
    for twin in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        twin.step("go on")
        assert (twin.room, env.room) == (2, 1)
        assert "Step 2" in twin.memory.get_memory_text()
    assert "Step 2" not in env.memory.get_memory_text()


def test_the_own_limit_of_an_environment_is_taken_over():
    assert LLMAgentEnv(gymnasium.make("MountainCar-v0")).max_steps == 200
    raw = Corridor()
    raw.max_steps = 12
    env = LLMAgentEnv(raw)
    assert env.max_steps == 12
    env.reset()
    assert "Steps taken: 1 of 12." in env.step("wait")[0]


def test_a_step_within_a_gymnasium_wrapper_counts_alike():
    env = gymnasium.wrappers.RecordEpisodeStatistics(LLMAgentEnv(Corridor(length=2)))
    env.reset(seed=0)
    env.step("go on")
    *_, info = env.step("go on")
    assert info["episode"]["l"] == 2


def test_defaults_of_the_environments_class_are_used():
    class Opinionated(Corridor):
        default_memory = WindowMemory(5)
        default_prompt = PromptTemplate(None, "own {memory}")

        def default_parser(self):
            return TagParser("do")

    first, second = LLMAgentEnv(Opinionated()), LLMAgentEnv(Opinionated())
    assert first.memory.window_size == 5
    assert len({id(first.memory), id(second.memory), id(Opinionated.default_memory)}) == 3
    assert (first.reset()[0], first.parser.tag) == ("own ", "do")
    assert LLMAgentEnv(Opinionated(), prompt=PromptTemplate(None, "given")).reset()[0] == "given"


def test_the_same_seed_and_completions_give_the_same_bytes():
    def play():
        env = longstep.make("longstep/KeyDoor-v0", memory=SimpleMemory())
        out = [env.reset(seed=3)]
        rng = np.random.default_rng(0)
        for _ in range(20):
            actions = [*out[-1][-1]["admissible_actions"], "nonsense"]
            out.append(env.step(actions[rng.integers(len(actions))]))
            if out[-1][2]:
                break
        return pickle.dumps(
            [(step[0], step[-1]["state_key"], step[-1]["prompt"].text) for step in out]
        )

    assert play() == play()


def test_the_budget_holds_over_a_whole_episode():
    env = LLMAgentEnv(
        Corridor(length=1000),
        memory=SimpleMemory(),
        prompt=PromptTemplate(
            "{task_description}", "{memory}\n{current_observation}", max_tokens=300
        ),
    )
    env.reset()
    lengths = []
    for _ in range(500):
        text, *_, info = env.step("go on")
        assert len(text.encode()) == info["prompt"].num_tokens <= 300
        lengths.append(info["prompt"].num_tokens)
    assert min(lengths[20:]) > 260
    assert info["prompt"].dropped[0].part == "memory"
    assert re.search(r"room 500\.$", text)


def test_no_warning_is_given_in_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = longstep.make("MountainCar-v0")
        env.reset(seed=0)
        env.step("1")


def test_a_prompt_that_fits_no_more_truncates_and_keeps_the_reward() -> None:
    class Growing(gymnasium.Env[str, str]):
        observation_space = action_space = longstep.TextSpace()

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.text = "x"
            return self.text, {}

        def step(self, action: str) -> Any:
            self.text *= 100
            return self.text, 1.0, False, False, {}

    template = PromptTemplate(None, "{current_observation}", max_tokens=50, drop_order=())
    env = LLMAgentEnv(Growing(), prompt=template, memory=longstep.Memory())
    env.reset(seed=0)
    text, reward, terminated, truncated, info = env.step("<action>go</action>")
    assert (text, reward, terminated, truncated) == ("", 1.0, False, True)
    assert info["over_budget"] is True
    assert "at most 50 tokens" in info["budget_error"]


class OneBuffer(gymnasium.Env):
    """Returns the same array at every step, written over each time."""

    observation_space = spaces.Box(0, 9, (2,), np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.buffer = np.zeros(2, np.int64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.buffer[:] = 0
        return self.buffer, {}

    def step(self, action):
        self.buffer += 1
        return self.buffer, 0.0, False, False, {}


def test_an_environment_that_writes_over_its_observation_does_not_change_the_past() -> None:
    env = LLMAgentEnv(OneBuffer(), memory=WindowMemory(2))
    _, first = env.reset(seed=0)
    env.step("1")
    text, *_, info = env.step("1")
    assert (first["observation"].tolist(), info["observation"].tolist()) == ([0, 0], [2, 2])
    assert "[Step 1] [0, 0]" in text
    assert "[Step 2] [1, 1]" in text


class Greedy(Memory):
    """Takes everything out of the info it is shown."""

    def update(self, observation, action, reward, done, info):
        info.clear()


def test_a_memory_cannot_change_the_info_of_the_step() -> None:
    env = LLMAgentEnv("longstep/KeyDoor-v0", memory=Greedy())
    env.reset(seed=0)
    *_, info = env.step("look")
    assert len(info["state_key"]) == 16


class Telling(OneBuffer):
    """Puts `told` into the info of each step, and gives `reward`."""

    def __init__(self, told: dict[str, Any], reward: Any = 0.0) -> None:
        super().__init__()
        self.told, self.given = told, reward

    def step(self, action):
        return self.buffer, self.given, False, False, self.told


@pytest.mark.parametrize(
    ("told", "reward", "match"),
    [
        ({"success": "False"}, 0.0, "expected a bool as info"),
        ({"won": np.array([True, False])}, 0.0, "expected a bool as info"),
        ({}, "1", "expected a finite number as reward"),
        ({"admissible_actions": "1"}, 0.0, "expected a list of texts"),
        ({"admissible_actions": 5}, 0.0, "expected a list of texts"),
    ],
)
def test_texts_where_numbers_or_lists_belong_are_errors(told, reward, match) -> None:
    env = LLMAgentEnv(Telling(told, reward))
    env.reset(seed=0)
    with pytest.raises(EnvError, match=match):
        env.step("1")
