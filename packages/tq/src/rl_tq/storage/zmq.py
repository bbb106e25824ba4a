"""`zmq://HOST:PORT`: encrypted queue for untrusted networks. Values are in the memory of the serving process.

Use it instead of `tcp` where others can reach or read the network: ZeroMQ's CURVE (curvezmq.org) encrypts and
authenticates every message. A client needs the address that `serve` returned, which contains the server's key, and the
same token as for `tcp`. One thread and one port serve any number of clients. It is slower than `tcp` because of the
encryption and one more copy. A dead client or server is detected by its silence after 10 s.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket as sockets
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from rl_tq.client.client import RemoteQueue
from rl_tq.errors import AddressError, ServerLostError
from rl_tq.protocol import handshake
from rl_tq.protocol.codec import decode, encode
from rl_tq.protocol.framing import MAX_MESSAGE_BYTES, Limits, encode_request
from rl_tq.server.connection import ClientConnection, Send
from rl_tq.storage import tcp
from rl_tq.storage.inproc import InprocQueue, serve_heap

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rl_tq.protocol.framing import Payload, Place
    from rl_tq.protocol.service import Message
    from rl_tq.server.host import QueueHost

_BEAT_S = 1.0
_SILENCE_S = 10.0
_TICK_S = 0.1
_MAX_HELLO_BYTES = 1024
_LINGER_MS = 1000
_CLOSED = encode({"op": "closed", "message": "the queue was closed"})
_MAX_UNREAD = 64
"""Messages of one client that ZeroMQ buffers unread."""


class _Loop:
    """Event loop: a thread that owns a ZeroMQ socket, and a socket pair by which other threads wake it."""

    def __init__(
        self, context: zmq.Context[Any], socket: zmq.Socket[Any], name: str, monitor: zmq.Socket[Any] | None = None
    ) -> None:
        self.socket, self.monitor = socket, monitor
        self._wake_read, self._wake_write = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._wake_read.bind(f"inproc://{id(self)}")
        self._wake_write.connect(f"inproc://{id(self)}")
        self._wake_lock = threading.Lock()
        self._outgoing: deque[list[Any]] = deque()
        self._is_ending = self._is_over = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def post(self, frames: list[Any]) -> None:
        """Queue frames for sending, from any thread."""
        self._outgoing.append(frames)
        self._wake()

    def end(self) -> None:
        """Send queued frames, and end the thread."""
        self._is_ending = True
        self._wake()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def take(self, frames: list[zmq.Frame]) -> None:
        """Handle a received message."""
        raise NotImplementedError

    def watch(self) -> None:
        """Handle the monitor's events about accepted and closed connections."""

    def sent(self, frames: list[Any], tracker: zmq.MessageTracker | None) -> None:
        """Note that frames were passed to ZeroMQ; the tracker reports when it is done with them."""

    def tick(self) -> None:
        """Periodic work, every `_TICK_S`."""
        raise NotImplementedError

    def stop(self) -> None:
        """Called when the thread ends."""

    def _wake(self) -> None:
        with self._wake_lock, contextlib.suppress(zmq.ZMQError):  # woken already
            if not self._is_over:  # using a socket that its thread has closed aborts the process
                self._wake_write.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        if self.monitor is not None:
            poller.register(self.monitor, zmq.POLLIN)
        try:
            ticked = time.monotonic()
            while not self._is_ending:
                ready = dict(poller.poll(round(1e3 * _TICK_S)))
                while self._wake_read in ready and self._wake_read.poll(0):
                    self._wake_read.recv()
                if self.monitor in ready:
                    self.watch()
                for _ in range(64 if self.socket in ready else 0):
                    try:
                        frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    except zmq.Again:
                        break
                    self.take(frames)
                if time.monotonic() - ticked >= _TICK_S:
                    ticked = time.monotonic()
                    self.tick()
                self._flush()
        finally:
            self.stop()
            self._flush()
            with self._wake_lock:
                self._is_over = True
                for each in (self._wake_read, self._wake_write):
                    each.close(0)
            if self.monitor is not None:
                self.socket.disable_monitor()
                self.monitor.close(0)
            self.socket.close(_LINGER_MS)

    def _flush(self) -> None:
        while self._outgoing:
            frames = self._outgoing.popleft()
            with contextlib.suppress(zmq.Again, zmq.error.ZMQError):  # the client is gone
                self.sent(frames, self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True))


