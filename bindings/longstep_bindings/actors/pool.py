"""`ActorPool`: requests spread over actors, whatever happens to these.

Whoever calls `submit` or `poll` does the work of the moment: hands requests to actors that have room, reads answers. What
must go on when nobody calls is done by the links' threads and by the pool's own, which looks ten times a second.
"""

from __future__ import annotations

import atexit
import dataclasses
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from longstep.errors import ConfigError, LongstepError, PolicyError
from longstep.types import Completion, FinishReason, GenerationRequest
from longstep_bindings.actors.delivery import Delivery
from longstep_bindings.actors.lane import ActorLane
from longstep_bindings.actors.link import ActorLink
from longstep_bindings.actors.process import ActorPlace, StartSettings
from longstep_bindings.actors.spec import ActorSpec, PoolSettings
from longstep_bindings.actors.stats import PoolStats, Rates
from longstep_bindings.actors.tickets import Assigner, Book, Ticket, failed
from longstep_bindings.actors.weights import Kind, Parcel, Route
from longstep_bindings.curve import ClientKeys
from longstep_bindings.engines.served import EngineDescription, ScoreRow
from longstep_bindings.envs.places import Place, ServerPlace
from longstep_bindings.transport import check_address, private_ipc_address

__all__ = ["ActorPool"]

_LOOK_S = 0.1


