"""`ray://NAME`: queue with values in Ray's object store, for jobs on Ray.

Processes of any job in the cluster find it by name. A put goes to the object store of its node, where an actor of the
queue owns it, so that it outlives its producer; for a get, Ray copies it to the reader's node, once per node. Requests
go to the serving process over TCP, with a token distributed by Ray. Ray spills what does not fit its store.

With the option `tensor_transport=nixl` values move by Ray Direct Transport instead: the actor reads a put out of its
producer's memory, a reader reads it out of the actor's, and the object store has none of it.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import uuid
import weakref
from collections import defaultdict, deque
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_tq.client.client import QueueClient, RemoteQueue
from rl_tq.columns.extent import ExtentView
from rl_tq.errors import (
    AddressError,
    ServerLostError,
    StaleReferenceError,
    StorageError,
    TransferQueueError,
    WaitTimeoutError,
)
from rl_tq.server.connection import ClientConnection
from rl_tq.server.host import QueueHost
from rl_tq.server.memory import HeapMemory
from rl_tq.storage.ray_owner import NAMESPACE, TRANSPORTS, OwnerActor, actor_name
from rl_tq.storage.tcp import TcpConnection, TcpFront

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tensordict import TensorDict

    from rl_tq.columns.extent import Layout, Opened
    from rl_tq.columns.output import Output
    from rl_tq.protocol.framing import Payload
    from rl_tq.protocol.service import Message
    from rl_tq.server.connection import Send
    from rl_tq.storage.ray_owner import Where


_DIRECT = threading.RLock()
"""One direct transfer of a process at a time: a newer tensor of the same maker invalidates fetches under way."""


class _StoredExtent:
    """Extent as the server stores it: its node, and its number in the keeper actor there."""

    def __init__(self, node: str, number: int, nbytes: int, keepers: _OwnerActors) -> None:
        self.place = (node, number, nbytes)
        weakref.finalize(self, keepers.gone.append, (node, number)).atexit = False


class _OwnerActors:
    """Actors of the queue that this process serves, one per node."""

    def __init__(self, queue: str, where: Where, transport: str | None) -> None:
        self._queue = queue
        self._transport = transport
        self._lock = threading.Lock()
        self.gone: deque[tuple[str, int]] = deque()
        """Values (node, number) without rows."""
        self._actors: dict[str, Any] = {}
        self._make("", where[-1], where)

    def make(self, node: str) -> None:
        """Start a keeper on a node, if there is none yet."""
        with self._lock:
            if node not in self._actors:
                self._make(node, node, None)

    def keep(self, memory: torch.Tensor) -> Any:
        """Store an extent on the serving node."""
        with nullcontext() if self._transport is None else _DIRECT:
            number: Any = ray.get(self._actors[""].keep.remote(_sent(memory, self._transport)), timeout=60.0)
        return _StoredExtent("", number, len(memory), self)

    def sweep(self) -> None:
        """Have the keepers drop values without rows."""
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        while self.gone:
            node, number = self.gone.popleft()
            numbers[node].append(number)
        for node, dropped in numbers.items():
            self._actors[node].drop.remote(dropped)

    def close(self) -> None:
        """Kill the keepers, and their objects with them."""
        for actor in self._actors.values():
            ray.kill(actor)

    def _make(self, key: str, node: str, where: Where | None) -> None:
        on_node = NodeAffinitySchedulingStrategy(node, soft=False)
        remote: Any = ray.remote(OwnerActor)
        by: dict[str, Any] = {"max_concurrency": 8}
        if self._transport is not None:
            by = {"max_concurrency": 1, "enable_tensor_transport": True}  # for the reason of `_DIRECT`
        actor = remote.options(
            name=actor_name(self._queue, key), namespace=NAMESPACE, num_cpus=0, scheduling_strategy=on_node,
            **by,
        ).remote(where, self._transport)  # fmt: skip
        ray.get(actor.where.remote(), timeout=60.0)
        self._actors[key] = actor


class _RayConnection(ClientConnection):
    """Server side of a Ray client: handles the places of values, never the values."""

    def __init__(self, keepers: _OwnerActors, host: QueueHost, label: str, send: Send, max_waiting_bytes: int) -> None:
        super().__init__(host, label, send, max_waiting_bytes=max_waiting_bytes)
        self._keepers = keepers

    def take(self, message: Message, payload: torch.Tensor | None) -> None:
        """See `ClientConnection`."""
        if message["op"] == "keeper":
            self._keepers.make(message["node"])
            self._send({"id": message["id"]}, [])
        else:
            super().take(message, payload)
            self._keepers.sweep()

    def extent_of(self, message: Message, payload: torch.Tensor | None) -> Any:
        """See `ClientConnection`."""
        node, number = message["object"]
        return _StoredExtent(node, number, message["nbytes"], self._keepers)

    def fetched(self, number: int, reply: Message, opened: Mapping[int, Any]) -> tuple[Message, Payload]:
        """See `ClientConnection`."""
        objects = {extent: held.memory.place for extent, held in opened.items()}
        return {**reply, "id": number, "objects": [*objects.items()]}, []


class _RayFront(TcpFront):
    """Front for clients whose values are in Ray's object store."""

    scheme = "ray"

    def __init__(
        self, host: QueueHost, memory: HeapMemory, queue: str, timeout_s: float, transport: str | None
    ) -> None:
        self._keepers: _OwnerActors | None = None
        token = secrets.token_hex()
        super().__init__(host, (ray.util.get_node_ip_address(), 0), timeout_s, token)
        self.address = f"ray://{queue}"
        try:
            node = ray.get_runtime_context().get_node_id()
            self._keepers = _OwnerActors(queue, (self._listener.host, self.port, token, node), transport)
            memory.place = self._keepers.keep
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        if self._keepers is not None:
            self._keepers.close()
            self._keepers = None

    def make_connection(self, label: str, send: Send) -> ClientConnection:
        assert self._keepers is not None
        return _RayConnection(self._keepers, self.host, label, send, self.limits.payload_bytes)


