"""Parsers of JSON: an object with one key of interest, and OpenAI-style tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from longstep.arguments import check_text
from longstep.errors import ConfigError, did_you_mean
from longstep.reading import DECODER, check_parse, invalid, match
from longstep.schemas import malformed, mismatch
from longstep.types import Action

__all__ = ["JsonParser", "ToolCallParser", "canonical_json", "json_objects"]

_OPENING = re.compile(r'\{\s*["}]')
"""Where an object may begin; the decoder is asked nowhere else, since each of its errors costs a pass over the text."""

_FREE_CHARACTERS = 200_000
"""Characters that may be read in vain before the rest of a text is left unread."""


def json_objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a text, in order, those inside another left out.

    The time is linear in the length: a text that makes the decoder read much in vain is not read to its end.

    >>> json_objects('so {x} or {"action": "look"}')
    [{'action': 'look'}]
    """
    objects: list[dict[str, Any]] = []
    allowance = len(text) + _FREE_CHARACTERS
    opening = _OPENING.search(text)
    while opening is not None and allowance > 0:
        start = opening.start()
        try:
            value, end = DECODER.raw_decode(text, start)
            objects.append(value)
        except (ValueError, RecursionError) as error:
            end = start + 1
            failed_at = error.pos if isinstance(error, json.JSONDecodeError) else len(text)
            allowance -= failed_at - start + failed_at // 50 + 100
        opening = _OPENING.search(text, end)
    return objects


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


class JsonParser:
    """The action is the value of a key in a JSON object; the last object with the key counts.

    >>> JsonParser("action").parse('{"thought": "a door", "action": "open door"}', None).text
    'open door'
    """

    def __init__(self, key: str = "action") -> None:
        """Args:
        key: Key of the action. A value that is not a string is taken as canonical JSON.
        """
        check_text("key", key)
        self.key = key

    @property
    def instruction(self) -> str:
        """How the model is told to answer."""
        return f'Answer with a JSON object whose key "{self.key}" holds the action.'

    def parse(self, completion: str, admissible: Sequence[str] | None) -> Action:
        """The value of the key in the last object that has it."""
        check_parse(completion, admissible)
        found = [entry[self.key] for entry in json_objects(completion) if self.key in entry]
        if not found:
            return invalid(completion, f'expected a JSON object with the key "{self.key}"')
        return _match_value(found[-1], admissible)


class ToolCallParser:
    """The action is a call of a tool: canonical JSON of its `name` and `arguments`.

    Reads `{"name": ..., "arguments": {...}}`, alone, inside text such as `<tool_call>` tags, or under the key `function`;
    the last object with a `name` counts. Arguments may be an object or, as OpenAI-style servers send them, its JSON text.

    >>> tools = [{"type": "function", "function": {"name": "go", "parameters": {
    ...     "type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}}}]
    >>> parser = ToolCallParser(tools)
    >>> parser.parse('<tool_call>{"name": "go", "arguments": {"to": "hall"}}</tool_call>', None).text
    '{"arguments":{"to":"hall"},"name":"go"}'
    >>> parser.parse('{"name": "go", "arguments": {}}', None).reason
    'expected `to` in the arguments of `go`'
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Args:
        tools: OpenAI-style tool schemas: `{"type": "function", "function": {"name", "parameters"}}`, or the inner
            object alone.
        """
        if not isinstance(cast(Any, tools), Sequence) or isinstance(tools, str | bytes):
            raise ConfigError(
                f"expected a sequence of tool schemas as `tools`, got {tools!r:.100}; put a single one into a list"
            )
        self.tools = tuple(tools)
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for index, tool in enumerate(tools):
            name, parameters = _read_tool(f"tools[{index}]", tool)
            if name in self._parameters:
                raise ConfigError(
                    f"expected tools with a `name` of their own, got {name!r} twice in `tools`; rename one"
                )
            self._parameters[name] = parameters
        if not self._parameters:
            raise ConfigError("expected at least one tool in `tools`, got none")

    @property
    def instruction(self) -> str:
        """How the model is told to answer, with the tools."""
        tools = "\n".join(canonical_json(tool) for tool in self.tools)
        return (
            'Answer with one tool call: a JSON object {"name": ..., "arguments": {...}}. '
            f"The tools are:\n{tools}"
        )

    def parse(self, completion: str, admissible: Sequence[str] | None) -> Action:
        """The last call in the completion, checked against the tool's schema."""
        check_parse(completion, admissible)
        calls = _calls(completion)
        if not calls:
            return invalid(completion, "expected a tool call: a JSON object with `name`")
        name, arguments = calls[-1]["name"], calls[-1].get("arguments", {})
        if not isinstance(name, str) or name not in self._parameters:
            hint = did_you_mean(str(name)[:100], self._parameters)
            return invalid(completion, f"expected a known tool; {hint}")
        if isinstance(arguments, str):
            decoded = json_objects(arguments)
            arguments = decoded[0] if len(decoded) == 1 else arguments
        problem = mismatch(arguments, {"type": "object", **self._parameters[name]})
        if problem:
            return invalid(completion, f"{problem} in the arguments of `{name}`")
        return _match_value({"name": name, "arguments": arguments}, admissible)


def _read_tool(place: str, tool: Any) -> tuple[str, Mapping[str, Any]]:
    """Name and parameters of a tool's schema, or a `ConfigError` that names what is wrong with it."""
    function: Any = tool
    if isinstance(tool, Mapping):
        function = cast(Mapping[str, Any], tool).get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(cast(Any, function).get("name"), str):
        raise ConfigError(
            f"expected tools with a `name`, got {tool!r:.100} at `{place}`; "
            'write {"type": "function", "function": {"name": ..., "parameters": ...}}'
        )
    schema = cast(Mapping[str, Any], function)
    name: str = schema["name"]
    try:
        canonical_json(tool)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"expected JSON values in the tool `{name}`, got {error} at `{place}`"
        ) from error
    parameters: Any = {} if schema.get("parameters") is None else schema["parameters"]
    problem = malformed(parameters, f"`{place}` parameters")
    if problem or not isinstance(parameters, dict):
        got = problem or f"{parameters!r} at `{place}` parameters"
        raise ConfigError(f"expected a JSON Schema of the tool `{name}`, got {got}")
    return name, cast(Mapping[str, Any], parameters)


def _calls(completion: str) -> list[dict[str, Any]]:
    entries: list[Any] = [entry.get("function", entry) for entry in json_objects(completion)]
    return [entry for entry in entries if isinstance(entry, dict) and "name" in entry]


def _match_value(value: Any, admissible: Sequence[str] | None) -> Action:
    try:
        text = value if isinstance(value, str) else canonical_json(value)
    except RecursionError:
        return invalid("", "the JSON is nested too deeply")
    return match(text, admissible)