class ActorPool:
    """Actors that are started and kept alive, or that run elsewhere.

    with ActorPool(ActorSpec(model="out/model"), 2) as pool:
        policy = ActorPolicy(pool)
    """

    def __init__(
        self,
        spec: ActorSpec,
        num_actors: int = 1,
        *,
        log_folder: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """Start actors on this machine and wait until all of them serve.

        Args:
            spec: What each of them is.
            num_actors: How many.
            log_folder: Where the output of each goes, as `actor-0.log`; None keeps it for error messages only.
            settings: See `PoolSettings`.

        Raises:
            ConfigError: An argument cannot be meant, or the engine cannot load the model.
            LongstepError: An actor could not be started; its own words are in the message.
        """
        if type(num_actors) is not int or num_actors < 1:
            raise ConfigError(f"expected `num_actors` of at least 1, got {num_actors!r}")
        checked = PoolSettings(**settings)
        folder = Path(private_ipc_address().removeprefix("ipc://")).parent
        if log_folder is not None:
            Path(log_folder).mkdir(parents=True, exist_ok=True)
        start = StartSettings(
            start_timeout_s=checked.start_timeout_s,
            max_in_flight=checked.max_in_flight,
            lost_after_s=checked.lost_after_s,
        )
        places = [
            ActorPlace(spec, start, log=Path(log_folder or folder) / f"actor-{index}.log")
            for index in range(num_actors)
        ]
        self._begin(places, checked, None, folder)

    @classmethod
    def connect(
        cls, addresses: str | Sequence[str], *, keys: ClientKeys | None = None, **settings: Any
    ) -> Self:
        """A pool of actors that run elsewhere, as by `longstep serve-actor`; their owner restarts them.

        Args:
            addresses: One or several.
            keys: CURVE keys, for addresses on other machines.
            settings: See `PoolSettings`.

        Raises:
            DeadlineError: No actor answers at an address.
            ConfigError: What answers is no actor, or an address needs keys.
        """
        listed = [addresses] if isinstance(addresses, str) else list(addresses)
        for address in listed:
            check_address(address, has_keys=keys is not None)
        return cls.of_places([ServerPlace(address) for address in listed], keys=keys, **settings)

    @classmethod
    def of_places(
        cls, places: Sequence[Place], *, keys: ClientKeys | None = None, **settings: Any
    ) -> Self:
        """A pool of actors that come from somewhere else, such as a cluster's scheduler."""
        if not places:
            raise ConfigError("expected at least one actor, got none")
        pool = cls.__new__(cls)
        pool._begin(places, PoolSettings(**settings), keys, None)
        return pool

    def _begin(
        self,
        places: Sequence[Place],
        settings: PoolSettings,
        keys: ClientKeys | None,
        folder: Path | None,
    ) -> None:
        self.settings = settings
        self.lock = threading.RLock()
        self.failure: LongstepError | None = None
        """Why no request is answered any more; None while some actor may come back."""
        self._folder = folder
        self._book = Book(settings.max_queued)
        self._assigner = Assigner(settings.affinity_slack)
        self._reading = threading.Lock()
        self._news = threading.Event()
        self._closing = threading.Event()
        self._rates = Rates()
        self._links: list[ActorLink] = []
        self._lanes: list[ActorLane] = []
        self.identity = secrets.token_hex(8)
        """Tells actors whose weights they are given."""
        self._delivery = Delivery(
            self._links,
            self.lock,
            require_open=self._require_open,
            start_timeout_s=settings.start_timeout_s,
        )
        self._watcher = threading.Thread(target=self._watch, name="longstep-pool", daemon=True)
        atexit.register(self.close)
        try:
            for index, place in enumerate(places):
                link = ActorLink(index, place, settings, self, keys)
                self._links.append(link)
                self._lanes.append(link.lane)
            for link in self._links:
                link.wait_ready()
        except BaseException:
            self.close()
            raise
        self._delivery.version = max(link.policy_version for link in self._links)
        self._watcher.start()

    # ---- requests ----

    @property
    def num_actors(self) -> int:
        """Number of actors, those that are down included."""
        return len(self._links)

    @property
    def shared_memory(self) -> Path:
        """Where weights are put for actors of this machine; can be set."""
        return self._delivery.shared_memory

    @shared_memory.setter
    def shared_memory(self, folder: Path) -> None:
        self._delivery.shared_memory = folder

    @property
    def all_ready(self) -> bool:
        """True when every actor takes requests."""
        return all(link.state == "ready" for link in self._links)

    @property
    def policy_version(self) -> int:
        """Version of the weights that were given to all actors last."""
        return self._delivery.version

    @property
    def descriptions(self) -> tuple[EngineDescription, ...]:
        """What the actors' engines are."""
        return tuple(link.description for link in self._links if link.description is not None)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests without waiting for their completions.

        Raises:
            ConfigError: An id is in use, or more than `max_queued` would wait.
            PolicyError: No actor is left, or the pool is closed.
        """
        with self.lock:
            self._require_open()
            self._book.add(requests, self.settings.request_timeout_s)
        self._dispatch()

    def poll(self, timeout_s: float) -> list[Completion]:
        """Completions that are ready; waits up to `timeout_s` for the first, empty when none came."""
        end_at = time.monotonic() + timeout_s
        while True:
            self._news.clear()
            self.read()
            with self.lock:
                if self._book.ready:
                    ready, self._book.ready = self._book.ready, []
                    return ready
            left_s = end_at - time.monotonic()
            if not left_s > 0.0 or self._closing.is_set():  # NaN too
                return []
            self._news.wait(min(left_s, _LOOK_S))

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Withdraw requests; they are never answered. Unknown ids are passed over."""
        with self.lock:
            gone = self._book.withdraw(request_ids)
        self._withdraw(gone)

    def _withdraw(self, gone: Sequence[Ticket]) -> None:
        if not gone:
            return
        names = {ticket.name for ticket in gone}
        with self.lock:
            owed = [[name for name in lane.owed if name in names] for lane in self._lanes]
        for lane, theirs in zip(self._lanes, owed, strict=True):
            lane.withdraw(theirs)

    def _require_open(self) -> None:
        if self._closing.is_set():
            raise PolicyError("expected a pool that is open, got one that was closed")
        if self.failure is not None:
            raise self.failure

    def _dispatch(self) -> None:
        """Hand waiting requests to whoever has room."""
        shares: dict[ActorLane, list[Ticket]] = {}
        with self.lock:

            def choose(ticket: Ticket) -> ActorLane | None:
                lane = self._assigner.choose(ticket.request.trajectory_id, self._lanes)
                if lane is not None:
                    ticket.name = self._assigner.next_name()
                    lane.own(ticket)
                return lane

            for lane, ticket in self._book.hand_over(choose):
                shares.setdefault(lane, []).append(ticket)
            clients = {lane: lane.client for lane in shares}
        for lane, tickets in shares.items():
            client = clients[lane]
            assert client is not None
            for ticket, why in lane.send(client, tickets):
                with self.lock:
                    lane.owed.pop(ticket.name, None)
                    self._fail(ticket, why)

    def read(self) -> None:
        """Read what has arrived, and hand waiting requests to whoever has room."""
        with self._reading:
            for lane in self._lanes:
                if lane.has_arrivals:
                    self._take(lane)
        self._dispatch()

    def _take(self, lane: ActorLane) -> None:
        done, again, refused = lane.read()
        with self.lock:
            for ticket, completion in done:
                whole = dataclasses.replace(
                    completion,
                    request_id=ticket.request.request_id,
                    resubmitted=ticket.resubmitted,
                )
                self._book.answer(ticket, whole)
            self._book.put_back(again)
            for ticket, why in refused:
                self._fail(ticket, why)

    def _fail(self, ticket: Ticket, why: str) -> None:
        self._book.answer(ticket, failed(ticket, why, self.policy_version))
        self._news.set()

    # ---- called by links ----

    def wake(self) -> None:
        """Have somebody look at what has arrived."""
        self._news.set()

    def newest(self) -> tuple[str | None, tuple[Parcel, ...]]:
        """The weights that every actor must have."""
        return self._delivery.newest()

    def lost(self, tickets: Sequence[Ticket], why: str) -> None:
        """Have requests answered elsewhere; those that were lost too often have failed."""
        again: list[Ticket] = []
        for ticket in tickets:
            if not ticket.is_open:
                continue
            if ticket.resubmitted == self.settings.max_resubmits:
                self._fail(ticket, f"its actor went down {ticket.resubmitted + 1} times: {why}")
                continue
            ticket.resubmitted += 1
            self._book.num_resubmitted += 1
            again.append(ticket)
        self._book.put_back(again)

    # ---- the pool's own thread ----

    def _watch(self) -> None:
        try:
            self._watch_until_closed()
        except Exception as error:
            with self.lock:
                self.failure = PolicyError(f"the thread that watches a pool failed: {error!r}")
                self._fail_all(str(self.failure))
            raise

    def _fail_all(self, why: str) -> None:
        for ticket in self._book.open_tickets():
            self._fail(ticket, why)

    def _watch_until_closed(self) -> None:
        while not self._closing.wait(_LOOK_S):
            self.read()
            now = time.monotonic()
            with self.lock:
                late = self._book.expired(now)
                for ticket in late:
                    limit_s = self.settings.request_timeout_s
                    self._fail(
                        ticket, f"expected an answer within {limit_s:g} s, no actor gave one"
                    )
                failures = [link.failure for link in self._links if link.failure is not None]
                if len(failures) == len(self._links) and self.failure is None:
                    self.failure = failures[0]
                if self.failure is not None:
                    self._fail_all(str(self.failure))
            self._withdraw(late)

    # ---- all actors at once ----

    def call_all(self, method: str, values: Sequence[Any], *, timeout_s: float) -> list[Any]:
        """Call a method of every actor's, side by side.

        Args:
            method: Its name.
            values: One for each actor.
            timeout_s: Seconds for all.

        Raises:
            LongstepError: What the first of the actors that failed raised.
        """
        return self._delivery.call_all(method, values, timeout_s=timeout_s)

    def score(self, rows: Sequence[ScoreRow]) -> dict[int, list[NDArray[np.float32]]]:
        """Log-probabilities of given completions from every actor that is there, by the actor's number.

        Raises:
            LongstepError: What an actor raised; one that died meanwhile is left out.
        """
        return self._delivery.score(rows)

    def update(
        self,
        source: Any,
        *,
        kind: Kind,
        version: int,
        route: Route = "auto",
        dtype: str | None = None,
    ) -> Route:
        """Have every actor serve new weights; gives the route that they took.

        Actors that are down get them when they are back, before anything else. Requests go on meanwhile. After an
        update by vLLM's own transfer, an actor that is restarted waits for the next update by this way.

        Args:
            source: A model, or the path of a folder or file.
            kind: Whole weights, or an adapter.
            version: Their `policy_version`.
            route: See `weights`; not `cuda`.
            dtype: Number format to send them in; None keeps it.

        Raises:
            WeightsError: They do not fit, or there is no room for them; all actors go on with the weights they had.
            PolicyError: No actor is there.
        """
        return self._delivery.update(source, kind=kind, version=version, route=route, dtype=dtype)

    def updated_on_device(self, version: int) -> None:
        """Take note that every actor has got weights by vLLM's own transfer."""
        self._delivery.took_from_device(version)

    def restart_all(self, why: str) -> None:
        """Replace every actor, as when nobody knows what weights they have."""
        for link in self._links:
            link.restart(why)

    # ---- numbers, ends ----

    def stats(self) -> PoolStats:
        """Load, counts and rates. Asks the actors; of one that does not answer at once it tells what is known."""
        ready = [link for link in self._links if link.state == "ready"]
        self._delivery.each(ready, lambda link: link.lane.ask_counts())
        with self.lock:
            return PoolStats(
                policy_version=self.policy_version,
                num_queued=self._book.num_waiting,
                num_in_flight=sum(link.lane.load for link in self._links),
                num_resubmitted=self._book.num_resubmitted,
                num_restarts=sum(link.num_restarts for link in self._links),
                num_updates=self._delivery.num_updates,
                actors=tuple(map(self._rates.stats_of, self._links)),
            )

    @property
    def actor_pids(self) -> list[int | None]:
        """Process ids of the actors; None where one is not there or runs elsewhere."""
        return [getattr(link.place, "pid", None) for link in self._links]

    def close(self) -> None:
        """End the actors that this pool started, and free everything. Idempotent.

        Requests that are open are answered with `FinishReason.CANCELLED`; `poll` still gives them.
        """
        atexit.unregister(self.close)
        self._closing.set()
        with self.lock:
            for ticket in self._book.open_tickets():
                why = "the pool was closed"
                cancelled = failed(ticket, why, self.policy_version, FinishReason.CANCELLED)
                self._book.answer(ticket, cancelled)
        self._news.set()
        for link in self._links:
            link.begin_close()
        for link in self._links:
            link.close()
        with suppress(RuntimeError):  # it was never started
            self._watcher.join()
        self._delivery.close()
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
