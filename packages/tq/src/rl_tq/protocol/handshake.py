"""Handshake of TCP connections: protocol version, and mutual authentication by a shared token.

Both ends prove the token by HMAC-SHA256 (RFC 2104) over fresh nonces of both, so the token is never sent and no proof
can be replayed. It authenticates the peers; what follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import struct
import time
from typing import TYPE_CHECKING

from rl_tq.errors import AddressError

if TYPE_CHECKING:
    import socket

VARIABLE = "RL_TQ_TOKEN"
"""Environment variable with the token."""
LIMIT_S = 10.0
"""Deadline of the handshake, seconds."""
_NONCE_BYTES = _PROOF_BYTES = 32
GREETING = struct.Struct(f"<8s{_NONCE_BYTES}s")
ANSWER = struct.Struct(f"<8s{_NONCE_BYTES}s{_PROOF_BYTES}s")
MAGIC = b"RLTQTCP\x04"
_MAKE = "python -c 'import secrets; print(secrets.token_hex(32))'"


def serving_token(host: str, given: str | None) -> bytes:
    """Token of a queue to be served at `host`: the one given, or that of the environment.

    On loopback, if there is neither, a new one is generated and set in this process's environment, which child
    processes inherit.

    Raises:
        AddressError: the queue could be reached from other hosts, and there is no token.
    """
    found = given or os.environ.get(VARIABLE)
    if not found and not is_loopback(host):
        raise AddressError(
            f"{host} can be reached from other hosts, and no token is set: anybody there could read and write. Set "
            f"{VARIABLE} to the same secret in every process of the job ({_MAKE}), or serve at 127.0.0.1"
        )
    if not found:
        found = os.environ[VARIABLE] = secrets.token_hex(32)
    return found.encode()


def client_token(address: str, given: str | None) -> bytes:
    """Token for connecting to `address`: the one given, or that of the environment.

    Raises:
        AddressError: there is neither.
    """
    found = given or os.environ.get(VARIABLE)
    if not found:
        raise AddressError(
            f"{address} asks for a token, and this process has none: set {VARIABLE} to that of the serving process (a "
            "process that it starts inherits it), or pass token="
        )
    return found.encode()


def welcome(connection: socket.socket, secret: bytes) -> None:
    """Server side of the handshake, blocking.

    Raises:
        ConnectionError, TimeoutError: the peer speaks another version, has another token, or is too slow.
    """
    deadline = time.monotonic() + LIMIT_S
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(GREETING.pack(MAGIC, nonce))
    magic, theirs, shown = ANSWER.unpack(_receive(connection, ANSWER.size, deadline))
    if magic != MAGIC:
        raise ConnectionAbortedError("the other end does not speak this version of rl-tq")
    if not hmac.compare_digest(shown, proof(secret, b"client", nonce, theirs)):
        raise ConnectionAbortedError("the other end has another token")
    connection.sendall(proof(secret, b"server", nonce, theirs))


def introduce(connection: socket.socket, address: str, timeout_s: float, secret: bytes) -> None:
    """Client side of the handshake, blocking.

    Raises:
        AddressError: the tokens differ, or the server is not rl-tq of this version.
        OSError: the connection broke, or the time is up.
    """
    deadline = time.monotonic() + timeout_s
    magic, theirs = GREETING.unpack(_receive(connection, GREETING.size, deadline))
    if magic != MAGIC:
        raise AddressError(f"the server at {address} is not a queue of this version of rl-tq: it began with {magic!r}")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(ANSWER.pack(MAGIC, nonce, proof(secret, b"client", theirs, nonce)))
    try:
        answer = _receive(connection, _PROOF_BYTES, deadline)
    except ConnectionError:
        answer = b""
    if not hmac.compare_digest(answer, proof(secret, b"server", theirs, nonce)):
        raise AddressError(other_token(address))


def other_token(address: str) -> str:
    """Error message for a client whose proof is refused."""
    return f"the server of {address} has another token than this process: set {VARIABLE} alike, or pass token="


def proof(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Proof (32 bytes) that the peer with this role has the token."""
    return hmac.digest(secret, MAGIC + role + server_nonce + client_nonce, "sha256")


def _receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    before = connection.gettimeout()
    received = bytearray()
    try:
        while len(received) < nbytes:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = connection.recv(nbytes - len(received))
            if not part:
                raise ConnectionResetError("the other side closed the connection")
            received += part
    finally:
        connection.settimeout(before)
    return bytes(received)


def is_loopback(host: str) -> bool:
    """Whether a host, a name or an address, is this machine's loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
