"""GiGPO and GRPO on step-independent rollouts, in one file to be read from top to bottom.

One iteration: play episode groups with the current weights (`Rollout.collect`), turn rewards into one advantage per
step (`longstep.credit`), and take clipped policy-gradient steps on the packed rows. GiGPO (Feng et al. 2025, equation 8)
adds to the episode's relative return the relative return among the steps of the group that stood in the same state;
GRPO (Shao et al. 2024) is the first term alone. There is no critic.

Completions come from the trained model in this process, or from actors that get the weights once after each update
(`longstep_trainers.policies`). With `actor.max_staleness` 0 every sample is made by the weights it trains; above, rollouts
go on during updates (`longstep_trainers.sources`), and importance weights correct for what older weights sampled.

Left out on purpose: a Trainer base class, several training processes. Everything random derives from (seed, iteration),
so a resumed run in one process repeats an uninterrupted one bit for bit.

Shape letters: N rows (steps), M loss tokens, B rows of the packed layout, L their length, H hidden size.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from longstep import credit
from longstep.recording import RolloutBatch
from longstep.tasks import TaskStream, panel
from longstep_trainers.assembly import agent_envs, prepare_model
from longstep_trainers.batching import MicroBatch, Rows, minibatches, pack
from longstep_trainers.checkpoints import (
    TrainerState,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from longstep_trainers.config import RunConfig
from longstep_trainers.config_files import require_same_run
from longstep_trainers.evaluate import evaluate
from longstep_trainers.forward import adapter_off, loss_token_logprobs, reads_packed_rows
from longstep_trainers.interrupts import GracefulStop, StopRequested
from longstep_trainers.losses import (
    clipped_policy_loss,
    effective_sample_share,
    kl_k3,
    truncated_importance_weights,
)
from longstep_trainers.optimization import MasterAdamW, learning_rate
from longstep_trainers.policies import open_policy
from longstep_trainers.sources import open_source
from longstep_trainers.tracking import CONFIG_FILE, MetricsLogger

__all__ = ["train"]

_log = logging.getLogger(__name__)


def train(config: RunConfig) -> dict[str, Any]:
    """Train as `config` says; gives the summary that is also written to `output_dir/summary.json`.

    Raises:
        ConfigError: a setting cannot work with this environment, model or folder.
        StopRequested: SIGINT or SIGTERM; a checkpoint was written before.
    """
    output_dir = Path(config.output_dir)
    checkpoint = find_checkpoint(output_dir, config.resume)
    if checkpoint is not None:
        require_same_run(config, checkpoint.resolve().parent.parent / CONFIG_FILE)
    model, tokenizer = prepare_model(config)
    device = next(model.parameters()).device
    reference = None
    if config.train.kl_coef and not config.model.use_lora:
        reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = MasterAdamW(
        model, betas=config.train.adam_betas, weight_decay=config.train.weight_decay
    )
    state = TrainerState()
    if checkpoint is not None:
        state = load_checkpoint(
            checkpoint, model=model, optimizer=optimizer, use_lora=config.model.use_lora
        )

    is_async = config.actor.max_staleness > 0
    held_out = panel(config.env.name, "eval", config.train.eval_tasks, env_kwargs=config.env.kwargs)

    with (
        MetricsLogger(output_dir, resume_from=state.iteration, config=config) as tracker,
        closing(open_policy(config, model, tokenizer, version=state.policy_version)) as policy,
        TaskStream(
            config.env.name,
            config.seed,
            env_kwargs=config.env.kwargs,
            position=state.task_position,
        ) as tasks,
        closing(agent_envs(config, tokenizer)) as envs,
        closing(agent_envs(config, tokenizer) if is_async else envs) as eval_envs,
        closing(
            open_source(
                config,
                envs,
                policy,
                tasks,
                version=state.policy_version,
                iteration=state.iteration,
                on_step=tracker.show_step if config.log_level == "DEBUG" else None,
            )
        ) as source,
        GracefulStop() as stop,
    ):

        def held_out_metrics() -> dict[str, float]:
            policy.forget()
            metrics = evaluate(eval_envs, policy.evaluation, held_out.tasks, config=config)
            return {f"eval/{name}": value for name, value in metrics.items()}

        def save() -> Path:
            return save_checkpoint(
                output_dir, model=model, tokenizer=tokenizer, optimizer=optimizer, state=state
            )

        @contextmanager
        def saved_on_failure(what: str) -> Iterator[None]:
            try:
                yield
            except Exception:
                _log.error("%s failed; what was learnt before is kept: %s", what, save())
                raise

        try:
            if state.iteration == 0:
                before = held_out_metrics()
                state.eval_success_before = before["eval/success_rate"]
                tracker.log(0, before)
            is_last = state.env_steps >= config.train.total_steps
            while not is_last:
                started = time.perf_counter()
                policy.forget()  # a resumed run remembers nothing here
                with saved_on_failure("the rollout"):
                    batch, source_metrics = source.next_batch()
                collected = time.perf_counter()
                with stop.postponed():
                    summary = batch.summary()
                    advantages = _advantages(batch, config)
                    metrics = {f"rollout/{name}": value for name, value in summary.items()}
                    metrics |= source_metrics | _credit_metrics(advantages)
                    rows = Rows.from_columns(batch.to_numpy(), advantages.total)
                    metrics |= _update(rows, model, reference, optimizer, config, state)
                    state.iteration += 1
                    state.env_steps += int(
                        summary["env_steps"] + source_metrics.get("async/dropped_env_steps", 0.0)
                    )
                    state.task_position = tasks.position
                    state.policy_version += 1
                    with saved_on_failure("the transfer of the weights"):
                        timings = policy.update(state.policy_version, rows)
                    source.advance(state.policy_version)
                    updated = time.perf_counter()
                    state.train_seconds += updated - started
                    is_last = state.env_steps >= config.train.total_steps
                    if is_last or _is_due(state.iteration, config.train.eval_every):
                        metrics |= held_out_metrics()
                    metrics["env_steps"] = state.env_steps
                    tracker.log(
                        state.iteration,
                        metrics,
                        timings=timings
                        | policy.timings()
                        | {
                            "rollout_s": collected - started,
                            "update_s": updated - collected,
                            "generated_tokens_per_s": summary["generated_tokens"]
                            / ((updated if is_async else collected) - started),
                            "env_steps_per_s": summary["env_steps"] / (updated - started),
                        },
                    )
                    if is_last or _is_due(state.iteration, config.train.save_every):
                        save()
        except StopRequested:
            _log.warning("stopped; go on with `--resume auto`: %s", save())
            raise
        model.save_pretrained(output_dir / "model")
        tokenizer.save_pretrained(output_dir / "model")
        summary = {
            "eval_success_before": state.eval_success_before,
            "eval_success_after": tracker.last("eval/success_rate"),
            "env_steps": state.env_steps,
            "iterations": state.iteration,
            "train_seconds": round(state.train_seconds, 1),
            "panel_sha256": held_out.sha256,
            "device": str(device),
        }
        (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        return summary


def _is_due(iteration: int, every: int) -> bool:
    return every > 0 and iteration % every == 0


def _advantages(batch: RolloutBatch, config: RunConfig) -> credit.Advantages:
    """One advantage per row, by the algorithm that the settings name."""
    columns = batch.to_numpy()
    algorithm = config.algorithm
    common: dict[str, Any] = {
        "baseline": algorithm.baseline,
        "valid": columns["valid"],
    }
    if algorithm.penalty_scope == "row":
        # The environment put no penalty into the reward; each invalid row bears its own.
        common |= {
            "invalid_action_penalty": algorithm.invalid_action_penalty,
            "penalty_scope": "row",
        }
    arrays = (columns["rewards"], columns["trajectory_ids"], columns["group_ids"])
    if algorithm.name == "grpo":
        return credit.grpo(*arrays, normalize=algorithm.grpo.normalize, **common)
    step_groups = None
    if algorithm.gigpo.similarity_threshold is not None:
        step_groups = credit.group_similar(
            [str(row.observation) for row in batch.rows],
            columns["group_ids"],
            algorithm.gigpo.similarity_threshold,
        )
    return credit.gigpo(
        *arrays,
        columns["state_keys"],
        gamma=algorithm.gamma,
        omega=algorithm.gigpo.omega,
        normalize=algorithm.gigpo.normalize,
        inner_group_size=algorithm.gigpo.inner_group_size,
        step_groups=step_groups,
        **common,
    )


def _credit_metrics(advantages: credit.Advantages) -> dict[str, float]:
    """What tells whether credit can work on this batch; warnings go to the log."""
    found = advantages.diagnostics
    for warning in found.warnings:
        _log.info("%s", warning)
    sizes = found.group_size_histogram
    num_groups = sum(sizes.values())
    grouped = sum(size * count for size, count in sizes.items())
    return {
        "credit/zero_variance_share": found.zero_variance_groups / max(found.num_episode_groups, 1),
        "credit/step_group_size_mean": grouped / num_groups if num_groups else 0.0,
        "credit/singleton_share": found.singleton_share,
        "credit/step_variance_share": found.step_variance_share,
        "credit/advantage_std": float(advantages.total.std()) if advantages.total.size else 0.0,
    }


def _update(
    rows: Rows,
    model: nn.Module,
    reference: nn.Module | None,
    optimizer: MasterAdamW,
    config: RunConfig,
    state: TrainerState,
) -> dict[str, float]:
    """Optimizer steps on one rollout's rows; gives the means over all loss tokens and steps."""
    device = next(model.parameters()).device
    rng = np.random.default_rng([config.seed, state.iteration])
    rows_per_step = config.train.batch_size * config.train.gradient_accumulation_steps
    dropout_seed = int(rng.integers(2**63))
    epochs = [
        list(minibatches(len(rows), rows_per_step, rng)) for _ in range(config.train.num_epochs)
    ]
    metrics: dict[str, float] = {}
    if config.actor.uses_actors:
        rows, metrics = _with_importance(rows, model, epochs[0], config)
    sums: dict[str, float] = {}
    norms: list[float] = []
    rate = 0.0
    model.train()
    # Dropout reads torch's global generator: seeded here for this iteration, and put back afterwards.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(dropout_seed)
        for selected in chain.from_iterable(epochs):
            num_tokens = rows.num_loss_tokens(selected)
            if num_tokens == 0:
                continue
            for microbatch in _packed(rows, selected, model, config):
                loss, parts = _loss(model, reference, microbatch, config)
                # The mean is over the whole optimizer step, so token weights do not depend on packing.
                (loss / num_tokens).backward()
                for name, value in parts.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
            rate = learning_rate(
                config.train, optimizer_steps=state.optimizer_steps, env_steps=state.env_steps
            )
            norms.append(
                optimizer.step(learning_rate=rate, max_grad_norm=config.train.max_grad_norm)
            )
            state.optimizer_steps += 1
    model.eval()
    total = max(sums.pop("tokens", 0.0), 1.0)
    metrics |= {f"train/{name}": value / total for name, value in sums.items()}
    metrics["train/grad_norm"] = float(np.mean(norms)) if norms else 0.0
    metrics["train/learning_rate"] = rate
    metrics["train/optimizer_steps"] = float(len(norms))
    metrics["train/loss_tokens"] = total
    return metrics


