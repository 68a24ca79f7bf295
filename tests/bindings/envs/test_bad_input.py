"""What does not fit is one clear error within the deadline. Wrong keys, names in use, unknown environments and servers
that are not there are in `test_env_server`; peers that break the protocol in `rpc/test_hostile_peers`.
"""

import threading
import time

import msgpack
import pytest
import zmq
from helpers import reset, step

from longstep.errors import ProtocolError
from longstep_bindings.envs import EnvSpec, RemoteVectorEnv
from longstep_bindings.heads import Kind


def test_an_observation_that_cannot_travel_is_its_slots_error_and_names_its_place():
    spec = EnvSpec(entry_point="odd_env:OddEnv", wrap=False)
    with RemoteVectorEnv(spec, 2, num_workers=1) as envs:
        reset(envs, {0: 1, 1: 1})
        results = step(envs, {0: "odd", 1: "go"})
        assert results[0].error.startswith("UnsupportedTypeError")
        assert "lock" in results[0].error
        assert ".view[1]" in results[0].error
        assert (results[1].error, results[1].observation) == (None, "here")
        assert reset(envs, {0: 1})[0].observation == "here"


@pytest.mark.parametrize("version", [2, "two", None])
def test_a_server_of_another_protocol_version_is_one_clear_error(version, tmp_path):
    """Every version's heads begin alike: version, kind, token."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.linger = 0
        server.bind(f"ipc://{tmp_path}/s")

        def answer():
            if server.poll(10_000):
                route, head, *_ = server.recv_multipart()
                token = msgpack.unpackb(head)[2]
                reply = msgpack.packb([version, int(Kind.WELCOME), token, {"terms": "of then"}])
                server.send_multipart([route, reply])

        thread = threading.Thread(target=answer)
        thread.start()
        began = time.monotonic()
        with pytest.raises(
            ProtocolError, match=r"expected protocol version 1, got .*; install the same version"
        ):
            RemoteVectorEnv.connect(
                f"ipc://{tmp_path}/s", 1, connect_timeout_s=20.0, max_restarts=0
            )
        assert time.monotonic() - began < 21.0
        thread.join()
