"""One actor as its pool sees it: a session with it, its weights, and what is done when it goes down.

A thread watches the actor. When it ends, hangs or falls silent, its requests go back to the pool, and the thread gets
another actor, loads the newest weights into it, and lets requests through again.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from longstep.errors import (
    DeadlineError,
    LongstepError,
    PolicyError,
    ProtocolError,
    SessionLostError,
    WeightsError,
)
from longstep_bindings.actors.lane import ActorLane
from longstep_bindings.actors.messages import LIMITS, SERVICE, VERSION
from longstep_bindings.actors.service import host_identity
from longstep_bindings.actors.spec import PoolSettings
from longstep_bindings.actors.tickets import Ticket
from longstep_bindings.actors.weights import Parcel, send_files
from longstep_bindings.curve import ClientKeys
from longstep_bindings.engines.served import EngineDescription
from longstep_bindings.envs.places import Place
from longstep_bindings.rpc import Client
from longstep_bindings.watched import ask, meet

__all__ = ["ActorLink", "LinkOwner", "State"]

State = Literal["starting", "waiting", "ready", "down", "failed"]
"""`waiting` is an actor that is there, but lacks the newest weights, which no file holds; the next update brings them."""

_log = logging.getLogger(__name__)
_WATCH_S = 0.05
_AGAIN_S = (0.2, 5.0)
"""Pause before another start when one failed: the first, and the longest."""
_CONNECT_S = 10.0
_ATTEMPT_S = 2.0
_DESCRIBE_TIMEOUT_S = 120.0


class LinkOwner(Protocol):
    """The pool, as its links see it."""

    lock: threading.RLock
    identity: str
    """Tells an actor whose weights it is given."""

    def newest(self) -> tuple[str | None, tuple[Parcel, ...]]:
        """See `Delivery.newest`; with the lock held."""
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
        self.shares_memory = False
        """True when the actor sees the files in this machine's shared memory."""
        self.last_route: Literal["shared_memory", "wire"] | None = None
        """How the weights that it was given last reached it."""
        self.lane = ActorLane(owner.lock, wake=owner.wake, report=self._report)
        """Its requests."""
        self._settings, self._owner, self._keys = settings, owner, keys
        self._limit = settings.max_in_flight
        self._token = ""
        self._refusing: Client | None = None
        """The session with the actor that refused weights last."""
        self._num_busy = 0
        """Long calls under way, during which no completions may come."""
        self._trouble = threading.Event()
        self._trouble_text = ""
        self._is_condemned = False
        """True when this very actor is of no use, whatever its session does."""
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
            client = self.lane.client
            self._num_busy += 1
        try:
            if client is None:
                raise SessionLostError(
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
                self.lane.heard()

    def load_parcels(self, parcels: Sequence[Parcel]) -> None:
        """Have the actor serve the weights of parcels, loaded one after the other.

        Raises:
            WeightsError: They do not fit, or did not arrive; the actor goes on with those that it had.
            SessionLostError: The actor died; the next one gets the newest weights anyway.
        """

        def load(client: Client) -> None:
            try:
                self._load(client, parcels)
            except (SessionLostError, DeadlineError):
                raise
            except LongstepError:
                self._refusing = client
                raise

        self._called(load)

    def _load(self, client: Client, parcels: Sequence[Parcel]) -> None:
        if parcels and self._token != parcels[-1].token:
            for parcel in parcels:
                self._load_one(client, parcel)

    def _load_one(self, client: Client, parcel: Parcel) -> None:
        timeout_s = self._settings.update_timeout_s
        order = {
            "kind": parcel.kind,
            "version": parcel.version,
            "token": parcel.token,
            "owner": self._owner.identity,
        }
        by_path = parcel.route == "shared_memory" and self.shares_memory
        if by_path:
            order["path"] = str(parcel.path)
            version = self._ask(client, "load", order, timeout_s=timeout_s)
        else:
            with self._courier(client.address) as courier:
                order["transfer"] = send_files(courier, parcel, check=self._check_there)
                version = self._ask(courier, "load", order, timeout_s=timeout_s)
        if version != parcel.version:
            raise ProtocolError(f"expected version {parcel.version} to serve, got {version!r}")
        self._token, self.policy_version = parcel.token, parcel.version
        self.last_route = "shared_memory" if by_path else "wire"
        self.num_transfers += 1

    def _courier(self, address: str) -> Client:
        """A session of its own for large things, with an actor that has one already."""
        try:
            return self._connected(address)
        except DeadlineError as error:
            raise SessionLostError(str(error)) from None

    def has(self, parcel: Parcel) -> bool:
        """True when the actor serves these weights."""
        return self._token == parcel.token

    def restart(self, why: str) -> None:
        """Give the actor up and get another."""
        with self._owner.lock:
            client = self.lane.client
        if client is not None:
            self._is_condemned = True
            self._report(client, why)

    def give_up_who_refused(self, why: str) -> None:
        """Give the actor up that refused weights last, and get another; one that has taken its place is left alone."""
        with self._owner.lock:
            is_there = self.lane.client is not None and self.lane.client is self._refusing
        if is_there:
            self.restart(why)

    def _ask(self, client: Client, method: str, value: Any, *, timeout_s: float) -> Any:
        """The answer of a method that may take long; an actor's death is noticed at once."""
        return ask(client, method, value, timeout_s=timeout_s, check_there=self._check_there)

    def _check_there(self) -> None:
        why = "the pool was closed" if self._closing.is_set() else self.place.why_down()
        if why is not None:
            raise SessionLostError(why)

    def served_device_weights(self, version: int) -> None:
        """Take note of weights that came by vLLM's own transfer."""
        self._token, self.policy_version = f"device-{version}", version
        self.num_transfers += 1

    # ---- the watching thread ----

    def _report(self, client: Client, trouble: str) -> None:
        if client is self.lane.client:
            self._is_condemned |= client.lost is None  # there is a session, and it is of no use
            self._trouble_text = self._trouble_text or trouble
            self._trouble.set()

    def _connected(self, address: str) -> Client:
        """A session with the actor at an address."""
        return meet(
            functools.partial(self._attempt, address),
            address=address,
            timeout_s=_CONNECT_S,
            check_there=self._check_there,
        )

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
        """A session with a new actor."""
        self.address = self.place.open()
        return self._introduced(self._connected(self.address))

    def _introduced(self, client: Client) -> Client:
        try:
            introduction = {"owner": self._owner.identity}
            told = self._ask(client, "describe", introduction, timeout_s=_DESCRIBE_TIMEOUT_S)
            self._described(told)
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
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise ProtocolError(f"expected an actor's description, got {error!r:.100}") from None
        self.shares_memory = bool(host) and host == host_identity()

    def _open_to(self, client: Client) -> None:
        """Load the newest weights, then let requests through."""
        try:
            while not self._opened(client):
                with self._owner.lock:
                    _, parcels = self._owner.newest()
                if parcels:
                    self._load_newest(client, parcels)
                    continue
                self.state = "waiting"
                self._closing.wait(_WATCH_S)
                self._check_there()
                if client.lost:
                    raise SessionLostError(client.lost)
        except BaseException:
            client.close()
            raise
        self.lane.begin(client)
        self._owner.read()

    def _load_newest(self, client: Client, parcels: Sequence[Parcel]) -> None:
        try:
            self._load(client, parcels)
        except WeightsError:
            with self._owner.lock:
                token, _ = self._owner.newest()
            if token == parcels[-1].token:
                raise  # else newer ones have taken their place, and their files

    def _opened(self, client: Client) -> bool:
        with self._owner.lock:
            token, _ = self._owner.newest()
            if token not in (None, self._token):
                return False
            self.lane.open(client, self._limit)
            self.state = "ready"
            return True

    def _watch(self) -> str | None:
        """Why the actor is of no more use, once it is; None when this link is closed."""
        while not self._closing.is_set():
            if self._trouble.wait(_WATCH_S):
                return (
                    None if self._closing.is_set() else self.place.why_down() or self._trouble_text
                )
            client = self.lane.client
            why = self.place.why_down() or (client and client.lost) or self._stalled()
            if why is not None:
                return why
        return None

    def _stalled(self) -> str | None:
        limit_s = self._settings.stall_timeout_s
        with self._owner.lock:
            if not self._num_busy and self.lane.silent_s > limit_s:
                owed = self.lane.load
                self._is_condemned = True
                return f"the actor owes {owed} completions and gave none for {limit_s:g} s"
        return None

    def _give_up(self, why: str) -> None:
        """End the session and give what is owed back to the pool."""
        self._owner.read()  # the answers that came in time
        with self._owner.lock:
            client = self.lane.close()
            self.state = "down"
            self._trouble.clear()
            self._trouble_text = ""
        if client is not None:
            client.close()
        with self._owner.lock:
            self._owner.lost(self.lane.drain(), why)
        self._owner.read()

    def _recover(self, why: str) -> None:
        if not self._is_condemned and self.place.why_down() is None and self._has_met_again(why):
            return
        pause_s = _AGAIN_S[0]
        limit_s = self._settings.start_timeout_s
        began, is_first = time.monotonic(), True
        while not self._closing.is_set():
            self._give_up(why)
            self.place.drop()
            self._is_condemned = False
            if is_first or self.place.starts:
                _log.warning("actor %d: %s; it is replaced", self.index, why)
                self._count_restart(why)
            elif time.monotonic() - began > limit_s:
                raise PolicyError(
                    f"expected the actor at {self.address} to be back within {limit_s:g} s, got {why}; restart it, or "
                    "raise `start_timeout_s` if its model takes longer to load"
                )
            is_first = False
            self.state = "starting"
            try:
                self._open_to(self._connect())
                return
            except LongstepError as error:
                why = str(error)
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_S[1])

    def _count_restart(self, why: str) -> None:
        self.num_restarts += 1
        if self.num_restarts > self._settings.max_restarts:
            raise PolicyError(
                f"expected actor {self.index} to go down at most {self._settings.max_restarts} times, got one more: "
                f"{why}; look for what kills it, or raise `max_restarts`"
            )

    def _has_met_again(self, why: str) -> bool:
        """Whether the same actor takes a new session: the old one may have ended because this process slept."""
        self._give_up(why)
        try:
            client = self._introduced(self._attempt(self.address, _ATTEMPT_S))
            self._open_to(client)
        except LongstepError:
            return False
        _log.warning("actor %d: %s; it is there, and goes on in a new session", self.index, why)
        return True

    def begin_close(self) -> None:
        """Begin to end the session and the actor."""
        self._closing.set()
        self._trouble.set()
        self.place.begin_close()

    def close(self) -> None:
        """Wait for the end."""
        self._thread.join()
