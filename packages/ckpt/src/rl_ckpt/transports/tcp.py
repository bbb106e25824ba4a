"""TCP connections of a session: listening, connecting, and the shared token."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from rl_ckpt.errors import AddressError
from rl_ckpt.protocol.channel import Channel
from rl_ckpt.transports.base import BACKLOG, ConnectingReceive, Listener, ListeningSend
from rl_csrc.ipc import close_in_children

if TYPE_CHECKING:
    from rl_ckpt.types import SessionConfig

TOKEN_VARIABLE = "RL_CKPT_TOKEN"  # the name of the variable
DIAL_S = 1.0
"""Longest wait for the answer to one attempt to connect, seconds."""
_HOST_AND_PORT = re.compile(r"\[?(?P<host>[^\[\]]+?)\]?:(?P<port>[0-9]{1,5})")


def token_of(config: SessionConfig) -> bytes:
    """Token of a TCP session; also checks that the URL has a host and a port.

    Raises:
        AddressError: there is no token, or the URL has no host and port.
    """
    host_and_port(config)
    token = config.token if config.token is not None else os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise AddressError(
            f"{config.address} needs a token, or anybody who reaches the port could send or take weights: pass "
            f"token=... to connect, or set {TOKEN_VARIABLE}, at both ends"
        )
    return token.encode()


def host_and_port(config: SessionConfig) -> tuple[str, int]:
    """Host and port of the URL.

    Raises:
        AddressError: it has none.
    """
    found = _HOST_AND_PORT.fullmatch(config.name)
    if found is None or int(found["port"]) > 65535:  # the last port
        raise AddressError(
            f"the address in {config.address!r} is {config.name!r}; write {config.address.partition(':')[0]}://host:port"
        )
    return found["host"], int(found["port"])


def _resolve(config: SessionConfig) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    host, port = host_and_port(config)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise AddressError(f"the host in {config.address!r} cannot be found: {error}") from error
    return family, address


def _address_text(address: tuple[object, ...]) -> str:
    return f"[{address[0]}]:{address[1]}" if ":" in str(address[0]) else f"{address[0]}:{address[1]}"


def _tune(connection: socket.socket, timeout_s: float) -> socket.socket:
    """Set socket options: no delay for small messages, and keep-alive to detect a dead machine."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(timeout_s * 1000)))
    return connection


class TcpListener(Listener):
    """Listening socket that holds a port."""

    def __init__(self, config: SessionConfig) -> None:
        family, address = _resolve(config)
        self._timeout_s = config.timeout_s
        self._socket = close_in_children(socket.socket(family, socket.SOCK_STREAM))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(address)
            self._socket.listen(BACKLOG)  # of two that bind, the second fails here
        except OSError as error:
            self._socket.close()
            raise AddressError(
                f"{config.address} cannot be listened on ({error}): it is taken by another sender, or not an address "
                "of this machine"
            ) from error
        self._socket.setblocking(False)
        name = _address_text((host_and_port(config)[0], int(self._socket.getsockname()[1])))
        self.config = replace(config, name=name, address=f"{config.address.partition(':')[0]}://{name}")

    def accept(self) -> Channel | None:
        """Accept the next connection; its peer has to prove the token."""
        try:
            connection, found = self._socket.accept()
        except OSError:  # none, or closed again
            return None
        address = _address_text(found)
        return Channel(_tune(connection, self._timeout_s), f"receiver at {address}", address=address)


class TcpSend(ListeningSend):
    """Sending side at a port (0: a free one); receivers prove the token. A subclass implements `allocate`."""

    listener = TcpListener

    def __init__(self, config: SessionConfig) -> None:
        self.token = token_of(config)
        super().__init__(config)


class TcpReceive(ConnectingReceive):
    """Receiving side of a `TcpSend`. A subclass implements `map_slots`."""

    def __init__(self, config: SessionConfig) -> None:
        self.token = token_of(config)
        super().__init__(config)

    def connect(self) -> socket.socket | None:
        """Connect to the sender; None if it does not answer."""
        family, address = _resolve(self._config)
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(min(DIAL_S, self._config.timeout_s))
        try:
            connection.connect(address)
            is_answered = (
                connection.getsockname() != connection.getpeername()
            )  # a free local port may connect to itself
        except OSError:  # refused or late: the caller retries until its deadline
            is_answered = False
        if not is_answered:
            connection.close()
            return None
        return _tune(connection, self._config.timeout_s)

    def channel_of(self, connection: socket.socket) -> Channel:
        """Control channel of a connection."""
        try:
            address = _address_text(connection.getpeername())
        except OSError:  # closed again, which the next read reports
            return Channel(connection, "sender")
        return Channel(connection, f"sender at {address}", address=address)
