"""Prompt templates: what they hold, and that the token budget is a guarantee."""

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstep import PromptTemplate, SimpleMemory
from longstep.budget import cut_last_lines, cut_middle, cut_oldest, fit
from longstep.errors import ConfigError, DataError
from longstep.prompt import count_utf8_bytes

FULL = PromptTemplate(
    "You solve: {task_description}",
    "{memory}|{current_observation}|{admissible_actions}|{step}|{max_steps}",
)


def build(template, **parts):
    parts = {"current_observation": "o", "task_description": "t", "memory": "m", "step": 2} | parts
    return template.build(**parts)


def test_every_placeholder_is_filled():
    prompt = build(FULL, admissible_actions=["go", "stay"], max_steps=9)
    assert [(m.role, m.content) for m in prompt.messages] == [
        ("system", "You solve: t"),
        ("user", "m|o|go\nstay|2|9"),
    ]
    assert (prompt.num_tokens, prompt.dropped, prompt.images) == (None, (), ())


def test_no_limit_shows_as_unlimited_and_no_actions_as_nothing():
    assert build(FULL).messages[1].content == "m|o||2|unlimited"


@pytest.mark.parametrize("system", [None, ""])
def test_without_system_text_there_is_one_message(system):
    prompt = build(PromptTemplate(system, "{memory}"))
    assert [message.role for message in prompt.messages] == ["user"]


def test_the_first_step_has_a_text_of_its_own():
    template = PromptTemplate(None, "later {memory}", first_user="first {current_observation}")
    assert build(template, step=0).text == "first o"
    assert build(template, step=1).text == "later m"
    assert build(PromptTemplate(None, "always"), step=0).text == "always"


def test_content_is_never_read_for_placeholders():
    hostile = "{memory} {0} {} {{x}} %s {task_description.__class__} \\1"
    prompt = build(FULL, memory=hostile, current_observation=hostile, task_description=hostile)
    assert prompt.messages[1].content.startswith(f"{hostile}|{hostile}|")
    assert prompt.messages[0].content == f"You solve: {hostile}"


def test_json_in_a_template_needs_no_escapes_and_doubled_braces_show_a_name():
    template = PromptTemplate(None, 'Answer {"action": "..."} or {}. {{memory}} is {memory}')
    assert build(template).text == 'Answer {"action": "..."} or {}. {memory} is m'


def test_an_unknown_placeholder_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"in `user`, got `\{observation\}`"):
        PromptTemplate("s", "{observation}")
    with pytest.raises(ConfigError, match=r"in `system`.*did you mean `memory`\?"):
        PromptTemplate("{memori}", "u")
    with pytest.raises(ConfigError, match="in `first_user`"):
        PromptTemplate("s", "u", first_user="{stepp}")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_tokens": 0}, "`max_tokens` of at least 1 or None, got 0"),
        ({"drop_order": ("memry",)}, "did you mean `memory`"),
        ({"drop_order": ("step",)}, "can be shortened in `drop_order`, got `step`"),
        ({"drop_order": ("memory", "memory")}, "each placeholder once"),
    ],
)
def test_wrong_settings_are_refused(arguments, match):
    with pytest.raises(ConfigError, match=match):
        PromptTemplate("s", "u", **arguments)


def test_parts_give_way_in_the_declared_order_and_the_record_says_so():
    def dropped(max_tokens):
        template = PromptTemplate(
            None,
            "{memory}|{current_observation}|{admissible_actions}|{task_description}",
            max_tokens=max_tokens,
            count_tokens=len,
        )
        prompt = build(
            template,
            memory="\n".join(f"memory line {n}" for n in range(20)),
            current_observation="o" * 300,
            admissible_actions=[f"action {n}" for n in range(20)],
            task_description="t" * 300,
        )
        assert len(prompt.text) == prompt.num_tokens <= max_tokens
        return [(cut.part, cut.how) for cut in prompt.dropped]

    memory, observation = ("memory", "removed"), ("current_observation", "removed")
    actions = ("admissible_actions", "removed")
    assert dropped(2000) == []
    assert dropped(900) == [("memory", "shortened")]
    assert dropped(700) == [memory, ("current_observation", "shortened")]
    assert dropped(450) == [memory, observation, ("admissible_actions", "shortened")]
    assert dropped(200) == [memory, observation, actions, ("task_description", "shortened")]
    assert dropped(3)[-1] == ("task_description", "removed")


