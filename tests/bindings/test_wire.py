"""The wire format: what goes in comes out; what must not travel is named; what a peer sends cannot hurt."""

import collections
import contextlib
import enum
import math
import re
import struct
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from longstep.errors import ConfigError, ProtocolError, UnsupportedTypeError
from longstep_bindings.limits import DEFAULT_LIMITS, Limits
from longstep_bindings.wire import decode, encode

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=50)
)
arrays = hnp.arrays(
    hnp.boolean_dtypes()
    | hnp.integer_dtypes()
    | hnp.unsigned_integer_dtypes()
    | hnp.floating_dtypes(sizes=(16, 32, 64))
    | hnp.complex_number_dtypes(sizes=(64, 128)),
    hnp.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=40),
)
values = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(scalars, inner, max_size=5)
        | st.sets(scalars.filter(lambda x: type(x) is str), max_size=5)
        | st.frozensets(st.integers(-9, 9), max_size=5)
    ),
    max_leaves=25,
)


def same(a, b):
    """Equal in value and in type, arrays bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return (
            a.shape == b.shape
            and a.dtype.newbyteorder("=") == b.dtype
            and a.astype(b.dtype).tobytes() == b.tobytes()
        )
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) and same(v, b[x]) for (x, v), y in zip(a.items(), b, strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@given(values)
@settings(max_examples=150, deadline=None)
def test_every_value_comes_back_with_its_type(value):
    assert same(value, decode(encode(value)))


@given(values)
@settings(max_examples=100, deadline=None)
def test_equal_values_give_equal_bytes(value):
    assert encode(value) == encode(decode(encode(value)))


@pytest.mark.parametrize("dtype", ["bool", "int8", ">i4", "<u8", "float16", ">f8", "complex64"])
def test_large_arrays_travel_as_frames_of_their_own_without_a_copy_on_arrival(dtype):
    sent = (np.arange(60_000) % 2).astype(dtype).reshape(300, 200)
    body, frame = encode({"image": sent, "text": "x"})
    received = decode([body, memoryview(frame)])["image"]
    assert len(body) < 100
    assert (received == sent).all()
    assert received.dtype.newbyteorder("=") == sent.dtype.newbyteorder("=")
    assert not received.flags.writeable
    assert np.shares_memory(received, np.frombuffer(frame, np.uint8))


def test_a_message_is_a_snapshot_of_the_array_it_was_given():
    buffer = np.zeros(10_000)
    frames = encode(buffer)
    buffer[:] = 1
    assert not decode(frames).any()


def test_strided_arrays_travel():
    sent = np.arange(40_000).reshape(200, 200)[::2, ::-3]
    assert (decode(encode(sent)) == sent).all()


@pytest.mark.parametrize("value", [np.float32(1.5), np.int64(-3), np.bool_(True), np.float64(0.1)])
def test_numpy_scalars_keep_their_type(value):
    received = decode(encode([value]))[0]
    assert type(received) is type(value)
    assert received == value


def test_subclasses_arrive_as_the_type_they_refine():
    class Colour(enum.StrEnum):
        RED = "red"

    class Number(enum.IntEnum):
        ONE = 1

    Point = collections.namedtuple("Point", "x y")
    sent = [
        Colour.RED,
        Number.ONE,
        Point(1, 2),
        collections.OrderedDict(a=1),
        collections.defaultdict(list, b=[2]),
        bytearray(b"x"),
        np.str_("s"),
        {Colour.RED: 1},
    ]
    received = decode(encode(sent))
    assert received == ["red", 1, (1, 2), {"a": 1}, {"b": [2]}, b"x", "s", {"red": 1}]
    assert [type(item) for item in received] == [str, int, tuple, dict, dict, bytes, str, dict]


class Opaque:
    pass


cycle: list = []
cycle.append(cycle)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"infos": [0, {"x": Opaque()}]}, r"Opaque \(at \$\.infos\[1\]\.x\)"),
        ({"score": math.nan}, r"NaN at \$\.score"),
        ([struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0]], r"NaN at \$\[0\]"),
        ([1.0, [np.float32("nan")]], r"NaN at \$\[1\]\[0\]"),
        ({"n": 1 << 64}, r"64 bits, got 1\.84e\+19 at \$\.n"),
        ({"n": -(1 << 63) - 1}, r"64 bits.* at \$\.n"),
        ([{"board": {(1, 2): "x"}}], r"scalar, got tuple in \$\[0\]\.board"),
        ({(1,)}, r"scalar, got tuple in \$"),
        ({"a": {np.complex64(1): 1}}, r"scalar, got numpy\.complex64 in \$\.a"),
        (cycle, r"at most 32 nested containers"),
        ({"text": "\ud800"}, r"UTF-8 can encode.* at \$\.text"),
        ([np.array(["a"])], r"dtype <U1.* \(at \$\[0\]\)"),
        ([np.array([None])], r"dtype object.* \(at \$\[0\]\)"),
        (({"f": len},), r"builtin_function_or_method \(at \$\[0\]\.f\)"),
    ],
)
def test_what_cannot_travel_is_named_with_its_place(value, said):
    with pytest.raises(UnsupportedTypeError, match=said):
        encode(value)


def test_infinities_and_nan_in_arrays_travel():
    received = decode(encode([math.inf, -math.inf, 1.7e308, np.array([math.nan])]))
    assert received[:3] == [math.inf, -math.inf, 1.7e308]
    assert np.isnan(received[3]).all()


def test_the_sender_keeps_the_limits_too():
    small = Limits(max_body_bytes=100, max_frame_bytes=10_000, max_frames=1, max_depth=2)
    for value in ["x" * 200, np.zeros(20_000), [np.zeros(1000)] * 2, [[[1]]]]:
        with pytest.raises(UnsupportedTypeError, match="at most"):
            encode(value, small)
    with pytest.raises(ConfigError, match="`max_depth` of at least 1"):
        Limits(max_depth=0)


# ---- hostile input ----


def ext(code, payload):
    return msgpack.packb(msgpack.ExtType(code, payload))


def reference(*parts):
    return ext(1, msgpack.packb(list(parts)))


def inline(dtype, shape, data):
    return ext(2, msgpack.packb([dtype, shape]) + data)


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([], "body frame"),
        ([b""], "truncated"),
        ([b"\xc1"], "msgpack"),
        ([b"\x91"], "truncated"),
        ([b"\x01\x02"], "1 bytes after"),
        ([b"\xdd\xff\xff\xff\xff"], "truncated"),
        ([b"\xdb\xff\xff\xff\xffab"], "truncated"),
        ([b"\x91" * 33 + b"\x01"], "at most 32 nested"),
        ([b"\xa2\xff\xff"], "UnicodeDecodeError"),
        ([b"\x81\x90\x01"], "TypeError"),
        ([ext(9, b"abc")], "ext code 1, 2 or 3, got 9"),
        ([b"\xd4\x03t"], "bare mark"),
        ([b"\x91\xd4\x03z"], "mark t, s or f"),
        ([b"\x92\x01\xd4\x03t"], "only as the first"),
        ([b"\x92\xd4\x03t\xd4\x03t"], "only as the first"),
        ([b"\x81\xa1a\xd4\x03t"], "only as the first"),
        ([b"\x81\xd4\x03t\x01"], "TypeError"),
        ([b"\x93\xd4\x03s\x01\x01"], "set to differ"),
        ([b"\x92\xd4\x03s\x92\xd4\x03t\x01"], "members of a set to be scalars"),
        ([b"\x81\x92\xd4\x03t\x01\x01"], "keys of a map to be scalars"),
        ([b"\x01", b"raw"], "raw frame 0 is not"),
        ([reference(0, "<f4", [1])], "unused raw frame below 0"),
        ([reference(-1, "<f4", [1]), b"abcd"], "unused raw frame"),
        ([reference(True, "<f4", [1]), b"abcd"], "unused raw frame"),
        ([b"\x92" + 2 * reference(0, "<f4", [1]), b"abcd"], "unused raw frame"),
        ([reference(0, "<f4", [2]), b"abcd"], "expected 8 bytes"),
        ([reference(0, "|O", [1]), b"12345678"], "dtype such as"),
        ([reference(0, ">f4", [1]), b"abcd"], "dtype such as"),
        ([reference(0, "|i4", [1]), b"abcd"], "one byte"),
        ([reference(0, "<f4, <f4", [1]), b"abcd"], "dtype such as"),
        ([reference(0, "<f4", [-1]), b"abcd"], "sizes from 0"),
        ([reference(0, "<f4", [1 << 39, 1 << 39, 4]), b"abcd"], "bytes for an array"),
        ([reference(0, "<f4", [1 << 32, 1 << 32, 0]), b""], "empty array"),
        ([reference(0, "<f4", [1] * 17), b"abcd"], "msgpack"),
        ([reference(0, "<f4", None), b"abcd"], "dimensions"),
        ([reference(0, "<f4"), b"abcd"], "header of 3 parts"),
        ([ext(1, b"x" * 300)], "at most 256"),
        ([inline("<f4", [2], b"abcd")], "expected 8 bytes"),
        ([inline("<f4", None, b"abcdef")], "expected 4 bytes"),
        ([inline(7, [1], b"")], "dtype such as"),
        ([ext(2, b"\xc1")], "array header"),
        ([ext(2, b"\x01")], "before the bytes"),
        ([b"\x01"] + [b""] * 1025, "at most 1024 raw frames"),
    ],
)
def test_malformed_messages_are_protocol_errors(frames, said):
    with pytest.raises(ProtocolError, match=re.escape(said) if said[0] != "^" else said):
        decode(frames)


@given(st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=3))
@settings(max_examples=500, deadline=None)
def test_random_bytes_decode_or_are_a_protocol_error(body, raw):
    with contextlib.suppress(ProtocolError):
        decode([body, *raw])


@given(values, st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_messages_decode_or_are_a_protocol_error(value, data):
    frames = [bytearray(frame) for frame in encode(value)]
    frame = data.draw(st.sampled_from(frames))
    for _ in range(data.draw(st.integers(1, 4))):
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del frame[data.draw(st.integers(0, len(frame))) :]
    with contextlib.suppress(ProtocolError):
        decode([bytes(frame) for frame in frames])


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff" * 200,
        b"\xdd\x00\x0f\xff\xff" * 1000 + b"\x01",
        b"\xdf\x7f\xff\xff\xff" * 200,
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
    ],
    ids=["arrays", "deep arrays", "maps", "bin", "ext"],
)
def test_claims_are_not_believed_before_they_are_checked(body):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode([body])
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_body_holds_no_more_values_than_allowed():
    few = Limits(max_items=1000)
    assert len(decode(encode([0] * 999), few)) == 999
    with pytest.raises(ProtocolError, match="at most 1000 values"):
        decode([b"\xdc\x03\xe8" + b"\xc0" * 1000], few)
    long_text = "x" * 5000  # many bytes, few values
    assert decode(encode(long_text), few) == long_text


def test_limits_of_the_receiver_are_kept():
    frames = encode([np.zeros(2000), np.zeros(3000)])
    for limits in (
        Limits(max_frames=1),
        Limits(max_frame_bytes=20_000),
        Limits(max_message_bytes=30_000),
        Limits(max_body_bytes=10),
        Limits(max_depth=1, max_body_bytes=10),
    ):
        with pytest.raises(ProtocolError, match="at most"):
            decode(frames, limits)
    assert len(decode(frames, DEFAULT_LIMITS)) == 2


@given(st.binary(max_size=300), values, st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_what_is_allocated_is_bounded_by_what_was_received(noise, value, seed):
    body, *raw = map(bytes, encode(value))
    cut = seed % (len(body) + 1)
    received = [body[:cut] + noise, *raw]
    tracemalloc.start()
    try:
        with contextlib.suppress(ProtocolError):
            decode(received)
        assert tracemalloc.get_traced_memory()[1] < 100_000 + 250 * sum(map(len, received))
    finally:
        tracemalloc.stop()
