"""Parsers: what each reads, what it refuses and why, and that no completion makes one slow or raise."""

import json
import string
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from longstep import (
    Action,
    ActionParser,
    ChoiceParser,
    JsonParser,
    RegexParser,
    TagParser,
    ToolCallParser,
)
from longstep.errors import ConfigError
from longstep.schemas import mismatch

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "parameters": {
                "type": "object",
                "properties": {
                    "to": {"type": "string", "enum": ["hall", "attic"]},
                    "steps": {"type": "integer", "minimum": 1, "maximum": 9},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["to"],
                "additionalProperties": False,
            },
        },
    },
    {"name": "look"},
]
PARSERS = [
    ChoiceParser(),
    TagParser(),
    TagParser("action", think_tag="think"),
    JsonParser("action"),
    ToolCallParser(TOOLS),
    RegexParser(r"ACTION: (.+)"),
]


def parser_id(parser):
    return type(parser).__name__ + str(getattr(parser, "think_tag", None) or "")


each_parser = pytest.mark.parametrize("parser", PARSERS, ids=parser_id)


@each_parser
@pytest.mark.parametrize("completion", ["", " \n\t", "\N{NO-BREAK SPACE}"])
def test_an_empty_completion_is_an_invalid_action_with_a_reason(parser, completion):
    for admissible in (None, [], ["go"]):
        action = parser.parse(completion, admissible)
        assert (action.valid, action.text) == (False, "")
        assert action.reason


HOSTILE = {
    "one letter": "a" * 100_000,
    "opening tags": "<action>" * 12_500,
    "closing tags": "</action>" * 11_111,
    "thoughts": "<think>" * 7_000 + "</think>" * 6_000,
    "braces": "{" * 100_000,
    "nested objects": '{"a":' * 20_000,
    "unclosed strings": '{"a":"' * 16_000,
    "braces and spaces": "{ " * 50_000,
    "braces and long spaces": ("{" + " " * 999) * 100,
    "braces and quotes": '{"' * 50_000,
    "objects before an open list": '{"a":' * 300 + "[" + "1," * 45_000,
    "many small objects": '{"a":1}' * 14_000,
    "a long number": '{"action": ' + "9" * 99_000 + "}",
    "white space": " " * 99_999 + "x",
    "new lines": "\n" * 100_000,
    "surrogates": "\ud800" * 100_000,
    "matches": "ACTION: a\n" * 10_000,
    "no match": "ACTION:" * 14_000,
    "deep lists": '{"action": ' + "[" * 50_000 + "]" * 49_000 + "}",
}


@each_parser
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_completion_of_100_000_characters_is_read_quickly(parser, name):
    admissible = [f"action {number}" for number in range(50)]
    for choice in (admissible, None):
        started = time.process_time()
        action = parser.parse(HOSTILE[name], choice)
        assert (
            time.process_time() - started < 2.0
        )  # of the processor; linear ones take milliseconds
        assert action.valid is (action.reason == "")
        if not action.valid:
            assert len(action.text) <= 200
            assert len(action.reason) <= 400
            action.text.encode()


@each_parser
@given(completion=st.text() | st.text(alphabet='{}[]",:<>/action think\\du8\n'))
@example(completion="<action></action>")
@example(completion='{"action": null}')
@example(completion='{"name": "move", "arguments": "nonsense"}')
def test_any_completion_gives_an_action_that_says_whether_it_is_valid(parser, completion):
    for admissible in (None, ["go", "stay"]):
        action = parser.parse(completion, admissible)
        assert isinstance(action, Action)
        assert action.valid is (action.reason == "")
        assert not action.valid or action.text.strip() == action.text != ""
        if admissible is not None and action.valid:
            assert action.text in admissible


@each_parser
def test_parsers_follow_the_protocol_and_say_how_to_answer(parser):
    assert isinstance(parser, ActionParser)
    assert parser.instruction.startswith(("Answer", "Think"))


actions = st.text(
    alphabet=string.ascii_letters + string.digits + " .,'[]-", min_size=1, max_size=20
).filter(lambda text: text.strip() == text)