def _packed(
    rows: Rows, selected: NDArray[np.int64], model: nn.Module, config: RunConfig
) -> Iterator[MicroBatch]:
    """The micro-batches of some rows, on the model's device."""
    device = next(model.parameters()).device
    for microbatch in pack(
        rows,
        selected,
        max_tokens=config.train.max_tokens_per_microbatch,
        row_length=config.train.row_length,
        use_trees=not reads_packed_rows(model),
    ):
        yield microbatch.to(device)


def _with_importance(
    rows: Rows, model: nn.Module, minibatches: list[NDArray[np.int64]], config: RunConfig
) -> tuple[Rows, dict[str, float]]:
    """Rows whose ratio is taken against the weights before this update, weighted for what the sampler was.

    Older weights sampled them, or the same ones in another runtime, whose arithmetic differs. The forward passes are
    packed as the first epoch will be, so that its first ratio is exactly 1.
    """
    proximal = rows.logprobs.copy()
    model.eval()
    with torch.no_grad():
        for selected in minibatches:
            for microbatch in _packed(rows, selected, model, config):
                logprobs_M, _ = loss_token_logprobs(
                    model, microbatch, config.generation.temperature
                )
                proximal[microbatch.tokens_M.cpu()] = logprobs_M.cpu()
    weights, truncated = truncated_importance_weights(
        torch.from_numpy(proximal), torch.from_numpy(rows.logprobs), cap=config.train.importance_cap
    )
    has_loss = torch.from_numpy(rows.num_choices() > 1)
    gaps = np.abs(proximal - rows.logprobs)[has_loss.numpy()]
    metrics = {
        "importance/abs_logprob_gap": float(gaps.mean()) if gaps.size else 0.0,
        "importance/truncated_share": float(truncated[has_loss].float().mean())
        if gaps.size
        else 0.0,
        "importance/effective_sample_share": float(effective_sample_share(weights[has_loss])),
    }
    return replace(rows, logprobs=proximal, importance=weights.numpy()), metrics


