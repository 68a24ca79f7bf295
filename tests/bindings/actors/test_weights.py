"""New weights on their way to actors: each route, what does not fit, what dies meanwhile."""

import json
import os
import struct
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from actor_helpers import gather, parts, plain_pool, request, requests
from plain_engine import PlainEngine
from safetensors.numpy import save_file
from xxhash import xxh3_64_intdigest

from longstep.errors import ConfigError, WeightsError
from longstep_bindings.actors import ActorPolicy, ActorPool, ActorServer, ActorSpec, Probe, ScoreRow
from longstep_bindings.actors.inbox import Transfer
from longstep_bindings.testing import hang, kill, resume, wait_until

ROUTES = ("shared_memory", "wire", "auto")
ROW = ScoreRow(
    prompt_token_ids=np.arange(3, dtype=np.int32), token_ids=np.arange(2, dtype=np.int32)
)


def weights(folder, shape=(4, 2), name="w", **more):
    path = Path(folder) / "model.safetensors"
    save_file({name: np.zeros(shape, np.float32), **more}, path)
    return path


def adapter(folder, rank=8, tensor_rank=None, **config):
    folder = Path(folder) / "adapter"
    folder.mkdir(exist_ok=True)
    save_file(
        {"base_model.model.w.lora_A.weight": np.zeros((tensor_rank or rank, 2), np.float32)},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, **config})
    )
    return folder


def probe(version, tolerance=0.1):
    return Probe(rows=(ROW,), logprobs=(np.full(2, -version, np.float32),), tolerance=tolerance)


@pytest.mark.parametrize("route", ROUTES)
def test_every_actor_serves_new_weights_after_one_transfer(route, tmp_path):
    with ActorPolicy(plain_pool(2)) as policy:
        policy.update_weights(weights(tmp_path), 7, route=route, probe=probe(7))
        assert policy.policy_version == 7
        policy.submit(requests("say x", 20))
        assert {c.policy_version for c in gather(policy, 20).values()} == {7}
        stats = policy.stats()
        assert [actor.num_transfers for actor in stats.actors] == [1, 1]
        assert [actor.policy_version for actor in stats.actors] == [7, 7]
        assert stats.num_updates == 1


@pytest.mark.parametrize("route", ROUTES)
def test_every_actor_serves_a_new_adapter(route, tmp_path):
    with ActorPolicy(plain_pool(2)) as policy:
        policy.update_adapter(adapter(tmp_path), 2, route=route, probe=probe(2))
        assert policy.policy_version == 2


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (4, 3)}, r"expected shape \(4, 2\) for `w`, got \(4, 3\)"),
        ({"name": "v"}, "got `v`, which it does not have"),
        ({"x": np.zeros(3, np.float32)}, "got `x`, which it does not have"),
    ],
)
def test_weights_of_another_model_are_refused_and_the_old_ones_go_on(
    route, change, message, tmp_path
):
    with ActorPolicy(plain_pool(2)) as policy:
        policy.update_weights(weights(tmp_path), 1)
        with pytest.raises(WeightsError, match=message):
            policy.update_weights(weights(tmp_path, **change), 2, route=route)
        assert policy.policy_version == 1
        policy.submit(requests("say x", 4))
        assert {c.policy_version for c in gather(policy, 4).values()} == {1}
        assert policy.stats().num_restarts == 0


def test_an_adapter_of_another_rank_is_refused(tmp_path):
    with ActorPolicy(plain_pool()) as policy:
        with pytest.raises(WeightsError, match="rank 8 at most, got rank 16"):
            policy.update_adapter(adapter(tmp_path, rank=16), 1)
        with pytest.raises(WeightsError, match=r"expected rank 8 .* got 4"):
            policy.update_adapter(adapter(tmp_path, tensor_rank=4), 1)
        with pytest.raises(WeightsError, match=r"adapter_config\.json"):
            policy.update_adapter(tmp_path, 1)
        assert policy.policy_version == 0


