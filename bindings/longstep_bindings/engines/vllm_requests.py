"""Requests as vLLM takes them, and its answers as completions.

vLLM runs the model; the tokens are drawn by our own sampler inside its engine (module `vllm_core`), so that seeds,
temperature, top-p and log-probabilities mean the same as in the transformers engine. A constrained request is computed
up to its last choice only: tokens that the choices force before the first choice are appended to the prompt, those after
the last one are appended to the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import PolicyError
from longstep.types import Completion, FinishReason, GenerationRequest
from longstep_bindings.engines.admission import Admitted
from longstep_bindings.engines.constraint import TrieNode

__all__ = [
    "EXTRA_ARG",
    "PARENT_VARIABLE",
    "Decisions",
    "Plan",
    "decisions",
    "plan_request",
    "score_settings",
    "unanswered",
]

EXTRA_ARG = "longstep"
"""Name, among a request's extra arguments, of what the sampler in the engine is told."""
PARENT_VARIABLE = "LONGSTEP_VLLM_PARENT"
"""Environment variable with the id of the process that the engine's process must not outlive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The choices of a trie up to the last one, as the engine's sampler takes them."""

    paths: bytes
    """int32: for each way to a decision the number of its tokens, and the tokens."""
    max_steps: int
    """Tokens of the longest way."""
    stop_ids: tuple[int, ...]
    """Tokens that always decide: the engine may end there."""


def decisions(node: TrieNode) -> Decisions:
    """The choices from `node` on; there is at least one to be made."""
    ways: list[list[int]] = []
    deciding: set[int] = set()
    passing: set[int] = set()
    open_nodes: list[tuple[TrieNode, list[int]]] = [(node, [])]
    while open_nodes:
        place, way = open_nodes.pop()
        for token_id, child in place.children.items():
            if child.num_choices:
                passing.add(token_id)
                open_nodes.append((child, [*way, token_id]))
            else:
                deciding.add(token_id)
                ways.append([*way, token_id])
    flat = [number for way in ways for number in (len(way), *way)]
    return Decisions(
        paths=np.array(flat, dtype=np.int32).tobytes(),
        max_steps=max(map(len, ways)),
        stop_ids=tuple(sorted(deciding - passing)),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Plan:
    """One request as it is computed."""

    request: GenerationRequest
    prompt_ids: NDArray[np.int32]
    """[P] the prompt as the model reads it; replaced where vLLM makes room for images."""
    max_new: int
    start: TrieNode | None
    """Where the choices begin; None without a constraint."""
    node: TrieNode | None
    """Where the first choice is, after what is forced."""
    given: tuple[int, ...]
    """Tokens that are forced before the first choice."""
    decisions: Decisions | None

    @property
    def is_decided(self) -> bool:
        """True when the choices leave one completion, which needs no computation."""
        return self.node is not None and not self.node.num_choices

    def settings(self, end_ids: Sequence[int]) -> dict[str, Any]:
        """Arguments of vLLM's `SamplingParams`.

        Args:
            end_ids: Ids that end a turn.
        """
        request = self.request
        told: dict[str, Any] = {
            "seed": request.seed & 0xFFFFFFFFFFFFFFFF,
            "temperature": float(request.temperature),
            "top_p": float(request.top_p),
            "offset": len(self.given),
        }
        stop = [text for text in request.stop if text]
        if self.decisions is None:
            limits = {"max_tokens": self.max_new, "stop_token_ids": list(end_ids)}
        else:
            told["paths"] = self.decisions.paths
            told["end"] = self.decisions.stop_ids[0] if self.decisions.stop_ids else 0
            stop = []
            limits = {
                "max_tokens": self.decisions.max_steps,
                "stop_token_ids": list(self.decisions.stop_ids),
            }
        return {**_settings(told), **limits, "stop": stop, "detokenize": bool(stop)}

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        is_stopped: bool,
        policy_version: int,
        decode: Callable[[Sequence[int]], str],
    ) -> Completion:
        """The completion, out of what was sampled.

        Args:
            token_ids: Sampled ids.
            logprobs: One for each.
            is_stopped: True when an end-of-turn id or a stop string ended it.
            policy_version: Version of the weights.
            decode: Text of token ids.
        """
        if self.start is not None:
            return self._chosen(token_ids, logprobs, policy_version)
        text = decode(token_ids)
        starts = [text.find(stop) for stop in self.request.stop if stop and stop in text]
        return self._completion(
            token_ids,
            logprobs,
            text[: min(starts)] if starts else text,
            FinishReason.STOP if is_stopped else FinishReason.LENGTH,
            policy_version,
        )

    def _chosen(
        self, token_ids: Sequence[int], logprobs: Sequence[float], policy_version: int
    ) -> Completion:
        ids: list[int] = []
        values: list[float] = []
        options: list[NDArray[np.int32]] = []
        node = self.start
        sampled = iter(zip(token_ids, logprobs, strict=True))
        assert node is not None
        while not node.is_over:
            options.append(node.options)
            if len(node.options) == 1:
                token_id, value = int(node.options[0]), 0.0
                if len(ids) >= len(self.given) and node.num_choices:
                    _next(sampled)  # forced between two choices: the model has read it
            else:
                token_id, value = _next(sampled)
            ids.append(token_id)
            values.append(value)
            node = node.children[token_id]
        assert node.text is not None
        chosen = self._completion(ids, values, node.text, FinishReason.STOP, policy_version)
        return replace(chosen, allowed_token_ids=None if chosen.error else tuple(options))

    def _completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        text: str,
        reason: FinishReason,
        policy_version: int,
    ) -> Completion:
        values = np.array(logprobs, dtype=np.float32)
        if not np.isfinite(values).all():
            return unanswered(
                self.request,
                FinishReason.ERROR,
                policy_version,
                f"expected finite log-probabilities, got {values[~np.isfinite(values)][0]}; the weights hold NaN or "
                "infinity, or overflow in this number format",
            )
        return Completion(
            request_id=self.request.request_id,
            prompt_token_ids=self.prompt_ids,
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=values,
            text=text,
            finish_reason=reason,
            policy_version=policy_version,
        )