def _loss(
    model: nn.Module, reference: nn.Module | None, microbatch: MicroBatch, config: RunConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the loss over the tokens of a micro-batch, and sums of what is worth watching."""
    logprobs_M, entropy_M = loss_token_logprobs(model, microbatch, config.generation.temperature)
    policy_M, clipped_M = clipped_policy_loss(
        logprobs_M,
        microbatch.old_logprobs_M,
        microbatch.advantages_M,
        clip_low=config.train.clip_low,
        clip_high=config.train.clip_high,
        dual_clip=config.train.dual_clip,
    )
    ratio_base = "sampler"
    if microbatch.importance_M is not None:
        policy_M, ratio_base = policy_M * microbatch.importance_M, "proximal"
    loss_M = policy_M - config.train.entropy_coef * entropy_M
    difference_M = (logprobs_M - microbatch.old_logprobs_M).detach()
    parts = {
        "policy_loss": policy_M.detach().sum(),
        "entropy": entropy_M.detach().sum(),
        "clip_fraction": clipped_M.float().sum(),
        f"kl_to_{ratio_base}": kl_k3(difference_M, torch.zeros_like(difference_M)).sum(),
        "tokens": torch.tensor(float(len(loss_M))),
    }
    if config.train.kl_coef:
        with torch.no_grad(), adapter_off(model) if reference is None else nullcontext():
            ref_logprobs_M, _ = loss_token_logprobs(
                model if reference is None else reference,
                microbatch,
                config.generation.temperature,
            )
        kl_M = kl_k3(logprobs_M, ref_logprobs_M)
        loss_M = loss_M + config.train.kl_coef * kl_M
        parts["kl_to_reference"] = kl_M.detach().sum()
    return (loss_M * microbatch.weights_M).sum(), parts