def test_half_a_file_is_never_loaded(tmp_path):
    path = weights(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    with ActorPolicy(plain_pool()) as policy:
        with pytest.raises(WeightsError, match="whole safetensors file"):
            policy.update_weights(path, 1)
        path.write_bytes(struct.pack("<Q", 1 << 40))
        with pytest.raises(WeightsError, match="whole safetensors file"):
            policy.update_weights(path, 1)
        with pytest.raises(WeightsError, match="without one"):
            policy.update_weights(tmp_path / "nowhere", 1)
        assert policy.policy_version == 0


def test_a_probe_tells_that_an_actor_does_not_serve_what_was_sent(tmp_path):
    with ActorPolicy(plain_pool()) as policy:
        with pytest.raises(WeightsError, match="actor 0, got a mean difference of 1 "):
            policy.update_weights(weights(tmp_path), 3, probe=probe(4))
        policy.update_weights(weights(tmp_path), 4, probe=probe(4.05))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"route": "cuda"}, "a route for files"), ({"dtype": "bf16"}, "did you mean `bfloat16`")],
)
def test_what_a_file_cannot_be_sent_as_is_refused(arguments, message, tmp_path):
    with plain_pool() as pool, pytest.raises(ConfigError, match=message):
        pool.update(weights(tmp_path), kind="weights", version=1, **arguments)


def test_wrong_arguments_of_an_update_are_refused(tmp_path):
    with ActorPolicy(plain_pool()) as policy:
        with pytest.raises(ConfigError, match="did you mean `shared_memory`"):
            policy.update_weights(weights(tmp_path), 1, route="shared-memory")
        with pytest.raises(ConfigError, match="expected a model or the path of one, got 3"):
            policy.update_weights(3, 1)
        with pytest.raises(ConfigError, match='another route for an adapter than "cuda"'):
            policy.update_adapter(adapter(tmp_path), 1, route="cuda")
        with pytest.raises(ConfigError, match="on a GPU"):
            policy.update_weights(weights(tmp_path), 1, route="cuda")
    with pytest.raises(ConfigError, match="at least one row"):
        Probe(rows=(), logprobs=())


def test_the_route_that_was_taken_is_told(tmp_path):
    with ActorPolicy(plain_pool(2)) as policy:
        policy.update_weights(weights(tmp_path), 1)
        assert policy.last_route == "shared_memory"
        policy.pool._links[1].shares_memory = False  # as of an actor on another machine
        policy.update_weights(weights(tmp_path), 2)
        assert policy.last_route == "wire"
        with pytest.raises(WeightsError, match=r"shared memory, got others: \[1\]"):
            policy.update_weights(weights(tmp_path), 3, route="shared_memory")
        assert policy.policy_version == 2


def test_files_that_went_away_are_weights_that_did_not_arrive(tmp_path):
    path = weights(tmp_path)
    with ActorPolicy(plain_pool(options={"load_s": 0.5})) as policy:
        policy.update_weights(path, 1, route="wire")
        path.unlink()
        kill(policy.pool.actor_pids[0])
        wait_until(lambda: policy.stats().num_restarts >= 2)  # it asks again and again
        policy.update_weights(weights(tmp_path), 2)
        policy.submit(requests("say x", 3))
        assert {c.policy_version for c in gather(policy, 3).values()} == {2}


def test_requests_go_on_while_weights_are_loaded(tmp_path):
    with ActorPolicy(plain_pool(options={"load_s": 1.0})) as policy:
        update = threading.Thread(target=policy.update_weights, args=(weights(tmp_path), 1))
        update.start()
        policy.submit(requests("say x", 10))
        assert {c.policy_version for c in gather(policy, 10).values()} == {0}
        assert update.is_alive()
        update.join()
        policy.submit(requests("say x", 10))
        assert {c.policy_version for c in gather(policy, 10).values()} == {1}


