"""Peers that speak the protocol badly, over a real socket: the server carries on and its other clients notice nothing."""

import random

import msgpack
import pytest
from raw_peer import RawPeer
from rpc_service import Recorder

from longstep_bindings.heads import Kind
from longstep_bindings.limits import Limits
from longstep_bindings.rpc import Client, Server, Terms
from longstep_bindings.testing import wait_until
from longstep_bindings.wire import decode

SMALL = Limits(
    max_body_bytes=10_000, max_frame_bytes=20_000, max_frames=4, max_message_bytes=50_000
)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def server(recorder):
    terms = Terms(num_credits=4, heartbeat_s=0.1, lost_after_s=20.0)
    with Server(recorder, limits=SMALL, terms=terms) as server:
        yield server


@pytest.fixture
def peer(server):
    with RawPeer(server.address, service="test.recorder") as peer:
        yield peer


def test_garbage_is_counted_and_changes_nothing(server, peer, recorder):
    draw = random.Random(0)
    with Client(server.address, service="test.recorder", version=1) as client:
        client.call("add", 1, timeout_s=10)
        for _ in range(200):
            peer.send(*[draw.randbytes(draw.randrange(60)) for _ in range(draw.randrange(1, 5))])
        peer.send(*[b"x"] * 50)
        peer.send(b"", b"", b"")
        peer.send(b"x" * 19_000)
        peer.send(*[b"y" * 15_000] * 4)
        peer.tell(Kind.WELCOME, {})
        peer.hello()
        wait_until(lambda: server.num_refused_messages >= 204)
        assert client.call("add", 1, timeout_s=10) == 2


def test_a_frame_beyond_every_limit_costs_the_connection_only(server, peer):
    with Client(server.address, service="test.recorder", version=1) as client:
        client.call("add", 1, timeout_s=10)
        peer.send(b"x" * 1_000_000)
        assert client.call("add", 1, timeout_s=10) == 2
    with RawPeer(server.address, service="test.recorder") as other:
        assert other.hello().kind is Kind.WELCOME


def test_another_version_of_the_protocol_is_told_so(peer):
    peer.send(msgpack.packb([2, 1, peer.token, {"anything": 1}]))
    head, _ = peer.hear()
    assert head.kind is Kind.REFUSED
    assert head.fields[0] == "ProtocolError"
    assert "expected protocol version 1, got 2; install the same version" in head.fields[1]


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.PING, Kind.CANCEL])
def test_a_token_without_a_session_learns_only_that(peer, kind):
    fields = {Kind.REQUEST: (1, 1, [1], 1000, "note"), Kind.PING: (1, 1, []), Kind.CANCEL: (1,)}
    peer.tell(kind, *fields[kind])
    assert peer.hear()[0].kind is Kind.LOST


def test_a_bad_body_is_answered_and_not_executed(peer, recorder):
    peer.hello()
    fields = (1, 1, [1], 10_000, "note")
    peer.tell(Kind.REQUEST, *fields, frames=[b"\xdd\xff\xff\xff\xff"])
    head, _ = peer.hear()
    assert (head.kind, head.fields[:2]) == (Kind.ERROR, (1, "ProtocolError"))
    peer.tell(Kind.REQUEST, 2, 2, [2], 10_000, "note")
    assert peer.hear()[0].fields[:2] == (2, "ProtocolError")
    assert recorder.notes == []


def test_a_repeated_request_is_answered_again_from_memory(peer, recorder):
    peer.hello()
    for _ in range(3):
        peer.request(1, "note", "once")
        head, frames = peer.hear()
        assert (head.kind, decode(frames)) == (Kind.REPLY, 0)
    assert recorder.notes == ["once"]


def test_an_old_copy_of_a_settled_request_is_dropped(peer, recorder):
    peer.hello()
    for seq in (1, 2):
        peer.request(seq, "note", seq)
        assert peer.hear()[0].fields == (seq,)
    peer.request(1, "note", 1)
    assert peer.hear(0.3) is None
    assert recorder.notes == [1, 2]


def test_requests_that_overtook_each_other_run_in_their_order(peer, recorder):
    peer.hello()
    peer.request(3, "note", 3, open_seqs=[1, 2, 3])
    peer.request(2, "note", 2, open_seqs=[1, 2], upto=2)
    assert peer.hear(0.3) is None
    peer.request(1, "note", 1, open_seqs=[1], upto=1)
    assert [peer.hear()[0].fields[0] for _ in range(3)] == [1, 2, 3]
    assert recorder.notes == [1, 2, 3]


def test_a_missing_request_that_is_given_up_holds_nobody_back(peer, recorder):
    peer.hello()
    peer.request(2, "note", 2, open_seqs=[1, 2])
    peer.tell(Kind.PING, 1, 2, [2])
    heard = [peer.hear()[0] for _ in range(2)]
    assert {head.kind for head in heard} == {Kind.PONG, Kind.REPLY}
    assert recorder.notes == [2]


def test_more_requests_than_credits_are_not_taken(server, peer, recorder):
    peer.hello()
    for seq in range(1, 5):
        peer.request(seq, "hold", open_seqs=list(range(1, seq + 1)))
    peer.request(5, "note", open_seqs=[1, 2, 3, 4, 5])
    peer.tell(Kind.PING, 1, 5, [1, 2, 3, 4, 5])
    head, _ = peer.hear()
    assert (head.kind, head.fields) == (Kind.PONG, (1, [1, 2, 3, 4]))
    assert server.num_refused_messages == 1
    assert recorder.notes == []


def test_answers_a_peer_never_takes_are_bounded(server, peer):
    peer.hello()
    for seq in range(1, 300):
        peer.request(seq, "echo", "x" * 1000)
    (book,) = server._hub._books.values()
    wait_until(lambda: book._highest >= 299)
    assert len(book.here) <= 1


def test_huge_numbers_and_times_are_taken_as_they_are(peer, recorder):
    peer.hello()
    peer.request(1 << 53, "note", "far", ms=1 << 40)
    assert peer.hear()[0].fields == (1 << 53,)
    peer.request((1 << 53) - 1, "note", "before", ms=0)
    assert peer.hear(0.3) is None
    assert recorder.notes == ["far"]
