"""What the columns of a reply are on the wire, and what is made of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from longstep.errors import ProtocolError
from longstep_bindings.envs.messages import REPLY_LIMITS, Columns, Row, encode_rows, read_reply
from longstep_bindings.wire import decode


def rows(
    num_rows: int, *, rewards: list[float], ends: list[bool], infos: list[dict[str, Any]]
) -> list[Row]:
    return [
        (
            f"observation {index}",
            rewards[index % len(rewards)],
            ends[index % len(ends)],
            False,
            infos[index % len(infos)],
            None,
            index / 7,
        )
        for index in range(num_rows)
    ]


def crossed(given: list[Row], *, compact: bool = True) -> Columns:
    return read_reply(decode(encode_rows(given, compact=compact), REPLY_LIMITS), len(given))


@pytest.mark.parametrize("num_rows", [1, 2, 99, 100, 700])
@pytest.mark.parametrize("rewards", [[0.0], [1.5, -2.0], [0.0, 0.0, 1.0]], ids=str)
@pytest.mark.parametrize("ends", [[False], [True], [True, False, False]], ids=str)
@pytest.mark.parametrize("infos", [[{}], [{}, {"won": True}]], ids=["bare", "told"])
@pytest.mark.parametrize("compact", [True, False])
def test_columns_come_as_they_went(
    num_rows: int,
    rewards: list[float],
    ends: list[bool],
    infos: list[dict[str, Any]],
    compact: bool,
) -> None:
    given = rows(num_rows, rewards=rewards, ends=ends, infos=infos)

    told = crossed(given, compact=compact)

    observations, got, terminated, truncated, their_infos, errors, seconds = map(
        list, zip(*given, strict=True)
    )
    assert told.observations == observations
    assert told.rewards == got
    assert told.terminated == terminated
    assert told.truncated == truncated
    assert (told.infos or [{}] * num_rows) == their_infos
    assert told.errors == errors
    assert told.seconds == seconds
    assert {type(value) for value in told.rewards + told.seconds} == {float}
    assert {type(value) for value in told.terminated + told.truncated} == {bool}


def test_the_two_zeros_are_not_one_number() -> None:
    told = crossed(rows(4, rewards=[0.0, -0.0], ends=[False], infos=[{}]))

    assert [math.copysign(1.0, reward) for reward in told.rewards] == [1.0, -1.0, 1.0, -1.0]


def test_a_column_of_one_value_takes_the_room_of_one() -> None:
    same = encode_rows(rows(64, rewards=[0.5], ends=[False], infos=[{}]), compact=True)
    other = encode_rows(rows(64, rewards=[0.5, 0.25], ends=[False], infos=[{}]), compact=True)

    assert len(same[0]) < len(other[0]) - 63 * 8


@pytest.mark.parametrize("index", range(7))
@pytest.mark.parametrize("value", ["text", 3, 3.5, True, None, {}, b"\0", [0.0]], ids=repr)
def test_one_value_that_cannot_stand_for_a_column_is_a_protocol_error(
    index: int, value: Any
) -> None:
    reply = decode(encode_rows(rows(2, rewards=[0.5], ends=[False], infos=[{}]), compact=True))
    reply[index] = value
    fits = {1: (int, float), 2: (bool,), 3: (bool,), 4: (type(None),), 5: (type(None),)}
    fits[6] = fits[1]
    if type(value) in fits.get(index, ()):
        read_reply(reply, 2)
    else:
        with pytest.raises(ProtocolError, match="column"):
            read_reply(reply, 2)
