"""`tcp://HOST:PORT`: queue for processes of several hosts. Values are in the memory of the serving process.

A put sends its extent once; a get receives the requested rows and columns in one message, directly into the memory that
it returns. Both ends prove the same token when they connect: `token=`, or the variable `RL_TQ_TOKEN`, which a server on
loopback sets for its child processes. Nothing is encrypted: serve inside a trusted network.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from rl_csrc.ipc import close_in_children
from rl_tq.client.client import RemoteQueue
from rl_tq.errors import AddressError, ServerLostError
from rl_tq.protocol import framing as stream
from rl_tq.protocol import handshake
from rl_tq.protocol.codec import encode
from rl_tq.protocol.framing import MAX_MESSAGE_BYTES, Limits
from rl_tq.server.connection import ClientConnection, Send
from rl_tq.server.listener import Listener
from rl_tq.storage.inproc import InprocQueue, serve_heap

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from rl_tq.protocol.framing import Payload
    from rl_tq.protocol.service import Message
    from rl_tq.server.host import QueueHost

_TICK_S = 0.1


class _Remote:
    """Server side of one TCP client: a thread that reads and handles requests, and one that sends."""

    def __init__(self, front: TcpFront, connection: socket.socket, label: str) -> None:
        self.is_authenticated = self.is_shut = False
        self._connection = connection
        self._secret = front.secret
        self._limits = front.limits
        self._outgoing: SimpleQueue[tuple[Message, Payload] | None] = SimpleQueue()
        self._unsent_bytes = 0
        self._sent = threading.Condition()
        self._client = front.make_connection(label, self._send)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether its threads still run."""
        return self._threads[1].is_alive()

    def shut(self) -> None:
        """Shut the connection down, without waiting for its end."""
        self.is_shut = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the connection down and wait for its end."""
        self.shut()
        for thread in self._threads:
            thread.join()

    def _send(self, message: Message, payload: Payload) -> None:
        self._count(payload, 1)
        self._outgoing.put((message, payload))

    def _count(self, payload: Payload, times: int) -> None:
        """Count a payload as unsent (1) or sent (-1)."""
        if payload:
            with self._sent:
                self._unsent_bytes += times * sum(map(len, payload))
                self._sent.notify()

    def _read(self) -> None:
        try:
            handshake.welcome(self._connection, self._secret)
            self.is_authenticated = True
            while True:
                message, payload = stream.receive(
                    self._connection, max_text_bytes=MAX_MESSAGE_BYTES, max_payload_bytes=self._limits.payload_bytes
                )
                # Back-pressure: requests of a client that does not read its replies are not read.
                if self._unsent_bytes > self._limits.payload_bytes:
                    with self._sent:
                        self._sent.wait_for(lambda: self._unsent_bytes <= self._limits.payload_bytes)
                self._client.take(message, payload)
        except (OSError, ValueError, KeyError, MemoryError):
            return  # the client closed, died, or violated the protocol
        finally:
            self._client.leave()
            self._outgoing.put(None)
            self.shut()

    def _write(self) -> None:
        try:
            while (item := self._outgoing.get()) is not None:
                message, payload = item
                stream.send(self._connection, encode(message), payload)
                self._count(payload, -1)
        except OSError:
            self.shut()  # ends the reading thread too
        finally:
            with self._sent:
                self._unsent_bytes = -(1 << 62)  # wakes the reading thread
                self._sent.notify()
            self._threads[0].join()
            self._connection.close()


class TcpFront:
    """TCP front of a host."""

    scheme = "tcp"

    def __init__(
        self, host: QueueHost, place: tuple[str, int], timeout_s: float, token: str | None, limits: Limits | None = None
    ) -> None:
        """Listen. `token` None: that of the environment, or a new one.

        Raises:
            AddressError: the address cannot be listened at, or is not loopback and there is no token.
        """
        self.host = host
        self.secret = handshake.serving_token(place[0], token)
        self.limits = limits or Limits()
        self._listener = Listener(
            lambda port: address_of(self.scheme, place[0], port), *place, timeout_s=timeout_s, limits=self.limits
        )
        self.port = self._listener.port
        self.address = address_of(self.scheme, place[0], self.port)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()
        self._listener.start(lambda connection, label: _Remote(self, connection, label))

    def close(self) -> None:
        """End every connection. Idempotent."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            self._listener.close()
            self._thread.join()

    def make_connection(self, label: str, send: Send) -> ClientConnection:
        """Server side of a new client."""
        return ClientConnection(self.host, label, send, max_waiting_bytes=self.limits.payload_bytes)

    def _tick(self) -> None:
        """Expire leases and parked requests at their deadlines."""
        while not self._is_closed.wait(_TICK_S):
            self.host.expire()


