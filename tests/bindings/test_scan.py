"""The two walks over a body give the same verdict."""

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstep.errors import ProtocolError
from longstep_bindings import scan

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


def verdict(check):
    try:
        check()
    except ProtocolError as error:
        return str(error).partition(", got")[0]
    return None


def both(body, max_depth):
    by_c = verdict(lambda: scan._skip(body, max_depth))
    by_python = verdict(lambda: scan._walk(memoryview(body), max_depth, 10**9))
    return by_c, by_python


@given(plain, st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_both_walks_agree_on_whole_values(value, max_depth):
    by_c, by_python = both(msgpack.packb(value), max_depth)
    assert by_c == by_python


@given(st.binary(max_size=60), st.integers(1, 6))
@settings(max_examples=500, deadline=None)
def test_both_walks_agree_on_what_is_acceptable(body, max_depth):
    by_c, by_python = both(body, max_depth)
    assert (by_c is None) == (by_python is None)


@pytest.mark.parametrize("max_depth", [1, 2, 31, 32])
def test_depth_is_exact(max_depth):
    for wide in (b"", b"\x00" * 100):  # a short body takes another way
        inner = bytes([0xDC, 0, len(wide) + 1]) + wide
        fits = b"\x91" * (max_depth - 1) + inner + b"\x00"
        assert both(fits, max_depth) == (None, None)
        assert None not in both(b"\x91" + fits, max_depth)


def test_values_are_counted_with_their_containers():
    scan.check_body(b"\x93\x01\x02\x03", max_depth=2, max_items=4)
    with pytest.raises(ProtocolError, match="at most 3 values"):
        scan.check_body(b"\x93\x01\x02\x03", max_depth=2, max_items=3)