@pytest.mark.parametrize("parser", [ChoiceParser(), TagParser(), TagParser("act")], ids=parser_id)
@given(admissible=st.lists(actions, unique=True, max_size=6))
def test_what_a_constraint_allows_is_read_as_the_admissible_actions(parser, admissible):
    allowed = parser.constraint(admissible)
    read = [parser.parse(completion, admissible) for completion in allowed]
    assert [action.text for action in read] == admissible
    assert all(action.valid for action in read)


def test_without_a_list_or_with_free_reasoning_there_is_no_constraint():
    assert ChoiceParser().constraint(None) is None
    assert TagParser().constraint(None) is None
    assert TagParser(think_tag="think").constraint(["go"]) is None


def test_case_and_white_space_are_forgiven_where_one_action_is_meant():
    parser = ChoiceParser()
    assert parser.parse("  GO\n north ", ["go north", "stay"]).text == "go north"
    assert parser.parse("Go", ["go", "Go"]).text == "Go"
    assert not parser.parse("GO", ["go", "Go"]).valid
    assert parser.parse("anything at all", None).text == "anything at all"


def test_an_action_that_is_not_admissible_is_named_in_the_reason():
    action = ChoiceParser().parse("fly away", ["go"])
    assert action == Action(text="fly away", valid=False, reason="'fly away' is not admissible now")
    assert not ChoiceParser().parse("go", []).valid


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("<action>go</action>", "go"),
        ("I <action>go</action> then <action> stay </action>.", "stay"),
        ("<action>go <action>stay</action>", "stay"),
        ("<action>go</action> and <action>unfinished", "go"),
        ("<action>a <b> c</action>", "a <b> c"),
    ],
)
def test_the_last_complete_pair_of_tags_counts(completion, text):
    assert TagParser().parse(completion, None) == Action(text=text, valid=True)


@pytest.mark.parametrize(
    "completion", ["go", "<action>go", "go</action>", "</action><action>", "<ACTION>go</ACTION>"]
)
def test_without_a_pair_of_tags_the_action_is_invalid(completion):
    action = TagParser().parse(completion, None)
    assert (action.valid, action.reason) == (False, "expected <action>...</action>")


@pytest.mark.parametrize(
    ("completion", "valid"),
    [
        ("<think>hm</think><action>go</action>", True),
        ("<think>maybe <action>stay</action></think> <action>go</action>", True),
        ("<action>go</action><think>hm</think>", False),
        ("<action>go</action>", False),
        ("hm</think><action>go</action>", False),
        ("<think>hm<action>go</action>", False),
    ],
)
def test_the_thought_comes_before_the_action(completion, valid):
    action = TagParser(think_tag="think").parse(completion, None)
    assert action.valid is valid
    assert not valid or action.text == "go"


@pytest.mark.parametrize("arguments", [{"tag": "<action>"}, {"tag": ""}, {"think_tag": "a b"}])
def test_a_tag_is_a_name_without_brackets(arguments):
    with pytest.raises(ConfigError, match="leave out the angle brackets"):
        TagParser(**arguments)


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ('{"action": "go"}', "go"),
        ('```json\n{"thought": "{x}", "action": " go "}\n```', "go"),
        ('{"action": "stay"} no, {"action": "go"}', "go"),
        ('{"inner": {"action": "stay"}, "action": "go"}', "go"),
        ('{"action": "go"} {"other": 1}', "go"),
        ('where {a} and } {"action": "go"', None),
        ('{"action": "go", }', None),
        ('{"act": "go"}', None),
        ('{"action": NaN}', None),
        ('{"action": 1e999}', None),
        ('{"action": "\\ud800"}', None),
        ('{"action": 3}', "3"),
        ('{"action": {"b": [1.5], "a": null}}', '{"a":null,"b":[1.5]}'),
    ],
)
def test_json_parser_reads_the_last_object_that_has_the_key(completion, text):
    action = JsonParser("action").parse(completion, None)
    assert (action.text if action.valid else None) == text


def test_a_long_reasoning_full_of_braces_does_not_hide_the_answer():
    completion = "\\frac{a}{b} " * 3000 + '{"action": "go"}'
    assert JsonParser("action").parse(completion, None).text == "go"


CALL = '{"arguments":{"steps":2,"to":"hall"},"name":"move"}'


