"""The test vectors of PROTOCOL.md, which a client in another language can use, hold for this one."""

import json
from pathlib import Path

import numpy as np
import pytest

from longstep.errors import ProtocolError
from longstep_bindings.heads import pack_head, unpack_head
from longstep_bindings.wire import decode, encode

VECTORS = json.loads((Path(__file__).parent / "vectors" / "protocol_v1.json").read_text())


def tagged(value):
    """The value in the notation of the vectors, described in PROTOCOL.md."""
    match value:
        case None | bool() | str():
            return value
        case np.generic():
            return {"scalar": [value.dtype.str.replace("=", "<"), value.tobytes().hex()]}
        case np.ndarray():
            return {"array": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
        case int():
            return {"int": str(value)}
        case float():
            return {"float": repr(value)}
        case bytes():
            return {"bytes": value.hex()}
        case list():
            return [tagged(item) for item in value]
        case dict():
            return {"map": [[tagged(key), tagged(item)] for key, item in value.items()]}
    kind = type(value).__name__
    items = [tagged(item) for item in value]
    return {kind: items if kind == "tuple" else sorted(items, key=json.dumps)}


def names(vectors):
    return [vector["name"] for vector in vectors]


@pytest.mark.parametrize("vector", VECTORS["values"], ids=names(VECTORS["values"]))
def test_value_vectors_decode_and_encode(vector):
    frames = [bytes.fromhex(frame) for frame in vector["frames"]]
    value = decode(frames)
    assert tagged(value) == vector["value"]
    assert encode(value) == frames


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=names(VECTORS["refused"]))
def test_refused_vectors_are_protocol_errors(vector):
    with pytest.raises(ProtocolError):
        decode([bytes.fromhex(frame) for frame in vector["frames"]])


@pytest.mark.parametrize("vector", VECTORS["heads"], ids=names(VECTORS["heads"]))
def test_head_vectors_unpack_and_pack(vector):
    frame = bytes.fromhex(vector["frame"])
    head = unpack_head(frame)
    assert head.kind.name == vector["name"]
    assert json.loads(json.dumps(head.fields)) == vector["fields"]
    assert pack_head(head.kind, head.token, *head.fields) == frame


@pytest.mark.parametrize("vector", VECTORS["refused_heads"], ids=names(VECTORS["refused_heads"]))
def test_refused_heads_are_protocol_errors(vector):
    with pytest.raises(ProtocolError):
        unpack_head(bytes.fromhex(vector["frame"]))
