"""One sync as the sender drives it: what is sent of each tensor, the votes, the commit. Knows no threads."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from rl_ckpt.errors import AttestationError, DigestError, SyncAbortedError, TensorError
from rl_ckpt.protocol.channel import Deadline
from rl_ckpt.protocol.messages import NO_VERSION, Begin, Commit, Mapped, Seal, Sources
from rl_ckpt.sender.packer import Filler
from rl_ckpt.tensors.buckets import Codec
from rl_ckpt.tensors.digest import LEAF_BYTES, combine, digests_of, model_digest
from rl_ckpt.tensors.spec import TensorSpec, as_bytes, spec_of
from rl_ckpt.types import Receipt, SyncReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from rl_ckpt.protocol.messages import AbortReason, Staged
    from rl_ckpt.sender.packer import Passage
    from rl_ckpt.sender.peers import Peer, Peers
    from rl_ckpt.tensors.delta import Snapshot
    from rl_ckpt.tensors.source import Clock, Schema, Source
    from rl_ckpt.transports.mapped_source import SourceMap


class Sync:
    """One version on its way to the receivers that take part.

    Errors of `stream` and `stage` mean that nothing is committed. After `stage` the decision stands, and `commit`
    raises nothing.
    """

    def __init__(
        self,
        *,
        version: int,
        peers: Peers,
        participants: Sequence[Peer],
        slots: Sequence[Tensor],
        source: Source,
        schema: Schema,
        snapshot: Snapshot | None,
        clock: Clock,
        limit_gb_per_s: float | None,
        passage: Passage | None = None,
    ) -> None:
        self._limit_gb_per_s = limit_gb_per_s
        self._began = 0.0
        self.version = version
        self._peers = peers
        self._participants = participants
        self._source = source
        self._schema = schema
        self._snapshot = snapshot
        self._clock = clock
        self._filler = Filler(peers, participants, slots, schema, clock, passage)
        self._passage = passage
        self._digests: dict[TensorSpec, int] = {}
        self._names: set[str] = set()
        self._num_bytes = 0
        self._num_deltas = 0
        self.digest = 0
        self._base: int | None = None
        self._is_stable = source.registered is not None or passage is not None

    def stream(self) -> None:
        """Send every tensor of the source, bucket by bucket."""
        source = self._source
        self._base = base = self._choose_base()
        self._began = time.perf_counter()
        self._peers.regroup(self._participants)
        for peer in self._participants:
            self._peers.send(peer, Begin(self.version, NO_VERSION if base is None else base))
        source_map = self._map(source)
        items = source if source_map is None else self._tell(source_map)
        for name, tensor in items if self._passage is None else self._pass_on(self._passage):
            if name not in source.tied:  # it went with another
                self._pack(spec_of(name, tensor), tensor)
                source.require_unchanged([name, *source.ties.get(name, ())])
        if not self._names:
            raise TensorError("the source yielded no tensor; an iterator that was drained before yields none")
        self._filler.close()

    def stage(self) -> None:
        """Wait until every receiver holds all of it, and compare what each attests."""
        with self._clock("verify_s"):
            self.digest = model_digest(self._digests.items())
        seal = Seal(self._filler.num_buckets, len(self._names), self._num_bytes, self.digest)
        for peer in self._participants:
            self._peers.send(peer, seal)
        self._filler.wait(lambda peer: peer.staged is not None, "take every tensor")
        for peer in self._participants:
            if peer.staged is not None:
                self._examine(peer.name, peer.staged)

    def commit(self) -> SyncReport:
        """Tell every receiver, without waiting, that the version is in force; then wait for their confirmations."""
        for peer in self._participants:
            if peer.error is None and not peer.link.try_send(Commit(self.version), peer.sync):
                self._peers.drop(peer)
        if self._snapshot is not None:
            self._snapshot.commit(self.version)
            for peer in self._participants:
                peer.is_complete = peer.is_complete or self._names >= self._snapshot.names
        with self._clock("wire_s"):
            self._confirm()
        for peer in self._participants:
            peer.sync = 0
        clock, now = self._clock, time.perf_counter()
        receipts = tuple(
            self._receipt(peer, peer.staged) for peer in self._participants if peer.is_committed and peer.staged
        )
        return SyncReport(
            version=self.version,
            digest=self.digest,
            num_tensors=len(self._names),
            num_bytes=self._num_bytes,
            num_wire_bytes=self._filler.num_wire_bytes,
            num_deltas=self._num_deltas,
            export_s=clock.export_s,
            pack_s=clock.pack_s,
            wire_s=clock.wire_s,
            verify_s=clock.verify_s,
            install_s=max((receipt.install_s for receipt in receipts), default=0.0),
            pause_s=now - self._began,
            wall_s=now - clock.started,
            limit_gb_per_s=self._limit_gb_per_s,
            receipts=receipts,
            lost=tuple(peer.name for peer in self._participants if not peer.is_committed),
        )

    def abort(self, reason: AbortReason, text: str) -> None:
        """Tell every receiver, without waiting, that the sync is off."""
        self._peers.abort(self._participants, reason, text)

    def _choose_base(self) -> int | None:
        """The version that differences are told from, if all who take part hold all of it; the snapshot is open."""
        if self._snapshot is None:
            return None
        base = self._snapshot.open()
        return (
            base
            if base is not None and all(peer.is_complete and peer.held == base for peer in self._participants)
            else None
        )

    def _examine(self, name: str, staged: Staged) -> None:
        """Compare a vote with what was sent."""
        if (staged.version, staged.digest, staged.num_tensors) != (self.version, self.digest, len(self._names)):
            raise DigestError(
                f"{name} attests {staged}; sent were {len(self._names)} tensors with digest {self.digest:#018x}"
            )
        if staged.is_attested and (staged.held_digest, staged.num_bound) != (self.digest, len(self._names)):
            raise AttestationError(
                f"{name} was sent {len(self._names)} tensors with digest {self.digest:#018x}; its engine holds "
                f"{staged.num_bound} of them, with digest {staged.held_digest:#018x}: its loader lost or changed some"
            )

    def _receipt(self, peer: Peer, staged: Staged) -> Receipt:
        return Receipt(
            peer=peer.name,
            version=staged.version,
            digest=staged.digest,
            num_tensors=staged.num_tensors,
            is_attested=bool(staged.is_attested),
            num_bound=staged.num_bound,
            num_expected=staged.num_expected,
            verify_s=staged.verify_ns / 1e9,
            install_s=staged.install_ns / 1e9,
        )

    def _map(self, source: Source) -> SourceMap | None:
        """What of the source the receivers can read where it is; they are told where, if they do not know."""
        registered = source.registered
        if registered is None or self._snapshot is not None:
            return None
        with self._clock("export_s"):
            if registered.mapped is None:
                registered.mapped = self._peers.transport.map_source(registered.items())
            found = cast("SourceMap | None", registered.mapped)
        if found is not None and found.places:
            indices = tuple((self._schema.index(spec), segment, offset) for spec, segment, offset in found.places)
            for peer in self._participants:
                self._filler.declare(peer)
                if peer.mapped != found.generation:
                    self._peers.send(peer, Sources(tuple(found.segments), indices))
                    peer.mapped = found.generation
        return found

    def _tell(self, source_map: SourceMap) -> Iterator[tuple[str, Tensor]]:
        """Say what is ready to be read where it is; yield, in their place, the tensors that have to be packed."""
        with self._clock("export_s"):
            self._peers.transport.settle()
        for step in source_map.steps:
            if isinstance(step, tuple):
                yield step
                continue
            self._filler.close()
            with self._clock("verify_s"):
                digests = digests_of(step.contents)
            self._source.require_unchanged(spec.name for spec in step.specs)
            memories = {content.data_ptr(): content.numel() for content in step.contents}
            self._filler.announce(Mapped(self._filler.num_buckets, step.first, tuple(digests)), sum(memories.values()))
            self._digests |= zip(step.specs, digests, strict=True)
            self._names |= {spec.name for spec in step.specs}
            self._num_bytes += sum(spec.num_bytes for spec in step.specs)

    def _pass_on(self, passage: Passage) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a relay, each when its first bytes have landed, or all of them where it is not one memory."""
        while True:
            if not passage.has_next():
                self._filler.close()  # rather than let those below wait until the bucket is full
            self._filler.wait_to_land(passage, passage.has_next, "the next tensor")
            taken = passage.take()
            if taken is None:
                return
            yield taken[0].name, taken[1]

    def _pack(self, spec: TensorSpec, tensor: Tensor) -> None:
        if spec.name in self._names:
            raise TensorError(f"the source yielded {spec.name!r} twice; names must differ")
        with self._clock("pack_s"):
            raw = as_bytes(tensor)
        index = self._schema.index(spec)
        ties: list[TensorSpec] = []

        def tie() -> list[int]:
            ties.extend(replace(spec, name=name) for name in self._tied_to(spec.name))
            return [self._schema.index(tied, index) for tied in ties]

        if self._snapshot is None:
            stays = self._is_stable and raw.data_ptr() == tensor.data_ptr()  # and not a copy made here
            is_tied = self._passage is not None or spec.name in self._source.ties
            found = self._filler.place(index, 0, Codec.RAW, raw, stays=stays, ties=tie if is_tied else tuple)
            digest = combine(found)
        else:
            with self._clock("pack_s"):
                self._snapshot.separate(spec.name, self._tied_to(spec.name))
            if self._base is None or not self._snapshot.can_advance(spec):
                with self._clock("pack_s"):
                    copied = self._snapshot.replace(spec, raw)
                leaves = self._filler.place(index, 0, Codec.RAW, copied, stays=True, ties=tie)
                self._snapshot.note(spec, leaves)
                digest = combine(leaves)
            else:
                digest = self._tell_differences(index, spec, raw, self._snapshot, tie)
            self._snapshot.tie(spec, ties)
        for sent in (spec, *ties):
            self._names.add(sent.name)
            self._digests[sent] = digest
            self._num_bytes += sent.num_bytes

    def _tied_to(self, name: str) -> Sequence[str]:
        """The other names of a tensor that is there."""
        passage = self._passage
        return self._source.ties.get(name, ()) if passage is None else passage.tied_to(name)

    def _tell_differences(
        self, index: int, spec: TensorSpec, raw: Tensor, snapshot: Snapshot, tie: Callable[[], Iterable[int]]
    ) -> int:
        """Send a tensor leaf by leaf, so that the receivers work on one while the next is looked through."""
        parts = snapshot.advance(spec, raw)
        leaves: list[int] = []
        is_different = False
        while True:
            with self._clock("pack_s"):
                told = next(parts, None)
            if told is None:
                break
            for part in told:
                is_whole = part.codec is Codec.RAW
                self._filler.place(
                    index,
                    part.start,
                    part.codec,
                    part.content,
                    stays=is_whole,
                    known=part.content_digest,
                    ties=tie if part.start + LEAF_BYTES >= spec.num_bytes else tuple,
                )
                leaves.append(part.digest)
                is_different = is_different or not is_whole
            self._filler.close_if_awaited()
        self._num_deltas += is_different
        return combine(leaves)

    def _confirm(self) -> None:
        deadline = Deadline(self._peers.timeout_s)
        try:
            while any(not peer.is_committed and peer.error is None for peer in self._participants):
                if not self._peers.pump(deadline):
                    break
        except SyncAbortedError:
            pass  # cancelled or closed while waiting: the commit stands, and who did not confirm is reported as lost
        for peer in self._participants:
            if not peer.is_committed:
                self._peers.drop(peer)
