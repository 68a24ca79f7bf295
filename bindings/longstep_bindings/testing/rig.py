"""`FaultRig`: an environment at a server of its own, with everything in reach that can go wrong."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from longstep.errors import DeadlineError
from longstep_bindings.envs.client import RemoteVectorEnv
from longstep_bindings.envs.server import EnvServer
from longstep_bindings.envs.spec import EnvSpec
from longstep_bindings.testing import processes
from longstep_bindings.testing.line import FaultyLine
from longstep_bindings.testing.line_faults import Faults

__all__ = ["FaultRig"]

_MANY = 1000
"""Restarts and retries that are put up with: those of a test are no sign of a broken environment."""


class FaultRig:
    """Environments in workers, each behind a line.

    with FaultRig("longstep/KeyDoor-v0", 8, faults=Faults(drop=0.1)) as rig:
        rig.kill(0)
        transcripts = play(rig.envs, tasks, num_steps=100)
    """

    def __init__(
        self,
        env: str | EnvSpec,
        num_envs: int,
        *,
        num_workers: int = 2,
        faults: Faults | None = None,
        seed: int = 0,
        step_timeout_s: float = 10.0,
        reset_timeout_s: float = 20.0,
        max_retries: int = _MANY,
    ) -> None:
        """Args:
        env: An id, or how to make one.
        num_envs: Slots of `envs`.
        num_workers: Processes of the server.
        faults: Of every line; None is none. See `set_faults`.
        seed: Of the lines' draws.
        step_timeout_s: Seconds that a step may take; a worker past that is replaced.
        reset_timeout_s: Seconds that making and resetting an environment may take.
        max_retries: Times that a command is done again after it took its worker down.
        """
        self.counts: Counter[str] = Counter()
        """What was done to workers so far: `kill`, `hang`."""
        with ExitStack() as stack:
            self.server = stack.enter_context(
                EnvServer(
                    env,
                    num_workers=num_workers,
                    step_timeout_s=step_timeout_s,
                    reset_timeout_s=reset_timeout_s,
                    max_restarts=_MANY,
                )
            )
            self.lines = [
                stack.enter_context(FaultyLine(address, faults=faults, seed=seed + index))
                for index, address in enumerate(self.server.addresses)
            ]
            self.envs = stack.enter_context(
                RemoteVectorEnv.connect(
                    [line.address for line in self.lines],
                    num_envs,
                    connect_timeout_s=30.0,
                    max_restarts=_MANY,
                    max_retries=max_retries,
                )
            )
            self._stack = stack.pop_all()

    @property
    def num_faults(self) -> int:
        """All that went wrong so far, on purpose: of lines and of workers."""
        return self.counts.total() + sum(line.num_faults for line in self.lines)

    def set_faults(self, faults: Faults) -> None:
        """Make every line as bad as `faults` says, from now on."""
        for line in self.lines:
            line.faults = faults

    def pid(self, worker: int, timeout_s: float = 30.0) -> int:
        """Process id of a worker, once it is there."""
        end_at = time.monotonic() + timeout_s
        while (pid := self.server.worker_pids[worker]) is None:
            if time.monotonic() > end_at:
                raise DeadlineError(f"expected worker {worker} to be replaced in {timeout_s:g} s")
            time.sleep(0.01)
        return pid

    def kill(self, worker: int) -> None:
        """SIGKILL a worker."""
        self.counts["kill"] += 1
        processes.kill(self.pid(worker))

    def hang(self, worker: int, seconds: float | None = None) -> None:
        """SIGSTOP a worker, and let it go on after `seconds`; None leaves it as it is."""
        self.counts["hang"] += 1
        pid = self.pid(worker)
        processes.hang(pid)
        if seconds is not None:
            time.sleep(seconds)
            processes.resume(pid)

    @contextmanager
    def storm(
        self,
        *,
        kill_every: float | None = None,
        hang_every: float | None = None,
        hang_s: Sequence[float | None] = (0.3,),
        seed: int = 0,
    ) -> Iterator[None]:
        """Meanwhile kill and hang workers, drawn at random.

        Its pace is that of the work, not of the clock, so that a slow machine gets to do something between two strikes.

        Args:
            kill_every: Mean number of messages on all lines together between kills; None kills none.
            hang_every: The same between hangs; None hangs none.
            hang_s: How many seconds they hang, drawn from these; None is for ever.
            seed: Of the draws.
        """
        stop = threading.Event()
        means = {"kill": kill_every, "hang": hang_every}
        rates = {name: 1.0 / mean for name, mean in means.items() if mean is not None}
        arguments = (rates, hang_s, random.Random(seed), stop)
        thread = threading.Thread(target=self._strike, args=arguments, name="longstep-storm")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _strike(
        self,
        rates: dict[str, float],
        hang_s: Sequence[float | None],
        draws: random.Random,
        stop: threading.Event,
    ) -> None:
        due = 0.0
        while rates:
            due += draws.expovariate(sum(rates.values()))
            while sum(line.num_messages for line in self.lines) < due:
                if stop.wait(0.01):
                    return
            (what,) = draws.choices(list(rates), list(rates.values()))
            worker = draws.randrange(len(self.lines))
            with contextlib.suppress(DeadlineError):  # it is not back yet
                if what == "kill":
                    self.kill(worker)
                else:
                    self.hang(worker, draws.choice(hang_s))

    def close(self) -> None:
        """Close the client, the lines and the server. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()