class TcpConnection:
    """TCP `Connection` to a server; messages can carry payloads."""

    server = ""

    def __init__(self, address: str, host: str, port: int, timeout_s: float, token: str | None) -> None:
        """Connect, and prove the token.

        Raises:
            AddressError: the token is missing or wrong.
            ServerLostError: no server listens there, or it does not answer in time.
        """
        secret = handshake.client_token(address, token)
        self._socket = connected(address, host, port, timeout_s)
        close_in_children(self._socket)
        try:
            handshake.introduce(self._socket, address, timeout_s, secret)
        except AddressError:
            self._socket.close()
            raise
        except OSError as error:
            self._socket.close()
            raise ServerLostError(f"the server of {address} did not greet within {timeout_s} s: {error}") from error
        self._socket.settimeout(None)
        stream.prepare(self._socket, timeout_s)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def send(self, message: Message, extra: Payload | None) -> None:
        """See `Connection`."""
        stream.send(self._socket, stream.encode_request(message), extra or ())

    def receive(self, timeout_s: float, place: stream.Place) -> Sequence[tuple[Message, torch.Tensor | None]]:
        """See `Connection`."""
        return [stream.receive(self._socket, place)] if self._poll.poll(1e3 * timeout_s) else ()

    def shut(self) -> None:
        """See `Connection`."""
        with contextlib.suppress(OSError):  # the other side did it already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See `Connection`."""
        self._socket.close()


def connected(address: str, host: str, port: int, timeout_s: float) -> socket.socket:
    """Socket connected to a server.

    Raises:
        ServerLostError: no server listens there.
    """
    try:
        return socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise ServerLostError(
            f"no process serves {address} ({error.strerror or error}): start it with rl_tq.serve, and check that this "
            "host reaches it"
        ) from error


OPTIONS = {
    "max_connections": "connections of one peer host; 1024",
    "max_put_bytes": "bytes of one put, and of what one client has under way; a quarter of the host's memory",
}
"""Options after `?` in a served address."""


def serve(
    name: str, *, timeout_s: float, snapshot: Path | None = None, token: str | None = None, **options: str
) -> InprocQueue:
    """See `rl_tq.serve`. `HOST:PORT` to listen at; port 0 is a free one; an empty name is `127.0.0.1:0`."""
    return serve_heap("tcp", attach, name, timeout_s=timeout_s, snapshot=snapshot, token=token, **options)


def attach(host: QueueHost, name: str, *, timeout_s: float, token: str | None = None, **options: str) -> None:
    """Serve a host at `HOST:PORT` as well. See `rl_tq.serve`."""
    host.add_front(
        lambda: TcpFront(host, split_place(name or "127.0.0.1:0"), timeout_s, token, Limits.from_options(**options))
    )


def connect(name: str, *, timeout_s: float, token: str | None = None) -> RemoteQueue:
    """See `rl_tq.connect`."""
    host, port = split_place(name)
    address = address_of("tcp", host, port)
    return RemoteQueue(address, TcpConnection(address, host, port, timeout_s, token), timeout_s=timeout_s)


def split_place(name: str, scheme: str = "tcp") -> tuple[str, int]:
    """HOST and PORT of an address.

    Raises:
        AddressError: it is not HOST:PORT.
    """
    host, _, port = name.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise AddressError(
            f"'{scheme}://{name}' is not understood: write {scheme}://HOST:PORT, for example {scheme}://10.0.0.1:7070"
        )
    return host.strip("[]"), int(port)


def address_of(scheme: str, host: str, port: int) -> str:
    """Address from HOST and PORT."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
