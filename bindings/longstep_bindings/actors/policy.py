"""`ActorPolicy`: a pool of actors as the sdk's `Policy`, with updates of the weights."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from longstep.errors import ConfigError, WeightsError, did_you_mean
from longstep.types import Completion, GenerationRequest
from longstep_bindings.actors.pool import ActorPool
from longstep_bindings.actors.spec import ActorSpec
from longstep_bindings.actors.stats import PoolStats
from longstep_bindings.actors.weights import ROUTES, Route
from longstep_bindings.curve import ClientKeys
from longstep_bindings.engines.served import ScoreRow

__all__ = ["ActorPolicy", "Probe", "open_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A few completions and the log-probabilities that the new weights must give them."""

    rows: tuple[ScoreRow, ...]
    logprobs: tuple[NDArray[np.float32], ...]
    """For each row [C], at temperature 1 and without a constraint, computed with the weights that are sent."""
    tolerance: float = 0.1
    """Largest mean absolute difference per token. Between bfloat16 runtimes 0.03 to 0.15 has been seen for single tokens."""

    def __post_init__(self) -> None:
        """Refuse what cannot be compared."""
        sizes = [len(row.token_ids) for row in self.rows]
        if not sizes or [len(each) for each in self.logprobs] != sizes:
            raise ConfigError(
                f"expected at least one row and one log-probability per token, got rows of {sizes} and "
                f"{[len(each) for each in self.logprobs]} log-probabilities"
            )
        if not self.tolerance > 0.0:
            raise ConfigError(f"expected `tolerance` above 0, got {self.tolerance}")