@pytest.mark.parametrize("route", ["shared_memory", "wire"])
def test_a_restarted_actor_gets_the_newest_weights_before_anything_else(route, tmp_path):
    with ActorPolicy(plain_pool(1)) as policy:
        for version in (1, 2, 3):
            policy.update_weights(weights(tmp_path), version, route=route)
        policy.submit(requests("wait 0.3 x", 10))
        kill(policy.pool.actor_pids[0])
        got = gather(policy, 10)
        assert {(c.policy_version, c.resubmitted) for c in got.values()} == {(3, 1)}
        assert policy.stats().actors[0].num_transfers == 4


def test_a_restarted_actor_gets_an_adapter_on_top_of_the_weights_before_it(tmp_path):
    (tmp_path / "a").mkdir()
    with ActorPolicy(plain_pool(1)) as policy:
        policy.update_weights(weights(tmp_path), 1)
        for version in (2, 3):
            policy.update_adapter(adapter(tmp_path / "a"), version)
        kill(policy.pool.actor_pids[0])
        policy.submit([request("a", "say x")])
        assert gather(policy, 1)["a"].policy_version == 3
        assert policy.stats().actors[0].num_transfers == 3 + 2
        policy.update_weights(weights(tmp_path), 4)
        kill(policy.pool.actor_pids[0])
        policy.submit([request("a", "say x")])
        assert gather(policy, 1)["a"].policy_version == 4
        assert policy.stats().actors[0].num_transfers == 3 + 2 + 1 + 1


def test_an_actor_that_dies_while_it_gets_weights_serves_them_when_it_is_back(tmp_path):
    with ActorPolicy(plain_pool(2, options={"load_s": 1.5})) as policy:
        victim = policy.pool.actor_pids[0]
        threading.Timer(0.5, kill, [victim]).start()
        policy.update_weights(weights(tmp_path), 1)
        assert policy.policy_version == 1
        wait_until(lambda: {a.state for a in policy.stats().actors} == {"ready"})
        policy.submit(requests("say x", 40))
        got = gather(policy, 40)
        assert {c.policy_version for c in got.values()} == {1}
        assert len({parts(c)[1] for c in got.values()}) == 2


def test_the_only_actor_dies_while_it_gets_weights(tmp_path):
    with ActorPolicy(plain_pool(1, options={"load_s": 1.0})) as policy:
        threading.Timer(0.3, kill, [policy.pool.actor_pids[0]]).start()
        policy.update_weights(weights(tmp_path), 1)
        policy.submit([request("a", "say x")])
        assert gather(policy, 1)["a"].policy_version == 1


def test_an_actor_that_stops_while_it_gets_weights_is_replaced(tmp_path):
    with ActorPolicy(plain_pool(2, options={"load_s": 1.0}, lost_after_s=2.0)) as policy:
        stopped = policy.pool.actor_pids[0]
        threading.Timer(0.3, hang, [stopped]).start()
        policy.update_weights(weights(tmp_path), 1)
        resume(stopped)
        wait_until(lambda: {a.state for a in policy.stats().actors} == {"ready"})
        assert {a.policy_version for a in policy.stats().actors} == {1}


def test_an_actor_elsewhere_keeps_its_weights_when_the_connection_is_made_again(tmp_path):
    with ActorServer(PlainEngine("any")) as server:
        with ActorPolicy(ActorPool.connect(server.address)) as policy:
            policy.update_weights(weights(tmp_path), 5)
        with ActorPolicy(ActorPool.connect(server.address)) as policy:
            assert policy.policy_version == 5
            assert policy.stats().actors[0].num_transfers == 0


