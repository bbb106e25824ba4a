"""`nixl://HOST:PORT`: queue as `tcp`, with values moved by RDMA through NVIDIA's NIXL.

For hosts with InfiniBand or RoCE: a client reads exactly the requested pieces of columns from the server's memory,
without a copy or a send by the server, and the server reads puts from the client's memory in the same way. Requests go
over TCP, with the same token. NIXL uses UCX, which chooses the wire; if you set UCX_TLS, keep `tcp` in it, which UCX
needs to connect. Without RDMA hardware, `tcp` is faster.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from nixl._api import nixl_agent, nixl_agent_config

from rl_tq.client.client import RemoteQueue, assembled
from rl_tq.columns.extent import as_bytes
from rl_tq.errors import ServerLostError, TransferQueueError, WaitTimeoutError
from rl_tq.protocol.framing import ALIGNMENT, Limits, Payload
from rl_tq.protocol.handshake import is_loopback
from rl_tq.server.connection import ClientConnection, checked_extent, located_parts
from rl_tq.storage import tcp
from rl_tq.storage.inproc import InprocQueue, serve_heap
from rl_tq.storage.tcp import TcpConnection, TcpFront, address_of, split_place

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from tensordict import TensorDict

    from rl_tq.columns.extent import Layout, Opened
    from rl_tq.columns.output import Output
    from rl_tq.protocol.service import Message
    from rl_tq.server.connection import Send
    from rl_tq.server.host import QueueHost

_IN_FLIGHT, _DONE = "PROC", "DONE"
_POLL_S = 5e-5
_DEVICES = "UCX_NET_DEVICES"
"""UCX's variable for its network interfaces. A value set by the user is kept."""

Place = tuple[int, int]
"""Address and number of bytes, in one process."""


@contextmanager
def _listening_with(host: str) -> Generator[None]:
    """Make UCX, if it starts in the body, listen on loopback only where the queue does: it has no token."""
    if not is_loopback(host) or _DEVICES in os.environ:
        yield
        return
    os.environ[_DEVICES] = "lo"
    try:
        yield
    finally:
        del os.environ[_DEVICES]


class _Agent:
    """NIXL agent of this process: registers memory for remote reads, and reads remote memory."""

    def __init__(self, role: str, host: str) -> None:
        name = f"rl-tq-{role}-{os.getpid()}-{secrets.token_hex(8)}"
        with _listening_with(host):
            self._agent: Any = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self._lock = threading.RLock()
        self._known: dict[int, bytes] = {}
        self._gone: deque[tuple[int, Any, torch.Tensor]] = deque()
        """Registrations of destroyed tensors to undo, each with a view that keeps the memory alive until then."""

    def describe(self, memory: torch.Tensor) -> str:
        """Metadata with which another process can read a tensor's memory, uint8 [n], while the tensor exists."""
        with self._lock:
            self._sweep()
            key = id(memory)
            if key not in self._known:
                registered = self._agent.register_memory([memory])
                self._known[key] = self._agent.get_partial_agent_metadata(registered, True, ["UCX"])
                weakref.finalize(memory, self._gone.append, (key, registered, memory[:])).atexit = False
            return self._known[key].hex()

    def meet(self, described: str) -> str:
        """Add the metadata of a remote agent's `describe`; returns the agent's name."""
        with self._lock:
            peer = self._agent.add_remote_agent(bytes.fromhex(described))
            return peer.decode() if isinstance(peer, bytes) else peer

    def read(
        self, peer: str, places: Sequence[Place], out: torch.Tensor, starts: Sequence[int], limit_s: float
    ) -> None:
        """Read places of another process's memory into `out`, uint8 [n], at the offsets `starts`.

        Raises:
            TransferQueueError: NIXL reports a failure.
            WaitTimeoutError: it took longer than `limit_s`.
        """
        with self._lock:
            registered = self._agent.register_memory([out])
            mine = [(out.data_ptr() + start, nbytes, 0) for start, (_, nbytes) in zip(starts, places, strict=True)]
            theirs = [(address, nbytes, 0) for address, nbytes in places]
            handle = self._agent.initialize_xfer(
                "READ", self._agent.get_xfer_descs(mine, "DRAM"), self._agent.get_xfer_descs(theirs, "DRAM"), peer
            )
            state = self._agent.transfer(handle)
        deadline = time.monotonic() + limit_s
        while state == _IN_FLIGHT and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        with self._lock:
            self._agent.release_xfer_handle(handle)
            self._agent.deregister_memory(registered)
        if state == _IN_FLIGHT:
            raise WaitTimeoutError(f"NIXL did not read {sum(n for _, n in places)} bytes of {peer} within {limit_s} s")
        if state != _DONE:
            raise TransferQueueError(f"NIXL could not read the memory of {peer}: the transfer is in state {state}")

    def _sweep(self) -> None:
        while self._gone:
            key, registered, _ = self._gone.popleft()
            del self._known[key]
            self._agent.deregister_memory(registered)


