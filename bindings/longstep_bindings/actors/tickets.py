"""A pool's book of requests: which wait, which are at which actor, which are answered. No sockets, no threads.

A *ticket* is a request from `submit` to its completion. It travels under a number of its own, one for each time that it
is handed over, so that a late answer from an actor that was given up is never taken for the answer that is waited for.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from longstep.errors import ConfigError
from longstep.types import Completion, FinishReason, GenerationRequest
from longstep_bindings.actors.images import digest_of

__all__ = ["Assigner", "Book", "Lane", "Ticket", "failed"]

_MAX_HOMES = 1 << 16


class Ticket:
    """One request until it is answered."""

    __slots__ = ("deadline", "digests", "is_open", "name", "request", "resubmitted", "with_images")

    def __init__(self, request: GenerationRequest, deadline: float) -> None:
        """Args:
        request: As it was submitted.
        deadline: Moment on `time.monotonic` at which it has failed.
        """
        self.request = request
        self.deadline = deadline
        self.digests = tuple(digest_of(image) for image in request.prompt.images)
        self.name = ""
        """Under which it travels now."""
        self.resubmitted = 0
        self.with_images = False
        """True to send its images even to an actor that has had them."""
        self.is_open = True
        """False once nobody waits for the answer."""


class Lane(Protocol):
    """What requests are assigned to."""

    @property
    def load(self) -> int:
        """Requests under way."""
        ...

    @property
    def has_room(self) -> bool:
        """True while one more may be sent."""
        ...


AnyLane = TypeVar("AnyLane", bound=Lane)


class Assigner:
    """Which lane a request goes to: the one of its trajectory, unless that is much busier than another."""

    def __init__(self, slack: int) -> None:
        """Args:
        slack: How many more requests than the idlest the trajectory's own lane may have, beside a quarter more.
        """
        self._slack = slack
        self._homes: OrderedDict[str, object] = OrderedDict()
        self._numbers = itertools.count(1)

    def next_name(self) -> str:
        """A name that no ticket has had."""
        return str(next(self._numbers))

    def choose(self, trajectory_id: str, lanes: Sequence[AnyLane]) -> AnyLane | None:
        """The lane for the next request of a trajectory; None when there is room in none."""
        free = [lane for lane in lanes if lane.has_room]
        if not free:
            return None
        best = min(free, key=lambda lane: lane.load)
        if not trajectory_id or len(lanes) == 1:
            return best
        home = self._homes.get(trajectory_id)
        for lane in free:
            if lane is home and lane.load <= best.load * 1.25 + self._slack:
                best = lane
        self._homes[trajectory_id] = best
        self._homes.move_to_end(trajectory_id)
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
        return best


def failed(
    ticket: Ticket, error: str, version: int, reason: FinishReason = FinishReason.ERROR
) -> Completion:
    """The completion of a request that could not be answered."""
    return Completion(
        request_id=ticket.request.request_id,
        prompt_token_ids=np.empty(0, np.int32),
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        text="",
        finish_reason=reason,
        policy_version=version,
        error=error,
        resubmitted=ticket.resubmitted,
    )


class Book:
    """The tickets of a pool; all methods with the pool's lock held."""

    def __init__(self, max_queued: int) -> None:
        """Args:
        max_queued: Most tickets that wait.
        """
        self._max_queued = max_queued
        self._tickets: dict[str, Ticket] = {}
        self.queue: deque[Ticket] = deque()
        """Those that wait for room; closed ones among them are passed over."""
        self.ready: list[Completion] = []
        """What `poll` gives next."""
        self.num_resubmitted = 0

    @property
    def num_waiting(self) -> int:
        """Open requests that wait for room."""
        return sum(ticket.is_open for ticket in self.queue)

    @property
    def num_open(self) -> int:
        """Requests that are not answered."""
        return len(self._tickets)

    def add(self, requests: Iterable[GenerationRequest], timeout_s: float) -> None:
        """Take requests in.

        Raises:
            ConfigError: An id is in use, or too many wait; none was taken then.
        """
        deadline = time.monotonic() + timeout_s
        new: dict[str, Ticket] = {}
        unread = {completion.request_id for completion in self.ready}
        for request in requests:
            name = request.request_id
            if name in self._tickets or name in new or name in unread:
                raise ConfigError(
                    f"expected unique request ids, got `{name}` twice; give each request its own id"
                )
            new[name] = Ticket(request, deadline)
        if len(self.queue) + len(new) > self._max_queued:
            self.queue = deque(ticket for ticket in self.queue if ticket.is_open)
        if len(self.queue) + len(new) > self._max_queued:
            raise ConfigError(
                f"expected at most {self._max_queued} requests waiting for an actor, got {len(self.queue)} and "
                f"{len(new)} more; take completions first, or raise `max_queued`"
            )
        self._tickets.update(new)
        self.queue.extend(new.values())

    def answer(self, ticket: Ticket, completion: Completion) -> None:
        """Close a ticket with its completion; without effect when it is closed."""
        if ticket.is_open:
            ticket.is_open = False
            del self._tickets[ticket.request.request_id]
            self.ready.append(completion)

    def withdraw(self, request_ids: Iterable[str]) -> list[Ticket]:
        """Close tickets that will never be answered, though their completion may be ready; gives those that were open."""
        names = set(request_ids)
        gone = [self._tickets.pop(name) for name in names if name in self._tickets]
        self.ready = [each for each in self.ready if each.request_id not in names]
        for ticket in gone:
            ticket.is_open = False
        return gone

    def put_back(self, tickets: Iterable[Ticket]) -> None:
        """Queue tickets again, before all others, in their order."""
        self.queue.extendleft(reversed([ticket for ticket in tickets if ticket.is_open]))

    def hand_over(self, choose: Callable[[Ticket], AnyLane | None]) -> list[tuple[AnyLane, Ticket]]:
        """Take tickets out of the queue, in order, as long as there is a lane for the next."""
        chosen: list[tuple[AnyLane, Ticket]] = []
        while self.queue:
            ticket = self.queue[0]
            lane = choose(ticket) if ticket.is_open else None
            if lane is None and ticket.is_open:
                break
            self.queue.popleft()
            if lane is not None:
                chosen.append((lane, ticket))
        return chosen

    def expired(self, now: float) -> list[Ticket]:
        """Open tickets past their deadline."""
        return [ticket for ticket in self._tickets.values() if ticket.deadline < now]

    def open_tickets(self) -> list[Ticket]:
        """All that are open."""
        return list(self._tickets.values())