class RayQueue(RemoteQueue):
    """Client in any process connected to the cluster; closing the one that `serve` returned ends the queue."""

    def __init__(self, queue: str, *, timeout_s: float, host: QueueHost | None = None) -> None:
        self._queue = queue
        self._keepers: dict[str, Any] = {}
        address = f"ray://{queue}"
        try:
            first = self._keepers[""] = ray.get_actor(actor_name(queue, ""), namespace=NAMESPACE)
            (place, port, token, serving), self._transport = ray.get(first.where.remote(), timeout=timeout_s)
        except (ValueError, RayError) as error:
            raise ServerLostError(f"no process serves {address} in this cluster of Ray: {error}") from error
        super().__init__(address, TcpConnection(address, place, port, timeout_s, token), timeout_s=timeout_s)
        self.host = host
        node = ray.get_runtime_context().get_node_id()
        self._node = "" if node == serving else node

    def close(self) -> None:
        """See `TransferQueue.close`."""
        super().close()
        if self.host is not None and self._session.is_of_this_process:
            self.host.close()

    def _store_extent(self, layout: Layout, request: Message, timeout_s: float) -> Message:
        memory = torch.empty(layout.nbytes, dtype=torch.uint8)
        layout.write(memory)
        with nullcontext() if self._transport is None else _DIRECT:
            number = self._ask(self._node, "keep", _sent(memory, self._transport))
        return self._request({**request, "object": [self._node, number]}, [], timeout_s)[0]

    def _fetch(self, request: Message, num_rows: int, output: Output) -> TensorDict:
        return QueueClient._fetch(self, request, num_rows, output)  # gathered here, not by the server

    def snapshot(self, path: str | Path, *, timeout_s: float | None = None) -> None:
        """See `TransferQueue.snapshot`."""
        QueueClient.snapshot(self, path, timeout_s=timeout_s)

    def _locate(self, request: Message, *, is_copied: bool) -> tuple[Message, Opened]:
        reply, _ = self._request({**request, "op": "fetch", "of": request["op"]}, [], self.timeout_s)
        by_node: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for extent, (node, number, _) in reply["objects"]:
            by_node[node].append((extent, number))
        opened: dict[int, ExtentView] = {}
        for node, wanted in by_node.items():
            found = self._ask(node, "give", [number for _, number in wanted])
            if None in found:
                raise StaleReferenceError(f"rows of {self.address} were cleared while they were fetched")
            for (extent, _), values in zip(wanted, self._get(node, found), strict=True):
                opened[extent] = ExtentView(memory=_viewed(values), is_private=False)
        return reply, opened

    def _ask(self, node: str, method: str, argument: Any) -> Any:
        """Call a method of a keeper. Not in a forked child, which Ray does not survive either."""
        self._session.check()
        if node not in self._keepers:
            self._request({"op": "keeper", "node": node}, [], self.timeout_s)
            self._keepers[node] = ray.get_actor(actor_name(self._queue, node), namespace=NAMESPACE)
        return self._get(node, getattr(self._keepers[node], method).remote(argument))

    def _get(self, node: str, references: Any) -> Any:
        where = f"node {node}" if node else "the serving node"
        try:
            if self._transport is None or not isinstance(references, list):
                return ray.get(references, timeout=self.timeout_s)
            with _DIRECT:
                return [ray.get(each, timeout=self.timeout_s) for each in references]
        except GetTimeoutError as error:
            raise WaitTimeoutError(f"Ray gave no values of {where} within {self.timeout_s} s") from error
        except RayError as error:
            self._session.check()  # says that the server is gone, if it is
            raise ServerLostError(f"what {self.address} kept on {where} is lost: {error}") from error


