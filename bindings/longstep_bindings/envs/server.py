"""`EnvServer`: environments for clients elsewhere, in worker processes that are kept alive.

Each worker has an address of its own, so that no process stands between it and its clients. The server watches its
workers: one that dies, or is past a deadline, is replaced at the same address, and tells its clients which of their
slots it was executing; they build their environments again.
"""

from __future__ import annotations

import atexit
import logging
import queue
import re
import shutil
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from longstep.errors import ConfigError, EnvError, LongstepError
from longstep_bindings.curve import ServerKeys
from longstep_bindings.envs.places import LocalPlace
from longstep_bindings.envs.process import WorkerSettings
from longstep_bindings.envs.spec import EnvSpec
from longstep_bindings.terms import Terms
from longstep_bindings.transport import check_address, private_ipc_address

__all__ = ["EnvServer"]

_log = logging.getLogger(__name__)
_WATCH_S = 0.05
_LOOK_S = 0.25


class EnvServer:
    """Serves environments until it is closed.

    >>> from longstep_bindings.envs import RemoteVectorEnv
    >>> with EnvServer("longstep/KeyDoor-v0") as server:
    ...     with RemoteVectorEnv.connect(server.addresses, num_envs=4) as envs:
    ...         envs.num_envs
    4
    """

    def __init__(
        self,
        envs: str | EnvSpec | Mapping[str, EnvSpec],
        address: str | None = None,
        *,
        num_workers: int = 1,
        keys: ServerKeys | None = None,
        step_timeout_s: float = 60.0,
        reset_timeout_s: float = 120.0,
        start_timeout_s: float = 60.0,
        max_restarts: int = 100,
        num_credits: int = 256,
    ) -> None:
        """Start the workers.

        Args:
            envs: An id, a spec, or several specs by the names that clients ask for.
            address: Of the first worker: `ipc://path` (others append `-1`, `-2` ...) or `tcp://host:port` (others use
                the ports after it; `*` picks free ones). None makes private ipc addresses.
            num_workers: Processes, each of which serves all environments.
            keys: The server's key pair and the public keys of the clients it lets in; required for an address that
                other machines can reach.
            step_timeout_s: Seconds that a step may take. A worker past that is killed and replaced.
            reset_timeout_s: Seconds that making and resetting an environment may take.
            start_timeout_s: Seconds until a new worker must be reachable.
            max_restarts: Workers that are replaced, all together, before the server gives up.
            num_credits: Requests that a client may have in flight.

        Raises:
            ConfigError: An argument cannot be meant, or the address cannot be bound.
            EnvError: A worker ended at once.
        """
        if isinstance(envs, str):
            envs = EnvSpec(env_id=envs)
        specs = {envs.name: envs} if isinstance(envs, EnvSpec) else dict(envs)
        if address is not None:
            check_address(address, has_keys=keys is not None)
        if num_workers < 1:
            raise ConfigError(f"expected at least 1 worker, got {num_workers}")
        longest_s = max(step_timeout_s, reset_timeout_s)
        settings = WorkerSettings(
            specs=specs,
            step_timeout_s=step_timeout_s,
            reset_timeout_s=reset_timeout_s,
            start_timeout_s=start_timeout_s,
            # silence proves nothing: a step may keep the worker's interpreter busy until its deadline
            terms=Terms(num_credits=num_credits, lost_after_s=longest_s + 60.0),
            keys=keys,
        )
        self.failure: LongstepError | None = None
        """Why the server gave up; None while it serves."""
        self.num_restarts = 0
        self._max_restarts = max_restarts
        self._stopping = threading.Event()
        self._folder: Path | None = None
        self._places: list[LocalPlace] = []
        self.addresses: list[str] = []
        """Of the workers; clients spread their slots over them."""
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._watch, name="longstep-env-server", daemon=True)
        try:
            for wanted in self._addresses(address, num_workers):
                self._start(settings, wanted)
        except BaseException:
            self.close()
            raise
        self._thread.start()

    def _addresses(self, address: str | None, num_workers: int) -> list[str]:
        if address is None:
            self._folder = Path(private_ipc_address().removeprefix("ipc://")).parent
            (self._folder / "kept").touch()  # a worker that ends would remove an empty folder
            return [f"ipc://{self._folder}/{index}" for index in range(num_workers)]
        if address.startswith("ipc://"):
            return [address, *(f"{address}-{index}" for index in range(1, num_workers))]
        host, _, port = address.rpartition(":")
        if port == "*":
            return [address] * num_workers
        if re.fullmatch(r"\d{1,5}", port) is None or int(port) + num_workers > 65536:
            raise ConfigError(f"expected tcp://host:port with a port or `*`, got `{address}`")
        return [f"{host}:{int(port) + index}" for index in range(num_workers)]

    def _start(self, settings: WorkerSettings, address: str) -> None:
        place = LocalPlace(settings, address)
        self._places.append(place)
        place.address = place.open()  # what `*` was bound to, for its successors too
        self.addresses.append(place.address)

    def _watch(self) -> None:
        while not self._stopping.wait(_WATCH_S):
            for place in self._places:
                why = place.why_down()
                if why is not None and not self._stopping.is_set():
                    self._replace(place, why)

    def _replace(self, place: LocalPlace, why: str) -> None:
        place.drop()
        self.num_restarts += 1
        if self.num_restarts > self._max_restarts:
            self.failure = EnvError(
                f"expected workers to go down at most {self._max_restarts} times, got one more: {why}; look for "
                "what kills them, or raise `max_restarts`"
            )
            self._stopping.set()
            return
        _log.warning("environment server: %s; it is replaced", why)
        try:
            place.open()
        except LongstepError as error:  # the next look finds it missing and tries again
            _log.warning("environment server: a new worker could not be started: %s", error)

    @property
    def worker_pids(self) -> list[int | None]:
        """Process ids of the workers; None where one is being replaced."""
        return [place.pid for place in self._places]

    def serve_forever(self) -> None:
        """Wait until SIGTERM or SIGINT, then close. Only from the main thread.

        Raises:
            EnvError: Workers went down more often than `max_restarts`.
        """
        asked: queue.SimpleQueue[None] = queue.SimpleQueue()  # unlike an Event, safe in a handler
        previous = {
            number: signal.signal(number, lambda *_: asked.put(None))
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            while asked.empty() and not self._stopping.is_set():
                with suppress(queue.Empty):
                    asked.get(timeout=_LOOK_S)
                    break
        finally:
            self.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """End the workers and everything they started. Idempotent."""
        atexit.unregister(self.close)
        self._stopping.set()
        for place in self._places:
            place.begin_close()
        with suppress(RuntimeError):  # it was never started
            self._thread.join()
        for place in self._places:
            place.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

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
