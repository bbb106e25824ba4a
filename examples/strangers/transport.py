"""Weight transport of a stranger: versions lie in this process's memory, where receivers find them, at `stranger://NAME`.

As over a folder, nobody knows who reads: a sync is committed once the version is there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rl_ckpt.base import CheckpointEngine, WeightReceiver, WeightSender
from rl_ckpt.errors import PeerTimeoutError, TensorError, UsageError, VersionError
from rl_ckpt.types import Capability, Metadata, ReceiverState, Role, SessionConfig, SyncReport

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping

    from torch import Tensor


@dataclass
class _Shelf:
    """The newest version of a session."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    version: int | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)


_SHELVES: defaultdict[str, _Shelf] = defaultdict(_Shelf)


class Backend:
    """What the entry point's module offers."""

    options: ClassVar[Mapping[str, str]] = {}
    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    def open_session(self, config: SessionConfig) -> Sender | Receiver:
        return Sender(config) if config.role is Role.SEND else Receiver(config)


class _End(CheckpointEngine):
    digest = None

    def __init__(self, config: SessionConfig) -> None:
        self.address, self._config, self._shelf = config.address, config, _SHELVES[config.name]
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def state(self) -> ReceiverState:
        return ReceiverState.IDLE if self._version is None else ReceiverState.COMMITTED

    async def prepare(self) -> Metadata:
        return Metadata(address=self.address, peer=f"stranger of {self._config.name}", bucket_bytes=None)

    async def close(self) -> None:
        """The version stays for those who come."""


class Sender(_End, WeightSender):
    """Copies what it is given."""

    async def connect(self, num_peers: int = 1) -> None:
        raise UsageError("this transport does not know its receivers")

    async def send_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]] | None = None,
        *,
        version: int,
        num_peers: int | None = None,
    ) -> SyncReport:
        if weights is None or num_peers is not None:
            raise UsageError("give the weights; this transport does not know its receivers")
        if self._version is not None and version <= self._version:
            raise VersionError(f"version {version} is not above {self._version}, which was committed")
        start = time.perf_counter()
        if hasattr(weights, "__aiter__"):
            copied = {name: tensor.detach().clone() async for name, tensor in weights}
        else:
            copied = await asyncio.to_thread(lambda: {name: tensor.detach().clone() for name, tensor in weights})
        with self._shelf.changed:
            self._shelf.weights, self._shelf.version, self._version = copied, version, version
            self._shelf.changed.notify_all()
        return SyncReport(
            version=version,
            num_tensors=len(copied),
            num_bytes=sum(tensor.nbytes for tensor in copied.values()),
            wall_s=time.perf_counter() - start,
            **dict.fromkeys(("export_s", "pack_s", "wire_s", "verify_s"), 0.0),
        )

    def register_source(self, named_tensors: Any) -> None:
        raise UsageError("this transport has no registered source; give send_weights the weights")


class Receiver(_End, WeightReceiver):
    """Takes the newest version that it has not got."""

    async def connect(self, num_peers: int = 1) -> None:
        """The memory is always there."""

    def _newer(self) -> dict[str, Tensor]:
        with self._shelf.changed:
            if not self._shelf.changed.wait_for(
                lambda: self._shelf.version not in (None, self._version), self._config.timeout_s
            ):
                raise PeerTimeoutError(f"{self.address}: no version came within {self._config.timeout_s} s")
            self._version = self._shelf.version
            return self._shelf.weights

    async def receive_weights(self, *, clone: bool = False) -> AsyncIterator[tuple[str, Tensor]]:
        for name, tensor in (await asyncio.to_thread(self._newer)).items():
            yield name, tensor.clone() if clone else tensor

    async def receive_into(self, targets: Mapping[str, Tensor], *, strict: bool = True, staged: bool = False) -> int:
        weights = await asyncio.to_thread(self._newer)
        if weights.keys() - targets.keys() or (strict and targets.keys() - weights.keys()):
            raise TensorError(f"{sorted(weights.keys() ^ targets.keys())[0]!r} is on one side alone")
        with torch.no_grad():
            for name, tensor in weights.items():
                targets[name].copy_(tensor)
        assert self._version is not None
        return self._version

    def attest_with(self, held: Callable[[], Mapping[str, Tensor] | None] | None) -> None:
        """Nobody votes, so nothing is attested."""
