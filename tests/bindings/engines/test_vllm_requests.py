"""What vLLM is asked to compute of a constrained request, and what becomes of its answer; without vLLM."""

import numpy as np
import pytest

from longstep.types import FinishReason, GenerationRequest, Message, Prompt
from longstep_bindings.engines.admission import Admitted
from longstep_bindings.engines.constraint import build_trie
from longstep_bindings.engines.vllm_requests import Plan, decisions, plan_request

END = 9
PROMPT = np.array([1, 2], dtype=np.int32)


def _plan(*ways: list[int]) -> Plan:
    allowed = tuple("-".join(map(str, way)) for way in ways)
    trie = build_trie(allowed, ways, END)
    request = GenerationRequest(
        request_id="r",
        prompt=Prompt(messages=(Message(role="user", content="?"),)),
        allowed=allowed,
    )
    return plan_request(request, PROMPT, Admitted(max_new=trie.depth, trie=trie), {})


def _ways(paths: bytes) -> set[tuple[int, ...]]:
    numbers, found, start = np.frombuffer(paths, np.int32).tolist(), set(), 0
    while start < len(numbers):
        found.add(tuple(numbers[start + 1 : start + 1 + numbers[start]]))
        start += 1 + numbers[start]
    return found


def _answer(plan: Plan, token_ids, logprobs):
    return plan.completion(
        token_ids, logprobs, is_stopped=True, policy_version=3, decode=lambda ids: str(list(ids))
    )


def test_what_is_forced_before_the_first_choice_goes_into_the_prompt():
    plan = _plan([5, 6, 7, 8], [5, 6, 8])
    assert plan.given == (5, 6)
    assert plan.decisions is not None
    assert _ways(plan.decisions.paths) == {(7,), (8,)}
    assert (plan.decisions.max_steps, plan.decisions.stop_ids) == (1, (7, 8))
    completion = _answer(plan, [7], [-0.5])
    assert completion.text == "5-6-7-8"
    assert completion.token_ids.tolist() == [5, 6, 7, 8]
    assert completion.logprobs.tolist() == [0, 0, -0.5, 0]
    assert [ids.tolist() for ids in completion.allowed_token_ids] == [[5], [6], [7, 8], [8]]
    assert completion.prompt_token_ids is PROMPT


def test_what_is_forced_between_choices_is_computed_and_what_follows_the_last_is_not():
    plan = _plan([5, 6, 7, 8], [5, 6, 8, 8], [7, 7, 7])
    assert plan.decisions is not None
    assert plan.given == ()
    assert _ways(plan.decisions.paths) == {(7,), (5, 6, 7), (5, 6, 8)}
    # 7 decides at once, and after 5 and 6; 8 too.
    assert plan.decisions.stop_ids == (7, 8)
    chosen = _answer(plan, [5, 6, 8], [-1.0, -0.0, -2.0])
    assert (chosen.text, chosen.logprobs.tolist()) == ("5-6-8-8", [-1, 0, -2, 0])
    assert _answer(plan, [7], [-1.0]).token_ids.tolist() == [7, 7, 7]


def test_a_token_that_decides_in_one_place_only_does_not_end_the_others():
    plan = _plan([5, 7], [5, 8], [6, 5, 5])
    assert plan.decisions is not None
    # 5 leads on at first: were it to end the request, 5-7 and 5-8 could not be told apart.
    assert plan.decisions.stop_ids == (6, 7, 8)
    assert plan.decisions.max_steps == 2
    assert _answer(plan, [6], [-1.0]).text == "6-5-5"


def test_tokens_beyond_the_decision_are_dropped():
    plan = _plan([5, 5], [5, 6], [7, 5])
    completion = _answer(plan, [7, 7], [-1.0, 0.0])
    assert completion.token_ids.tolist() == [7, 5]


def test_the_end_of_turn_chooses_the_shorter_string():
    plan = _plan([5], [5, 6])
    assert plan.given == (5,)
    completion = _answer(plan, [END], [-0.25])
    assert (completion.text, completion.token_ids.tolist()) == ("5", [5, END])
    assert completion.finish_reason is FinishReason.STOP


def test_a_single_string_is_decided():
    plan = _plan([5, 6])
    assert plan.is_decided
    assert _answer(plan, [], []).token_ids.tolist() == [5, 6]


def test_deep_choices_do_not_recurse():
    way = list(range(10, 3010))
    trie = build_trie(("a", "b"), [[*way, 1], [*way, 2]], END)
    assert decisions(trie).max_steps == 3001


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_log_probabilities_that_are_no_numbers_are_an_error(value):
    completion = _answer(_plan([5], [6]), [5], [value])
    assert completion.finish_reason is FinishReason.ERROR
    assert "expected finite log-probabilities" in completion.error
    assert completion.allowed_token_ids is None
