"""Actors that cannot be started, or are not there: one clear error that tells all."""

import shutil
import sys

import pytest
from actor_helpers import PLAIN, gather, parts, plain_pool, request

from longstep.errors import ConfigError, DeadlineError, LongstepError, PolicyError
from longstep_bindings.actors import ActorPool, ActorSpec, open_policy
from longstep_bindings.actors.process import ActorProcess, StartSettings
from longstep_bindings.engines.opening import open_engine
from longstep_bindings.rpc import Server
from longstep_bindings.testing import kill
from longstep_bindings.transport import private_ipc_address, tidy_ipc


def start(model="any", **spec):
    ActorPool(ActorSpec(model=model, engine=spec.pop("engine", PLAIN), **spec)).close()


def test_a_model_that_the_engine_refuses_is_its_own_error():
    with pytest.raises(ConfigError, match="expected a model, got `refused`"):
        start("refused")


def test_an_engines_start_up_error_arrives_with_its_traceback():
    with pytest.raises(LongstepError, match="expected 7 layers, got 3") as caught:
        start("broken")
    assert "Traceback" in str(caught.value)
    assert "plain_engine.py" in str(caught.value)


def test_an_actor_that_crashes_while_it_starts_is_told_with_its_last_words():
    with pytest.raises(PolicyError, match="SIGSEGV before it was ready") as caught:
        start("crash")
    assert "about to crash: device lost" in str(caught.value)


def test_an_engine_that_forks_does_not_keep_its_pool_waiting():
    with ActorPool(ActorSpec(model="fork", engine=PLAIN), start_timeout_s=30.0) as pool:
        assert pool.all_ready


def test_a_folder_that_is_no_model_is_refused_by_transformers(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ConfigError, match="expected a causal language model"):
        start(str(tmp_path), engine="transformers")


def test_an_unknown_engine_is_told_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean `transformers`"):
        start(engine="transfomers")


def test_an_unknown_option_is_named():
    with pytest.raises(ConfigError, match="colour"):
        start(options={"colour": "red"})


def test_an_interpreter_that_is_not_there_is_named():
    with pytest.raises(PolicyError, match="/no/such/python"):
        start(python="/no/such/python")


def test_an_interpreter_without_longstep_says_what_it_lacks(tmp_path):
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    script.chmod(0o755)
    with pytest.raises(PolicyError, match="longstep_bindings"):
        start(python=str(script))


def test_an_actor_runs_in_an_interpreter_of_its_own(tmp_path):
    script = tmp_path / "python"
    paths = ":".join(path for path in sys.path if path)
    script.write_text(f'#!/bin/sh\nexport PYTHONPATH={paths}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    with open_policy("any", engine=PLAIN, python=str(script)) as policy:
        policy.submit([request("a", "say x")])
        assert parts(gather(policy, 1)["a"])[0] == "x"


def test_a_start_that_takes_too_long_is_given_up():
    with pytest.raises(DeadlineError, match="ready within 1 s"):
        plain_pool(options={"start_s": 60.0}, start_timeout_s=1.0)


def test_one_bad_actor_of_several_ends_the_others():
    with pytest.raises(ConfigError):
        plain_pool(2, model="refused")


def test_an_actor_is_replaced_though_the_folder_of_its_log_is_gone(tmp_path):
    folder = tmp_path / "logs"
    with plain_pool(log_folder=folder) as pool:
        shutil.rmtree(folder)
        kill(pool.actor_pids[0])
        pool.submit([request("a", "say x")])
        assert parts(gather(pool, 1)["a"])[0] == "x"
        assert (folder / "actor-0.log").is_file()


def test_a_log_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(PolicyError, match="expected to write the actor's output to"):
        ActorProcess(
            ActorSpec(model="any", engine=PLAIN),
            StartSettings(start_timeout_s=10.0, max_in_flight=1, lost_after_s=30.0),
            log=tmp_path,
        )


def test_an_address_where_nobody_is_is_named(monkeypatch):
    monkeypatch.setattr("longstep_bindings.actors.link._CONNECT_S", 0.5)
    address = private_ipc_address()
    try:
        with pytest.raises(DeadlineError, match=f"expected a server at {address}"):
            open_policy(addresses=address)
    finally:
        tidy_ipc(address)


def test_a_server_that_is_no_actor_is_refused():
    class Counter:
        name, version, methods = "example.counter", 1, {}

        def close_session(self, session):
            pass

    with (
        Server(Counter()) as server,
        pytest.raises(ConfigError, match=r"example\.counter.*longstep\.actor"),
    ):
        open_policy(addresses=server.address)


@pytest.mark.parametrize(
    "given",
    [
        {"model": "out/model"},
        {"engine": "vllm"},
        {"num_actors": 2},
        {"options": {"dtype": "bfloat16"}},
        {"python": "python3"},
        {"environ": {"A": "1"}},
        {"log_folder": "out"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_only_new_actors_can_be_told_is_refused_beside_addresses(given):
    with pytest.raises(ConfigError, match=f"expected no `{next(iter(given))}` beside `addresses`"):
        open_policy(addresses="ipc:///nowhere", **given)


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"max_batch": 0}, {"gather_s": -1.0}])
def test_options_that_cannot_be_meant_are_refused(options, tiny):
    with pytest.raises(ConfigError, match=f"`{next(iter(options))}`"):
        open_engine("transformers", tiny[2], **options)


def test_an_address_on_another_machine_needs_keys():
    with pytest.raises(ConfigError, match="CURVE keys"):
        open_policy(addresses="tcp://192.0.2.1:5555")
