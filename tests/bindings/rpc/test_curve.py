"""Keys: who is let in, and what the others learn."""

import stat

import pytest
from rpc_service import Recorder

from longstep.errors import ConfigError, DeadlineError
from longstep_bindings.curve import ClientKeys, KeyPair, ServerKeys, load_public, new_keys
from longstep_bindings.rpc import Client, Server


@pytest.fixture
def keys(tmp_path):
    return {name: new_keys(tmp_path, name) for name in ("server", "friend", "stranger")}


def connect(server, keys, timeout_s=10.0):
    return Client(
        server.address,
        service="test.recorder",
        version=1,
        connect_timeout_s=timeout_s,
        keys=keys,
    )


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://0.0.0.0:*", None])
def test_a_client_of_the_allow_list_gets_in_and_no_other(tmp_path, keys, address):
    server_keys = ServerKeys(
        own=KeyPair.load(tmp_path / "server.key_secret"),
        allowed=load_public([tmp_path / "friend.key"]),
    )
    server_public = keys["server"].public
    with Server(Recorder(), address, keys=server_keys) as server:
        server.address = server.address.replace("0.0.0.0", "127.0.0.1")
        friend = ClientKeys(own=keys["friend"], server_public=server_public)
        with connect(server, friend) as client:
            assert client.call("echo", 1, timeout_s=10) == 1
        wrong = [
            ClientKeys(own=keys["stranger"], server_public=server_public),
            ClientKeys(own=keys["friend"], server_public=keys["stranger"].public),
            None,
        ]
        for others in wrong:
            with pytest.raises(DeadlineError, match="does not know this client's key"):
                connect(server, others, timeout_s=0.5)
        assert server.num_refused_messages == 0  # nothing of theirs ever came through
        with connect(server, friend) as client:
            assert client.call("echo", 2, timeout_s=10) == 2


def test_secret_keys_are_for_their_owner_only(tmp_path, keys):
    secret = tmp_path / "server.key_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert keys["server"].secret.decode() not in repr(keys["server"])
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyPair.load(secret)


def test_key_files_are_checked(tmp_path, keys):
    with pytest.raises(ConfigError, match="got a public one"):
        KeyPair.load(tmp_path / "server.key")
    with pytest.raises(ConfigError, match="expected a key file at"):
        KeyPair.load(tmp_path / "nobody.key_secret")
    with pytest.raises(ConfigError, match="expected a new name, got `server`"):
        new_keys(tmp_path, "server")