def test_an_actor_follows_one_trainer_at_a_time(tmp_path):
    with ActorServer(PlainEngine("any"), lost_after_s=1.0) as server:
        first = ActorPolicy(ActorPool.connect(server.address))
        with first, ActorPolicy(ActorPool.connect(server.address)) as second:
            first.update_weights(weights(tmp_path), 1)
            for route in ("shared_memory", "wire"):
                with pytest.raises(WeightsError, match="follows one trainer at a time"):
                    second.update_weights(weights(tmp_path), 9, route=route)
            first.update_weights(weights(tmp_path), 2)
            second.submit([request("a", "say x")])
            assert gather(second, 1)["a"].policy_version == 2
            first.close()
            second.update_weights(weights(tmp_path), 9)
            second.submit([request("b", "say x")])
            assert gather(second, 1)["b"].policy_version == 9


@pytest.mark.parametrize("route", ROUTES)
def test_weights_that_do_not_fit_are_refused_also_when_every_actor_had_died(route, tmp_path):
    with ActorPolicy(plain_pool(1, max_restarts=3)) as policy:
        policy.update_weights(weights(tmp_path), 1)
        kill(policy.pool.actor_pids[0])
        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises(WeightsError, match="expected shape"):
            policy.update_weights(weights(other, shape=(4, 3)), 2, route=route)
        policy.submit([request("a", "say x")])
        assert gather(policy, 1)["a"].policy_version == 1
        policy.update_weights(weights(tmp_path), 3, route=route)
        assert policy.policy_version == 3
        assert policy.stats().num_restarts == 1


@pytest.mark.parametrize("route", ROUTES)
def test_an_actor_that_died_just_before_an_update_costs_one_restart(route, tmp_path):
    with ActorPolicy(plain_pool(2)) as policy:
        kill(policy.pool.actor_pids[0])
        policy.update_weights(weights(tmp_path), 1, route=route)
        wait_until(lambda: {a.state for a in policy.stats().actors} == {"ready"})
        assert {a.policy_version for a in policy.stats().actors} == {1}
        assert policy.stats().num_restarts == 1


@pytest.mark.parametrize("version", [-1, 1.0, True, None, "2", float("nan")])
def test_a_version_is_a_number_of_updates(version, tmp_path):
    with ActorPolicy(plain_pool()) as policy:
        for update in (policy.update_weights, policy.update_adapter):
            with pytest.raises(ConfigError, match="a version of at least 0"):
                update(weights(tmp_path), version)
        assert policy.policy_version == 0


# ---- room, and what is left ----


def left():
    """This process's folders for weights in shared memory."""
    mine = f"longstep-weights-{os.getpid()}-"
    return [name for name in os.listdir("/dev/shm") if name.startswith(mine)]