class _Connections:
    """Connection limits per peer host of a listening ZeroMQ socket, as in `server.listener`.

    ZeroMQ accepts by itself and has no such limits. Its monitor reports every accepted and closed descriptor; one above
    the limit is shut down, which ZeroMQ handles as a disconnect of the peer.
    """

    def __init__(self, port: int, limits: Limits) -> None:
        self._port, self._limits = port, limits
        self._unauthenticated: dict[int, str] = {}
        """Peer host by descriptor, the oldest first."""
        self._clients: dict[bytes, str] = {}
        """Peer host by authenticated client."""

    def accepted(self, fd: int) -> None:
        """Note an accepted connection; above the limit, the host's oldest unauthenticated one is shut down."""
        with contextlib.suppress(OSError):  # it is gone already
            with self._socket(fd) as connection:
                self._unauthenticated[fd] = host = str(connection.getpeername()[0])
            own = [each for each, of in self._unauthenticated.items() if of == host]
            if len(own) > self._limits.unauthenticated:
                self.closed(own[0])
                with self._socket(own[0]) as oldest:
                    oldest.shutdown(sockets.SHUT_RDWR)

    def closed(self, fd: int) -> None:
        """Note a connection that ZeroMQ closed, or will."""
        self._unauthenticated.pop(fd, None)

    def proved(self, fd: int, client: bytes, host: str) -> bool:
        """Admit a client of a host that proved the token; False if the host has too many."""
        if sum(of == host for of in self._clients.values()) >= self._limits.connections:
            return False
        self.closed(fd)
        self._clients[client] = host
        return True

    def left(self, client: bytes) -> None:
        """Remove a client that left."""
        self._clients.pop(client, None)

    def _socket(self, fd: int) -> sockets.socket:
        """Duplicate of ZeroMQ's descriptor.

        Raises:
            OSError: it is closed, even if its number is another file by now.
        """
        copy = os.dup(fd)
        try:
            connection = sockets.socket(fileno=copy)
        except OSError:
            os.close(copy)
            raise
        if connection.getsockname()[1:2] != (self._port,):
            connection.close()
            raise OSError(f"descriptor {fd} is another file now")
        return connection


