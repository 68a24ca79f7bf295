"""Environment servers and actors placed on a Ray cluster; the clients in front of them stay the ones of a single machine.

Ray decides where a server runs, with what CPUs and GPUs, and starts it anew after a failure; nothing else is left to
Ray: steps and completions travel over ZeroMQ as ever. A server keeps its address when Ray restarts it (the placement
group pins it to its node, the port is chosen once), so that clients reconnect and recover as they do on one machine.

Between machines traffic is encrypted: a key pair for the servers and one for the client are made for each placement.

    ray.init("auto")
    with place_env_servers(EnvSpec(env_id="longstep/KeyDoor-v0"), num_servers=4) as servers:
        with RemoteVectorEnv.connect(servers.addresses, num_envs=256, keys=servers.keys) as envs:
            ...
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from longstep.errors import ConfigError, DeadlineError, LongstepError, require
from longstep_bindings.curve import ClientKeys, KeyPair, ServerKeys
from longstep_bindings.transport import is_loopback, private_ipc_address

if TYPE_CHECKING:
    from longstep_bindings.actors.spec import ActorSpec
    from longstep_bindings.envs.server import EnvServer
    from longstep_bindings.envs.spec import EnvSpec

__all__ = ["Placement", "RayServers", "place_actors", "place_env_servers"]

_CLOSE_S = 30.0
_WATCH_S = 0.2
Opener = Callable[[str, ServerKeys | None], Any]
"""Gives a server at an address, with its keys: something with `addresses` and `close`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What each server gets of the cluster, and what happens when it fails."""

    num_cpus: float = 1.0
    """CPUs that Ray sets aside for a server."""
    num_gpus: float = 0.0
    """GPUs that Ray sets aside for a server, and that it alone sees."""
    resources: Mapping[str, float] = field(default_factory=dict[str, float])
    """Other resources of the nodes, as Ray counts them."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "SPREAD"
    """How Ray lays the servers over the nodes."""
    max_restarts: int = 3
    """Times that Ray starts a server anew; -1 means without end."""
    timeout_s: float = 120.0
    """Seconds until the cluster must have room, and until an environment server must be there."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("num_cpus", "num_gpus"):
            if getattr(self, name) < 0:
                raise ConfigError(f"expected `{name}` of at least 0, got {getattr(self, name)}")
        if not self.bundle:
            raise ConfigError("expected CPUs, GPUs or other `resources` for each server, got none")
        if self.max_restarts < -1 or not self.timeout_s > 0.0:
            raise ConfigError(
                "expected `max_restarts` of at least -1 and `timeout_s` above 0, got "
                f"{self.max_restarts} and {self.timeout_s}"
            )

    @property
    def bundle(self) -> dict[str, float]:
        """One server's share, as Ray's placement groups take it."""
        parts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in parts.items() if amount}


def place_env_servers(
    spec: EnvSpec, *, num_servers: int, num_workers: int = 1, placement: Placement | None = None
) -> RayServers:
    """Environment servers on the cluster that `ray.init` joined; for `RemoteVectorEnv.connect`.

    Args:
        spec: What each of them serves.
        num_servers: Servers that Ray places.
        num_workers: Worker processes of each, which share its CPUs.
        placement: What each gets.

    Raises:
        DeadlineError: The cluster has no room for them in time.
        LongstepError: A server could not be started; its own words.
    """
    opener = partial(_open_env_server, spec, num_workers)
    placement = placement or Placement()
    return RayServers(opener, num_servers, num_workers, placement, placement.timeout_s)


def place_actors(
    spec: ActorSpec,
    *,
    num_actors: int,
    placement: Placement | None = None,
    start_timeout_s: float = 600.0,
) -> RayServers:
    """Actors on the cluster that `ray.init` joined; for `ActorPool.connect`.

    Args:
        spec: The model and engine of each of them.
        num_actors: Actors that Ray places.
        placement: What each gets, such as `num_gpus=1`.
        start_timeout_s: How long an actor may take to load its model.

    Raises:
        DeadlineError: The cluster has no room for them in time.
        LongstepError: An actor could not be started; its own words.
    """
    opener = partial(_open_actor, spec, start_timeout_s)
    return RayServers(opener, num_actors, 1, placement or Placement(), start_timeout_s)


class RayServers:
    """Servers that Ray runs, until `close`."""

    def __init__(
        self,
        opener: Opener,
        num_servers: int,
        num_ports: int,
        placement: Placement,
        start_timeout_s: float,
    ) -> None:
        """Made by `place_env_servers` and `place_actors`."""
        if num_servers < 1:
            raise ConfigError(f"expected at least 1 server, got {num_servers}")
        ray = require("ray", extra="ray", needed_by="longstep_bindings.ray")
        if not ray.is_initialized():
            raise ConfigError("expected a Ray cluster, got none; call `ray.init` first")
        self._ray, self._timeout_s = ray, start_timeout_s
        self._holders: list[Any] = []
        self._group: Any = ray.util.placement_group(
            [placement.bundle] * num_servers, strategy=placement.strategy
        )
        try:
            self._await_room(num_servers, placement)
            places = self._places(num_servers, num_ports, placement)
            server_keys, self.keys = _new_keys(places)
            """CURVE keys of the client; None when every server is on this machine's loopback."""
            for index, (host, port) in enumerate(places):
                holder = self._remote(
                    _Holder, index, placement, max_restarts=placement.max_restarts
                )
                address = f"tcp://{host}:{port}"
                self._holders.append(holder.remote(opener, address, server_keys))
            self.addresses: list[str] = self._gather(start_timeout_s)
            """Where the servers are."""
        except BaseException:
            self.close()
            raise

    def _await_room(self, num_servers: int, placement: Placement) -> None:
        try:
            self._ray.get(self._group.ready(), timeout=placement.timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                f"expected a cluster with room for {num_servers} times {placement.bundle} within "
                f"{placement.timeout_s:g} s, got one with {self._ray.available_resources()} free; ask for less, or add nodes"
            ) from None

    def _remote(self, thing: Any, index: int, placement: Placement, **options: Any) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index
        )
        return self._ray.remote(
            num_cpus=placement.num_cpus,
            num_gpus=placement.num_gpus,
            resources=dict(placement.resources),
            scheduling_strategy=strategy,
            **options,
        )(thing)

    def _places(
        self, num_servers: int, num_ports: int, placement: Placement
    ) -> list[tuple[str, int]]:
        """Host and first free port of each server's node."""
        found = [
            self._remote(_free_place, index, placement).remote(num_ports)
            for index in range(num_servers)
        ]
        return self._ray.get(found, timeout=placement.timeout_s)

    def _gather(self, timeout_s: float) -> list[str]:
        deadline = time.monotonic() + timeout_s
        answers = [holder.addresses.remote() for holder in self._holders]
        try:
            told = [
                self._ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
                for answer in answers
            ]
        except self._ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                f"expected {len(answers)} servers to be there within {timeout_s:g} s; raise "
                "`Placement.timeout_s` or, for actors, `start_timeout_s`"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise LongstepError(f"expected servers on the Ray cluster, got {error}") from error
        return [address for addresses in told for address in addresses]

    def nodes(self) -> list[str]:
        """Ray's id of the node that each server runs on, in the order in which they were placed."""
        return [self._ask(holder, "node") for holder in self._holders]

    def pids(self) -> list[int]:
        """Process id, on its node, of the Ray worker that holds each server."""
        return [self._ask(holder, "pid") for holder in self._holders]

    def _ask(self, holder: Any, method: str) -> Any:
        """What a holder says; one that is being restarted is waited for."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._ray.get(getattr(holder, method).remote(), timeout=self._timeout_s)
            except self._ray.exceptions.ActorUnavailableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_WATCH_S)

    def close(self) -> None:
        """End the servers and give back their share of the cluster. Idempotent."""
        holders, self._holders = self._holders, []
        with suppress(Exception):  # the cluster may be gone, and the servers with it
            self._ray.get([holder.close.remote() for holder in holders], timeout=_CLOSE_S)
        for holder in holders:
            with suppress(Exception):
                self._ray.kill(holder, no_restart=True)
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):
                self._ray.util.remove_placement_group(group)

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


class _Holder:
    """Runs in a Ray worker process and holds one server there."""

    def __init__(self, opener: Opener, address: str, keys: ServerKeys | None) -> None:
        self._server = opener(address, keys)

    def addresses(self) -> Sequence[str]:
        return self._server.addresses

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self._server.close()


def _open_env_server(
    spec: EnvSpec, num_workers: int, address: str, keys: ServerKeys | None
) -> EnvServer:
    from longstep_bindings.envs.server import EnvServer

    return EnvServer(spec, address, num_workers=num_workers, keys=keys)


def _open_actor(
    spec: ActorSpec, start_timeout_s: float, address: str, keys: ServerKeys | None
) -> _HeldActor:
    return _HeldActor(spec, start_timeout_s, address, keys)


class _HeldActor:
    """An actor process; when it ends, so does the Ray worker that holds it, and Ray starts both anew."""

    def __init__(
        self, spec: ActorSpec, start_timeout_s: float, address: str, keys: ServerKeys | None
    ) -> None:
        from longstep_bindings.actors.process import ActorPlace, StartSettings
        from longstep_bindings.actors.spec import PoolSettings

        usual = PoolSettings()
        settings = StartSettings(
            start_timeout_s=start_timeout_s,
            max_in_flight=usual.max_in_flight,
            lost_after_s=usual.lost_after_s,
            keys=keys,
        )
        # A folder that a later start sweeps up if this process is killed.
        self._folder = Path(private_ipc_address().removeprefix("ipc://")).parent
        self._place = ActorPlace(spec, settings, log=self._folder / "actor.log", address=address)
        self._closing = threading.Event()
        try:
            self.addresses = [self._place.open()]
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        threading.Thread(target=self._watch, name="longstep-ray-actor", daemon=True).start()

    def _watch(self) -> None:
        while not self._closing.wait(_WATCH_S):
            why = self._place.why_down()
            if why is not None and not self._closing.is_set():
                print(f"longstep: {why}", file=sys.stderr, flush=True)
                self._place.close()
                shutil.rmtree(self._folder, ignore_errors=True)
                os._exit(1)

    def close(self) -> None:
        self._closing.set()
        self._place.begin_close()
        self._place.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _free_place(num_ports: int) -> tuple[str, int]:
    """This node's address, and the first of some consecutive ports that are free on it."""
    import ray

    host = ray.util.get_node_ip_address()
    while True:
        with socket.socket() as probe:
            probe.bind((host, 0))
            first = probe.getsockname()[1]
        if first + num_ports <= 65536 and all(_is_free(host, first + i) for i in range(num_ports)):
            return host, first


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind((host, port))
        return True
    return False


def _new_keys(places: Sequence[tuple[str, int]]) -> tuple[ServerKeys | None, ClientKeys | None]:
    """Keys of one placement: a pair for the servers, a pair for the client; none on loopback."""
    import zmq

    if all(is_loopback(f"tcp://{host}:{port}") for host, port in places):
        return None, None
    server, client = (KeyPair(public=p, secret=s) for p, s in (zmq.curve_keypair() for _ in "ab"))
    return (
        ServerKeys(own=server, allowed=frozenset([client.public])),
        ClientKeys(own=client, server_public=server.public),
    )
