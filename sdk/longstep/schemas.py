"""The part of JSON Schema that tool definitions use: types, required keys, enumerations, bounds.

Keywords that are not read here (`pattern`, `oneOf`, `$ref` and their kin) never make a value wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

__all__ = ["malformed", "mismatch"]

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


_KEYWORDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "properties": ("an object of schemas", (dict,)),
    "required": ("a list of names", (list, tuple)),
    "enum": ("a list", (list, tuple)),
    "minimum": ("a number", (int, float)),
    "maximum": ("a number", (int, float)),
}
"""What the keywords that are read here must be."""


def malformed(schema: Any, place: str = "schema") -> str:
    """What is wrong with a schema itself, and where; empty when nothing is.

    >>> malformed({"required": "to"})
    "'to' instead of a list of names as `required` of schema"
    """
    if isinstance(
        schema, bool
    ):  # a schema that everything, or nothing, satisfies; read as the former
        return ""
    if not isinstance(schema, dict):
        return f"{schema!r:.60} at {place}"
    given = {name: item for name, item in cast(dict[Any, Any], schema).items() if item is not None}
    kinds: Any = given.get("type", "object")
    if not isinstance(kinds, str) and not _are_names(kinds):
        return f"{kinds!r:.60} instead of a name as `type` of {place}"
    for keyword, (expected, types) in _KEYWORDS.items():
        value: Any = given.get(keyword)
        wrong_kind = value is not None and not isinstance(value, types)
        if wrong_kind or (keyword == "required" and value is not None and not _are_names(value)):
            return f"{value!r:.60} instead of {expected} as `{keyword}` of {place}"
    inner: dict[str, Any] = {**given.get("properties", {})}
    if "items" in given:
        inner["[]"] = given["items"]
    problems = (malformed(part, f"{place}.{name}") for name, part in inner.items())
    return next(filter(None, problems), "")


def _are_names(value: Any) -> bool:
    items = cast("list[Any]", value) if isinstance(value, list | tuple) else [None]
    return all(isinstance(item, str) for item in items)


def mismatch(value: Any, schema: Mapping[str, Any] | bool, name: str = "") -> str:
    """What is wrong with a JSON value, as the beginning of a sentence; empty when nothing is.

    >>> mismatch({"n": "3"}, {"properties": {"n": {"type": "integer"}}})
    'expected integer as `n`'
    """
    if isinstance(schema, bool):
        return ""
    kinds = schema.get("type")
    if kinds is not None:
        allowed: list[str] = [kinds] if isinstance(kinds, str) else list(kinds)
        if not any(_is(value, kind) for kind in allowed):
            return f"expected {' or '.join(allowed)}" + (f" as `{name}`" if name else "")
    if schema.get("enum") is not None and value not in schema["enum"]:
        return f"expected one of {schema['enum']} as `{name}`"
    if schema.get("minimum") is not None and _is(value, "number") and value < schema["minimum"]:
        return f"expected at least {schema['minimum']} as `{name}`"
    if schema.get("maximum") is not None and _is(value, "number") and value > schema["maximum"]:
        return f"expected at most {schema['maximum']} as `{name}`"
    if isinstance(value, dict):
        return _object_mismatch(cast(dict[str, Any], value), schema)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        problems = (
            mismatch(item, schema["items"], f"{name}[{index}]")
            for index, item in enumerate(cast(list[Any], value))
        )
        return next(filter(None, problems), "")
    return ""


def _object_mismatch(value: dict[str, Any], schema: Mapping[str, Any]) -> str:
    properties: Mapping[str, Any] = schema.get("properties") or {}
    for key in schema.get("required") or ():
        if key not in value:
            return f"expected `{key}`"
    for key, item in value.items():
        if key in properties:
            problem = mismatch(item, properties[key], key)
            if problem:
                return problem
        elif schema.get("additionalProperties") is False:
            return f"expected no `{key[:100]}`"
    return ""


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind != "boolean":
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, (object,)))