class ZmqFront(_Loop):
    """ZeroMQ front of a host."""

    def __init__(self, host: QueueHost, name: str, token: str | None, limits: Limits) -> None:
        """Listen at `HOST:PORT`.

        Raises:
            AddressError: the address cannot be bound; or it is not loopback, and there is no token.
        """
        interface, port, key = _split(name)
        if key:
            raise AddressError(f"'zmq://{name}' brings a key: a server makes its own; serve zmq://HOST:PORT")
        self._host = host
        self._secret = handshake.serving_token(interface, token)
        self._limits = limits
        self._context: zmq.Context[Any] = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        public, secret = zmq.curve_keypair()
        for option, value in (
            (zmq.CURVE_SERVER, 1), (zmq.CURVE_SECRETKEY, secret), (zmq.SNDHWM, 0), (zmq.RCVHWM, _MAX_UNREAD),
            (zmq.ROUTER_HANDOVER, 0), (zmq.IPV6, int(":" in interface)), (zmq.MAXMSGSIZE, limits.payload_bytes),
            (zmq.HANDSHAKE_IVL, round(1e3 * handshake.LIMIT_S)),
        ):  # fmt: skip
            socket.setsockopt(option, value)
        try:
            if port:
                socket.bind(_endpoint(interface, port))
            else:
                port = socket.bind_to_random_port(_endpoint(interface, 0).rpartition(":")[0])
        except zmq.ZMQError as error:
            socket.close(0)
            self._context.term()
            raise AddressError(
                f"zmq://{interface}:{port} cannot be served: {error.strerror}; take another port, or an address of "
                "this host"
            ) from error
        events = f"inproc://monitor-{id(self)}"
        socket.monitor(events, zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ waits where an event has no room
        monitor.connect(events)
        super().__init__(self._context, socket, "rl-tq-zmq-server", monitor)
        self._connections = _Connections(port, limits)
        self.address = f"zmq://{_bracketed(interface)}:{port}/{z85.decode(public).hex()}"
        self._key = public
        self._full = (
            f"{self.address} has {limits.connections} connections of {{}} already: close some, or serve with a larger "
            "max_connections"
        )
        self._clients: dict[bytes, ClientConnection] = {}
        self._heard: dict[bytes, float] = {}
        self._unsent: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}
        self.thread.start()

    def close(self) -> None:
        """Disconnect every client and stop serving. Idempotent."""
        if not self._context.closed:
            self.end()
            self._context.destroy(_LINGER_MS)

    def take(self, frames: list[zmq.Frame]) -> None:
        """See `_Loop`."""
        client = frames[0].bytes
        if client not in self._clients:
            self._greet(client, frames)
            return
        self._heard[client] = time.monotonic()
        try:
            if len(frames) > 3 or len(frames[1]) > MAX_MESSAGE_BYTES or not self._takes_answers(client):
                raise ValueError("it sends too much, or reads too little")
            message = decode(frames[1].bytes)
            if message.get("op") == "beat":
                self._outgoing.append([client, encode({"op": "beat"})])
                return
            payload = None
            if len(frames) > 2:  # a copy: the extent outlives the frame, and needs an alignment of 64
                payload = torch.empty(len(frames[2]), dtype=torch.uint8)
                payload.numpy()[:] = frames[2].buffer
            self._clients[client].take(message, payload)
            if self._clients[client].has_left:
                self._drop(client)
        except (ConnectionError, ValueError, IndexError, MemoryError):
            self._drop(client)  # it violated the protocol

    def watch(self) -> None:
        """See `_Loop`."""
        while self.monitor is not None and self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connections.accepted(event["value"])
            else:
                self._connections.closed(event["value"])

    def sent(self, frames: list[Any], tracker: zmq.MessageTracker | None) -> None:
        """See `_Loop`."""
        unsent = self._unsent.get(frames[0])
        if unsent is not None and tracker is not None and len(frames) > 2:
            unsent.append((tracker, sum(frame.nbytes for frame in frames[2:])))

    def _takes_answers(self, client: bytes) -> bool:
        """Whether a client reads its replies, so that unsent bytes are within the limit."""
        unsent = self._unsent[client]
        while unsent and unsent[0][0].done:
            unsent.popleft()
        return sum(nbytes for _, nbytes in unsent) <= self._limits.payload_bytes

    def _greet(self, client: bytes, frames: list[zmq.Frame]) -> None:
        """Authenticate a client by its first message; other messages of unauthenticated peers are ignored."""
        try:
            if len(frames) != 2 or len(frames[1]) > _MAX_HELLO_BYTES:
                return
            message = decode(frames[1].bytes)
            if message.get("op") != "hello":
                return
            expected = handshake.proof(self._secret, b"client", z85.decode(self._key), message["nonce"])
            has_token = hmac.compare_digest(message["proof"], expected)
        except (ConnectionError, KeyError, TypeError):
            return
        if not has_token:
            self._outgoing.append([client, encode({"op": "refused"})])
            return
        self.watch()  # connections accepted before this message
        host = str(frames[1].get("Peer-Address"))
        if not self._connections.proved(int(frames[1].get(zmq.SRCFD)), client, host):
            self._outgoing.append([client, encode({"op": "refused", "message": self._full.format(host)})])
            return
        self._heard[client] = time.monotonic()
        self._unsent[client] = deque()
        label = f"client {str(message.get('id'))[:64]}"
        self._clients[client] = ClientConnection(
            self._host, label, self._sender(client), max_waiting_bytes=self._limits.payload_bytes
        )
        self._outgoing.append([client, encode({"op": "beat"})])

    def tick(self) -> None:
        """See `_Loop`."""
        self._host.expire()
        now = time.monotonic()
        for client in [client for client, heard in self._heard.items() if now - heard > _SILENCE_S]:
            self._drop(client)

    def stop(self) -> None:
        """See `_Loop`."""
        for client in self._clients:
            self._outgoing.append([client, _CLOSED])

    def _drop(self, client: bytes) -> None:
        self._heard.pop(client, None)
        self._unsent.pop(client, None)
        self._connections.left(client)
        served = self._clients.pop(client, None)
        if served is not None:
            served.leave()

    def _sender(self, client: bytes) -> Send:
        def send(message: Message, payload: Payload) -> None:
            self.post([client, encode(message), *(part.numpy().data for part in payload)])

        return send