class _NixlConnection(ClientConnection):
    """Server side of a NIXL client: replies with the places of values, and reads puts by RDMA."""

    def __init__(
        self, agent: _Agent, host: QueueHost, label: str, send: Send, limit_s: float, max_waiting_bytes: int
    ) -> None:
        super().__init__(host, label, send, max_waiting_bytes=max_waiting_bytes)
        self._agent = agent
        self._limit_s = limit_s
        self._held: dict[int, tuple[Opened, list[torch.Tensor]]] = {}
        """Reads of the client under way: extents, and copies of values that were too small and scattered to list
        individually."""

    def take(self, message: Message, payload: torch.Tensor | None) -> None:
        """See `ClientConnection`."""
        if message["op"] == "done":
            self._held.pop(message["request"], None)
        else:
            super().take(message, payload)

    def leave(self) -> None:
        """See `ClientConnection`."""
        super().leave()
        self._held.clear()

    def extent_of(self, message: Message, payload: torch.Tensor | None) -> torch.Tensor:
        """See `ClientConnection`."""
        address, nbytes = message["from"]
        if nbytes != message["nbytes"] or not 1 <= nbytes <= self._max_waiting_bytes:
            raise TransferQueueError(
                f"a put of {message['nbytes']} bytes shows {nbytes} of them: it may have {self._max_waiting_bytes}"
            )
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self._agent.read(self._agent.meet(message["memory"]), [(address, nbytes)], memory, [0], self._limit_s)
        return checked_extent(message, memory)

    def fetched(self, number: int, reply: Message, opened: Opened) -> tuple[Message, Payload]:
        """See `ClientConnection`."""
        places: list[Place] = []
        starts: list[int] = []
        described: dict[str, Any] = {}
        copies: list[torch.Tensor] = []
        kept = {extent.memory.untyped_storage().data_ptr() for extent in opened.values()}
        cursor = 0
        for name, (schema, pieces, lengths) in located_parts(reply, opened).items():
            start = cursor
            for piece in pieces:
                if piece.nbytes:
                    values = as_bytes(piece)
                    if values.untyped_storage().data_ptr() not in kept:
                        copies.append(values)
                    places.append((values.data_ptr(), values.nbytes))
                    starts.append(cursor)
                    cursor += piece.nbytes
            described[name] = [schema, sum(map(len, pieces)), cursor - start, lengths]
            cursor += -cursor % ALIGNMENT
        self._held[number] = opened, copies
        memory = [self._agent.describe(tensor) for tensor in (*(extent.memory for extent in opened.values()), *copies)]
        answer = {"columns": described, "places": places, "starts": starts, "nbytes": cursor, "memory": memory}
        return {"id": number, **answer}, []


class _NixlFront(TcpFront):
    """Front for clients that use RDMA."""

    scheme = "nixl"

    def __init__(
        self, host: QueueHost, place: tuple[str, int], timeout_s: float, token: str | None, limits: Limits
    ) -> None:
        self._agent = _Agent("server", place[0])
        self._limit_s = timeout_s
        super().__init__(host, place, timeout_s, token, limits)

    def make_connection(self, label: str, send: Send) -> ClientConnection:
        return _NixlConnection(self._agent, self.host, label, send, self._limit_s, self.limits.payload_bytes)


class NixlQueue(RemoteQueue):
    """Client in any process from which NIXL reaches the server."""

    def __init__(self, host: str, port: int, *, timeout_s: float, token: str | None = None) -> None:
        address = address_of("nixl", host, port)
        super().__init__(address, TcpConnection(address, host, port, timeout_s, token), timeout_s=timeout_s)
        self._agent = _Agent("client", host)

    def _store_extent(self, layout: Layout, request: Message, timeout_s: float) -> Message:
        memory = torch.empty(layout.nbytes, dtype=torch.uint8)
        layout.write(memory)
        place = {"from": [memory.data_ptr(), layout.nbytes], "memory": self._agent.describe(memory)}
        return self._request({**request, **place}, [], timeout_s)[0]

    def _fetch(self, request: Message, num_rows: int, output: Output) -> TensorDict:
        reply, _ = self._request({"op": "fetch", **request}, [], self.timeout_s)
        payload = output.take_over(reply, reply["nbytes"])
        if payload is None:
            payload = torch.empty(reply["nbytes"], dtype=torch.uint8)
        try:
            peers = {self._agent.meet(described) for described in reply["memory"]}
            if reply["places"]:
                [peer] = peers
                places = [(address, nbytes) for address, nbytes in reply["places"]]
                self._agent.read(peer, places, payload, reply["starts"], self.timeout_s)
        except TransferQueueError:
            self._session.check()  # says that the server is gone, if it is
            raise
        finally:
            self._release(reply["id"])
        return assembled(reply, payload, num_rows, output)

    def _release(self, request: int) -> None:
        """Report to the server that the values of a fetch were read."""
        try:
            self._session.send({"op": "done", "request": request, "id": 0})
        except ServerLostError:
            return  # the server keeps nothing then


def serve(
    name: str, *, timeout_s: float, snapshot: Path | None = None, token: str | None = None, **options: str
) -> InprocQueue:
    """See `rl_tq.serve`. `HOST:PORT` to listen at; port 0 is a free one; an empty name is `127.0.0.1:0`."""
    return serve_heap("nixl", _attach, name, timeout_s=timeout_s, snapshot=snapshot, token=token, **options)


def _attach(host: QueueHost, name: str, *, timeout_s: float, token: str | None, **options: str) -> None:
    place, limits = split_place(name or "127.0.0.1:0", "nixl"), Limits.from_options(**options)
    host.add_front(lambda: _NixlFront(host, place, timeout_s, token, limits))


OPTIONS = tcp.OPTIONS


def connect(name: str, *, timeout_s: float, token: str | None = None) -> NixlQueue:
    """See `rl_tq.connect`."""
    return NixlQueue(*split_place(name, "nixl"), timeout_s=timeout_s, token=token)
