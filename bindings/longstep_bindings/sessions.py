"""The server's book of one session: what has arrived, what runs, which answers are kept. No sockets, no threads.

Exactly once. Requests carry numbers 1, 2, 3 ... and every message from the client carries (`upto`, `open`): of the
requests up to `upto`, those in `open` are still unanswered there, all others are settled. So

- an answer is kept until a message shows that the client has it, and for no longer;
- a number that is kept is answered again, never executed again;
- a number that is neither kept nor known to be missing was settled: the message is an old copy and is dropped.

Old copies of messages do no harm: `open` of an older message can only name more requests, never fewer.
"""

from __future__ import annotations

from collections.abc import Sequence

from longstep.errors import ProtocolError
from longstep_bindings.calls import Call, Session

__all__ = ["Book"]

_FEW = 4
"""Numbers up to which a list is searched sooner than a set is made."""


class Book:
    """Requests of one session, from arrival to acknowledgement.

    At most `credits` requests are in the book, which bounds both the work in progress and the answers kept.
    """

    def __init__(self, session: Session, token: bytes, route: bytes, num_credits: int) -> None:
        """Args:
        session: What the service sees.
        token: What the client's messages carry.
        route: Where the client's last message came from; the next connection has another.
        num_credits: Most requests that may be unanswered or unacknowledged.
        """
        self.session = session
        self.token = token
        self.route = route
        self.heard_at = 0.0
        self.running: Call | None = None
        self.lost: str | None = None
        """Why no further request is executed; None while all is well."""
        self.dropped = False
        """True once the client is gone."""
        self.answers: dict[int, tuple[float, list[bytes]]] = {}
        """Answers that the client may not have: when last sent, and their frames."""
        self._credits = num_credits
        self._calls: dict[int, Call] = {}
        self._waiting: dict[int, Call] = {}
        self._missing: set[int] = set()
        self._highest = 0

    @property
    def here(self) -> list[int]:
        """Numbers of the requests in the book."""
        return sorted(self._calls)

    def is_open(self, call: Call) -> bool:
        """True while `call` still needs an answer."""
        return self._calls.get(call.seq) is call and call.seq not in self.answers

    def is_new(self, seq: int, open_seqs: Sequence[int]) -> bool:
        """True when request `seq` has not arrived before and is still wanted.

        Raises:
            ProtocolError: More requests are in flight than there are credits.
        """
        if len(open_seqs) > self._credits:
            raise ProtocolError(
                f"expected at most {self._credits} requests in flight, got {len(open_seqs)}"
            )
        if seq in self._calls or seq not in open_seqs:
            return False
        return seq > self._highest or seq in self._missing

    def add(self, call: Call, open_seqs: Sequence[int]) -> None:
        """Take in a new request; numbers skipped before it are missing if the client still waits for them."""
        if call.seq > self._highest:
            if call.seq > self._highest + 1:
                self._missing.update(seq for seq in open_seqs if self._highest < seq < call.seq)
            self._highest = call.seq
        self._missing.discard(call.seq)
        self._calls[call.seq] = self._waiting[call.seq] = call

    def settle(self, upto: int, open_seqs: Sequence[int]) -> None:
        """Forget every request up to `upto` that the client no longer waits for."""
        still = open_seqs if len(open_seqs) <= _FEW else set(open_seqs)
        for seq in [seq for seq in self._calls if seq <= upto and seq not in still]:
            self.forget(seq)
        if self._missing:
            self._missing = {seq for seq in self._missing if seq > upto or seq in still}

    def forget(self, seq: int) -> None:
        """Drop one request: an answered one with its answer, a waiting one unexecuted."""
        call = self._calls.pop(seq, None)
        self._waiting.pop(seq, None)
        if self.answers.pop(seq, None) is None and call is not None:
            call.cancelled = True

    def next_call(self) -> Call | None:
        """The call to execute now, which becomes `running`; None while one runs, none waits, or one is missing."""
        if self.running is not None or not self._waiting:
            return None
        seq = min(self._waiting)
        if self._missing and min(self._missing) < seq:
            return None
        self.running = self._waiting.pop(seq)
        return self.running

    def answer(self, call: Call, frames: list[bytes]) -> None:
        """Keep the answer of `call` until it is acknowledged."""
        self._waiting.pop(call.seq, None)
        self.answers[call.seq] = (0.0, frames)

    def is_waiting(self, call: Call) -> bool:
        """True while `call` has not been started."""
        return self._waiting.get(call.seq) is call

    def waiting_calls(self) -> list[Call]:
        """Calls that were not started."""
        return list(self._waiting.values())