def _next(sampled: Iterator[tuple[int, float]]) -> tuple[int, float]:
    found = next(sampled, None)
    if found is None:
        raise PolicyError("vLLM ended it before the last choice: the context is full")
    return found


def plan_request(
    request: GenerationRequest,
    prompt_ids: NDArray[np.int32],
    admitted: Admitted,
    known: dict[tuple[str, ...], Decisions],
) -> Plan:
    """How to compute an admitted request.

    Args:
        request: The request.
        prompt_ids: [P] its prompt.
        admitted: How far it may go.
        known: Decisions of choices met before, by `allowed`; grows.
    """
    node = admitted.trie
    given: list[int] = []
    while node is not None and len(node.options) == 1 and node.num_choices:
        given.append(int(node.options[0]))
        node = node.children[given[-1]]
    found: Decisions | None = None
    if node is not None and node.num_choices:
        assert request.allowed is not None
        found = known.get(request.allowed)
        if found is None:
            if len(known) >= _MAX_KNOWN:
                known.clear()
            found = known[request.allowed] = decisions(node)
    return Plan(
        request=request,
        prompt_ids=prompt_ids,
        max_new=admitted.max_new,
        start=admitted.trie,
        node=node,
        given=tuple(given),
        decisions=found,
    )


_MAX_KNOWN = 1 << 14


def score_settings(forced_ids: Sequence[int], *, scores_prompt: bool) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams` that score a sequence.

    Args:
        forced_ids: Its last ids, at least one, which are sampled by force: so a sequence may fill the context.
        scores_prompt: True when ids before these, as part of the prompt, are to be scored too.
    """
    return {
        **_settings({"force": [int(token_id) for token_id in forced_ids]}),
        "max_tokens": len(forced_ids),
        "detokenize": False,
        "prompt_logprobs": 0 if scores_prompt else None,
    }


def _settings(told: Mapping[str, Any]) -> dict[str, Any]:
    # To vLLM every request is a greedy one: our sampler has left one token to choose.
    return {
        "temperature": 0.0,
        "logprobs": 0,
        "flat_logprobs": True,
        "ignore_eos": True,
        "extra_args": {EXTRA_ARG: dict(told)},
        "skip_clone": True,
    }


def unanswered(
    request: GenerationRequest,
    reason: FinishReason,
    policy_version: int,
    error: str | None = None,
) -> Completion:
    """The completion of a request that brought none."""
    return Completion(
        request_id=request.request_id,
        prompt_token_ids=np.empty(0, np.int32),
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        text="",
        finish_reason=reason,
        policy_version=policy_version,
        error=error,
    )
