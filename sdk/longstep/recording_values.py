"""Values of any type in a recording: observations and options as JSON, and back.

What has no JSON form (arrays, bytes, tuples, sets, dicts) is a tagged object; arrays go into a list beside the JSON and
are referred to by index.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from longstep.errors import UnsupportedTypeError

__all__ = ["decode_value", "encode_value"]

_TAG = "$"
_CONTAINERS: dict[str, Callable[..., Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def encode_value(value: Any, values: list[NDArray[Any]]) -> Any:
    """The JSON form of a value; arrays go to `values` and are referred to by index."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_array(cast("NDArray[Any] | np.generic[Any]", value), values)
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": value.hex()}
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return {
            _TAG: "dict",
            "value": [[encode_value(k, values), encode_value(v, values)] for k, v in pairs],
        }
    for kind, container in _CONTAINERS.items():
        if isinstance(value, cast("type", container)):
            encoded = [encode_value(item, values) for item in cast("Iterable[Any]", value)]
            if kind in ("set", "frozenset"):  # no order of its own; the file must not depend on it
                encoded.sort(key=json.dumps)
            return encoded if kind == "list" else {_TAG: kind, "value": encoded}
    for base in (str, bool, int, float):
        if isinstance(value, base):  # an enum or another subclass is saved as its plain value
            return base(value)
    raise UnsupportedTypeError(
        "expected observations and options of JSON or array types to save, got "
        f"{type(value).__name__}; use text, numbers, arrays, lists, tuples, sets or dicts"
    )


def _encode_array(value: NDArray[Any] | np.generic[Any], values: list[NDArray[Any]]) -> Any:
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise UnsupportedTypeError(
            f"expected arrays of numbers or fixed-size items to save, got dtype {array.dtype}; "
            "convert it first"
        )
    values.append(array)
    kind = "array" if isinstance(value, np.ndarray) else "scalar"
    return {_TAG: kind, "value": len(values) - 1}


def decode_value(value: Any, values: list[Any]) -> Any:
    """The value of a JSON form; a LookupError or its kin where there is none."""
    if isinstance(value, list):
        return [decode_value(item, values) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    tagged = cast("dict[str, Any]", value)
    kind, inner = tagged[_TAG], tagged["value"]
    decoded: Any = None
    if kind == "array":
        decoded = values[inner]
    elif kind == "scalar":
        decoded = values[inner][()]
    elif kind == "bytes":
        decoded = bytes.fromhex(inner)
    elif kind == "dict":
        decoded = {decode_value(k, values): decode_value(v, values) for k, v in inner}
    else:
        decoded = _CONTAINERS[kind]([decode_value(item, values) for item in inner])
    return decoded
