"""All actors of a pool at once: calls side by side, and new weights, which every actor must have before it answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import LongstepError, PolicyError, SessionLostError, WeightsError
from longstep_bindings.actors.folders import SHARED_MEMORY
from longstep_bindings.actors.link import ActorLink
from longstep_bindings.actors.messages import pack_rows
from longstep_bindings.actors.weights import Kind, Parcel, Route, pack_parcel
from longstep_bindings.engines.served import ScoreRow

__all__ = ["Delivery"]

_LOOK_S = 0.05
_SCORE_TIMEOUT_S = 300.0


class Delivery:
    """What is sent to all actors. One update at a time; requests go on meanwhile."""

    def __init__(
        self,
        links: Sequence[ActorLink],
        lock: threading.RLock,
        *,
        require_open: Callable[[], None],
        start_timeout_s: float,
    ) -> None:
        """Args:
        links: The actors; the list may still grow.
        lock: The pool's.
        require_open: Raises when the pool can do nothing any more.
        start_timeout_s: How long an actor may take to come back.
        """
        self.shared_memory: Path = SHARED_MEMORY
        """Where weights are put for actors of this machine."""
        self.version = self.num_updates = 0
        self._links, self._lock = links, lock
        self._require_open, self._start_timeout_s = require_open, start_timeout_s
        self._parcels: tuple[Parcel, ...] = ()
        """What an actor needs that has only the model it was started with: weights, an adapter, or both."""
        self._token: str | None = None
        self._updating = threading.Lock()

    def newest(self) -> tuple[str | None, tuple[Parcel, ...]]:
        """The token of the weights that every actor must have, None for any, and what to load for it in which order,
        nothing when no file holds them; with the lock held.
        """
        return self._token, self._parcels

    # ---- calls ----

    def each(
        self, links: Sequence[ActorLink], work: Callable[[ActorLink], Any]
    ) -> list[Any | LongstepError]:
        """What `work` gives for each link, or the error that it raised; side by side."""

        def attempt(link: ActorLink) -> Any:
            try:
                return work(link)
            except LongstepError as error:
                return error

        if len(links) <= 1:
            return [attempt(link) for link in links]
        with ThreadPoolExecutor(len(links)) as threads:
            return list(threads.map(attempt, links))

    def ready_links(self, *, or_waiting: bool = False) -> list[ActorLink]:
        """Links that take requests; waits for the first, or with `or_waiting` for one that waits for new weights.

        Raises:
            PolicyError: There is none within the time that an actor may take to start.
        """
        end_at = time.monotonic() + self._start_timeout_s
        while True:
            self._require_open()
            ready = [link for link in self._links if link.state == "ready"]
            if ready or (or_waiting and any(link.state == "waiting" for link in self._links)):
                return ready
            if time.monotonic() > end_at:
                raise PolicyError(
                    f"expected an actor within {self._start_timeout_s:g} s, all of them are down"
                )
            time.sleep(_LOOK_S)

    def call_all(self, method: str, values: Sequence[Any], *, timeout_s: float) -> list[Any]:
        """Call a method of every actor's; raises what the first of those that failed raised."""

        def call(link: ActorLink) -> Any:
            return link.call(method, values[link.index], timeout_s=timeout_s)

        answers = self.each(self._links, call)
        for answer in answers:
            if isinstance(answer, LongstepError):
                raise answer
        return answers

    def score(self, rows: Sequence[ScoreRow]) -> dict[int, list[NDArray[np.float32]]]:
        """Log-probabilities from every actor that is there, by its number; one that dies meanwhile is left out."""
        packed = pack_rows(rows)
        scores: dict[int, list[NDArray[np.float32]]] = {}
        while not scores:
            links = self.ready_links()
            answers = self.each(
                links, lambda link: link.call("score", packed, timeout_s=_SCORE_TIMEOUT_S)
            )
            for link, answer in zip(links, answers, strict=True):
                if isinstance(answer, SessionLostError):
                    continue
                if isinstance(answer, LongstepError):
                    raise answer
                scores[link.index] = [np.asarray(row, np.float32) for row in answer]
        return scores

    # ---- weights ----

    def update(
        self, source: Any, *, kind: Kind, version: int, route: Route, dtype: str | None
    ) -> Route:
        """Have every actor serve new weights; see `ActorPool.update`."""
        with self._updating:
            links = self.ready_links(or_waiting=True)
            if route == "shared_memory":
                _require_shared_memory(links)
            parcel = pack_parcel(
                source,
                kind=kind,
                version=version,
                route=route,
                shared_memory=self.shared_memory,
                dtype=dtype,
            )
            try:
                self._deliver(links, parcel)
            finally:
                if parcel not in self._parcels:
                    parcel.remove()
            used = {link.last_route for link in self._links if link.has(parcel)}
            return "wire" if "wire" in used else parcel.route

    def _deliver(self, links: Sequence[ActorLink], parcel: Parcel) -> None:
        while True:
            answers = self.each(links, lambda link: link.load_parcels([parcel]))
            refusals = [
                error
                for error in answers
                if isinstance(error, LongstepError) and not isinstance(error, SessionLostError)
            ]
            took = any(not isinstance(answer, LongstepError) for answer in answers)
            if refusals and not took:
                raise refusals[0]
            if took or not links:
                break
            # All died, so nobody has said yet whether these weights fit.
            links = self.ready_links(or_waiting=True)
        self._take_over(parcel)
        _give_up_who_refused(links, answers)
        # Whoever became ready while this went on, before it knew of these weights.
        late = [link for link in self._links if link.state == "ready" and not link.has(parcel)]
        parcels = self._parcels
        _give_up_who_refused(late, self.each(late, lambda link: link.load_parcels(parcels)))
        if not took:
            self.ready_links()

    def _take_over(self, parcel: Parcel) -> None:
        """From here on every actor must have these weights."""
        with self._lock:
            before = self._parcels
            # An adapter goes on top of the weights that were sent before it, and in place of an earlier one.
            kept = [each for each in before if parcel.kind == "adapter" and each.kind == "weights"]
            self._parcels = (*kept, parcel)
            self._token, self.version = parcel.token, parcel.version
            self.num_updates += 1
        for each in before:
            if each not in self._parcels:
                each.remove()

    def took_from_device(self, version: int) -> None:
        """Take note that every actor has got weights by vLLM's own transfer; no file holds them."""
        with self._lock:
            before, self._parcels = self._parcels, ()
            self._token, self.version = f"device-{version}", version
            self.num_updates += 1
            for link in self._links:
                link.served_device_weights(version)
        for parcel in before:
            parcel.remove()

    def close(self) -> None:
        """Remove the files. Idempotent."""
        with self._lock:
            before, self._parcels = self._parcels, ()
        for parcel in before:
            parcel.remove()


def _give_up_who_refused(links: Sequence[ActorLink], answers: Sequence[Any]) -> None:
    """Replace actors that did not take what others took; those that died are being replaced anyway."""
    for link, error in zip(links, answers, strict=True):
        if isinstance(error, LongstepError) and not isinstance(error, SessionLostError):
            link.give_up_who_refused(f"it did not take the weights that others took: {error}")


def _require_shared_memory(links: Sequence[ActorLink]) -> None:
    elsewhere = [link.index for link in links if not link.shares_memory]
    if elsewhere:
        raise WeightsError(
            f"expected actors that see this machine's shared memory, got others: {elsewhere}; "
            'send by route="wire" or "auto"'
        )
