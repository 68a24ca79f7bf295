"""`ActorServer`: an engine at an address, in this process."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from longstep.errors import ConfigError, PolicyError
from longstep_bindings.actors.messages import LIMITS
from longstep_bindings.actors.service import ActorService
from longstep_bindings.curve import ServerKeys
from longstep_bindings.engines.served import ServedEngine
from longstep_bindings.rpc import Server, Terms

__all__ = ["ActorServer"]

_NUM_CREDITS = 256
_NUM_THREADS = 3


class ActorServer:
    """Serves an engine until it is closed, or until the engine answers nothing any more.

    `with ActorServer(engine) as server:` serves in the background; `server.serve_forever()` in a process of its own.
    """

    def __init__(
        self,
        engine: ServedEngine,
        address: str | None = None,
        *,
        max_in_flight: int = 256,
        max_image_bytes: int = 1 << 30,
        lost_after_s: float = 30.0,
        keys: ServerKeys | None = None,
    ) -> None:
        """Args:
            engine: What answers. It is closed with this server.
            address: `ipc://path`, or `tcp://host:port` with `*` for a free port; None makes a private ipc address.
            max_in_flight: Most requests under way, those of all clients together.
            max_image_bytes: Images that are kept for each client.
            lost_after_s: Silence after which a client and this server give each other up.
            keys: CURVE keys; required for an address that other machines can reach.

        Raises:
            ConfigError: An argument is out of range, or the address cannot be meant or bound.
        """
        for name, value in (("max_in_flight", max_in_flight), ("max_image_bytes", max_image_bytes)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"expected `{name}` of at least 1, got {value!r}")
        if not 0.0 < lost_after_s < 1e7:
            raise ConfigError(f"expected seconds above 0 as `lost_after_s`, got {lost_after_s!r}")
        self.engine = engine
        self.failure: str | None = None
        """Why the engine answers nothing any more; None while all is well."""
        self._service = ActorService(
            engine,
            max_in_flight=max_in_flight,
            max_image_bytes=max_image_bytes,
            owner_patience_s=lost_after_s + 5.0,
            on_failure=self._failed,
        )
        self._stopper = threading.Thread(target=self._stop, name="longstep-actor-stop", daemon=True)
        try:
            self._server = Server(
                self._service,
                address,
                terms=Terms(
                    num_credits=_NUM_CREDITS,
                    heartbeat_s=min(1.0, lost_after_s / 3),
                    lost_after_s=lost_after_s,
                ),
                num_threads=_NUM_THREADS,
                keys=keys,
                limits=LIMITS,
            )
        except BaseException:
            self._service.close()
            raise
        self.address = self._server.address
        """Where pools connect."""

    def _failed(self, why: str) -> None:
        """The engine is dead: so is this actor; its clients have their requests answered elsewhere."""
        self.failure = why
        self._stopper.start()  # for this may be a thread that the server waits for

    def _stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        """Serve in the background."""
        self._server.start()

    def serve_forever(self, *, parent_pid: int | None = None) -> None:
        """Serve until `close`, SIGTERM or SIGINT, then close.

        Args:
            parent_pid: Process to follow: when it dies, serving ends, and this process is gone within 4 s.

        Raises:
            PolicyError: The engine answers nothing any more.
        """
        try:
            self._server.serve_forever(parent_pid=parent_pid)
        finally:
            self.close()
        if self.failure is not None:
            raise PolicyError(f"expected an engine that answers, but {self.failure}")

    def close(self) -> None:
        """Say goodbye to the clients and close the engine. Idempotent."""
        self._server.stop()
        if self._stopper.is_alive():  # the goodbyes are still being said
            self._stopper.join()
        self._service.close()
        self.engine.close()

    def __enter__(self) -> Self:
        """Serve in the background."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()
