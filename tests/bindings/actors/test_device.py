"""vLLM's weight-transfer calls over the actors' RPC. No GPU is needed for what is ours: who is called, in which order, with what."""

import json

import pytest
import torch
from actor_helpers import gather, parts, request, requests
from plain_engine import DeviceEngine
from safetensors.torch import save_file

from longstep.errors import ConfigError, LongstepError, ProtocolError, UnsupportedTypeError
from longstep_bindings.actors import ActorPolicy, ActorPool, ActorServer, ActorSpec
from longstep_bindings.actors.device import (
    ActorWeightSyncClient,
    DeviceSender,
    device_info,
    read_device_info,
)
from longstep_bindings.testing import kill, wait_until

HANDLE = {
    "GPU-1": (
        torch.Tensor,
        torch.Size([2, 3]),
        (3, 1),
        0,
        torch.UntypedStorage,
        torch.bfloat16,
        0,
        b"\x00handle",
        64,
        0,
        False,
        b"counter",
        0,
        b"event",
        True,
    )
}


@pytest.fixture
def pool(tmp_path):
    spec = ActorSpec(model=str(tmp_path), engine="plain_engine:DeviceEngine")
    with ActorPool(spec, 2) as pool:
        yield pool


def calls(folder):
    """What each actor was called with, in order."""
    return [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in folder.glob("calls-*")
    ]


def test_a_transfer_is_four_calls_at_every_actor_and_each_gets_its_rank(pool, tmp_path):
    client = ActorWeightSyncClient(pool)
    client.init_weight_transfer_engine(
        {"master_address": "10.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 3}
    )
    client.start_weight_update()
    client.update_weights({"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]})
    client.finish_weight_update("4")
    first, second = sorted(calls(tmp_path), key=lambda each: each[0][1]["rank_offset"])
    assert [name for name, _ in first] == [name for name, _ in second]
    assert [name for name, _ in first] == [
        "init_weight_transfer",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ]
    assert [each[0][1]["rank_offset"] for each in (first, second)] == [1, 2]
    assert first[2][1] == {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}
    pool.updated_on_device(4)
    pool.submit(requests("say x", 10))
    assert {c.policy_version for c in gather(pool, 10).values()} == {4}
    assert pool.policy_version == 4


def test_an_actor_that_is_restarted_waits_for_weights_that_no_file_holds(pool, tmp_path):
    ActorWeightSyncClient(pool).finish_weight_update("1")
    pool.updated_on_device(1)
    kill(pool.actor_pids[0])
    wait_until(lambda: pool.stats().actors[0].state == "waiting")
    pool.submit(requests("say x", 10))
    assert {parts(c)[1] for c in gather(pool, 10).values()} == {pool.actor_pids[1]}
    with pytest.raises(LongstepError, match="actor 0 to be there, but it is waiting"):
        ActorWeightSyncClient(pool).start_weight_update()
    kill(pool.actor_pids[1])
    wait_until(lambda: {a.state for a in pool.stats().actors} == {"waiting"})
    pool.submit([request("late", "say x")])
    weights = tmp_path / "w.safetensors"
    save_file({"w": torch.zeros(4, 2)}, weights)
    pool.update(weights, kind="weights", version=2)
    assert gather(pool, 1)["late"].policy_version == 2


def test_an_actor_whose_trainer_leaves_in_the_middle_of_a_transfer_ends(tmp_path):
    with ActorServer(DeviceEngine(str(tmp_path))) as server:
        with ActorPool.connect(server.address) as pool:
            pool.call_all("start_weight_update", [None], timeout_s=10.0)
            assert server.failure is None
        wait_until(lambda: server.failure is not None)
        assert "in the middle of a transfer" in server.failure


def test_the_trainers_side_asks_for_vllm_before_it_waits_for_anybody(pool):
    model = torch.nn.Linear(2, 2)
    model.device = "cuda:0"
    with pytest.raises(ConfigError, match=r"engine `vllm` for route=.cuda., got \['plain'\]"):
        DeviceSender(pool, model)


def test_handles_of_gpu_memory_travel_without_pickle():
    plain = device_info({"names": ["w"], "ipc_handles": [HANDLE], "tensor_sizes": None})
    again = read_device_info(plain)
    assert again["ipc_handles"] == [HANDLE]
    assert again["names"] == ["w"]
    with pytest.raises(UnsupportedTypeError, match="expected plain values"):
        device_info({"f": print})
    with pytest.raises(ProtocolError, match="a type of the table"):
        read_device_info({"longstep.type": "os.system"})


def test_a_model_that_is_on_no_gpu_is_refused(pool):
    policy = ActorPolicy(pool)
    with pytest.raises(ConfigError, match="a model on a GPU"):
        policy.update_weights(torch.nn.Linear(2, 2), 1, route="cuda")
    assert policy.policy_version == 0