class ZmqConnection(_Loop):
    """ZeroMQ `Connection` over a DEALER socket with CURVE; messages can carry payloads."""

    server = ""

    def __init__(self, address: str, host: str, port: int, key: bytes, timeout_s: float, token: str | None) -> None:
        """Connect, and prove the token.

        Raises:
            AddressError: the token is missing or wrong.
            ServerLostError: no server listens there, or it has another key.
        """
        secret_token = handshake.client_token(address, token)
        tcp.connected(address, host, port, timeout_s).close()  # ZeroMQ itself would retry forever
        self._context: zmq.Context[Any] = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        public, secret = zmq.curve_keypair()
        for option, value in (
            (zmq.CURVE_SERVERKEY, z85.encode(key)), (zmq.CURVE_PUBLICKEY, public),
            (zmq.CURVE_SECRETKEY, secret), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.IPV6, int(":" in host)),
        ):  # fmt: skip
            socket.setsockopt(option, value)
        socket.connect(_endpoint(host, port))
        super().__init__(self._context, socket, f"rl-tq-client-{address}")
        self._received: SimpleQueue[tuple[Message, list[zmq.Frame]] | OSError] = SimpleQueue()
        self._heard = self._beaten = time.monotonic()
        self._greeted = threading.Event()
        self._refusal: str | None = None
        nonce = secrets.token_bytes(32)
        proof = handshake.proof(secret_token, b"client", key, nonce)
        self._outgoing.append([encode({"op": "hello", "id": f"process {os.getpid()}", "nonce": nonce, "proof": proof})])
        self.thread.start()
        has_answered = self._greeted.wait(min(timeout_s, _SILENCE_S))
        if has_answered and self._refusal is None:
            return
        self.close()
        if self._refusal:
            raise ServerLostError(self._refusal)
        if self._refusal is not None:
            raise AddressError(handshake.other_token(address))
        raise ServerLostError(
            f"who listens at {host}:{port} does not serve {address}: pass the address that serve() returned, whose end "
            "is the server's key"
        )

    def send(self, message: Message, extra: Payload | None) -> None:
        """See `Connection`."""
        self.post([encode_request(message), *(part.numpy().data for part in extra or ())])

    def receive(self, timeout_s: float, place: Place) -> Sequence[tuple[Message, torch.Tensor | None]]:
        """See `Connection`."""
        try:
            received = self._received.get(timeout=timeout_s)
        except Empty:
            return ()
        if isinstance(received, OSError):
            raise received
        message, frames = received
        return [(message, _joined(frames, message, place))]

    def shut(self) -> None:
        """See `Connection`."""
        self._received.put(ConnectionResetError("it is over"))

    def close(self) -> None:
        """See `Connection`."""
        if not self._context.closed:
            self.end()
            self._context.destroy(_LINGER_MS)

    def take(self, frames: list[zmq.Frame]) -> None:
        """See `_Loop`."""
        self._heard = time.monotonic()
        message = decode(frames[0].bytes)
        if message.get("op") in ("beat", "refused"):
            self._refusal = str(message.get("message", "")) if message["op"] == "refused" else None
            self._greeted.set()
        else:
            self._received.put((message, frames[1:]))

    def tick(self) -> None:
        """See `_Loop`."""
        now = time.monotonic()
        if now - self._heard > _SILENCE_S and self._greeted.is_set():
            self._received.put(TimeoutError(f"it was silent for {_SILENCE_S:.0f} s"))
            self._heard = now
        if now - self._beaten >= _BEAT_S:
            self._beaten = now
            self._outgoing.append([encode({"op": "beat"})])

    def stop(self) -> None:
        """See `_Loop`."""
        self.shut()


OPTIONS = tcp.OPTIONS


def serve(
    name: str, *, timeout_s: float, snapshot: Path | None = None, token: str | None = None, **options: str
) -> InprocQueue:
    """See `rl_tq.serve`. `HOST:PORT` to listen at; port 0 is a free one; an empty name is `127.0.0.1:0`."""
    return serve_heap("zmq", attach, name, timeout_s=timeout_s, snapshot=snapshot, token=token, **options)


def attach(host: QueueHost, name: str, *, timeout_s: float, token: str | None = None, **options: str) -> None:
    """Serve a host at `HOST:PORT`, too. See `rl_tq.serve`."""
    host.add_front(lambda: ZmqFront(host, name or "127.0.0.1:0", token, Limits.from_options(**options)))


def connect(name: str, *, timeout_s: float, token: str | None = None) -> RemoteQueue:
    """See `rl_tq.connect`."""
    host, port, key = _split(name)
    if not key:
        raise AddressError(
            f"'zmq://{name}' lacks the server's key: pass the address of the client that serve() returned"
        )
    address = f"zmq://{_bracketed(host)}:{port}/{key.hex()}"
    return RemoteQueue(address, ZmqConnection(address, host, port, key, timeout_s, token), timeout_s=timeout_s)


def _split(name: str) -> tuple[str, int, bytes]:
    place, _, key = name.partition("/")
    host, _, port = place.rpartition(":")
    is_key = not key or (len(key) == 64 and set(key) <= set("0123456789abcdef"))
    if not host or not port.isdigit() or int(port) > 65535 or not is_key:
        raise AddressError(
            f"'zmq://{name}' is not understood: serve zmq://HOST:PORT, for example zmq://10.0.0.1:7070, and connect to "
            "the address that this returns"
        )
    return host.strip("[]"), int(port), bytes.fromhex(key)


def _endpoint(host: str, port: int) -> str:
    return f"tcp://{_bracketed(host)}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _joined(frames: list[zmq.Frame], message: Message, place: Place) -> torch.Tensor | None:
    """Payload of a message, joined in one tensor."""
    nbytes = sum(len(frame) for frame in frames)
    if not nbytes:
        return None
    memory = place(message, nbytes)
    if memory is None:
        memory = torch.empty(nbytes, dtype=torch.uint8)
    start = 0
    for frame in frames:
        memory.numpy()[start : start + len(frame)] = frame.buffer
        start += len(frame)
    return memory