def test_memory_loses_its_oldest_lines_and_keeps_whole_ones():
    template = PromptTemplate(None, "{memory}", max_tokens=100, count_tokens=len)
    prompt = build(template, memory="\n".join(f"line {n}" for n in range(100)))
    lines = prompt.text.split("\n")
    assert lines[0] == "[earlier left out]"
    assert lines[1:] == [f"line {n}" for n in range(100 - len(lines) + 1, 100)]
    assert 90 <= prompt.num_tokens <= 100
    (cut,) = prompt.dropped
    assert cut.num_characters == len("\n".join(f"line {n}" for n in range(100))) - len(
        "\n".join(lines[1:])
    )


def test_a_placeholder_that_is_not_in_the_drop_order_is_never_touched():
    template = PromptTemplate(
        None,
        "{memory}{current_observation}",
        max_tokens=20,
        count_tokens=len,
        drop_order=("memory",),
    )
    assert build(template, memory="m" * 100, current_observation="o" * 20).text == "o" * 20
    with pytest.raises(ConfigError, match="at most 20 tokens, got 21 for what may not be dropped"):
        build(template, current_observation="o" * 21)


def test_a_template_that_does_not_fit_is_an_error_with_both_numbers():
    template = PromptTemplate("x" * 50, "{memory}", max_tokens=40)
    with pytest.raises(ConfigError, match="at most 40 tokens, got 52"):
        build(template, memory="m" * 10)


def test_what_a_first_step_does_not_show_is_not_recorded_as_dropped():
    template = PromptTemplate(None, "{memory}", first_user="{current_observation}", max_tokens=30)
    prompt = build(template, step=0, memory="m" * 100, current_observation="o" * 50)
    assert [cut.part for cut in prompt.dropped] == ["current_observation"]


