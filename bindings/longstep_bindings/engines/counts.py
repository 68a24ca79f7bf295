"""What an engine has done, and for how long there was something to do."""

from __future__ import annotations

import time

from longstep.types import Completion
from longstep_bindings.engines.served import EngineStats

__all__ = ["Counts"]


class Counts:
    """Counts behind `ServedEngine.stats`. Written by one thread."""

    def __init__(self) -> None:
        """All zero."""
        self._num_completions = self._prompt = self._cached = self._generated = self._num_open = 0
        self._busy_s = self._since = 0.0

    def begin(self) -> None:
        """A request was taken."""
        if not self._num_open:
            self._since = time.monotonic()
        self._num_open += 1

    def end(self, completion: Completion, *, num_cached: int = 0) -> None:
        """A request was answered.

        Args:
            completion: The answer.
            num_cached: Tokens of its prompt that were found computed.
        """
        self._num_open -= 1
        if not self._num_open:
            self._busy_s += time.monotonic() - self._since
        self._num_completions += 1
        self._prompt += len(completion.prompt_token_ids)
        self._cached += num_cached
        self._generated += len(completion.token_ids)

    def stats(self, *, num_waiting: int) -> EngineStats:
        """The counts now; of the open requests `num_waiting` are not being computed."""
        busy_s = self._busy_s + (time.monotonic() - self._since if self._num_open else 0.0)
        return EngineStats(
            num_waiting=num_waiting,
            num_running=max(0, self._num_open - num_waiting),
            num_completions=self._num_completions,
            prompt_tokens=self._prompt,
            cached_prompt_tokens=self._cached,
            generated_tokens=self._generated,
            busy_s=busy_s,
        )
