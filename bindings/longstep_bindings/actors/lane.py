"""The requests of one actor: which it has been handed, how they travel, how their answers are read.

A lane is open while there is a session. It does not judge the actor: whatever goes wrong with the session is reported, and
the link that owns the lane closes it and opens it again to the actor's successor.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from longstep.errors import DeadlineError, LongstepError, SessionLostError, UnsupportedTypeError
from longstep.types import Completion
from longstep_bindings.actors.messages import (
    pack_requests,
    read_not_taken,
    read_stats,
    read_taken,
)
from longstep_bindings.actors.tickets import Ticket
from longstep_bindings.engines.served import EngineStats
from longstep_bindings.pending import Pending
from longstep_bindings.rpc import Client

__all__ = ["ActorLane", "Arrivals"]

Arrivals = tuple[list[tuple[Ticket, Completion]], list[Ticket], list[tuple[Ticket, str]]]
"""Tickets with their completions, tickets to be sent again, tickets that were refused and why."""

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


class ActorLane:
    """What one actor owes. Methods that say so are called with the pool's lock held, the others without."""

    def __init__(
        self,
        lock: threading.RLock,
        *,
        wake: Callable[[], None],
        report: Callable[[Client, str], None],
    ) -> None:
        """Args:
        lock: The pool's.
        wake: Called when something has arrived.
        report: Called with what is wrong with the session.
        """
        self.owed: dict[str, Ticket] = {}
        """What the actor has been handed, by the names under which that travels; with the lock held."""
        self.counts = EngineStats()
        """What the actor said last."""
        self._lock, self._wake, self._report = lock, wake, report
        self._client: Client | None = None
        self._inbox: deque[tuple[Client, Pending, list[Ticket] | None]] = deque()
        """Answers: of `start` with its tickets, or of `take` with None."""
        self._num_starts = self._limit = 0
        self._full_until = 0.0
        self._known_images: set[bytes] = set()
        self._heard_at = 0.0

    # ---- with the lock held ----

    @property
    def client(self) -> Client | None:
        """The session; None while there is none and requests have to wait."""
        return self._client

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
    def silent_s(self) -> float:
        """Seconds since the last completion, or since there was something to complete; 0 when nothing is owed."""
        if not self.owed or self._inbox:
            return 0.0
        return time.monotonic() - self._heard_at

    def heard(self) -> None:
        """Begin to count silence anew."""
        self._heard_at = time.monotonic()

    def own(self, ticket: Ticket) -> None:
        """Take note of what is about to be sent."""
        if not self.owed:
            self.heard()
        self.owed[ticket.name] = ticket

    def open(self, client: Client, limit: int) -> None:
        """Let requests through to an actor that has none; `begin` follows, without the lock."""
        self._client, self._limit = client, limit
        self._num_starts, self._full_until = 0, 0.0
        self._known_images.clear()
        self.heard()

    def close(self) -> Client | None:
        """Let nothing through any more; gives the session."""
        client, self._client = self._client, None
        return client

    def drain(self) -> list[Ticket]:
        """Give up what is owed."""
        owed, self.owed = list(self.owed.values()), {}
        return owed

    # ---- without the lock ----

    def begin(self, client: Client) -> None:
        """Ask for completions."""
        for _ in range(_NUM_TAKES):
            self._take(client)

    def send(self, client: Client, tickets: Sequence[Ticket]) -> list[tuple[Ticket, str]]:
        """Send tickets that this lane owns; gives those that cannot travel, and why.

        When the session is lost, the link gives all that is owed back to the pool.
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
            self._wake()

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
        with self._lock:
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

    def _take(self, client: Client) -> None:
        def arrived(pending: Pending) -> None:
            self._inbox.append((client, pending, None))
            self._wake()

        try:
            client.submit("take", timeout_s=_TAKE_TIMEOUT_S, on_done=arrived)
        except (SessionLostError, DeadlineError) as error:
            self._report(client, str(error))

    def read(self) -> Arrivals:
        """What has arrived; called by one thread at a time."""
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
        completions, self.counts = read_taken(value)
        self._take(client)
        done: list[tuple[Ticket, Completion]] = []
        with self._lock:
            if completions:
                self._heard_at, self._full_until = time.monotonic(), 0.0
            for completion in completions:
                ticket = self.owed.pop(completion.request_id, None)
                if ticket is not None:
                    done.append((ticket, completion))
        return done

    def _not_taken(self, tickets: Sequence[Ticket], value: Any) -> list[Ticket]:
        """Tickets that the actor sent back: for want of an image, or because it is full."""
        missing, full = read_not_taken(value)
        again = [ticket for ticket in tickets if ticket.name in missing or ticket.name in full]
        with self._lock:
            again = [ticket for ticket in again if self._give_back(ticket)]
            for ticket in again:
                ticket.with_images = ticket.name in missing
            if full:  # other clients use it too
                self._full_until = time.monotonic() + _FULL_S
        return again

    def _give_back(self, ticket: Ticket) -> bool:
        with self._lock:
            return self.owed.pop(ticket.name, None) is ticket

    @property
    def has_arrivals(self) -> bool:
        """True while there is something to `read`."""
        return bool(self._inbox)