def _sent(memory: torch.Tensor, transport: str | None) -> Any:
    """Argument of `OwnerActor.keep`: an array for the object store, or a reference to a tensor that stays here."""
    return memory.numpy() if transport is None else ray.put(memory, _tensor_transport=transport)


def _viewed(values: Any) -> torch.Tensor:
    """View uint8 [n] of a tensor, or of a read-only array of Ray; its values are copied before a caller gets them."""
    if isinstance(values, torch.Tensor):
        return values
    mapping: Any = (ctypes.c_uint8 * len(values)).from_address(values.ctypes.data)
    mapping.kept = values  # lives as long as the tensor
    return torch.frombuffer(mapping, dtype=torch.uint8)


OPTIONS = {"tensor_transport": "nixl: values move by Ray Direct Transport; else through Ray's object store"}


def serve(
    name: str, *, timeout_s: float, snapshot: Path | None = None, tensor_transport: str | None = None
) -> RayQueue:
    """See `rl_tq.serve`. This process must be connected to Ray."""
    if tensor_transport is not None and tensor_transport not in TRANSPORTS:
        raise AddressError(
            f"ray:// takes tensor_transport={' or '.join(TRANSPORTS)}, not {tensor_transport!r}: a reader must be able "
            "to fetch alone, which Ray's gloo and nccl are not made for"
        )
    _check_ray()
    queue = name or uuid.uuid4().hex[:12]
    try:
        memory = HeapMemory(is_compacted=False)
        host = QueueHost(f"ray://{queue}", memory)
        host.add_front(lambda: _RayFront(host, memory, queue, timeout_s, tensor_transport))
        host.begin(snapshot)
    except AddressError:
        raise
    except ValueError as error:
        raise AddressError(f"ray://{queue} is served already: close that queue, or take another name") from error
    except (RayError, TransferQueueError) as error:
        raise StorageError(f"ray://{queue} cannot be served: {error}") from error
    try:
        return RayQueue(queue, timeout_s=timeout_s, host=host)
    except BaseException:
        host.close()
        raise


def connect(name: str, *, timeout_s: float) -> RayQueue:
    """See `rl_tq.connect`. This process must be connected to Ray."""
    _check_ray()
    return RayQueue(name, timeout_s=timeout_s)


def _check_ray() -> None:
    if not ray.is_initialized():
        raise StorageError("this process is not connected to Ray: call ray.init() before it serves or connects")
