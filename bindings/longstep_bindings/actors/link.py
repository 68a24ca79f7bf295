"""One actor as its pool sees it: a session with it, the requests that it owes, and what is done when it goes down.

A thread watches the actor. When it ends, hangs or falls silent, its requests go back to the pool, and the thread gets
another actor, loads the newest weights into it, and lets requests through again.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from longstep.errors import (
    DeadlineError,
    LongstepError,
    PolicyError,
    ProtocolError,
    SessionLostError,
    UnsupportedTypeError,
    WeightsError,
)
from longstep.types import Completion
from longstep_bindings.actors.messages import (
    LIMITS,
    SERVICE,
    VERSION,
    pack_requests,
    read_completions,
    read_stats,
)
from longstep_bindings.actors.service import host_identity
from longstep_bindings.actors.spec import PoolSettings
from longstep_bindings.actors.tickets import Ticket
from longstep_bindings.actors.weights import Parcel, send_files
from longstep_bindings.curve import ClientKeys
from longstep_bindings.engines.served import EngineDescription, EngineStats
from longstep_bindings.envs.places import Place
from longstep_bindings.pending import Pending
from longstep_bindings.rpc import Client

__all__ = ["ActorLink", "LinkOwner", "State"]

State = Literal["starting", "waiting", "ready", "down", "failed"]
"""`waiting` is an actor that is there, but lacks the newest weights, which no file holds; the next update brings them."""
Arrival = tuple[Client, Pending, list[Ticket] | None]
"""An answer: of `start` with its tickets, or of `take` with None."""

_log = logging.getLogger(__name__)
_WATCH_S = 0.05
_AGAIN_S = (0.2, 5.0)
"""Pause before another start when one failed: the first, and the longest."""
_CONNECT_S = 10.0
_ATTEMPT_S = 2.0
_START_TIMEOUT_S = 120.0
_SHORT_TIMEOUT_S = 5.0
_TAKE_TIMEOUT_S = 600.0
_NUM_TAKES = 2
"""So that one waits at the actor while the answer of the other is on its way."""
_MAX_STARTS = 64
"""Messages with requests that are not acknowledged; beyond that the actor gets no more."""
_BATCH_REQUESTS = 256
_BATCH_BYTES = 32 << 20
_FULL_S = 0.25
"""How long an actor that was full gets no more, unless it completes something before."""
_MAX_KNOWN_IMAGES = 1 << 20


class LinkOwner(Protocol):
    """The pool, as its links see it."""

    lock: threading.RLock

    def newest(self) -> tuple[str | None, Parcel | None]:
        """The token of the weights that every actor must have, None for any, and where they are, None for nowhere;
        with the lock held.
        """
        ...

    def lost(self, tickets: Sequence[Ticket], why: str) -> None:
        """Take back what an actor will not answer; with the lock held."""
        ...

    def read(self) -> None:
        """Read what has arrived at all links, and hand waiting requests to whoever has room."""
        ...

    def wake(self) -> None:
        """Have somebody look at what has arrived."""
        ...


class ActorLink:
    """A session that outlives its actors."""

    def __init__(
        self,
        index: int,
        place: Place,
        settings: PoolSettings,
        owner: LinkOwner,
        keys: ClientKeys | None,
    ) -> None:
        """Begin to get an actor; `wait_ready` says when it is there.

        Args:
            index: Number within the pool.
            place: Where actors come from.
            settings: The pool's.
            owner: The pool.
            keys: CURVE keys, or None.
        """
        self.index, self.place = index, place
        self.state: State = "starting"
        self.failure: LongstepError | None = None
        """Why this actor stays down; None while it may come back."""
        self.address = ""
        self.description: EngineDescription | None = None
        self.policy_version = 0
        self.num_restarts = self.num_transfers = 0
        self.counts = EngineStats()
        """What the actor said last."""
        self.owed: dict[str, Ticket] = {}
        """What it has been handed, by the names under which that travels; with the pool's lock held."""
        self._settings, self._owner, self._keys = settings, owner, keys
        self._client: Client | None = None
        self._inbox: deque[Arrival] = deque()
        self._num_starts = 0
        self._limit = settings.max_in_flight
        self._full_until = 0.0
        self._known_images: set[bytes] = set()
        self._token = ""
        self._shares_memory = False
        self._heard_at = 0.0
        self._num_busy = 0
        """Long calls under way, during which no completions may come."""
        self._trouble = threading.Event()
        self._trouble_text = ""
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"longstep-actor-{index}", daemon=True
        )
        self._thread.start()

    def wait_ready(self) -> None:
        """Wait until the first actor is there; raises what prevents it."""
        self._ready.wait()
        if self.failure is not None:
            raise self.failure

    # ---- requests: as a lane, with the pool's lock held ----

    @property
    def load(self) -> int:
        """Requests under way."""
        return len(self.owed)

    @property
    def has_room(self) -> bool:
        """True while one more may be sent."""
        is_open = self._client is not None and self._num_starts < _MAX_STARTS
        return is_open and len(self.owed) < self._limit and time.monotonic() >= self._full_until

    @property
    def client(self) -> Client | None:
        """The session; None while there is none and requests have to wait."""
        return self._client

    def own(self, tickets: Sequence[Ticket]) -> Client | None:
        """Take note of what is about to be sent, and by which session."""
        if not self.owed:
            self._heard_at = time.monotonic()
        self.owed.update((ticket.name, ticket) for ticket in tickets)
        return self._client

    # ---- requests: without the lock ----

    def send(self, client: Client, tickets: Sequence[Ticket]) -> list[tuple[Ticket, str]]:
        """Send tickets that this link owns; gives those that cannot travel, and why.

        When the session is lost, the watching thread gives all that is owed back to the pool.
        """
        refused: list[tuple[Ticket, str]] = []
        for batch in self._batches(tickets):
            try:
                self._start(client, batch)
            except UnsupportedTypeError as error:
                if len(batch) == 1:
                    refused.append((batch[0], f"UnsupportedTypeError: {error}"))
                    continue
                for ticket in batch:
                    refused += self.send(client, [ticket])
            except (SessionLostError, DeadlineError) as error:
                self._report(client, str(error))
                break
        return refused

    def _batches(self, tickets: Sequence[Ticket]) -> list[list[Ticket]]:
        batches: list[list[Ticket]] = []
        num_bytes = 0
        for ticket in tickets:
            size = sum(image.nbytes for image in ticket.request.prompt.images)
            is_full = batches and (
                len(batches[-1]) >= _BATCH_REQUESTS or num_bytes + size > _BATCH_BYTES
            )
            if not batches or is_full:
                batches.append([])
                num_bytes = 0
            batches[-1].append(ticket)
            num_bytes += size
        return batches

    def _start(self, client: Client, tickets: list[Ticket]) -> None:
        images = {
            digest: image
            for ticket in tickets
            for digest, image in zip(ticket.digests, ticket.request.prompt.images, strict=True)
            if ticket.with_images or digest not in self._known_images
        }
        body = pack_requests(
            [(ticket.name, ticket.request, ticket.digests) for ticket in tickets], images
        )

        def arrived(pending: Pending) -> None:
            self._inbox.append((client, pending, tickets))
            self._owner.wake()

        self._count_starts(client, 1)
        try:
            client.submit("start", body, timeout_s=_START_TIMEOUT_S, on_done=arrived)
        except BaseException:
            self._count_starts(client, -1)
            raise
        if len(self._known_images) > _MAX_KNOWN_IMAGES:
            self._known_images.clear()
        self._known_images.update(images)

    def _count_starts(self, client: Client, change: int) -> None:
        with self._owner.lock:
            if client is self._client:
                self._num_starts += change

    def withdraw(self, names: Sequence[str]) -> None:
        """Tell the actor that nobody waits for these any more."""
        client = self._client
        if client is not None and names:
            with suppress(SessionLostError, DeadlineError):
                client.submit("cancel", list(names), timeout_s=_SHORT_TIMEOUT_S)

    def ask_counts(self) -> None:
        """Bring `counts` up to date, if the actor answers at once."""
        client = self._client
        if client is not None:
            with suppress(LongstepError):
                self.counts = read_stats(client.call("stats", timeout_s=_SHORT_TIMEOUT_S))

    def _take_next(self, client: Client) -> None:
        def arrived(pending: Pending) -> None:
            self._inbox.append((client, pending, None))
            self._owner.wake()

        try:
            client.submit("take", timeout_s=_TAKE_TIMEOUT_S, on_done=arrived)
        except (SessionLostError, DeadlineError) as error:
            self._report(client, str(error))

    # ---- answers, read by whoever holds the pool's reading lock ----

    def read(
        self,
    ) -> tuple[list[tuple[Ticket, Completion]], list[Ticket], list[tuple[Ticket, str]]]:
        """What has arrived: tickets with their completions, tickets to be sent again, tickets that were refused."""
        done: list[tuple[Ticket, Completion]] = []
        again: list[Ticket] = []
        refused: list[tuple[Ticket, str]] = []
        while self._inbox:
            client, pending, tickets = self._inbox.popleft()
            if tickets is not None:
                self._count_starts(client, -1)
            try:
                value = pending.result()
                if tickets is None:
                    done += self._completions(client, value)
                else:
                    again += self._not_taken(tickets, value)
            except (SessionLostError, DeadlineError) as error:
                self._report(client, str(error))
            except LongstepError as error:
                if tickets is None:
                    self._report(client, str(error))
                    continue
                refused += [
                    (ticket, f"{type(error).__name__}: {error}")
                    for ticket in tickets
                    if self._give_back(ticket)
                ]
        return done, again, refused

    def _completions(self, client: Client, value: Any) -> list[tuple[Ticket, Completion]]:
        if client is not self._client:
            return []
        columns, counts = value
        completions = read_completions(columns)
        self._take_next(client)
        self.counts = read_stats(counts)
        done: list[tuple[Ticket, Completion]] = []
        with self._owner.lock:
            if completions:
                self._heard_at, self._full_until = time.monotonic(), 0.0
            for completion in completions:
                ticket = self.owed.pop(completion.request_id, None)
                if ticket is not None:
                    done.append((ticket, completion))
        return done

    def _not_taken(self, tickets: Sequence[Ticket], value: Any) -> list[Ticket]:
        """Tickets that the actor sent back: for want of an image, or because it is full."""
        missing, full = set(value["missing"]), set(value["full"])
        again = [ticket for ticket in tickets if ticket.name in missing or ticket.name in full]
        with self._owner.lock:
            again = [ticket for ticket in again if self._give_back(ticket)]
            for ticket in again:
                ticket.with_images = ticket.name in missing
            if full:  # other clients use it too
                self._full_until = time.monotonic() + _FULL_S
        return again

    def _give_back(self, ticket: Ticket) -> bool:
        with self._owner.lock:
            return self.owed.pop(ticket.name, None) is ticket

    @property
    def has_arrivals(self) -> bool:
        """True while there is something to `read`."""
        return bool(self._inbox)

    # ---- long calls ----

    def call(self, method: str, value: Any, *, timeout_s: float) -> Any:
        """The answer of a method that may take long.

        Raises:
            SessionLostError: There is no actor now, or it died.
            LongstepError: What the actor raised.
        """
        return self._called(lambda client: client.call(method, value, timeout_s=timeout_s))

    def _called(self, call: Callable[[Client], Any]) -> Any:
        with self._owner.lock:
            client = self._client
            self._num_busy += 1
        try:
            if client is None:
                raise PolicyError(
                    f"expected actor {self.index} to be there, but it is {self.state}"
                )
            return call(client)
        except (SessionLostError, DeadlineError) as error:
            if client is not None:
                self._report(client, str(error))
            raise
        finally:
            with self._owner.lock:
                self._num_busy -= 1
                self._heard_at = time.monotonic()

    def load_parcel(self, parcel: Parcel) -> None:
        """Have the actor serve the weights of a parcel.

        Raises:
            WeightsError: They do not fit, or did not arrive; the actor goes on with those that it had.
            SessionLostError: The actor died; the next one gets the newest weights anyway.
        """
        self._called(lambda client: self._load(client, parcel))

    def _load(self, client: Client, parcel: Parcel) -> None:
        if self._token == parcel.token:
            return
        timeout_s = self._settings.update_timeout_s
        order = {"kind": parcel.kind, "version": parcel.version, "token": parcel.token}
        if parcel.route == "shared_memory" and self._shares_memory:
            version = client.call("load", {**order, "path": str(parcel.path)}, timeout_s=timeout_s)
        else:
            with self._connected(client.address) as courier:
                order["transfer"] = send_files(courier, parcel)
                version = courier.call("load", order, timeout_s=timeout_s)
        if version != parcel.version:
            raise ProtocolError(f"expected version {parcel.version} to serve, got {version!r}")
        self._token, self.policy_version = parcel.token, parcel.version
        self.num_transfers += 1

    def has(self, parcel: Parcel) -> bool:
        """True when the actor serves these weights."""
        return self._token == parcel.token

    def restart(self, why: str) -> None:
        """Give the actor up and get another."""
        with self._owner.lock:
            if self._client is not None:
                self._report(self._client, why)

    def served_device_weights(self, version: int) -> None:
        """Take note of weights that came by vLLM's own transfer."""
        self._token, self.policy_version = f"device-{version}", version
        self.num_transfers += 1

    # ---- the watching thread ----

    def _report(self, client: Client, trouble: str) -> None:
        if client is self._client:
            self._trouble_text = self._trouble_text or trouble
            self._trouble.set()

    def _connected(self, address: str) -> Client:
        """A session with the actor at an address; short attempts, so that closing need not wait for a long one."""
        end_at = time.monotonic() + _CONNECT_S
        while True:
            try:
                return self._attempt(address, min(_CONNECT_S, _ATTEMPT_S))
            except DeadlineError:
                if time.monotonic() > end_at or self._closing.is_set():
                    raise

    def _attempt(self, address: str, timeout_s: float) -> Client:
        client = Client(
            address,
            service=SERVICE,
            version=VERSION,
            connect_timeout_s=timeout_s,
            keys=self._keys,
            limits=LIMITS,
        )
        atexit.unregister(
            client.close
        )  # the pool closes it; before, its end would look like a death
        return client

    def _run(self) -> None:
        try:
            self._open_to(self._connect())
            self._ready.set()
            while (why := self._watch()) is not None:
                self._recover(why)
        except LongstepError as error:
            self.failure = error
        except Exception as error:
            self.failure = PolicyError(f"the thread that watches an actor failed: {error!r}")
            raise
        finally:
            self._give_up("the pool was closed" if self.failure is None else str(self.failure))
            self.state = "failed" if self.failure is not None else "down"
            self.place.begin_close()
            self.place.close()
            self._ready.set()
            self._owner.wake()

    def _connect(self) -> Client:
        self.address = self.place.open()
        client = self._connected(self.address)
        try:
            self._described(client.call("describe", timeout_s=_START_TIMEOUT_S))
        except BaseException:
            client.close()
            raise
        return client

    def _described(self, told: Any) -> None:
        try:
            known = {name: told["engine"][name] for name in EngineDescription.__dataclass_fields__}
            self.description = EngineDescription(**known)
            self.policy_version, self._token = int(told["policy_version"]), str(told["weights"])
            self._limit = min(self._settings.max_in_flight, int(told["max_in_flight"]))
            host = told["host"]
        except (TypeError, KeyError, ValueError) as error:
            raise ProtocolError(f"expected an actor's description, got {error!r:.100}") from None
        self._shares_memory = bool(host) and host == host_identity()

    def _open_to(self, client: Client) -> None:
        """Load the newest weights, then let requests through."""
        try:
            while not self._opened(client):
                with self._owner.lock:
                    _, parcel = self._owner.newest()
                if parcel is not None:
                    self._load_newest(client, parcel)
                    continue
                self.state = "waiting"
                if self._closing.wait(_WATCH_S) or client.lost or self.place.why_down():
                    raise PolicyError(client.lost or self.place.why_down() or "the pool was closed")
        except BaseException:
            client.close()
            raise
        for _ in range(_NUM_TAKES):
            self._take_next(client)
        self._owner.read()

    def _load_newest(self, client: Client, parcel: Parcel) -> None:
        try:
            self._load(client, parcel)
        except WeightsError:
            with self._owner.lock:
                token, _ = self._owner.newest()
            if token == parcel.token:
                raise  # else newer ones have taken their place, and their files

    def _opened(self, client: Client) -> bool:
        with self._owner.lock:
            token, _ = self._owner.newest()
            if token not in (None, self._token):
                return False
            self._known_images.clear()
            self._num_starts = 0
            self._heard_at = time.monotonic()
            self._client = client
            self.state = "ready"
            return True

    def _watch(self) -> str | None:
        """Why the actor is of no more use, once it is; None when this link is closed."""
        while not self._closing.is_set():
            if self._trouble.wait(_WATCH_S) and not self._closing.is_set():
                return self.place.why_down() or self._trouble_text
            client = self._client
            why = self.place.why_down() or (client and client.lost) or self._stalled()
            if why is not None:
                return why
        return None

    def _stalled(self) -> str | None:
        limit_s = self._settings.stall_timeout_s
        with self._owner.lock:
            silent_s = time.monotonic() - self._heard_at
            if self.owed and not self._num_busy and not self._inbox and silent_s > limit_s:
                return (
                    f"the actor owes {len(self.owed)} completions and gave none for {limit_s:g} s"
                )
        return None

    def _give_up(self, why: str) -> None:
        """End the session and give what is owed back to the pool."""
        self._owner.read()  # the answers that came in time
        with self._owner.lock:
            client, self._client = self._client, None
            self.state = "down"
        if client is not None:
            client.close()
        with self._owner.lock:
            owed, self.owed = list(self.owed.values()), {}
            self._owner.lost(owed, why)
        self._owner.read()

    def _recover(self, why: str) -> None:
        pause_s = _AGAIN_S[0]
        while not self._closing.is_set():
            _log.warning("actor %d: %s; it is replaced", self.index, why)
            self._give_up(why)
            self.place.drop()
            self._trouble.clear()
            self._trouble_text = ""
            self.num_restarts += 1
            if self.num_restarts > self._settings.max_restarts:
                raise PolicyError(
                    f"expected actor {self.index} to go down at most {self._settings.max_restarts} times, got one more: "
                    f"{why}; look for what kills it, or raise `max_restarts`"
                )
            self.state = "starting"
            try:
                self._open_to(self._connect())
                return
            except LongstepError as error:
                why = str(error)
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_S[1])

    def begin_close(self) -> None:
        """Begin to end the session and the actor."""
        self._closing.set()
        self._trouble.set()
        self.place.begin_close()

    def close(self) -> None:
        """Wait for the end."""
        self._thread.join()
