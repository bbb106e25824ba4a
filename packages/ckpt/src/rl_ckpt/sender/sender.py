"""`Sender`, the sending end of a session: opens it once, and runs one transaction per sync."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_ckpt.errors import (
    AttestationError,
    DigestError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    SyncAbortedError,
    UsageError,
)
from rl_ckpt.protocol.messages import AbortReason, Session
from rl_ckpt.sender.peers import Peers
from rl_ckpt.sender.runner import SourceSender
from rl_ckpt.sender.transaction import Transaction
from rl_ckpt.tensors.buckets import Codec
from rl_ckpt.tensors.delta import BaseCopy, compressor
from rl_ckpt.tensors.source import Clock, ManifestIndex, Source, checked_version, copy_gb_per_s
from rl_ckpt.types import Metadata

if TYPE_CHECKING:
    from collections.abc import Callable, ItemsView, Iterable, Sequence

    from torch import Tensor

    from rl_ckpt.sender.membership import Peer
    from rl_ckpt.sender.packer import RelayPipe
    from rl_ckpt.transports.base import SendTransport
    from rl_ckpt.types import SessionConfig, SyncReport

MAX_VERSION = 2**63 - 1
_REASONS: dict[type[BaseException], AbortReason] = {
    AttestationError: AbortReason.DIGEST,
    DigestError: AbortReason.DIGEST,
    ProtocolError: AbortReason.PROTOCOL,
    PeerTimeoutError: AbortReason.TIMEOUT,
    PeerLostError: AbortReason.PEER_LOST,
}


@dataclass(frozen=True, slots=True)
class PreparedVersion:
    """Prepared version: all receivers voted for it. Call exactly one of `commit` and `abort`."""

    digest: int
    """Tree digest of the version."""
    commit: Callable[[], SyncReport]
    """Commits the version."""
    abort: Callable[[str], None]
    """Aborts the version, with a reason."""


class Sender(SourceSender):
    """Sending end of a session over any transport."""

    def __init__(self, config: SessionConfig, transport: SendTransport) -> None:
        super().__init__(config)
        self._transport = transport
        self._bucket_bytes = config.bucket_bytes or transport.bucket_bytes
        self._manifest = ManifestIndex()
        self._base_copy = BaseCopy(compressor() if config.zstd else None) if config.delta else None
        self._peers: Peers | None = None
        self.slots: list[Tensor] = []
        self._limit_gb_per_s: float | None = None
        self._num_peers = 1
        self._committed: set[tuple[int, int]] = set()
        """(version, digest) of the committed version, for each sync that sent it."""

    async def prepare(self) -> Metadata:
        """Bind the address and allocate the ring of buckets. Idempotent."""
        await self._worker.run(self._open)
        return Metadata(address=self.address, peer=f"sender pid {os.getpid()}", bucket_bytes=self._bucket_bytes)

    async def connect(self, num_peers: int = 1) -> None:
        """Wait until `num_peers` receivers have joined, and require as many in every later sync."""
        self._require(num_peers)
        await self._worker.run(lambda: self._open().wait_for_count(num_peers))

    async def resend_current(self) -> SyncReport | None:
        """Send the committed version to receivers that wait and do not hold it. See `WeightSender`."""
        return await self._worker.run(self._resend_current)

    def _release(self) -> None:
        if self._peers is not None:
            self._peers.close()
        self.slots = []
        self._transport.close()

    def _require(self, num_peers: int | None) -> None:
        if num_peers is not None and num_peers < 1:
            raise UsageError(f"num_peers is {num_peers}; a session needs at least one receiver")
        self._num_peers = num_peers or self._num_peers

    def _open(self) -> Peers:
        if self._peers is None:
            try:
                self._peers = self._open_transport()
            except BaseException:  # else the next attempt would find the address in use, by this end
                self.slots = []
                self._transport.close()
                raise
        return self._peers

    def _open_transport(self) -> Peers:
        self.slots = self._transport.open(self._transport.num_slots, self._bucket_bytes)
        self._limit_gb_per_s = copy_gb_per_s(self.slots[0], self.slots[1])
        self.address = self._transport.address
        return Peers(
            transport=self._transport,
            slots=self.slots,
            session=Session(self._bucket_bytes, self._transport.num_slots, self._transport.num_streams),
            canceller=self._worker.canceller,
            timeout_s=self._config.timeout_s,
            pid=os.getpid(),
        )

    def _run(self, source: Source, version: int, clock: Clock) -> SyncReport:
        """Run one sync, from waiting for receivers to the last confirmation."""
        return self._commit(self._attempt(source, version, clock))

    def _attempt(self, source: Source, version: int, clock: Clock, pipe: RelayPipe | None = None) -> Transaction:
        """Run one sync up to the votes."""
        last = -1 if self._version is None else self._version
        version = checked_version(version, last, MAX_VERSION)
        peers = self._open()
        try:
            with clock("wire_s"):
                participants = peers.wait_for_ready(self._num_peers)
        except SyncAbortedError as error:  # called off: those that came wait for nothing
            peers.dismiss(AbortReason.FAILED, str(error))
            raise
        self._require_codecs(participants)
        return self._stage(peers, participants, source, version, clock, self._base_copy, pipe)

    async def prepare_version(
        self, version: int, *, num_peers: int, weights: Iterable[tuple[str, Tensor]] = (), pipe: RelayPipe | None = None
    ) -> PreparedVersion:
        """Send `weights`, or what arrives at a relay, up to the votes; the caller decides on commit or abort.

        Raises:
            SyncAbortedError: it failed, and was aborted.
        """
        self._require(num_peers)
        clock = Clock()
        prepared: list[Transaction] = []

        def attempt() -> None:
            source = Source(weights, clock)
            try:
                prepared.append(self._attempt(source, version, clock, pipe))
            except Exception as error:
                raise SyncAbortedError(f"version {version} was not taken over {self.address}: {error}") from error
            finally:
                source.close()

        def abort(text: str) -> None:
            self._worker.call(lambda: prepared[0].abort(AbortReason.FAILED, text))

        try:
            await self._worker.run(attempt)
        except asyncio.CancelledError as error:
            if prepared:  # all voted at the moment of the cancellation, and wait for the outcome
                await asyncio.to_thread(abort, str(error))
            raise
        return PreparedVersion(
            prepared[0].digest, commit=lambda: self._worker.call(lambda: self._commit(prepared[0])), abort=abort
        )

    async def dismiss(self, text: str) -> None:
        """Notify receivers waiting for a sync that none begins. See `WeightSender`."""

        def notify() -> None:
            if self._peers is not None:
                self._peers.poll()
                self._peers.dismiss(AbortReason.FAILED, text)

        await self._worker.run(notify)

    def _require_codecs(self, participants: Sequence[Peer]) -> None:
        if self._config.zstd:
            for peer in participants:
                if not peer.codecs >> Codec.DELTA_ZSTD & 1:
                    raise UsageError(f"{peer.name} cannot read zstd; there: pip install 'rl-ckpt[zstd]'")

    def _resend_current(self) -> SyncReport | None:
        """Send the committed version, from the base copy, to receivers that do not hold it."""
        version = self._version
        if self._base_copy is None:
            raise UsageError(f"{self.address} keeps no copy of the weights to give to late receivers: pass delta=True")
        peers = self._open()
        if version is None or not (out_of_date := peers.out_of_date(self._committed)):
            return None
        clock = Clock()
        source = Source(self._copy_of(version), clock)
        try:
            sync = self._stage(peers, out_of_date, source, version, clock, None)
        except Exception as error:
            raise SyncAbortedError(f"version {version} could not be sent again: {error}") from error
        finally:
            source.close()
        report = self._commit(sync, is_new=False)
        for peer in out_of_date:
            peer.is_complete = True
        return report

    def _copy_of(self, version: int) -> ItemsView[str, Tensor]:
        base_copy = self._base_copy
        if base_copy is None or base_copy.version != version or not base_copy.is_whole:
            raise UsageError(
                f"the copy of version {version} is not whole, because a sync failed since; send all of the weights"
            )
        return base_copy.tensors()

    def _stage(
        self,
        peers: Peers,
        participants: Sequence[Peer],
        source: Source,
        version: int,
        clock: Clock,
        base_copy: BaseCopy | None,
        pipe: RelayPipe | None = None,
    ) -> Transaction:
        """Run one sync with these receivers up to their votes."""
        for peer in participants:
            peer.join()
        sync = Transaction(
            version=version,
            peers=peers,
            participants=participants,
            slots=self.slots,
            source=source,
            manifest=self._manifest,
            base_copy=base_copy,
            clock=clock,
            limit_gb_per_s=self._limit_gb_per_s,
            pipeline=peers.pipeline,
            pipe=pipe,
        )
        try:
            try:
                sync.stream()
                sync.stage()
            except DigestError:
                source.require_unchanged()  # a source read in place differs if it was modified,
                if source.registered is not None:
                    source.registered.mapped = None  # or if it was freed and its address reused
                raise
        except BaseException as error:
            sync.abort(_REASONS.get(type(error), AbortReason.FAILED), str(error) or repr(error))
            raise
        return sync

    def _commit(self, sync: Transaction, *, is_new: bool = True) -> SyncReport:
        """Commit a transaction that all receivers voted for."""
        self._version = sync.version
        report = sync.commit()
        self._committed = {(sync.version, report.digest)} | (set() if is_new else self._committed)
        self._digest = report.digest if is_new else self._digest
        return report