def words_of_three(text):
    """A counter that is not monotone in the characters kept, as real tokenizers are not."""
    return (
        sum(max(1, len(word) // 3) for word in re.findall(r"\w+|[^\w\s]|\n", text)) + len(text) % 2
    )


COUNTERS = [None, len, words_of_three, lambda text: len(text.split()) + 3]


def test_the_budget_holds_over_ten_thousand_random_histories():
    rng = random.Random(0)
    alphabet = [
        "go ",
        "\n",
        "a",
        "\N{DOOR}",
        "{memory}",
        "x" * 50,
        " ",
        "<image>",
        "\ud800",
        "caf\u00e9 ",
    ]
    num_cut = 0
    for _ in range(10_000):
        max_tokens = rng.randint(30, 400)
        template = PromptTemplate(
            "S {task_description}",
            "{memory}\n{current_observation}\n{admissible_actions}",
            max_tokens=max_tokens,
            count_tokens=rng.choice(COUNTERS),
            drop_order=rng.sample(
                ["memory", "current_observation", "admissible_actions", "task_description"], 4
            ),
        )

        def text(longest, rng=rng):
            return "".join(rng.choices(alphabet, k=rng.randint(0, rng.randint(0, longest))))

        parts = {
            "task_description": text(40),
            "memory": text(300),
            "current_observation": text(150),
            "admissible_actions": [text(4) for _ in range(rng.randint(0, 20))],
        }
        prompt = template.build(step=rng.randint(0, 500), **parts)
        assert template.count_tokens(prompt.text) == prompt.num_tokens <= max_tokens
        whole = PromptTemplate(template.system, template.user).build(**parts)
        assert bool(prompt.dropped) == (template.count_tokens(whole.text) > max_tokens)
        assert all(cut.num_characters > 0 for cut in prompt.dropped)
        num_cut += bool(prompt.dropped)
    assert 2_000 < num_cut < 9_000


def test_the_prompt_is_flat_over_five_hundred_steps():
    memory = SimpleMemory()
    template = PromptTemplate("Play.", "{memory}\n{current_observation}", max_tokens=600)
    lengths = []
    for step in range(500):
        prompt = template.build(
            current_observation=f"You are in room {step}.",
            memory=memory.get_memory_text(),
            step=step,
        )
        lengths.append(prompt.num_tokens)
        memory.update(f"You are in room {step}.", "go on", 0.0, False, {})
        assert f"room {step}." in prompt.text
    assert max(lengths) <= 600
    assert min(lengths[50:]) > 540
    assert len(memory.get_memory_text()) > 15_000


@pytest.mark.parametrize("num_steps", [0, 30, 3000])
def test_the_tokenizer_is_asked_only_a_few_times(num_steps):
    calls = []

    def count(text):
        calls.append(len(text))
        return words_of_three(text)

    template = PromptTemplate(
        "S", "{memory}\n{current_observation}", max_tokens=500, count_tokens=count
    )
    memory = "\n".join(
        f"[Step {n}] You are in room {n} with a door.\n> go" for n in range(num_steps)
    )
    prompt = build(template, memory=memory)
    assert prompt.num_tokens <= 500
    assert len(calls) <= (12 if prompt.dropped else 1)
    if prompt.dropped:
        assert prompt.num_tokens > 460


@given(
    text=st.text(alphabet="ab\n", max_size=40),
    kept=st.integers(-1, 45),
    cut=st.sampled_from([cut_oldest, cut_middle, cut_last_lines]),
)
def test_a_cut_keeps_a_beginning_and_an_end_and_no_more_than_it_may(text, kept, cut):
    shown = cut(text, kept)
    assert text.startswith(shown.head)
    assert text.endswith(shown.tail)
    assert shown.num_kept <= max(0, min(kept, len(text)))
    assert bool(shown.marker) == (0 < shown.num_kept < len(text))


@settings(max_examples=300)
@given(
    length=st.integers(1, 5000),
    per_token=st.floats(0.2, 9.0),
    fixed=st.integers(0, 200),
    max_tokens=st.integers(1, 1000),
)
def test_fit_finds_nearly_the_most_for_a_linear_count(length, per_token, fixed, max_tokens):
    def count(kept):
        return fixed + int(kept / per_token)

    if count(length) <= max_tokens:
        return
    kept, num_tokens = fit(count, length, count(length), max_tokens)
    assert num_tokens == count(kept)
    if fixed > max_tokens:
        assert kept == 0
    else:
        assert num_tokens <= max_tokens
        assert count(kept + 1) > max_tokens or max_tokens - num_tokens <= 0.02 * max_tokens


@given(st.text())
def test_the_default_counter_counts_utf8_bytes(text):
    assert count_utf8_bytes(text) == len(text.encode("utf-8", "surrogatepass"))


def image(value):
    return np.full((4, 4, 3), value, np.uint8)


def values(prompt):
    return [int(picture[0, 0, 0]) for picture in prompt.images]


def test_images_follow_their_placeholders_in_the_text():
    template = PromptTemplate(None, "{current_observation} before {memory}")
    prompt = build(
        template,
        current_observation="now <image>",
        images=[image(9)],
        memory="<image> <image>",
        memory_images=[image(1), image(2)],
    )
    assert prompt.text == "now <image> before <image> <image>"
    assert values(prompt) == [9, 1, 2]


def test_images_of_a_part_that_the_template_lacks_are_left_out():
    prompt = build(
        PromptTemplate(None, "{memory}"), current_observation="<image>", images=[image(1)]
    )
    assert (prompt.text, prompt.images) == ("m", ())


def test_a_literal_placeholder_beside_images_is_made_harmless():
    prompt = build(FULL, current_observation="<image>", images=[image(1)], memory="saw <image> tag")
    assert prompt.text.count("<image>") == len(prompt.images) == 1
    assert "saw <image > tag" in prompt.text
    assert "saw <image> tag" in build(FULL, memory="saw <image> tag").text


def test_a_wrong_number_of_placeholders_is_an_error():
    with pytest.raises(DataError, match=r"expected 2 placeholders `<image>` in `memory`.*got 1"):
        build(FULL, memory="<image>", memory_images=[image(1), image(2)])


@pytest.mark.parametrize("max_tokens", range(10, 130, 7))
def test_cut_text_and_images_stay_in_step(max_tokens):
    template = PromptTemplate(
        None, "{memory}|{current_observation}", max_tokens=max_tokens, count_tokens=len
    )
    prompt = build(
        template,
        memory="\n".join(f"step {n} <image>" for n in range(6)),
        memory_images=[image(n) for n in range(6)],
        current_observation="<image> now <image>",
        images=[image(10), image(11)],
    )
    assert prompt.text.count("<image>") == len(prompt.images)
    kept = [int(n) for n in re.findall(r"step (\d) <image>", prompt.text)]
    remembered = [value for value in values(prompt) if value < 10]
    assert remembered == list(range(6 - len(remembered), 6))
    assert remembered[len(remembered) - len(kept) :] == kept


def test_prompts_with_images_compare_by_value():
    def one(value):
        return build(FULL, current_observation="<image>", images=[image(value)])

    assert one(1) == one(1)
    assert one(1) != one(2)
    assert hash(one(1)) == hash(one(1))
    assert one(1) != "text"
