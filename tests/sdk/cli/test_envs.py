"""`longstep envs` and `longstep check-env`."""

import gymnasium
import pytest

import longstep
from longstep.cli import main


class ForgetfulEnv(gymnasium.Env):
    """Ignores the seed of its reset."""

    observation_space = action_space = longstep.TextSpace()
    resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        ForgetfulEnv.resets += 1
        return f"reset {ForgetfulEnv.resets}", {"admissible_actions": ["wait"]}

    def step(self, action):
        return "waiting", 0.0, False, False, {"admissible_actions": ["wait"]}


def register(name: str, entry_point, request: pytest.FixtureRequest) -> None:
    longstep.register(name, entry_point, max_steps=5)
    request.addfinalizer(lambda: longstep.registry.remove(name))


def test_list_names_each_environment_and_says_what_it_is(capsys) -> None:
    assert main(["envs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(longstep.registry)
    assert all(len(line.split()) > 1 for line in lines)


def test_environment_that_cannot_be_loaded_hides_no_other(capsys, request) -> None:
    register("test/Broken-v0", "no_such_module:Env", request)
    assert main(["envs"]) == 0
    shown = capsys.readouterr().out
    assert "(cannot be loaded: ModuleNotFoundError: No module named 'no_such_module')" in shown
    assert "longstep/KeyDoor-v0" in shown


def test_one_environment_shows_its_first_prompt(capsys) -> None:
    assert main(["envs", "longstep/KeyDoor-v0", "--seed", "3"]) == 0
    shown = capsys.readouterr().out
    env = longstep.make("longstep/KeyDoor-v0")
    _, info = env.reset(seed=3)
    env.close()
    assert f"limit: {env.max_steps} steps" in shown
    for message in info["prompt"].messages:
        assert f"[{message.role}]\n{message.content}" in shown


def test_unknown_environment_names_the_nearest(capsys) -> None:
    assert main(["envs", "longstep/KeyDor-v0"]) == 1
    assert "did you mean `longstep/KeyDoor-v0`?" in capsys.readouterr().err


def test_wrong_constructor_argument_is_a_usage_error(capsys) -> None:
    assert main(["envs", "longstep/KeyDoor-v0", "--kwargs", '{"sizze": 4}']) == 2
    assert "sizze" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{sizze", "[1]", "4"])
def test_arguments_that_are_no_json_object_are_a_usage_error(capsys, text: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["envs", "longstep/KeyDoor-v0", "--kwargs", text])
    assert "expected a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["longstep/KeyDoor-v0", "longstep/Sokoban-v0"])
def test_shipped_environments_pass_the_check(capsys, name: str) -> None:
    assert main(["check-env", name]) == 0
    assert capsys.readouterr().out == f"{name}: no fault found\n"


def test_faulty_environment_fails_the_check(capsys, request) -> None:
    register("test/Forgetful-v0", ForgetfulEnv, request)
    assert main(["check-env", "test/Forgetful-v0"]) == 1
    assert "seed" in capsys.readouterr().err
