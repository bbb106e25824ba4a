"""`tcp://HOST:PORT`: a queue for the processes of several hosts. The values lie in the serving process's memory.

A put sends its extent once; a get receives the rows and columns it names, in one message, straight into the memory that
it returns. Both ends must have the same token, which they prove when they connect: `token=`, or the variable
`RL_TQ_TOKEN`, which a server on the loopback interface sets for the processes that it starts. Nothing is encrypted:
serve inside a network whose wires you trust.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING

from rl_csrc.ipc import close_in_children
from rl_tq.client.remote import RemoteQueue, output_memory
from rl_tq.client.session import GRACE_S, LeaderFollower, PendingReply
from rl_tq.errors import AddressError, ServerLostError, WaitTimeoutError
from rl_tq.metadata.checks import check_process
from rl_tq.protocol import handshake as _handshake
from rl_tq.protocol import stream as _stream
from rl_tq.protocol.codec import encode
from rl_tq.protocol.limits import MAX_MESSAGE_BYTES, Limits
from rl_tq.protocol.service import Message, raise_error
from rl_tq.server.connection import ClientConnection, Send
from rl_tq.server.host import QueueHost
from rl_tq.server.listener import Listener
from rl_tq.storage.inproc import InprocQueue

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from rl_tq.columns.output import Output
    from rl_tq.protocol.stream import Payload

_TICK_S = 0.1


class _Remote:
    """One client, as the server has it: a thread that reads and handles, and one that sends."""

    def __init__(self, gateway: Gateway, connection: socket.socket, label: str) -> None:
        self.is_authenticated = False
        self._connection = connection
        self._secret = gateway.secret
        self._limits = gateway.limits
        self._outgoing: SimpleQueue[tuple[Message, Payload] | None] = SimpleQueue()
        self._unsent_bytes = 0
        self._sent = threading.Condition()
        self._client = gateway.make_connection(gateway.hub, label, self._send)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the connection is not all wound up yet."""
        return self._threads[1].is_alive()

    def shut(self) -> None:
        """End the connection, without waiting until it has ended."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self.shut()
        for thread in self._threads:
            thread.join()

    def _send(self, message: Message, payload: Payload) -> None:
        with self._sent:
            self._unsent_bytes += sum(map(len, payload))
        self._outgoing.put((message, payload))

    def _read(self) -> None:
        try:
            _handshake.welcome(self._connection, self._secret)
            self.is_authenticated = True
            while True:
                message, payload = _stream.receive(
                    self._connection,
                    max_text_bytes=MAX_MESSAGE_BYTES,
                    max_payload_bytes=self._limits.payload_bytes,
                )
                with self._sent:  # who asks for more than it reads is not read from
                    self._sent.wait_for(lambda: self._unsent_bytes <= self._limits.payload_bytes)
                self._client.take(message, payload)
        except (OSError, ValueError, KeyError, MemoryError):
            return  # it closed, died, or does not speak our language: nothing of it can be answered any more
        finally:
            self._client.leave()
            self._outgoing.put(None)
            self.shut()

    def _write(self) -> None:
        try:
            while (item := self._outgoing.get()) is not None:
                message, payload = item
                _stream.send(self._connection, encode(message), payload)
                with self._sent:
                    self._unsent_bytes -= sum(map(len, payload))
                    self._sent.notify()
        except OSError:
            self.shut()  # the reader ends, and says so
        finally:
            with self._sent:
                self._unsent_bytes = -(1 << 62)  # nobody waits for a connection that is over
                self._sent.notify()
            self._threads[0].join()
            self._connection.close()


class Gateway:
    """Lets the clients of other processes into a hub."""

    scheme = "tcp"
    is_compacted = True
    """Whether extents are memory of this process."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout_s: float,
        *,
        token: str | None = None,
        limits: Limits | None = None,
        snapshot: Path | None = None,
    ) -> None:
        """`token` None: that of the environment, or a new one."""
        self.host = host
        self.secret = _handshake.serving_token(host, token)
        self.limits = limits or Limits()
        self._listener = Listener(
            lambda port: _address(self.scheme, host, port), host, port, timeout_s=timeout_s, limits=self.limits
        )  # fmt: skip
        self.port = self._listener.port
        try:
            self.hub = QueueHost(_address(self.scheme, host, self.port), snapshot, is_compacted=self.is_compacted)
        except BaseException:
            self._listener.close()
            raise
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()
        self._listener.start(lambda connection, label: _Remote(self, connection, label))

    def close(self) -> None:
        """End every connection, and free every extent. Idempotent."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._listener.close()
        self._thread.join()
        self.hub.close()

    def make_connection(self, hub: QueueHost, label: str, send: Send) -> ClientConnection:
        """Where a client is answered."""
        return ClientConnection(hub, label, send, max_waiting_bytes=self.limits.payload_bytes)

    def _tick(self) -> None:
        """Have leases and waits end at their deadline."""
        while not self._is_closed.wait(_TICK_S):
            self.hub.expire()


class ServedQueue(InprocQueue):
    """The client of the process that serves."""

    def __init__(self, gateway: Gateway, *, timeout_s: float) -> None:
        super().__init__(gateway.hub, timeout_s=timeout_s, is_owner=True)
        self._gateway = gateway

    def close(self) -> None:
        """See `TransferQueue.close`."""
        if os.getpid() == self._pid:
            self._gateway.close()
            super().close()


class TcpQueue(RemoteQueue):
    """A client in any process that reaches the server."""

    scheme = "tcp"

    def __init__(self, host: str, port: int, *, timeout_s: float, token: str | None = None) -> None:
        super().__init__(_address(self.scheme, host, port), timeout_s=timeout_s)
        self._pid = os.getpid()
        secret = _handshake.client_token(self.address, token)
        try:
            self._socket = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            raise ServerLostError(
                f"nobody serves {self.address} ({error.strerror or error}): start it with rl_tq.serve, and check that "
                "this host reaches it"
            ) from error
        close_in_children(self._socket)
        try:
            _handshake.introduce(self._socket, self.address, timeout_s, secret)
        except AddressError:
            self._socket.close()
            raise
        except OSError as error:
            self._socket.close()
            raise ServerLostError(
                f"the server of {self.address} did not greet within {timeout_s} s: {error}"
            ) from error
        self._socket.settimeout(None)
        _stream.prepare(self._socket, timeout_s)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._ids = count(1)
        self._pending: dict[int, PendingReply[tuple[Message, torch.Tensor | None]]] = {}
        self._outputs: dict[int, Output] = {}
        self._why_lost: str | None = None
        self._replies = LeaderFollower(self._read)

    def close(self) -> None:
        """See `TransferQueue.close`."""
        if os.getpid() != self._pid:
            return
        if self._why_lost is None:
            with contextlib.suppress(ServerLostError):
                self._send({"op": "bye", "id": 0}, [])
        self._lose("this client was closed")
        with self._send_lock:
            self._socket.close()

    def _request(
        self, request: Message, payload: list[torch.Tensor], timeout_s: float, output: Output | None = None
    ) -> tuple[Message, torch.Tensor | None]:
        check_process(self.address, self._pid)
        number = next(self._ids)
        slot: PendingReply[tuple[Message, torch.Tensor | None]] = PendingReply()
        with self._lock:
            self._check_alive()
            self._pending[number] = slot
            if output is not None and output.is_given:
                self._outputs[number] = output
        try:
            self._send({**request, "id": number}, payload)
            if not self._replies.wait(slot, timeout_s + GRACE_S):
                raise WaitTimeoutError(
                    f"the server of {self.address} did not answer {request['op']!r} within {timeout_s} s and "
                    f"{GRACE_S} s more"
                )
        except BaseException:
            with self._lock:
                is_receiving = self._outputs.pop(number, None) is None and output is not None and output.is_taken
                was_pending = self._pending.pop(number, None) is not None
            if is_receiving:
                self._lose("a call was given up while its values were being received into the caller's buffer")
            if was_pending and self._why_lost is None:
                self._send({"op": "withdraw", "request": number, "id": 0}, [])
            raise
        raise_error(slot.result()[0])
        return slot.result()

    def _send(self, message: Message, payload: list[torch.Tensor]) -> None:
        text = _stream.encode_request(message)
        with self._send_lock:
            try:
                _stream.send(self._socket, text, payload)
            except OSError as error:
                self._lose(f"sending to it failed: {error}")
        self._check_alive()

    def _read(self, timeout_s: float) -> None:
        if self._why_lost is not None:
            return
        try:
            if not self._poll.poll(1e3 * timeout_s):
                return
            message, payload = _stream.receive(self._socket, self._place)
        except (OSError, ValueError) as error:
            self._lose(f"it closed or died ({error})")
            return
        with self._lock:
            slot = self._pending.pop(message["id"], None)
        if slot is not None:
            slot.put((message, payload))

    def _place(self, message: Message, nbytes: int) -> torch.Tensor | None:
        with self._lock:
            output = self._outputs.pop(message.get("id", 0), None)
        return output_memory(output, message, nbytes)

    def _lose(self, why: str) -> None:
        with self._lock:
            if self._why_lost is None:
                self._why_lost = why
            pending, self._pending = self._pending, {}
        for slot in pending.values():
            slot.fail(self._lost())
        with contextlib.suppress(OSError):  # the other side did it already
            self._socket.shutdown(socket.SHUT_RDWR)

    def _check_alive(self) -> None:
        if self._why_lost is not None:
            raise self._lost()

    def _lost(self) -> ServerLostError:
        return ServerLostError(f"the queue {self.address} is lost: {self._why_lost}")


def serve(
    name: str,
    *,
    timeout_s: float,
    snapshot: Path | None = None,
    token: str | None = None,
    max_connections: str | None = None,
    max_put_bytes: str | None = None,
) -> ServedQueue:
    """See `rl_tq.serve`. `HOST:PORT` to listen at; port 0 is a free one; an empty name is `127.0.0.1:0`.

    Options: `token`; `max_connections` of one peer host (1024); `max_put_bytes`, of one put, and of what one client
    has under way (a quarter of the host's memory).
    """
    limits = Limits.from_options(max_connections, max_put_bytes)
    gateway = Gateway(
        *split_place(name or "127.0.0.1:0"), timeout_s, token=token, limits=limits, snapshot=snapshot
    )  # fmt: skip
    return ServedQueue(gateway, timeout_s=timeout_s)


def connect(name: str, *, timeout_s: float, token: str | None = None) -> TcpQueue:
    """See `rl_tq.connect`. Option: `token`."""
    return TcpQueue(*split_place(name), timeout_s=timeout_s, token=token)


def split_place(name: str, scheme: str = "tcp") -> tuple[str, int]:
    """HOST and PORT of an address.

    Raises:
        AddressError: it is none.
    """
    host, _, port = name.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise AddressError(
            f"'{scheme}://{name}' is not understood: write {scheme}://HOST:PORT, for example {scheme}://10.0.0.1:7070"
        )
    return host.strip("[]"), int(port)


def _address(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
