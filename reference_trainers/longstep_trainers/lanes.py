"""One policy for several threads: each asks through a lane of its own and gets what it asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from longstep.policy import Policy
from longstep.types import Completion, GenerationRequest

__all__ = ["PolicyLanes"]

_TURN_S = 0.02
"""Longest wait in one call of the policy; after it another lane has its turn."""


class PolicyLanes:
    """Hands each completion of a policy to the lane that asked for it.

    The policy's `submit` may be called while another thread is in its `poll`; its `poll` is called by one at a time.
    """

    def __init__(self, policy: Any) -> None:
        """Args:
        policy: A `Policy` with `cancel`, used through lanes only.
        """
        self._policy = policy
        self._polling = threading.Lock()
        self._lock = threading.Lock()  # guards the lanes' inboxes and owners
        self._owners: dict[str, _Lane] = {}

    def lane(self) -> _Lane:
        """A policy that shares the one behind it."""
        return _Lane(self)

    def submit(self, lane: _Lane, requests: Sequence[GenerationRequest]) -> None:
        """Hand requests over for a lane."""
        with self._lock:
            self._owners.update((request.request_id, lane) for request in requests)
        try:
            self._policy.submit(requests)
        except BaseException:
            with self._lock:
                for request in requests:
                    self._owners.pop(request.request_id, None)
            raise

    def poll(self, lane: _Lane, timeout_s: float) -> list[Completion]:
        """A lane's completions; while it waits it works for the others too."""
        deadline = time.monotonic() + timeout_s
        while True:
            taken = self._take(lane)
            left_s = deadline - time.monotonic()
            if taken or left_s < 0.0:
                return taken
            if not self._polling.acquire(timeout=left_s):
                return self._take(lane)
            try:
                taken = self._take(lane)  # somebody else's poll may have brought them
                if taken:
                    return taken
                self._sort(self._policy.poll(max(0.0, min(left_s, _TURN_S))))
            finally:
                self._polling.release()

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Withdraw requests."""
        self._policy.cancel(request_ids)
        with self._lock:
            for name in request_ids:
                self._owners.pop(name, None)

    @property
    def policy_version(self) -> int:
        """The policy's."""
        return self._policy.policy_version

    def _take(self, lane: _Lane) -> list[Completion]:
        with self._lock:
            taken, lane.inbox = lane.inbox, []
            return taken

    def _sort(self, completions: Sequence[Completion]) -> None:
        with self._lock:
            for completion in completions:
                lane = self._owners.pop(completion.request_id, None)
                if lane is not None:  # else it was withdrawn
                    lane.inbox.append(completion)


class _Lane(Policy):
    """A `Policy` of one thread's own."""

    def __init__(self, lanes: PolicyLanes) -> None:
        self._lanes = lanes
        self.inbox: list[Completion] = []

    @property
    def policy_version(self) -> int:
        return self._lanes.policy_version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._lanes.submit(self, requests)

    def poll(self, timeout_s: float) -> list[Completion]:
        return self._lanes.poll(self, timeout_s)

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._lanes.cancel(request_ids)
