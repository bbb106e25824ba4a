"""The first bytes of a TCP connection: that both ends speak rl-tq, and know the same token where there is one.

Each proves it by HMAC-SHA256 (RFC 2104) over both ends' fresh nonces, so the token never travels and no proof can be
used twice. It says who is there; what follows is neither encrypted nor signed.
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
"""The environment variable that has the token."""
LIMIT_S = 10.0
"""How long a stranger may take to prove himself."""
_NONCE_BYTES = _PROOF_BYTES = 32
_GREETING = struct.Struct(f"<8s?{_NONCE_BYTES}s")
_ANSWER = struct.Struct(f"<8s?{_NONCE_BYTES}s{_PROOF_BYTES}s")
_MAGIC = b"RLTQTCP\x03"


def token() -> bytes | None:
    """The token of this process's environment; None where there is none."""
    return os.environ.get(VARIABLE, "").encode() or None


def check_exposure(host: str, secret: bytes | None) -> None:
    """Raise AddressError if a queue would be served beyond this host to whoever comes."""
    if secret is None and not _is_loopback(host):
        raise AddressError(
            f"{host} can be reached from other hosts, and no token is set: anybody there could read and write. Set "
            f"{VARIABLE} to the same secret in every process of the job (python -c 'import secrets; "
            f"print(secrets.token_hex())'), or serve at 127.0.0.1"
        )


def welcome(connection: socket.socket, secret: bytes | None) -> None:
    """The server's side, blocking.

    Raises:
        ConnectionError, TimeoutError: the other end is none of ours.
    """
    deadline = time.monotonic() + LIMIT_S
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_GREETING.pack(_MAGIC, secret is not None, nonce))
    magic, has_token, theirs, proof = _ANSWER.unpack(_receive(connection, _ANSWER.size, deadline))
    if magic != _MAGIC or has_token != (secret is not None):
        raise ConnectionAbortedError(
            "the other end does not speak this version of rl-tq, or has another idea of tokens"
        )
    if secret is not None:
        if not hmac.compare_digest(proof, _proof(secret, b"client", nonce, theirs)):
            raise ConnectionAbortedError("the other end has another token")
        connection.sendall(_proof(secret, b"server", nonce, theirs))


def introduce(connection: socket.socket, address: str, timeout_s: float, secret: bytes | None) -> None:
    """The client's side, blocking.

    Raises:
        AddressError: the two have different tokens, or one has none, or the server is not of rl-tq.
        OSError: the connection broke, or the time is up.
    """
    deadline = time.monotonic() + timeout_s
    magic, wants_token, theirs = _GREETING.unpack(_receive(connection, _GREETING.size, deadline))
    if magic != _MAGIC:
        raise AddressError(f"what answers at {address} is no queue of this version of rl-tq: it began with {magic!r}")
    if wants_token != (secret is not None):
        this, that = ("no token", "one") if wants_token else ("a token", "none")
        raise AddressError(f"this process has {this} and the server of {address} has {that}: set {VARIABLE} alike")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    proof = bytes(_PROOF_BYTES) if secret is None else _proof(secret, b"client", theirs, nonce)
    connection.sendall(_ANSWER.pack(_MAGIC, secret is not None, nonce, proof))
    if secret is not None:
        try:
            answer = _receive(connection, _PROOF_BYTES, deadline)
        except ConnectionError:
            answer = b""
        if not hmac.compare_digest(answer, _proof(secret, b"server", theirs, nonce)):
            raise AddressError(f"the server of {address} has another {VARIABLE} than this process: set it alike")


def _proof(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret, _MAGIC + role + server_nonce + client_nonce, "sha256")


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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
