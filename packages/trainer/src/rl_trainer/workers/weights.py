"""Sending of weights by one rank of an engine: whole tensors from rank 0, or from each rank its shards."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import rl_ckpt.registry
from rl_ckpt.errors import SyncAbortedError
from rl_engine.errors import ConfigError
from rl_trainer.config.schema import ADAPTER
from rl_trainer.runtime.network import has_votes
from rl_trainer.workers.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence

    from torch import Tensor

    from rl_ckpt.base import ShardSender, WeightSender
    from rl_ckpt.types import SyncReport
    from rl_engine.base import Engine
    from rl_engine.types import ShardSpec
    from rl_rollout.types import TensorPart
    from rl_trainer.runtime.base import WorkerContext


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """Weights that one rank of an engine holds, to be sent."""

    specs: list[ShardSpec]
    dtypes: dict[str, str]
    """Dtype in which each tensor is sent, by name: `bfloat16`."""
    host: str


class WeightSessions:
    """Sessions by which a rank of an engine sends its weights."""

    def __init__(self, engine: Engine, context: WorkerContext, address: str | None, timeout_s: float) -> None:
        self._engine, self._context, self._address = engine, context, address
        self._timeout_s = timeout_s
        self._loop = LoopThread("weights")
        self._senders: dict[str, WeightSender] = {}
        self._sharded: ShardSender | None = None
        self._waiting: asyncio.Task[Any] | None = None

    def send(self, version: int, num_receivers: int, address: str | None) -> SyncReport | None:
        """See `EngineWorker.send_weights`."""
        named_tensors, adapter = self._engine.get_per_tensor_param()
        if adapter is not None:
            named_tensors = ((f"adapters.{ADAPTER}.{name}", tensor) for name, tensor in named_tensors)
        address = address or self._address
        if self._context.rank > 0 or address is None:
            for _ in named_tensors:  # the gather is collective
                pass
            return None
        if address not in self._senders:
            self._senders[address] = rl_ckpt.registry.connect(address, role="send", timeout_s=self._timeout_s)

        def begun() -> Iterator[tuple[str, Tensor]]:
            self._waiting = None
            yield from named_tensors

        num_peers = num_receivers if has_votes(address) else None  # a folder knows no readers
        sent = self._senders[address].send_weights(begun(), version=version, num_peers=num_peers)
        try:
            return self._run(sent, version)
        except SyncAbortedError as error:
            if isinstance(error.__cause__, CancelledError):
                for _ in self._engine.get_per_tensor_param()[0]:  # the other ranks gather meanwhile
                    pass
            raise

    def layout(self) -> LocalWeights | None:
        """See `EngineWorker.weight_layout`."""
        held = LocalWeights([], {}, self._context.host)
        try:
            for spec, tensor in self._engine.get_local_shards():
                held.specs.append(spec)
                held.dtypes[spec.name] = str(tensor.dtype).removeprefix("torch.")
        except ConfigError:
            return None
        return held

    def open(
        self, layouts: tuple[Sequence[ShardSpec], ...], targets: list[list[TensorPart]] | None, address: str
    ) -> dict[int, str]:
        """See `EngineWorker.open_sessions`."""
        rank, host = self._context.rank, self._context.host
        if self._sharded is not None:
            self._loop.run(self._sharded.close(), self._timeout_s)
        self._sharded = rl_ckpt.registry.create_sender(
            layouts,
            targets,
            rank,
            lambda target: address.format(rank=rank, target=target, host=host),
            timeout_s=self._timeout_s,
        )
        return self._loop.run(self._sharded.prepare(), self._timeout_s)

    @property
    def sharded(self) -> ShardSender:
        """Sender of this rank's shards."""
        assert self._sharded is not None, "sessions are opened first"
        return self._sharded

    def stage(self, version: int, num_replicas: int | Mapping[int, int]) -> Mapping[str, object]:
        """See `EngineWorker.stage_weights`."""
        staged = self.sharded.stage(self._engine.get_local_shards, version=version, num_replicas=num_replicas)
        return self._run(staged, version)

    def commit(self, version: int, digest: int) -> SyncReport:
        """See `EngineWorker.commit_weights`."""
        return self._loop.run(self.sharded.commit(digest, version), self._timeout_s)

    def abort(self, why: str) -> None:
        """See `EngineWorker.abort_weights`."""
        self._loop.run(self.sharded.abort(why), self._timeout_s)

    def call_off(self) -> None:
        """See `EngineWorker.call_off`."""
        if self._waiting is not None:
            self._loop.cancel(self._waiting)

    def dismiss(self, why: str) -> None:
        """See `EngineWorker.dismiss_receivers`."""
        for sender in self._all():
            self._loop.run(sender.dismiss(why), self._timeout_s)

    def close(self) -> None:
        """Close every session. Idempotent."""
        for sender in self._all():
            self._loop.run(sender.close(), 30.0)
        self._senders, self._sharded = {}, None
        self._loop.close()

    def _all(self) -> list[WeightSender | ShardSender]:
        return [*self._senders.values(), *([] if self._sharded is None else [self._sharded])]

    def _run(self, work: Coroutine[Any, Any, T], version: int) -> T:
        """Run a sync that `call_off` may cancel while it waits for receivers.

        Raises:
            SyncAbortedError: it was called off.
        """

        async def waiting() -> T:
            self._waiting = asyncio.current_task()
            try:
                return await work
            finally:
                self._waiting = None

        try:
            return self._loop.run(waiting(), self._timeout_s)
        except CancelledError as error:
            raise SyncAbortedError(f"the sync of version {version} was called off") from error