class ActorPolicy:
    """Completions from a pool's actors, by the weights that were sent there last."""

    def __init__(self, pool: ActorPool, *, dtype: str | None = "engine") -> None:
        """Args:
        pool: The actors; closed with this policy.
        dtype: Number format to send weights in. `engine` is that of the actors' engines, None that of the model.
        """
        self.pool = pool
        self._dtype = dtype
        self._sender: Any = None
        self.last_route: Route | None = None
        """How the last update travelled; None before the first."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that were given to all actors last."""
        return self.pool.policy_version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests without waiting for their completions; see `ActorPool.submit`."""
        self.pool.submit(requests)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Completions that are ready; waits up to `timeout_s` for the first, empty when none came."""
        return self.pool.poll(timeout_s)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Withdraw requests; they are never answered. Unknown ids are passed over."""
        self.pool.cancel(request_ids)

    def stats(self) -> PoolStats:
        """Load, counts and rates of the pool and of each actor."""
        return self.pool.stats()

    def update_weights(
        self, source: Any, version: int, *, route: Route = "auto", probe: Probe | None = None
    ) -> None:
        """Have every actor serve new weights: one transfer to each. Returns once they serve.

        Args:
            source: A transformers model, or the path of a folder or file with its weights, which stays in place until
                the next update: an actor that is restarted reads it again.
            version: Their `policy_version`, at least 0.
            route: `shared_memory`, `wire`, `cuda`, or `auto` for the first that works here without a GPU.
            probe: Compared at each actor after the transfer.

        Raises:
            WeightsError: They do not fit or could not be sent, and every actor goes on with those it had; or the probe
                found that an actor does not compute what it should.
        """
        _check_route(route)
        version = _check_version(version)
        if route == "cuda":
            self._update_on_device(source, version)
        else:
            self._update(source, "weights", version, route)
        self._check(probe)

    def update_adapter(
        self, source: Any, version: int, *, route: Route = "auto", probe: Probe | None = None
    ) -> None:
        """Have every actor serve its model with this LoRA adapter in place of any other; as `update_weights`.

        Args:
            source: A peft model, or the path of an adapter's folder, which stays in place until the next update.
            version: Its `policy_version`.
            route: As for `update_weights`, but not `cuda`.
            probe: Compared at each actor after the transfer.

        Raises:
            WeightsError: As for `update_weights`.
        """
        _check_route(route)
        version = _check_version(version)
        if route == "cuda":
            raise ConfigError(
                'expected another route for an adapter than "cuda"; it is small, use "auto"'
            )
        self._update(source, "adapter", version, route)
        self._check(probe)

    def _update(self, source: Any, kind: Any, version: int, route: Route) -> None:
        dtype = self._dtype
        if dtype == "engine":
            formats = {description.dtype for description in self.pool.descriptions}
            dtype = (formats.pop() or None) if len(formats) == 1 else None
        self.last_route = self.pool.update(
            source, kind=kind, version=version, route=route, dtype=dtype
        )

    def _update_on_device(self, model: Any, version: int) -> None:
        from longstep_bindings.actors.device import DeviceSender

        if isinstance(model, str | Path):
            raise ConfigError('expected a model on a GPU for route="cuda", got a path')
        if (
            not self.pool.all_ready
        ):  # a restarted actor is in no group, and what it lacks stands in no file
            self._sender = None
            said = "some actor was restarted: weights go by files this time"
            warnings.warn(said, RuntimeWarning, stacklevel=3)
            self._update(model, "weights", version, "auto")
            return
        if self._sender is None or self._sender.model is not model:
            self._sender = DeviceSender(self.pool, model)
        try:
            self._sender.send(version)
        except BaseException as error:
            self._sender = None
            self.pool.restart_all(f"weights may have arrived in part: {error}")
            raise
        self.last_route = "cuda"

    def _check(self, probe: Probe | None) -> None:
        if probe is None:
            return
        for index, scores in self.pool.score(probe.rows).items():
            differences = np.concatenate(
                [np.abs(got - want) for got, want in zip(scores, probe.logprobs, strict=True)]
            )
            mean = float(differences.mean())
            if not mean <= probe.tolerance:  # NaN too
                raise WeightsError(
                    f"expected log-probabilities of version {self.policy_version} within {probe.tolerance:g} per token "
                    f"at actor {index}, got a mean difference of {mean:.4g} and a largest of {differences.max():.4g}; "
                    "the weights that it serves are not the ones that were sent"
                )

    def close(self) -> None:
        """Close the pool. Idempotent."""
        self.pool.close()

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


def _check_version(version: Any) -> int:
    if isinstance(version, bool) or not hasattr(version, "__index__") or version < 0:
        raise ConfigError(f"expected a version of at least 0, got {version!r:.80}")
    return operator.index(version)


def _check_route(route: str) -> None:
    if route not in ROUTES:
        raise ConfigError(f"expected a route, got `{route}`; {did_you_mean(route, ROUTES)}")


def open_policy(
    model: str | Path = "",
    *,
    engine: str = "transformers",
    num_actors: int = 1,
    options: Mapping[str, Any] | None = None,
    python: str | None = None,
    environ: Mapping[str, str] | None = None,
    addresses: str | Sequence[str] = (),
    keys: ClientKeys | None = None,
    **settings: Any,
) -> ActorPolicy:
    """A policy with actors of its own, or with actors that run elsewhere.

    Args:
        model: A model folder in Hugging Face form; not needed beside `addresses`.
        engine: `transformers`, `vllm`, or what else `open_engine` takes.
        num_actors: How many to start.
        options: What the engine takes beside its model.
        python: Interpreter for the actors, with longstep and the engine's runtime; None is this one.
        environ: Environment variables for the actors.
        addresses: Actors that run elsewhere; none are started then.
        keys: CURVE keys, for addresses on other machines.
        settings: See `PoolSettings`.

    Raises:
        ConfigError: An argument cannot be meant, or the engine cannot load the model.
        LongstepError: An actor could not be started or is not there.
    """
    if addresses:
        _refuse_beside_addresses(
            model=str(model),
            engine=engine if engine != "transformers" else "",
            num_actors=num_actors if num_actors != 1 else 0,
            options=options,
            python=python,
            environ=environ,
            log_folder=settings.get("log_folder"),
        )
        return ActorPolicy(ActorPool.connect(addresses, keys=keys, **settings))
    spec = ActorSpec(
        model=str(model),
        engine=engine,
        options=dict(options or {}),
        python=python,
        environ=dict(environ or {}),
    )
    return ActorPolicy(ActorPool(spec, num_actors, **settings))


def _refuse_beside_addresses(**given: Any) -> None:
    meant = [name for name, value in given.items() if value]
    if meant:
        raise ConfigError(
            f"expected no `{'`, `'.join(meant)}` beside `addresses`: whoever started those actors has settled it"
        )
