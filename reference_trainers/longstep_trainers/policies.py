"""The policy that rollouts of a training run ask: the trained model in this process, or actors that get its weights.

Both are `longstep.policy.Policy`s with the same few methods beside it, so the trainer reads the same either way. See
`longstep_trainers.actors` for the second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from longstep.errors import require
from longstep.policy import EnginePolicy, Policy
from longstep_bindings.engines.transformers_engine import TransformersEngine
from longstep_trainers.batching import Rows
from longstep_trainers.config import RunConfig

__all__ = ["InProcessPolicy", "TrainedPolicy", "open_policy"]


class TrainedPolicy(Policy, Protocol):
    """A policy whose weights follow the trainer's."""

    @property
    def evaluation(self) -> Policy:
        """The same weights for evaluations, which may ask while a rollout does."""
        ...

    def cancel(self, request_ids: Any) -> None:
        """Withdraw requests; they are never answered."""
        ...

    def forget(self) -> None:
        """Drop whatever would make a later completion depend on earlier ones in its last bits."""
        ...

    def update(self, version: int, rows: Rows) -> dict[str, float]:
        """Serve the model's present weights from now on.

        Args:
            version: Number of weight updates made so far.
            rows: What was trained on last; a few of them prove that the weights have arrived.

        Returns:
            Timings of the transfer.
        """
        ...

    def timings(self) -> dict[str, float]:
        """Load and speed since the last call."""
        ...

    def close(self) -> None:
        """End what serves the weights. Idempotent."""
        ...


def open_policy(
    config: RunConfig,
    model: Any,
    tokenizer: Any,
    *,
    version: int | None,
    folder: Path | None = None,
) -> TrainedPolicy:
    """The policy that the settings ask for, with the model's present weights.

    Args:
        config: Settings of the run.
        model: What is trained.
        tokenizer: The model's.
        version: Number of weight updates made so far. None for an evaluation: actors that run elsewhere keep what they
            serve.
        folder: For what actors need on disk; None means `actors` in the run's own. Not used without actors.

    Raises:
        LongstepError: Actors could not be started; the message has their own words.
    """
    if not config.actor.uses_actors:
        return InProcessPolicy(model, tokenizer, version=version or 0)
    for name in ("zmq", "msgpack"):
        require(name, extra="bindings", needed_by="actors")
    from longstep_trainers.actors import ActorsPolicy, start_actors

    folder = folder or Path(config.output_dir) / "actors"
    trains = version is not None
    actors = start_actors(config, model, tokenizer, folder, trains=trains)
    policy = ActorsPolicy(actors, model, config)
    # Actors that were started for this run have the weights that training began with.
    if version is not None and (version > 0 or config.actor.addresses):
        try:
            policy.send(version, probe=None)
        except BaseException:
            policy.close()
            raise
    return policy


class InProcessPolicy(EnginePolicy):
    """Samples from the very model that is trained; nothing has to be transferred."""

    def __init__(self, model: Any, tokenizer: Any, *, version: int) -> None:
        """Args:
        model: Shared with the trainer.
        tokenizer: The model's.
        version: Number of weight updates made so far.
        """
        self._engine = TransformersEngine(model, tokenizer, policy_version=version)
        super().__init__(self._engine)

    @property
    def evaluation(self) -> Policy:
        """Itself: rollouts and evaluations take turns."""
        return self

    def forget(self) -> None:
        """Drop the scores of earlier choices."""
        self._engine.reset_cache()

    def update(self, version: int, rows: Rows) -> dict[str, float]:
        """Count the update."""
        self._engine.policy_version = version
        return {}

    def timings(self) -> dict[str, float]:
        """None beside those that the trainer takes itself."""
        return {}

    def close(self) -> None:
        """The model belongs to the trainer."""
