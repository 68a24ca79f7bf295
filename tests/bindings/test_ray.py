"""Servers on a real Ray cluster of two nodes, both on this machine."""

from __future__ import annotations

import os
import signal
from contextlib import closing

import pytest

from longstep import EnginePolicy, FunctionPolicy, Rollout, Task, make
from longstep.errors import ConfigError, DeadlineError, LongstepError
from longstep.vector import GroupVectorEnv
from longstep_bindings.actors import ActorPolicy, ActorPool, ActorSpec
from longstep_bindings.engines.transformers_engine import TransformersEngine
from longstep_bindings.envs import RemoteVectorEnv
from longstep_bindings.envs.spec import EnvSpec
from longstep_bindings.ray import Placement, place_actors, place_env_servers
from longstep_trainers.embedded import build_embedded, corpus_of

KEYDOOR = "longstep/KeyDoor-v0"
TASKS = [Task(env_id=KEYDOOR, seed=seed) for seed in range(6)]


ray = pytest.importorskip("ray")


def test_no_cluster_is_a_clear_error():
    with pytest.raises(ConfigError, match=r"call `ray\.init` first"):
        place_env_servers(EnvSpec(env_id=KEYDOOR), num_servers=1)


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20},
    )
    cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def _play(envs):
    policy = FunctionPolicy(lambda request: request.allowed[request.seed % len(request.allowed)])
    rollout = Rollout(envs, policy, group_size=2, max_steps=8, constrain=True)
    return rollout.collect(TASKS)


def _play_by(policy):
    with Rollout(
        KEYDOOR, policy, group_size=2, max_steps=8, constrain=True, num_envs=12
    ) as rollout:
        return rollout.collect(TASKS, iteration=0)


def _small_model():
    with closing(make(KEYDOOR)) as env:
        corpus = corpus_of(env, num_episodes=16)
    return build_embedded(
        corpus.texts,
        actions=corpus.actions,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        max_length=512,
        seed=0,
    )


def _states(batch):
    return [[step.state_key for step in one.steps] for one in batch.trajectories]


def test_environments_on_two_nodes_give_what_they_give_in_process(cluster):
    with closing(GroupVectorEnv(KEYDOOR, 4)) as here:
        expected = _states(_play(here))

    with place_env_servers(EnvSpec(env_id=KEYDOOR), num_servers=2) as servers:
        assert len(set(servers.nodes())) == 2
        with RemoteVectorEnv.connect(servers.addresses, num_envs=4, keys=servers.keys) as envs:
            assert _states(_play(envs)) == expected


def test_a_server_that_is_killed_comes_back_at_its_address(cluster):
    with closing(GroupVectorEnv(KEYDOOR, 4)) as here:
        expected = _states(_play(here))

    with (
        place_env_servers(EnvSpec(env_id=KEYDOOR), num_servers=2) as servers,
        RemoteVectorEnv.connect(
            servers.addresses, num_envs=4, keys=servers.keys, connect_timeout_s=60.0
        ) as envs,
    ):
        _play(envs)
        os.kill(servers.pids()[0], signal.SIGKILL)

        assert _states(_play(envs)) == expected


def test_a_cluster_without_room_is_told(cluster):
    with pytest.raises(DeadlineError, match="expected a cluster with room for 1 times"):
        place_env_servers(
            EnvSpec(env_id=KEYDOOR),
            num_servers=1,
            placement=Placement(num_cpus=64.0, timeout_s=2.0),
        )


def test_a_server_that_cannot_start_says_why(cluster):
    spec = EnvSpec(env_id=KEYDOOR, python="/no/such/python")
    with pytest.raises(LongstepError, match="/no/such/python"):
        place_env_servers(spec, num_servers=1)


def test_actors_on_two_nodes_answer_as_in_process_and_one_that_dies_is_replaced(cluster, tmp_path):
    model, tokenizer = _small_model()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    here = _play_by(EnginePolicy(TransformersEngine(model, tokenizer)))
    spec = ActorSpec(model=str(tmp_path))

    with place_actors(spec, num_actors=2) as actors:
        assert len(set(actors.nodes())) == 2
        pool = ActorPool.connect(actors.addresses, keys=actors.keys)
        with ActorPolicy(pool) as policy:
            assert _states(_play_by(policy)) == _states(here)

            killed, other = actors.pids()
            os.kill(killed, signal.SIGKILL)

            assert _states(_play_by(policy)) == _states(here)
            assert actors.pids()[0] != killed
            assert actors.pids()[1] == other
            policy.update_weights(model, version=1)
            assert policy.policy_version == 1
