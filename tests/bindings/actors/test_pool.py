"""Requests spread over real actor processes, and what becomes of them when actors die, hang, stop or are full."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from actor_helpers import gather, parts, plain_pool, request, requests
from plain_engine import PlainEngine

from longstep.errors import ConfigError, PolicyError
from longstep.policy import Policy
from longstep.types import FinishReason
from longstep_bindings.actors import ActorPolicy, ActorPool, ActorServer
from longstep_bindings.testing import hang, is_gone, kill, resume, wait_until


def test_every_request_is_answered_once_with_its_own_answer():
    with plain_pool(2) as pool:
        pool.submit([request(f"r{i}", f"say {i}", trajectory=f"t{i}") for i in range(500)])
        got = gather(pool, 500)
        assert {name: parts(c)[0] for name, c in got.items()} == {
            f"r{i}": str(i) for i in range(500)
        }
        assert len({parts(c)[1] for c in got.values()}) == 2
        completion = got["r42"]
        assert completion.token_ids.tolist() == list(b"42")
        assert completion.logprobs.dtype == np.float32
        assert completion.prompt_token_ids.tolist() == [0, 1, 2]
        assert completion.resubmitted == 0
        assert pool.poll(0.0) == []


def test_an_actor_policy_is_a_policy():
    with ActorPolicy(plain_pool()) as policy:
        assert isinstance(policy, Policy)
        assert policy.policy_version == 0


def test_a_trajectory_stays_at_its_actor():
    with plain_pool(2) as pool:
        homes = {}
        for step in range(20):
            pool.submit([request(f"t{t}:{step}", "say x", trajectory=f"t{t}") for t in range(8)])
            for name, completion in gather(pool, 8).items():
                homes.setdefault(name.split(":")[0], set()).add(parts(completion)[1])
        assert all(len(pids) == 1 for pids in homes.values()), homes
        assert len(set().union(*homes.values())) == 2


def test_a_trajectory_leaves_an_actor_that_is_much_busier():
    with plain_pool(2, affinity_slack=2) as pool:
        pool.submit([request(f"x{i}", "wait 0.5 x", trajectory="t") for i in range(12)])
        got = gather(pool, 12)
        homes = [parts(c)[1] for c in got.values()]
        assert len(set(homes)) == 2
        assert min(homes.count(pid) for pid in set(homes)) >= 4


def test_no_actor_gets_more_than_its_share_and_nothing_is_dropped():
    with plain_pool(1, max_in_flight=3) as pool:
        pool.submit(requests("wait 0.02 x", 60))
        assert pool.stats().num_queued >= 50
        got = gather(pool, 60)
        assert max(parts(c)[2] for c in got.values()) == 3
        assert pool.stats().num_queued == 0


def test_more_requests_than_may_wait_are_refused_as_a_whole():
    with plain_pool(1, max_in_flight=1, max_queued=5) as pool:
        pool.submit(requests("wait 0.2 x", 1))
        with pytest.raises(ConfigError, match="at most 5 requests waiting"):
            pool.submit(requests("say y", 6, "q"))
        pool.submit(requests("say y", 5, "q"))
        assert set(gather(pool, 6)) == {"r0", *(f"q{i}" for i in range(5))}


def test_withdrawn_requests_make_room_for_others():
    with plain_pool(1, max_in_flight=1, max_queued=5) as pool:
        pool.submit([request("first", "hang")])
        for _ in range(3):
            pool.submit(requests("say x", 5))
            assert pool.stats().num_queued == 5
            pool.cancel([f"r{i}" for i in range(5)])
            assert pool.stats().num_queued == 0
        pool.cancel(["first"])


def test_two_pools_share_an_actor_that_is_too_small_for_both():
    with (
        ActorServer(PlainEngine("any"), max_in_flight=4) as server,
        ActorPool.connect(server.address) as one,
        ActorPool.connect(server.address) as two,
    ):
        one.submit(requests("wait 0.02 x", 40))
        two.submit(requests("wait 0.02 x", 40))
        got = [*gather(one, 40).values(), *gather(two, 40).values()]
        assert max(parts(c)[2] for c in got) == 4
        assert all(c.finish_reason is FinishReason.STOP for c in got)


def test_an_id_that_is_in_use_is_refused():
    with plain_pool() as pool:
        pool.submit([request("a", "wait 0.2 x")])
        with pytest.raises(ConfigError, match="`a` twice"):
            pool.submit([request("b", "say x"), request("a", "say x")])
        assert set(gather(pool, 1)) == {"a"}
        pool.submit([request("a", "say x"), request("b", "say x")])
        assert set(gather(pool, 2)) == {"a", "b"}


def test_withdrawn_requests_are_never_answered():
    with plain_pool(max_in_flight=2) as pool:
        pool.submit(requests("hang", 4))
        pool.cancel(["r0", "r3", "nobody"])
        pool.submit([request("a", "say x")])
        pool.cancel(["r1", "r2"])
        assert set(gather(pool, 1)) == {"a"}
        wait_until(lambda: pool.stats().actors[0].engine.num_running == 0)
        pool.submit([request("r0", "say again")])
        assert parts(gather(pool, 1)["r0"])[0] == "again"


def test_a_withdrawn_request_is_not_answered_though_its_completion_is_there():
    with plain_pool() as pool:
        pool.submit([request("a", "say first")])
        wait_until(lambda: pool.read() or pool._book.ready)
        with pytest.raises(ConfigError, match="`a` twice"):
            pool.submit([request("a", "say second")])
        pool.cancel(["a"])
        pool.submit([request("a", "say third")])
        assert parts(gather(pool, 1)["a"])[0] == "third"
        assert pool.poll(float("nan")) == []


def test_a_request_that_cannot_travel_fails_alone():
    with plain_pool() as pool:
        pool.submit([request("a", "say x"), request("b", "say \ud800"), request("c", "say y")])
        got = gather(pool, 3)
        assert got["b"].finish_reason is FinishReason.ERROR
        assert "UnsupportedTypeError" in got["b"].error
        assert [parts(got[name])[0] for name in "ac"] == ["x", "y"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": None},
        {"max_tokens": 64.5},
        {"stop": None},
        {"seed": 1.5},
        {"allowed": [1]},
        {"trajectory": None},
        {"images": [np.zeros((2, 2, 3), np.float32)]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
@pytest.mark.parametrize("is_full", [False, True])
def test_a_request_of_wrong_types_fails_alone(wrong, is_full):
    with plain_pool(max_in_flight=1 if is_full else 8) as pool:
        pool.submit(
            [request("a", "wait 0.2 x"), request("b", "say x", **wrong), request("c", "say y")]
        )
        got = gather(pool, 3)
        assert got["b"].finish_reason is FinishReason.ERROR
        assert "in `b`" in got["b"].error
        assert [parts(got[name])[0] for name in ("a", "c")] == ["x", "y"]


def test_numbers_of_numpy_and_lists_of_choices_travel():
    with plain_pool() as pool:
        pool.submit(
            [request("a", "say x", max_tokens=np.int64(3), seed=np.int32(1), allowed=["x"])]
        )
        assert parts(gather(pool, 1)["a"])[0] == "x"


def test_an_engines_error_is_its_requests_alone():
    with plain_pool() as pool:
        pool.submit([request("a", "raise too long"), request("b", "say y")])
        got = gather(pool, 2)
        assert (got["a"].finish_reason, got["a"].error) == (FinishReason.ERROR, "too long")
        assert got["b"].finish_reason is FinishReason.STOP


def test_a_killed_actor_loses_no_request():
    with plain_pool(2) as pool:
        pool.submit(requests("wait 0.5 x", 40))
        time.sleep(0.2)
        victim = pool.actor_pids[0]
        kill(victim)
        got = gather(pool, 40)
        assert {c.finish_reason for c in got.values()} == {FinishReason.STOP}
        moved = [c for c in got.values() if c.resubmitted]
        assert len(moved) == 20
        assert {c.resubmitted for c in moved} == {1}
        assert victim not in {parts(c)[1] for c in got.values()}
        wait_until(lambda: pool.stats().num_restarts == 1)
        wait_until(lambda: {actor.state for actor in pool.stats().actors} == {"ready"})
        assert pool.stats().num_resubmitted == 20


def test_the_only_actor_is_replaced_and_answers_what_it_owed():
    with plain_pool(1) as pool:
        pool.submit([*requests("wait 0.5 x", 10), request("s", "say done")])
        before = parts(gather(pool, 1)["s"])[1]
        kill(before)
        got = gather(pool, 10)
        assert {c.resubmitted for c in got.values()} == {1}
        assert {parts(c)[1] for c in got.values()} == set(pool.actor_pids)


def test_what_was_answered_before_a_death_is_not_asked_again():
    with plain_pool(1) as pool:
        pool.submit([*requests("say x", 20), request("w", "wait 30 x")])
        time.sleep(1.0)  # the answers are there, nobody has taken them
        kill(pool.actor_pids[0])
        time.sleep(0.3)
        got = gather(pool, 20)
        assert {c.resubmitted for c in got.values()} == {0}
        pool.cancel(["w"])


def test_an_actor_that_is_stopped_is_noticed_and_replaced():
    with plain_pool(1, lost_after_s=2.0) as pool:
        stopped = pool.actor_pids[0]
        pool.submit(requests("wait 0.3 x", 8))
        hang(stopped)
        got = gather(pool, 8)
        assert {c.resubmitted for c in got.values()} == {1}
        assert is_gone(stopped)


def test_an_engine_that_hangs_is_noticed_and_replaced(tmp_path):
    with plain_pool(1, stall_timeout_s=1.0) as pool:
        pool.submit([request("a", f"once {tmp_path}/mark hang"), request("b", "say x")])
        got = gather(pool, 2)
        assert parts(got["a"])[0] == "after"
        assert (got["a"].resubmitted, got["b"].resubmitted) == (1, 0)


def test_an_engine_that_fails_ends_its_actor_and_loses_no_request(tmp_path):
    with plain_pool(1) as pool:
        pool.submit([*requests("wait 0.5 x", 5), request("a", f"once {tmp_path}/mark break")])
        got = gather(pool, 6)
        assert {c.finish_reason for c in got.values()} == {FinishReason.STOP}
        assert {c.resubmitted for c in got.values()} == {1}
        assert pool.stats().num_restarts == 1


def test_an_engine_whose_counts_fail_ends_its_actor():
    """The thread that hands completions out would be gone, and nothing would ever be answered."""
    with plain_pool(1, model="uncounted", max_restarts=0) as pool:
        pool.submit([request("a", "say x")])
        assert "at most 0 times" in gather(pool, 1)["a"].error


def test_a_request_that_kills_every_actor_fails_and_the_pool_goes_on():
    with plain_pool(2, max_resubmits=2) as pool:
        pool.submit([request("bad", "kill")])
        bad = gather(pool, 1)["bad"]
        assert bad.finish_reason is FinishReason.ERROR
        assert "went down 3 times" in bad.error
        assert "SIGKILL" in bad.error
        pool.submit(requests("say x", 10))
        assert {c.finish_reason for c in gather(pool, 10).values()} == {FinishReason.STOP}


def test_a_pool_whose_actors_stay_down_says_why():
    with plain_pool(1, max_restarts=1, max_resubmits=9) as pool:
        pool.submit([request("bad", "kill"), request("good", "wait 60 x")])
        got = gather(pool, 2)
        assert all("at most 1 times" in c.error and "SIGKILL" in c.error for c in got.values())
        with pytest.raises(PolicyError, match="at most 1 times"):
            pool.submit([request("more", "say x")])


def test_a_request_has_a_deadline():
    with plain_pool(1, request_timeout_s=0.5) as pool:
        pool.submit([request("a", "hang"), request("b", "say x")])
        got = gather(pool, 2)
        assert got["b"].finish_reason is FinishReason.STOP
        assert got["a"].error == "expected an answer within 0.5 s, no actor gave one"
        wait_until(lambda: pool.stats().actors[0].engine.num_running == 0)


def test_an_image_travels_once_to_each_actor():
    generator = np.random.default_rng(0)
    images = [generator.integers(0, 255, (32, 32, 3), np.uint8) for _ in range(3)]
    sent = []
    with plain_pool() as pool:
        link = pool._lanes[0]
        start = link._start

        def spy(client, tickets):
            before = set(link._known_images)
            start(client, tickets)
            sent.append(len(set(link._known_images) - before))

        link._start = spy
        for step in range(4):
            pool.submit(
                [request(f"s{step}{i}", "sum", images=[images[i], images[0]]) for i in range(3)]
            )
            got = gather(pool, 3)
            for i in range(3):
                expected = int(images[i].sum()) + int(images[0].sum())
                assert parts(got[f"s{step}{i}"])[0] == str(expected)
    assert sent == [3, 0, 0, 0]


def test_an_image_that_the_actor_has_forgotten_is_asked_for_again():
    images = [np.full((32, 32, 3), value, np.uint8) for value in range(1, 9)]
    with (
        ActorServer(PlainEngine("any"), max_image_bytes=2 * images[0].nbytes) as server,
        ActorPool.connect(server.address) as pool,
    ):
        for turn in range(3):
            pool.submit(
                [request(f"{turn}{i}", "sum", images=[images[i], images[7 - i]]) for i in range(8)]
            )
            got = gather(pool, 8)
            assert {parts(c)[0] for c in got.values()} == {str(9 * 32 * 32 * 3)}


def test_stats_count_what_was_done():
    with plain_pool(2) as pool:
        pool.stats()
        pool.submit(requests("say abcd", 50))
        gather(pool, 50)
        stats = pool.stats()
        assert sum(actor.engine.num_completions for actor in stats.actors) == 50
        assert sum(actor.engine.generated_tokens for actor in stats.actors) == 200
        assert all(actor.tokens_per_s > 0 for actor in stats.actors)
        assert (stats.num_in_flight, stats.num_queued, stats.num_restarts) == (0, 0, 0)


def test_a_closed_pool_takes_nothing():
    pool = plain_pool()
    pids = pool.actor_pids
    pool.submit(requests("hang", 3))
    pool.close()
    pool.close()
    cancelled = gather(pool, 3)
    assert {c.finish_reason for c in cancelled.values()} == {FinishReason.CANCELLED}
    assert pool.poll(10.0) == []
    with pytest.raises(PolicyError, match="closed"):
        pool.submit([request("a", "say x")])
    assert all(map(is_gone, pids))
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_in_flight": 0}, "`max_in_flight` of at least 1"),
        ({"stall_timeout_s": 0.0}, "`stall_timeout_s`"),
        ({"max_restarts": -1}, "`max_restarts` of at least 0"),
    ],
)
def test_wrong_settings_are_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        plain_pool(**setting)


@pytest.mark.parametrize("name", ["max_in_flight", "max_image_bytes", "lost_after_s"])
def test_wrong_settings_of_a_server_are_refused(name):
    with pytest.raises(ConfigError, match=f"`{name}`"):
        ActorServer(PlainEngine("any"), **{name: 0})


def test_a_pool_has_actors():
    with pytest.raises(ConfigError, match="`num_actors` of at least 1, got 0"):
        plain_pool(0)
    with pytest.raises(ConfigError, match="at least one actor"):
        ActorPool.connect([])


def test_a_trainer_that_slept_finds_its_actors_again():
    """Each side gave the other up meanwhile; the model need not be loaded again."""
    here = Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, str(here / "sleeper.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(here)},
    ) as trainer:

        def turn():
            trainer.stdin.write("go\n")
            trainer.stdin.flush()
            return trainer.stdout.readline().split()

        before = turn()
        assert before[0] == "5"
        hang(trainer.pid)
        time.sleep(4.0)
        resume(trainer.pid)
        assert turn() == before
        trainer.stdin.close()
        assert trainer.wait(60.0) == 0


def test_closing_does_not_wait_for_weights_that_an_actor_is_loading(tmp_path):
    from safetensors.numpy import save_file

    save_file({"w": np.zeros((4, 2), np.float32)}, tmp_path / "w.safetensors")
    with plain_pool(1, options={"load_s": 1.0}) as pool:
        pool.update(tmp_path / "w.safetensors", kind="weights", version=1)
        kill(pool.actor_pids[0])
        wait_until(lambda: pool.stats().actors[0].state == "starting")
        wait_until(lambda: pool.actor_pids[0] is not None)
        pids = pool.actor_pids
        time.sleep(0.5)
    assert all(map(is_gone, pids))
