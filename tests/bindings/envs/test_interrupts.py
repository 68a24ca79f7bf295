"""Interrupts at any moment of `send` and `recv`: nothing hangs afterwards, and no step is doubled."""

import random
import signal
from contextlib import contextmanager

import pytest
from helpers import commands, gather, reset
from worker_envs import counter

from longstep_bindings.envs import RemoteVectorEnv

NUM_ENVS = 4


@contextmanager
def interrupts(draws, longest_s):
    """One interrupt of this thread, at a moment drawn from the next `longest_s`."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, draws.uniform(1e-5, longest_s))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


# Where an interrupt meets a finalizer, Python can only report it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("longest_s", [0.0005, 0.005])
def test_an_interrupt_at_any_moment_leaves_nothing_hanging_and_doubles_no_step(longest_s):
    draws, num_interrupts = random.Random(longest_s), 0
    counts = dict.fromkeys(range(NUM_ENVS), 0)
    with RemoteVectorEnv(counter, NUM_ENVS, num_workers=2, max_restarts=1000) as envs:
        reset(envs, dict.fromkeys(range(NUM_ENVS), 1))

        def look_at(results):
            for result in results:
                assert result.error is None
                count = int(result.info["observation"].rpartition("count ")[2])
                assert count > counts[result.slot]
                counts[result.slot] = count

        for _ in range(100):
            try:
                with interrupts(draws, longest_s):
                    envs.send(commands(dict.fromkeys(range(NUM_ENVS), "a")))
                    look_at(envs.recv(NUM_ENVS))
            except KeyboardInterrupt:
                num_interrupts += 1
            while results := envs.recv(1, 60.0):
                look_at(results)
            assert not envs._busy
        assert num_interrupts > 10
        histories = [envs._history(slot) for slot in range(NUM_ENVS)]
        envs.send(commands(dict.fromkeys(range(NUM_ENVS), "a")))
        for slot, result in gather(envs, NUM_ENVS).items():
            expected = f"count {len(histories[slot].actions) + 1}"
            assert result.info["observation"].endswith(expected)
