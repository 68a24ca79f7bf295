"""The Policy protocol: anything that turns prompts into completions, in process or remote.

`submit` hands over requests and returns at once; `poll` returns whatever is ready. Completions come in any order and
are matched by `request_id`. A policy never raises for one bad request: it answers it with `FinishReason.ERROR`. A policy
may also have `cancel(request_ids)`, which withdraws requests; `Rollout` calls it for what nobody waits for any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from longstep.types import Completion, FinishReason, GenerationRequest, require_unique_ids

__all__ = ["Engine", "EnginePolicy", "FunctionPolicy", "Policy"]


@runtime_checkable
class Policy(Protocol):
    """Anything that turns prompts into completions."""

    @property
    def policy_version(self) -> int:
        """Number of weight updates the policy has taken over."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests without waiting for their completions."""
        ...

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        """Completions that are ready; waits up to `timeout_s` for the first, empty when none came."""
        ...


@runtime_checkable
class Engine(Protocol):
    """A model runtime: completions for a batch of requests, in the order of the requests."""

    @property
    def policy_version(self) -> int:
        """Number of weight updates the engine has taken over."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """One completion for each request, in the same order."""
        ...


class EnginePolicy:
    """An in-process engine as a policy: each `poll` generates for everything that is pending, in one batch."""

    def __init__(self, engine: Engine, *, max_batch: int | None = None) -> None:
        """Args:
        engine: The model runtime.
        max_batch: Most requests per call of the engine; None means all that are pending.
        """
        self.engine = engine
        self._max_batch = max_batch
        self._pending: list[GenerationRequest] = []

    @property
    def policy_version(self) -> int:
        """The engine's version."""
        return self.engine.policy_version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; nothing runs before `poll`."""
        require_unique_ids([*self._pending, *requests])
        self._pending.extend(requests)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        """Generate for what is pending; `timeout_s` plays no part, the engine is asked only when there is work."""
        if not self._pending:
            return []
        size = self._max_batch or len(self._pending)
        batch, self._pending = self._pending[:size], self._pending[size:]
        return self.engine.generate(batch)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Withdraw requests that are still pending; they are never answered. Unknown ids are passed over."""
        withdrawn = set(request_ids)
        self._pending = [r for r in self._pending if r.request_id not in withdrawn]


class FunctionPolicy:
    """A plain function from a request to a text, as a policy: scripted experts, random players, tests.

    >>> from longstep.types import Message, Prompt
    >>> policy = FunctionPolicy(lambda request: "go north")
    >>> prompt = Prompt(messages=(Message(role="user", content="where?"),))
    >>> policy.submit([GenerationRequest(request_id="a", prompt=prompt)])
    >>> [completion.text for completion in policy.poll(0.0)]
    ['go north']
    """

    def __init__(self, function: Callable[[GenerationRequest], str]) -> None:
        """Args:
        function: Gives the completion's text for one request.
        """
        self._function = function
        self._pending: list[GenerationRequest] = []

    @property
    def policy_version(self) -> int:
        """Always 0: a function has no weights."""
        return 0

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        require_unique_ids([*self._pending, *requests])
        self._pending.extend(requests)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        """Answer everything that is pending."""
        batch, self._pending = self._pending, []
        return [self._answer(request) for request in batch]

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Withdraw requests that are still pending; they are never answered. Unknown ids are passed over."""
        withdrawn = set(request_ids)
        self._pending = [r for r in self._pending if r.request_id not in withdrawn]

    def _answer(self, request: GenerationRequest) -> Completion:
        text, error = "", None
        try:
            text = self._function(request)
        except (
            Exception
        ) as failure:  # the policy's contract: one bad request is one failed completion
            error = f"{type(failure).__name__}: {failure}"
        empty_ids = np.empty(0, dtype=np.int32)
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=empty_ids,
            token_ids=empty_ids,
            logprobs=np.empty(0, dtype=np.float32),
            text=text,
            finish_reason=FinishReason.STOP if error is None else FinishReason.ERROR,
            policy_version=0,
            error=error,
        )