class Tensors:
    """As much of a model as is packed."""

    def __init__(self, num_bytes):
        import torch

        self.tensor = torch.zeros(num_bytes // 4)

    def state_dict(self):
        return {"w": self.tensor[:8].reshape(4, 2), "more": self.tensor}


def test_an_actor_that_dies_while_its_weights_are_packed_gets_them_when_it_is_back():
    class Slow(Tensors):
        def state_dict(self):
            kill(policy.pool.actor_pids[0])
            wait_until(lambda: policy.pool._links[0].lane.client is None)
            return {"w": self.tensor[:8].reshape(4, 2)}

    with ActorPolicy(plain_pool(1, options={"start_s": 1.0})) as policy:
        policy.update_weights(Slow(64), 1, probe=probe(1))
        policy.submit([request("a", "say x")])
        assert gather(policy, 1)["a"].policy_version == 1
        assert policy.stats().num_restarts == 1


def test_what_dead_processes_left_makes_room(tmp_path, monkeypatch):
    old = tmp_path / "longstep-weights-1-x"
    old.mkdir()
    (old / ".lock").touch()
    monkeypatch.setattr(
        "longstep_bindings.actors.folders._num_free_bytes",
        lambda root: 0 if old.exists() else 1 << 30,
    )
    with ActorPolicy(any_pool()) as policy:
        policy.pool.shared_memory = tmp_path
        policy.update_weights(Tensors(1 << 16), 1, route="shared_memory")
        assert policy.last_route == "shared_memory"
        assert not old.exists()


@pytest.fixture
def small_memory(tmp_path):
    """A memory file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def any_pool():
    return ActorPool(ActorSpec(model="any", engine="plain_engine:TakesAnything"))


def test_a_full_memory_file_system_is_one_clear_error(small_memory):
    with ActorPolicy(any_pool()) as policy:
        policy.pool.shared_memory = small_memory
        with pytest.raises(WeightsError, match=r"expected room for 4\.0 MiB .* which is full"):
            policy.update_weights(Tensors(4 << 20), 1, route="shared_memory")
        assert policy.policy_version == 0
        assert os.listdir(small_memory) == []


def test_auto_sends_over_the_wire_when_the_memory_file_system_is_full(small_memory):
    with ActorPolicy(any_pool()) as policy:
        policy.pool.shared_memory = small_memory
        with pytest.warns(RuntimeWarning, match="sent over the wire"):
            policy.update_weights(Tensors(4 << 20), 1)
        assert (policy.policy_version, policy.last_route) == (1, "wire")
        policy.update_weights(Tensors(1 << 18), 2)
        assert (policy.policy_version, policy.last_route) == (2, "shared_memory")


def test_room_is_seen_at_the_actor_too(small_memory):
    with pytest.raises(WeightsError, match="which is full"):
        Transfer({"model.safetensors": 4 << 20}, small_memory)
    assert os.listdir(small_memory) == []


def test_files_go_when_newer_ones_serve_and_when_the_pool_is_closed():
    with ActorPolicy(any_pool()) as policy:
        for version in (1, 2, 3):
            policy.update_weights(Tensors(1 << 16), version, route=ROUTES[version % 3])
            assert len(left()) == 1  # the newest, for actors that are restarted
    assert left() == []


def test_files_of_a_refused_update_go_at_once():
    with ActorPolicy(plain_pool()) as policy:
        with pytest.raises(WeightsError, match="`more`, which it does not have"):
            policy.update_weights(Tensors(1 << 16), 1)
        assert left() == []


def test_a_piece_that_was_changed_on_the_way_is_refused():
    transfer = Transfer({"a": 8})
    try:
        with pytest.raises(WeightsError, match="expected checksum"):
            transfer.write("a", 0, np.zeros(8, np.uint8), 1)
        with pytest.raises(WeightsError, match="8 bytes less"):
            transfer.finish()
    finally:
        transfer.close()


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 8), (6, 2), (4, 1), (3, 2), (15, 2), (16, 1), (-1, 1), (8, 0)]
)
def test_a_piece_that_covers_others_or_leaves_the_file_is_refused(offset, size):
    transfer = Transfer({"a": 16})
    piece = np.ones(8, np.uint8)
    try:
        transfer.write("a", 4, piece[:4], xxh3_64_intdigest(piece[:4].data))
        with pytest.raises(ConnectionError, match=r"each byte of `a` once|within 16 bytes of `a`"):
            transfer.write("a", offset, piece[:size], xxh3_64_intdigest(piece[:size].data))
        for begin, end in ((8, 16), (0, 4)):
            part = piece[: end - begin]
            transfer.write("a", begin, part, xxh3_64_intdigest(part.data))
        transfer.finish()
        assert (transfer.path / "a").read_bytes() == b"\1" * 16
    finally:
        transfer.close()


@pytest.mark.parametrize("name", ["../a", ".a", "a/b", ""])
def test_a_file_cannot_be_put_elsewhere(name):
    with pytest.raises(ConnectionError, match="a file's name"):
        Transfer({name: 8})


def test_an_engine_that_takes_no_weights_from_a_gpu_says_so(tmp_path):
    with plain_pool() as pool, pytest.raises(ConfigError, match='route="cuda", got `plain`'):
        pool.call_all("start_weight_update", [None], timeout_s=10.0)
