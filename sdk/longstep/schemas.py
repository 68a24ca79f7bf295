"""The part of JSON Schema that tool definitions use: types, required keys, enumerations, bounds.

Keywords that are not read here (`pattern`, `oneOf`, `$ref` and their kin) never make a value wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

__all__ = ["mismatch"]

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def mismatch(value: Any, schema: Mapping[str, Any], name: str = "") -> str:
    """What is wrong with a JSON value, as the beginning of a sentence; empty when nothing is.

    >>> mismatch({"n": "3"}, {"properties": {"n": {"type": "integer"}}})
    'expected integer as `n`'
    """
    kinds = schema.get("type")
    if kinds is not None:
        allowed: list[str] = [kinds] if isinstance(kinds, str) else list(kinds)
        if not any(_is(value, kind) for kind in allowed):
            return f"expected {' or '.join(allowed)}" + (f" as `{name}`" if name else "")
    if "enum" in schema and value not in schema["enum"]:
        return f"expected one of {schema['enum']} as `{name}`"
    if "minimum" in schema and _is(value, "number") and value < schema["minimum"]:
        return f"expected at least {schema['minimum']} as `{name}`"
    if "maximum" in schema and _is(value, "number") and value > schema["maximum"]:
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
