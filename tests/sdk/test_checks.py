"""check_env: every rule with an environment that breaks exactly that one, and sound environments that pass."""

import random
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from longstep import LLMAgentEnv, TextSpace, check_env, register, registry
from longstep.errors import ConfigError, EnvContractError, EnvError
from longstep.plain_data import complain
from longstep.state_key import state_key


class Sound(gymnasium.Env):
    """A walk of at most `max_steps` steps from a random place to 0, which keeps every rule. Faults are subclasses."""

    max_steps = 8

    def __init__(self):
        self.action_space = spaces.Discrete(2)
        self.observation_space = TextSpace()
        self.action_names = ["down", "up"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = self.start(), 0
        return self.observe(), self.tell()

    def step(self, action):
        if self.over():
            raise EnvError("the episode is over")
        self.place += 1 if action else -1
        self.time += 1
        solved = self.place == 0
        return (
            self.observe(),
            self.pay(),
            *self.ends(solved, self.time >= self.max_steps),
            self.tell(),
        )

    def start(self):
        return int(self.np_random.integers(1, 5))

    def observe(self):
        return f"You are at {self.place}."

    def tell(self):
        return {"success": self.place == 0, "places": [self.place]}

    def pay(self):
        return float(self.place == 0)

    def ends(self, solved, late):
        return solved, late and not solved

    def over(self):
        return self.place == 0


class RaisesAtAnAction(Sound):
    def pay(self):
        if self.place == 7:
            raise ZeroDivisionError("division by zero")
        return super().pay()


class RaisesAtUnknownText(Sound):
    def __init__(self):
        super().__init__()
        self.action_space = TextSpace()

    def step(self, action):
        return super().step(["down", "up"].index(action))


class IgnoresItsSeed(Sound):
    def start(self):
        self.stream = getattr(self, "stream", np.random.default_rng(0))
        return int(self.stream.integers(1, 5))


class ShowsACounter(Sound):
    num_resets = 0

    def start(self):
        self.num_resets += 1
        return super().start()

    def observe(self):
        return f"{super().observe()} Episode {self.num_resets}."


class PaysAtRandom(Sound):
    def pay(self):
        self.stream = getattr(self, "stream", np.random.default_rng(0))
        return float(self.stream.normal())


class MembersStartDifferently(Sound):
    num_members = 0

    def __init__(self):
        super().__init__()
        type(self).num_members += 1
        self.offset = type(self).num_members

    def start(self):
        return super().start() + self.offset


class MembersShareState(Sound):
    """The place lives in the class, so members that are stepped in turn push each other."""

    shared = {}  # noqa: RUF012 - this is the fault

    @property
    def place(self):
        return self.shared.get("place", 1)

    @place.setter
    def place(self, value):
        self.shared["place"] = value


class DrawsFromRandom(Sound):
    def start(self):
        return random.randint(1, 4)


class DrawsFromNumpy(Sound):
    def start(self):
        return int(np.random.randint(1, 5))


class SeedsRandom(Sound):
    def start(self):
        random.seed(3)
        return super().start()


class DrawsFromRandomInAStep(Sound):
    def pay(self):
        random.random()
        return super().pay()


class ReturnsAnObject(Sound):
    def observe(self):
        return object()


class ReusesItsBuffer(Sound):
    def __init__(self):
        super().__init__()
        self.buffer = np.zeros(1)
        self.observation_space = spaces.Box(-20, 20, (1,), np.float64)

    def observe(self):
        self.buffer[0] = self.place
        return self.buffer


class PaysNaN(Sound):
    def pay(self):
        return float("nan") if self.place == 4 else super().pay()


class PaysInfinity(Sound):
    def pay(self):
        return np.inf


class PaysNothing(Sound):
    def pay(self):
        return None


class ReturnsFourValues(Sound):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class ResetsWithoutInfo(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class GoesOnAfterTheEnd(Sound):
    def over(self):
        return False


class PaysAfterTheEnd(Sound):
    def step(self, action):
        if self.place == 0:
            return self.observe(), 9.9, True, False, self.tell()
        return super().step(action)


class SwapsTheEnds(Sound):
    def ends(self, solved, late):
        return late and not solved, solved


class SetsBothEnds(Sound):
    def ends(self, solved, late):
        return (solved or late,) * 2


class TerminatesAtTheLimit(Sound):
    def start(self):
        return 20

    def ends(self, solved, late):
        return solved or late, False


class TruncatesInInfoOnly(Sound):
    def ends(self, solved, late):
        return solved or late, False

    def tell(self):
        return super().tell() | {
            "TimeLimit.truncated": self.time >= self.max_steps and self.place != 0
        }


class FlagsAreNumbers(Sound):
    def ends(self, solved, late):
        return int(solved), late


class TellsASet(Sound):
    def tell(self):
        return super().tell() | {"inventory": [{"items": {"key"}}]}


class TellsALargeNumber(Sound):
    def tell(self):
        return super().tell() | {"hash": 2**70}


class AdmitsWhatIsNoAction(Sound):
    def tell(self):
        return super().tell() | {"admissible_actions": ["down", "sideways"]}


class LeavesItsSpace(Sound):
    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Text(5)


class TakesNoSeed(Sound):
    def reset(self, *, options=None):
        return super().reset()


FAULTS = [
    (RaisesAtAnAction, "no-crash", "got ZeroDivisionError: division by zero at action 1"),
    (RaisesAtUnknownText, "no-crash", "should change nothing, or its info should list"),
    (TakesNoSeed, "no-crash", "got TypeError: .*; it should take `seed`"),
    (IgnoresItsSeed, "seed", r"another observation at reset\(seed=\d\); begin `reset` with"),
    (ShowsACounter, "seed", "keep time and counters out of observations"),
    (PaysAtRandom, "seed", "another `reward` at step 1"),
    (MembersStartDifferently, "group", r"another observation at reset\(seed=0\)"),
    (MembersShareState, "group", "keep it in the instance, not in the class"),
    (DrawsFromRandom, "global-rng", "`reset` to leave the global generator of `random` alone"),
    (DrawsFromNumpy, "global-rng", "generator of `numpy.random` alone.*draw from `self.np_random`"),
    (SeedsRandom, "global-rng", "`random` alone"),
    (DrawsFromRandomInAStep, "global-rng", "`step` to leave"),
    (ReturnsAnObject, "state-key", "with a state key, got object at reset"),
    (ReusesItsBuffer, "state-key", "one that changed at step 1; return a copy"),
    (PaysNaN, "finite-reward", "got nan"),
    (PaysInfinity, "finite-reward", "got inf"),
    (PaysNothing, "finite-reward", "got None"),
    (ReturnsFourValues, "five-values", "got 4 values"),
    (ResetsWithoutInfo, "five-values", "two values .* got a str"),
    (FlagsAreNumbers, "five-values", "a bool as `terminated`"),
    (GoesOnAfterTheEnd, "after-end", "got an episode that goes on"),
    (PaysAfterTheEnd, "after-end", "got a reward of 9.9"),
    (SwapsTheEnds, "ends", "`terminated` with a solved task, got `truncated`"),
    (SetsBothEnds, "ends", "one of `terminated` and `truncated`"),
    (TerminatesAtTheLimit, "ends", r"`truncated` at the limit of 8 steps, got `terminated`"),
    (TruncatesInInfoOnly, "ends", "`truncated` at the time limit"),
    (TellsASet, "plain-values", r'a set at info\["inventory"\]\[0\]\["items"\] after reset'),
    (TellsALargeNumber, "plain-values", r'an int beyond 64 bits at info\["hash"\]'),
    (AdmitsWhatIsNoAction, "admissible-actions", "got 'sideways'"),
    (LeavesItsSpace, "gymnasium", "is not within the observation space"),
]


@pytest.mark.parametrize(
    ("fault", "rule", "advice"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_fault_is_found_and_named_with_what_to_do(fault, rule, advice):
    with pytest.raises(EnvContractError, match=rf"(?s)^rule `{rule}`: expected .*{advice}"):
        check_env(fault(), num_steps=80)


@pytest.mark.parametrize(
    "fault", [MembersStartDifferently, MembersShareState, IgnoresItsSeed, SetsBothEnds]
)
def test_a_fault_is_found_by_id_by_class_and_within_a_wrapper_too(fault):
    register("test/Faulty-v0", fault)
    try:
        for subject in ("test/Faulty-v0", fault, LLMAgentEnv(fault())):
            with pytest.raises(EnvContractError):
                check_env(subject, num_steps=20)
    finally:
        registry.remove("test/Faulty-v0")


def test_the_sound_environment_passes_and_the_report_says_what_was_seen():
    report = check_env(Sound(), num_steps=100)
    assert report.num_steps == 100
    assert report.num_terminated > 2
    assert 5 < report.num_states < 20
    assert report.warnings == ()


def test_an_unstable_state_key_function_is_found():
    calls = []

    def unstable(observation):
        calls.append(observation)
        return state_key(len(calls))

    with pytest.raises(EnvContractError, match="rule `state-key`: expected equal keys"):
        check_env(LLMAgentEnv(Sound(), state_key=unstable))


def test_a_function_that_gives_the_environment_is_called_twice():
    made = []

    class Limited(Sound):
        def __init__(self, size):
            super().__init__()
            made.append(size)

        def __deepcopy__(self, memo):
            raise TypeError("holds a socket")

    check_env(lambda: Limited(3), num_steps=20)
    assert made == [3, 3]
    with pytest.raises(
        ConfigError,
        match=r"a second environment like .* TypeError: holds a socket; pass a function",
    ):
        check_env(Limited(3), num_steps=20)


def test_a_player_reaches_what_random_play_does_not():
    class Far(Sound):
        max_steps = 60

        def start(self):
            return 30

    assert check_env(Far, num_steps=100).num_terminated == 0
    report = check_env(Far, num_steps=100, player=lambda env, info: "down")
    assert report.num_terminated == 3


def test_a_faulty_end_that_only_a_player_reaches_is_found():
    class Far(GoesOnAfterTheEnd):
        max_steps = 60

        def start(self):
            return 30

    check_env(Far, num_steps=50)
    with pytest.raises(EnvContractError, match="after-end"):
        check_env(Far, player=lambda env, info: "down")


@pytest.mark.parametrize(
    "id",
    ["longstep/KeyDoor-v0", "longstep/Sokoban-v0", "FrozenLake-v1", "CartPole-v1", "Pendulum-v1"],
)
def test_what_is_shipped_and_what_gymnasium_ships_passes(id):
    report = check_env(id, num_steps=60)
    if id.startswith("longstep"):
        assert report.warnings == ()


def test_expert_play_passes_on_the_built_in_key_and_door():
    report = check_env(
        "longstep/KeyDoor-v0", player=lambda env, info: env.unwrapped.expert_action()
    )
    assert report.num_terminated > 3


def test_checking_leaves_the_global_generators_and_warnings_alone():
    before = random.getstate(), np.random.get_state()[1].tobytes()
    filters = list(warnings.filters)
    check_env(Sound, num_steps=20)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before
    assert warnings.filters == filters


def test_an_environment_made_for_the_check_is_closed_and_a_given_one_is_not():
    closed = []

    class Closing(Sound):
        def close(self):
            closed.append(self)

    given = Closing()
    check_env(given, num_steps=20)
    assert given not in closed
    assert len(closed) == 2
    closed.clear()
    check_env(Closing, num_steps=20)
    assert len(set(closed)) == 2


def test_no_steps_are_refused():
    with pytest.raises(ConfigError, match="`num_steps` of at least 1"):
        check_env(Sound(), num_steps=0)


DEEP = []
for _ in range(100):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value",
    [
        None, True, -(2**63), 2**64 - 1, 0.5, float("inf"), "text", b"bytes", [1, (2, {"a": {3: 4}})],
        np.zeros((2, 3), np.float16), np.int8(3), np.bool_(True), np.array([1 + 2j]), np.float64("nan"),
    ],
    ids=repr,
)  # fmt: skip
def test_plain_values_are_allowed(value):
    assert complain({"value": [value]}) == ""


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({1}, "a set at value"),
        (2**64, "an int beyond 64 bits at value"),
        (-(2**63) - 1, "an int beyond 64 bits at value"),
        (float("nan"), "NaN at value"),
        ("\ud800", "a str with a lone surrogate at value"),
        ({(1, 2): 3}, "a key of type tuple in value"),
        ({True: 3}, "a key of type bool in value"),
        ({2**70: 3}, "an int beyond 64 bits at a key of value"),
        ({"a": [0, object()]}, 'a object at value["a"][1]'),
        (np.array(["a"]), "an array of dtype <U1 at value"),
        (np.array([None]), "an array of dtype object at value"),
        (np.datetime64("2026-01-01"), "an array of dtype datetime64[D] at value"),
        (1j, "a complex at value"),
        (DEEP, "more than 64 levels"),
    ],
)
def test_other_values_are_named_with_their_place(value, problem):
    assert complain(value).startswith(problem)
