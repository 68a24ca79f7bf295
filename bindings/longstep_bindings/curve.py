"""CURVE keys: who may reach a server that other machines can reach.

Every party has a key pair. A server knows the public keys of the clients it lets in; a client knows its server's public
key. Traffic is encrypted; a peer with another key gets no answer at all, so it learns nothing, not even that it was
refused. Key files: `name.key` (public, to hand out) and `name.key_secret` (mode 0600), the format of `zmq.auth`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from longstep.errors import ConfigError

__all__ = [
    "ClientKeys",
    "CurveGuard",
    "KeyPair",
    "ServerKeys",
    "load_public",
    "new_keys",
    "use_client_keys",
]

_DOMAIN = "longstep"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """One party's keys, in Z85 text (40 bytes each)."""

    public: bytes
    secret: bytes

    @classmethod
    def load(cls, path: str | Path) -> KeyPair:
        """The pair in a `name.key_secret` file.

        Raises:
            ConfigError: The file is missing, holds no secret key, or others can read it.
        """
        path = Path(path)
        public, secret = _load(path)
        if secret is None:
            raise ConfigError(f"expected a secret key in {path}, got a public one")
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise ConfigError(f"expected a secret key only you can read; run: chmod 600 {path}")
        return cls(public=public, secret=secret)

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r}, secret=...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """What a server needs: its own pair and its allow list."""

    own: KeyPair
    allowed: frozenset[bytes]
    """Public keys of the clients that are let in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    """What a client needs: its own pair and its server's public key."""

    own: KeyPair
    server_public: bytes


def new_keys(folder: str | Path, name: str) -> KeyPair:
    """A new pair, written to `name.key` and `name.key_secret` in `folder`.

    Raises:
        ConfigError: Keys of that name exist; they are never overwritten.
    """
    from zmq import auth

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("key", "key_secret"):
        if (folder / f"{name}.{suffix}").exists():
            raise ConfigError(f"expected a new name, got `{name}`: {folder} has its {suffix}")
    previous = os.umask(0o077)  # the secret is never readable by others, not even for a moment
    try:
        _, secret_path = auth.create_certificates(folder, name)
    finally:
        os.umask(previous)
    return KeyPair.load(secret_path)


def load_public(paths: Iterable[str | Path]) -> frozenset[bytes]:
    """The public keys in these `name.key` files; an allow list."""
    return frozenset(_load(Path(path))[0] for path in paths)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    from zmq import auth

    try:
        return auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"expected a key file at {path}, got {error}") from None


def use_client_keys(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Encrypt what `socket` sends, and accept only the server with the known key."""
    socket.curve_publickey = keys.own.public
    socket.curve_secretkey = keys.own.secret
    socket.curve_serverkey = keys.server_public


class CurveGuard:
    """Lets in the clients of the allow list, on one context's sockets."""

    def __init__(self, context: zmq.Context[Any], keys: ServerKeys) -> None:
        """Start the thread that libzmq asks about each connection.

        Args:
            context: The server's own context: there can be only one guard in a context.
            keys: The server's pair and the allow list.
        """
        self._keys = keys
        from zmq.auth.thread import ThreadAuthenticator  # brings asyncio, which only this needs

        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(_DOMAIN, _AllowList(keys.allowed))
        self._authenticator.start()

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Require keys on `socket`; call before it is bound."""
        socket.zap_domain = _DOMAIN.encode()
        socket.curve_secretkey = self._keys.own.secret
        socket.curve_publickey = self._keys.own.public
        socket.curve_server = True

    def stop(self) -> None:
        """End the thread."""
        self._authenticator.stop()


class _AllowList:
    """The callback of `zmq.auth`."""

    def __init__(self, allowed: frozenset[bytes]) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        """True for a key of the list; `key` is Z85 text."""
        return key in self._allowed
