"""Control channel: sends and receives whole messages on a non-blocking socket; deadlines and cancellation."""

from __future__ import annotations

import hmac
import os
import select
import socket
import time
from typing import TYPE_CHECKING, Literal

from rl_ckpt.errors import PeerLostError, PeerTimeoutError, ProtocolError, SyncAbortedError
from rl_ckpt.protocol.messages import GREETING_BYTES, MAX_BODY_BYTES, Decoder, Encoded
from rl_csrc.ipc import Waker, close_in_children, receive_now, send_now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_ckpt.protocol.messages import Message

_READ_BYTES = 1 << 16
_MAX_DESCRIPTORS = 4
_CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Deadline:
    """Deadline of a wait."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end - time.monotonic())


class Canceller:
    """Cancels the waits of another thread, which then raise `SyncAbortedError`."""

    def __init__(self) -> None:
        self._waker = Waker()
        self._reason: str | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._reason is not None

    def fileno(self) -> int:
        """Descriptor that becomes readable on `cancel`."""
        return self._waker.fileno()

    def cancel(self, reason: str) -> None:
        """Cancel the present wait, and every later one until `clear`."""
        if self._reason is None:
            self._reason = reason
            self._waker.wake()

    def clear(self) -> None:
        """Allow waits again."""
        if self._reason is not None:
            self._waker.clear()
            self._reason = None

    def check(self) -> None:
        """Raise `SyncAbortedError` if cancelled."""
        if self._reason is not None:
            raise SyncAbortedError(self._reason)

    def close(self) -> None:
        """Free the sockets."""
        self._reason = None
        self._waker.close()


class Observer:
    """Hook that sees every channel of this process, for fault injection; put one into `observers`."""

    def sending(self, message: Message) -> None:
        """Called before a message is sent."""

    def pausing(self) -> None:
        """Called before a channel is read or closed: earlier messages have been sent."""


observers: list[Observer] = []


def wait_for(
    canceller: Canceller, deadline: Deadline, *, readable: Sequence[int] = (), writable: Sequence[int] = ()
) -> list[int]:
    """Wait for descriptors; returns those that are ready, or [] if the deadline passed.

    Raises:
        SyncAbortedError: the canceller was cancelled.
    """
    poll = select.poll()
    poll.register(canceller.fileno(), select.POLLIN)
    for descriptor in readable:
        poll.register(descriptor, select.POLLIN)
    for descriptor in writable:
        poll.register(descriptor, select.POLLOUT)
    events = poll.poll(deadline.remaining_s() * 1000)
    canceller.check()
    return [descriptor for descriptor, _ in events if descriptor != canceller.fileno()]


class Channel:
    """Control channel over a connected stream socket, with the messages of WIRE.md. Owns the socket."""

    def __init__(self, connection: socket.socket, peer: str, *, address: str = "") -> None:
        connection.setblocking(False)
        self.peer = peer
        """Name of the peer, for messages."""
        self.address = address
        """Address of the peer, if the kernel does not report its process id, which `Hello` then contains."""
        self.is_closed = False
        """Whether the peer closed the connection. Earlier messages have been returned by `receive`."""
        self._cause = ""
        self.descriptors: list[int] = []
        """File descriptors received with messages; a caller that removes one owns it."""
        self._socket = close_in_children(connection)
        self._decoder = Decoder(max_body_bytes=GREETING_BYTES)
        self._takes_descriptors = True

    def fileno(self) -> int:
        """Descriptor that becomes readable when the peer sent something or is gone."""
        return self._socket.fileno()

    def addresses(self) -> tuple[str, str]:
        """(local, remote) host of a TCP connection; raises `PeerLostError` once it is gone."""
        try:
            return str(self._socket.getsockname()[0]), str(self._socket.getpeername()[0])
        except OSError as error:
            raise self.loss() from error

    def loss(self) -> PeerLostError:
        """Error to raise when the peer closed the connection."""
        return PeerLostError(f"{self.peer} went away{self._cause}")

    def is_closed_by_peer(self, timeout_s: float) -> bool:
        """Whether the peer has closed, or closes within this time, seconds. Reads nothing."""
        poll = select.poll()
        poll.register(self.fileno(), getattr(select, "POLLRDHUP", 0))  # only that event, which Linux has
        return bool(poll.poll(timeout_s * 1000))

    def introduce(self, role: str, pid: int) -> None:
        """Name the peer by the process id of its `Hello`, unless the kernel reported one."""
        if self.address:
            self.peer = f"{role} pid {pid} at {self.address}"

    def trust(self) -> None:
        """Accept messages of any size, and no descriptors, from now on: the peer is authenticated."""
        self._decoder.max_body_bytes = MAX_BODY_BYTES
        self._takes_descriptors = False

    def detach(self) -> socket.socket:
        """Return the socket to the caller; the channel must not be used any more.

        Raises:
            ProtocolError: the peer has already sent part of another message.
        """
        if not self._decoder.is_empty:
            raise ProtocolError(f"{self.peer} sent more than a greeting on a connection for payload")
        return self._socket

    def send(
        self,
        message: Message | Encoded,
        sync: int,
        *,
        canceller: Canceller,
        deadline: Deadline,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send one whole message, waiting while the peer's socket is full.

        Raises:
            PeerLostError, PeerTimeoutError: the peer is gone, or took nothing before the deadline.
        """
        data = memoryview(self.encode(message if isinstance(message, Encoded) else Encoded(message), sync))
        while data:
            sent = self._write(data, descriptors)
            data = data[sent:]
            if sent:
                descriptors = ()
            if data and not wait_for(canceller, deadline, writable=[self.fileno()]):
                raise PeerTimeoutError(f"{self.peer} took no control message within {deadline.timeout_s:g} s")

    def try_send(self, message: Message, sync: int) -> bool:
        """Send without waiting. False if it was not sent completely: the connection must then be closed."""
        data = self.encode(Encoded(message), sync)
        try:
            return self._write(memoryview(data), ()) == len(data)
        except PeerLostError:
            return False

    def receive(self) -> list[tuple[int, Message]]:
        """Available `(sync, message)` pairs, without waiting. Sets `is_closed` at the end of the stream.

        Raises:
            ProtocolError: the peer sent something that is not a message.
        """
        for observer in observers:
            observer.pausing()
        messages: list[tuple[int, Message]] = []
        while not self.is_closed:
            try:
                data = self._read()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:  # reset, or the network is gone: the end of the stream either way
                data = b""
                self._cause = f": {error}"
            self.is_closed = not data
            messages += self._decoder.feed(data)
        return messages

    def encode(self, message: Encoded, sync: int) -> bytes:
        """Message as bytes. Fault injectors override this."""
        for observer in observers:
            observer.sending(message.message)
        return message.for_sync(sync)

    def close(self) -> None:
        """Close the socket and the descriptors that were not taken."""
        for observer in observers:
            observer.pausing()
        self._socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _read(self) -> bytes:
        if not self._takes_descriptors:
            return receive_now(self._socket)
        data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, _MAX_DESCRIPTORS, _CLOSE_ON_EXEC)
        self.descriptors += descriptors
        return data

    def _write(self, data: memoryview, descriptors: Sequence[int]) -> int:
        try:
            if descriptors:
                return socket.send_fds(self._socket, [data], list(descriptors))
            return send_now(self._socket, data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise PeerLostError(f"{self.peer} is not there any more: {error}") from error


_PREFIX = b"rl-ckpt 5 "


def proof_of(token: bytes, role: Literal["sender", "receiver"], receiver_nonce: bytes, sender_nonce: bytes) -> bytes:
    """Proof of the token by the end with this role, 32 bytes. The token itself is never sent."""
    return hmac.digest(token, _PREFIX + role.encode() + receiver_nonce + sender_nonce, "sha256")


def is_proof(
    mac: bytes, token: bytes, role: Literal["sender", "receiver"], receiver_nonce: bytes, sender_nonce: bytes
) -> bool:
    """Whether a proof is valid for the end with this role; compared in constant time."""
    return hmac.compare_digest(mac, proof_of(token, role, receiver_nonce, sender_nonce))
