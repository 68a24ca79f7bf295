"""Two threads ask one policy: each gets its own completions, all of them, and waits for nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from longstep.policy import FunctionPolicy
from longstep.types import Completion, GenerationRequest, Message, Prompt
from longstep_trainers.lanes import PolicyLanes

PROMPT = Prompt(messages=(Message(role="user", content="?"),))


def requests(name: str, number: int) -> list[GenerationRequest]:
    return [GenerationRequest(request_id=f"{name}{i}", prompt=PROMPT) for i in range(number)]


class Locked(FunctionPolicy):
    """Answers one request at a time; notices two polls at once."""

    def __init__(self) -> None:
        super().__init__(lambda request: request.request_id)
        self.lock = threading.Lock()
        self.num_polling = 0

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        with self.lock:
            super().submit(requests)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        self.num_polling += 1
        assert self.num_polling == 1, "two threads were in poll"
        with self.lock:
            later, self._pending = self._pending[1:], self._pending[:1]
            given = super().poll(0.0)
            self._pending = later
        if not given:
            time.sleep(min(timeout_s, 0.001))
        self.num_polling -= 1
        return given

    def cancel(self, request_ids: Sequence[str]) -> None:
        with self.lock:
            super().cancel(request_ids)


def test_each_lane_gets_what_it_asked_for() -> None:
    lanes = PolicyLanes(Locked())
    got: dict[str, list[str]] = {}

    def ask(name: str) -> None:
        lane = lanes.lane()
        texts: list[str] = []
        for part in range(20):
            lane.submit(requests(f"{name}-{part}-", 7))
            while len(texts) < 7 * (part + 1):
                texts += [completion.text for completion in lane.poll(1.0)]
        got[name] = texts

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for name in "abc":
        wanted = {f"{name}-{part}-{i}" for part in range(20) for i in range(7)}
        assert len(got[name]) == 140
        assert set(got[name]) == wanted


def test_what_is_withdrawn_comes_to_no_lane() -> None:
    lanes = PolicyLanes(Locked())
    first, second = lanes.lane(), lanes.lane()
    first.submit(requests("a", 3))
    second.submit(requests("b", 1))
    first.cancel(["a1", "unknown"])
    texts: list[str] = []
    while len(texts) < 2:
        texts += [completion.text for completion in first.poll(1.0)]
    assert texts == ["a0", "a2"]
    assert [completion.text for completion in second.poll(1.0)] == ["b0"]
    assert first.poll(0.0) == []


def test_a_refused_submit_leaves_nothing_behind() -> None:
    lanes = PolicyLanes(Locked())
    lane = lanes.lane()
    with pytest.raises(ValueError, match="unique request ids"):
        lane.submit([*requests("a", 1), *requests("a", 1)])
    lane.submit(requests("a", 1))
    assert [completion.text for completion in lane.poll(1.0)] == ["a0"]


def test_an_empty_poll_returns_in_time() -> None:
    assert PolicyLanes(Locked()).lane().poll(0.01) == []