@pytest.mark.parametrize(
    "completion",
    [
        CALL,
        '<tool_call>\n{"name": "move", "arguments": {"to": "hall", "steps": 2}}\n</tool_call>',
        'I will. {"name": "move", "arguments": "{\\"to\\": \\"hall\\", \\"steps\\": 2}"}',
        '{"type": "function", "function": {"name": "move", "arguments": {"steps": 2, "to": "hall"}}}',
        '{"name": "look", "arguments": {}} {"name": "move", "arguments": {"to": "hall", "steps": 2}}',
    ],
)
def test_tool_calls_in_every_usual_form_become_one_canonical_text(completion):
    assert ToolCallParser(TOOLS).parse(completion, None) == Action(text=CALL, valid=True)
    assert ToolCallParser(TOOLS).parse(completion, [CALL]).valid
    assert not ToolCallParser(TOOLS).parse(completion, ["other"]).valid


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"name": "mov"}, "expected a known tool; did you mean `move`?"),
        ({"name": 3}, "expected a known tool"),
        ({"name": "move", "arguments": {}}, "expected `to` in the arguments of `move`"),
        ({"name": "move", "arguments": {"to": 1}}, "expected string as `to`"),
        (
            {"name": "move", "arguments": {"to": "cellar"}},
            "expected one of ['hall', 'attic'] as `to`",
        ),
        (
            {"name": "move", "arguments": {"to": "hall", "steps": 0}},
            "expected at least 1 as `steps`",
        ),
        (
            {"name": "move", "arguments": {"to": "hall", "steps": 10}},
            "expected at most 9 as `steps`",
        ),
        (
            {"name": "move", "arguments": {"to": "hall", "steps": True}},
            "expected integer as `steps`",
        ),
        (
            {"name": "move", "arguments": {"to": "hall", "tags": ["a", 1]}},
            "expected string as `tags[1]`",
        ),
        ({"name": "move", "arguments": {"to": "hall", "x": 1}}, "expected no `x`"),
        ({"name": "move", "arguments": ["hall"]}, "expected object"),
        ({"name": "move", "arguments": "hall"}, "expected object"),
        ({"tool": "move"}, "expected a tool call"),
    ],
)
def test_a_call_that_breaks_the_schema_is_invalid_with_the_reason(call, reason):
    action = ToolCallParser(TOOLS).parse(json.dumps(call), None)
    assert not action.valid
    assert action.reason.startswith(reason)


def test_a_tool_without_arguments_may_be_called_without():
    assert (
        ToolCallParser(TOOLS).parse('{"name": "look"}', None).text
        == '{"arguments":{},"name":"look"}'
    )


@pytest.mark.parametrize("tools", [[], [{"function": {}}], [{"name": "a"}, {"name": "a"}]])
def test_tools_need_names_of_their_own(tools):
    with pytest.raises(ConfigError, match="expected"):
        ToolCallParser(tools)


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [
        (3, "integer", True),
        (3.0, "integer", True),
        (3.5, "integer", False),
        (3, "number", True),
        (True, "number", False),
        (None, ["string", "null"], True),
        ({}, "array", False),
        ("x", "made-up", True),
    ],
)
def test_schema_types_are_those_of_json(value, kind, fits):
    assert (mismatch(value, {"type": kind}, "v") == "") is fits


@pytest.mark.parametrize(
    ("pattern", "completion", "text"),
    [
        (r"ACTION: (.+)", "ACTION: stay\nACTION: go\nbye", "go"),
        (r"go|stay", "stay or go", "go"),
        (r"(?:I|we) (?P<who>x)?(?P<action>\w+)", "I go", "go"),
        (r".*", "first\nlast", "last"),
        (r"a(b)?", "ab a", "b"),
    ],
)
def test_regex_parser_takes_the_last_match_that_captures_something(pattern, completion, text):
    assert RegexParser(pattern).parse(completion, None).text == text


def test_regex_parser_reads_the_end_of_a_long_completion():
    parser = RegexParser(r"ACTION: (\w+)", max_characters=20)
    assert parser.parse("x" * 1000 + "ACTION: go", None).text == "go"
    assert not parser.parse("ACTION: go" + "x" * 1000, None).valid


def test_a_wrong_pattern_is_refused():
    with pytest.raises(ConfigError, match=r"regular expression as `pattern`, got '\(a'"):
        RegexParser("(a")
    with pytest.raises(ConfigError, match="`max_characters` of at least 1"):
        RegexParser("a", max_characters=0)
