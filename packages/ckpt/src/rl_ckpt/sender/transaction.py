"""`Transaction`: one sync at the sender, as a two-phase commit (stream, votes, commit). Knows no threads."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from rl_ckpt.errors import AttestationError, DigestError, SyncAbortedError, TensorError
from rl_ckpt.protocol.channel import Deadline
from rl_ckpt.protocol.messages import NO_VERSION, Begin, Commit, Mapped, Seal, Sources
from rl_ckpt.sender.packer import BucketPacker
from rl_ckpt.tensors.buckets import Codec
from rl_ckpt.tensors.digest import LEAF_BYTES, combine, digests_of, model_digest
from rl_ckpt.tensors.spec import TensorSpec, as_bytes, dense, spec_of
from rl_ckpt.types import Receipt, SyncReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from rl_ckpt.protocol.messages import AbortReason, Staged
    from rl_ckpt.sender.membership import Peer
    from rl_ckpt.sender.packer import RelayPipe
    from rl_ckpt.sender.peers import Peers
    from rl_ckpt.tensors.delta import BaseCopy
    from rl_ckpt.tensors.source import Clock, ManifestIndex, Source
    from rl_ckpt.transports.mapped_source import SourceMap
    from rl_csrc.buffers.pipeline import Pipeline


class Transaction:
    """Two-phase commit of one version with the participating receivers.

    Errors of `stream` and `stage` mean that nothing is committed. After `stage` the version can be committed, and
    `commit` raises nothing.
    """

    def __init__(
        self,
        *,
        version: int,
        peers: Peers,
        participants: Sequence[Peer],
        slots: Sequence[Tensor],
        source: Source,
        manifest: ManifestIndex,
        base_copy: BaseCopy | None,
        clock: Clock,
        limit_gb_per_s: float | None,
        pipeline: Pipeline,
        pipe: RelayPipe | None = None,
    ) -> None:
        self._limit_gb_per_s = limit_gb_per_s
        self._began = 0.0
        self.version = version
        self._peers = peers
        self._participants = participants
        self._source = source
        self._manifest = manifest
        self._base_copy = base_copy
        self._clock = clock
        self._packer = BucketPacker(peers, participants, slots, pipeline, manifest, clock, pipe)
        self._pipe = pipe
        self._digests: dict[TensorSpec, int] = {}
        self._names: set[str] = set()
        self._num_bytes = 0
        self._num_deltas = 0
        self.digest = 0
        self._base: int | None = None
        self._is_stable = source.is_at_rest or pipe is not None

    def stream(self) -> None:
        """Send every tensor of the source, bucket by bucket."""
        source = self._source
        self._base = base = self._choose_base()
        self._began = time.perf_counter()
        self._peers.new_group(self._participants)
        for peer in self._participants:
            self._peers.send(peer, Begin(self.version, NO_VERSION if base is None else base))
        source_map = self._map(source)
        items = source if source_map is None else self._announce(source_map)
        for name, tensor in items if self._pipe is None else self._pass_on(self._pipe):
            if name not in source.alias_of:  # else it was sent with its original
                self._pack(spec_of(name, tensor), tensor)
            if not source.is_at_rest and self._pipe is None:
                self._packer.flush()  # the next item may be slow, or depend on what receivers do with this one
        if not self._names:
            raise TensorError("the source yielded no tensor; an iterator that was drained before yields none")
        self._packer.close()
        self._packer.end()

    def stage(self) -> None:
        """Wait for the votes of all receivers, and check what each attests."""
        with self._clock("verify_s"):
            self.digest = model_digest(self._digests.items())
        seal = Seal(self._packer.num_buckets, len(self._names), self._num_bytes, self.digest)
        for peer in self._participants:
            self._peers.send(peer, seal)
        self._packer.wait(lambda peer: peer.staged is not None, "take every tensor")
        for peer in self._participants:
            if peer.staged is not None:
                self._examine(peer.name, peer.staged)

    def commit(self) -> SyncReport:
        """Send `Commit` to every receiver without waiting; then wait for their confirmations."""
        for peer in self._participants:
            if peer.error is None and not peer.channel.try_send(Commit(self.version), peer.sync):
                self._peers.drop(peer)
        if self._base_copy is not None:
            self._base_copy.commit(self.version)
            for peer in self._participants:
                peer.is_complete = peer.is_complete or self._names >= self._base_copy.names
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
            num_wire_bytes=self._packer.num_wire_bytes,
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
        """Send `Abort` to every receiver, without waiting."""
        self._packer.end()
        self._peers.abort(self._participants, reason, text)

    def _choose_base(self) -> int | None:
        """Base version for deltas, if all participants hold all of it; opens the base copy."""
        if self._base_copy is None:
            return None
        base = self._base_copy.open()
        return (
            base
            if base is not None and all(peer.is_complete and peer.held == base for peer in self._participants)
            else None
        )

    def _examine(self, name: str, staged: Staged) -> None:
        """Check a vote against what was sent."""
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
        """Map of the source tensors that receivers can read in place, announced to those that do not know it."""
        registered = source.registered
        if registered is None or self._base_copy is not None:
            return None
        with self._clock("export_s"):
            if registered.mapped is None:
                registered.mapped = self._peers.transport.map_source(registered.items())
            found = cast("SourceMap | None", registered.mapped)
        if found is not None and found.locations:
            indices = tuple((self._manifest.index(spec), segment, offset) for spec, segment, offset in found.locations)
            for peer in self._participants:
                self._packer.declare(peer)
                if peer.mapped != found.generation:
                    self._peers.send(peer, Sources(tuple(found.segments), indices))
                    peer.mapped = found.generation
        return found

    def _announce(self, source_map: SourceMap) -> Iterator[tuple[str, Tensor]]:
        """Announce tensors that can be read in place; yields those that have to be packed, in order."""
        with self._clock("export_s"):
            self._peers.transport.synchronize()
        for step in source_map.steps:
            if isinstance(step, tuple):
                yield step
                continue
            self._packer.close()
            with self._clock("verify_s"):
                digests = digests_of(step.contents)
            self._source.require_unchanged(spec.name for spec in step.specs)
            memories = {content.data_ptr(): content.numel() for content in step.contents}
            self._packer.announce(Mapped(self._packer.num_buckets, step.first, tuple(digests)), sum(memories.values()))
            self._digests |= zip(step.specs, digests, strict=True)
            self._names |= {spec.name for spec in step.specs}
            self._num_bytes += sum(spec.num_bytes for spec in step.specs)

    def _pass_on(self, pipe: RelayPipe) -> Iterator[tuple[str, Tensor]]:
        """Tensors of a relay, each once its first bytes are verified."""
        while True:
            if not pipe.has_next():
                self._packer.close()  # so that receivers do not wait for a full bucket
            self._packer.wait_to_land(pipe, pipe.has_next, "the next tensor")
            taken = pipe.take()
            if taken is None:
                return
            yield taken[0].name, taken[1]

    def _pack(self, spec: TensorSpec, tensor: Tensor) -> None:
        if spec.name in self._names:
            raise TensorError(f"the source yielded {spec.name!r} twice; names must differ")
        self._names.add(spec.name)
        raw = dense(tensor)
        index = self._manifest.index(spec)
        aliases: list[TensorSpec] = []

        def add_aliases() -> list[int]:
            aliases.extend(replace(spec, name=name) for name in self._aliases_of(spec.name))
            self._names.update(alias.name for alias in aliases)
            return [self._manifest.index(alias, index) for alias in aliases]

        def packed(digest: int) -> None:
            for sent in (spec, *aliases):
                self._digests[sent] = digest
                self._num_bytes += sent.num_bytes
            self._source.require_unchanged([spec.name, *self._source.aliases.get(spec.name, ())])

        if self._base_copy is not None:
            self._pack_with_copy(index, spec, raw, self._base_copy, add_aliases, packed)
            self._base_copy.add_aliases(spec, aliases)
            return
        stays = self._is_stable and raw is tensor  # not a copy made here
        has_aliases = self._pipe is not None or spec.name in self._source.aliases
        self._packer.add(
            index,
            0,
            Codec.RAW,
            raw,
            stays=stays,
            then=lambda leaves: packed(combine(leaves)),
            aliases=add_aliases if has_aliases else tuple,
        )

    def _pack_with_copy(
        self,
        index: int,
        spec: TensorSpec,
        raw: Tensor,
        base_copy: BaseCopy,
        add_aliases: Callable[[], Iterable[int]],
        packed: Callable[[int], None],
    ) -> None:
        """Take a tensor into the base copy, and send it from there, or how it differs."""
        raw = as_bytes(raw)
        with self._clock("pack_s"):
            base_copy.separate(spec.name, self._aliases_of(spec.name))
        if self._base is not None and base_copy.can_advance(spec):
            packed(self._send_differences(index, spec, raw, base_copy, add_aliases))
            return
        with self._clock("pack_s"):
            copied = base_copy.replace(spec, raw)

        def noted(leaves: list[int]) -> None:
            base_copy.note(spec, leaves)
            packed(combine(leaves))

        self._packer.add(index, 0, Codec.RAW, copied, stays=True, then=noted, is_awaited=True, aliases=add_aliases)

    def _aliases_of(self, name: str) -> Sequence[str]:
        """Names of the aliases of a tensor."""
        pipe = self._pipe
        return self._source.aliases.get(name, ()) if pipe is None else pipe.alias_of(name)

    def _send_differences(
        self, index: int, spec: TensorSpec, raw: Tensor, base_copy: BaseCopy, add_aliases: Callable[[], Iterable[int]]
    ) -> int:
        """Send deltas of a tensor leaf by leaf, so that receivers apply one while the next is computed."""
        parts = base_copy.advance(spec, raw)
        leaves: list[int] = []
        is_different = False
        while True:
            with self._clock("pack_s"):
                batch = next(parts, None)
            if batch is None:
                break
            for part in batch:
                is_whole = part.codec is Codec.RAW
                self._packer.add(
                    index,
                    part.start,
                    part.codec,
                    part.content,
                    stays=is_whole,
                    known=part.content_digest,
                    aliases=add_aliases if part.start + LEAF_BYTES >= spec.num_bytes else tuple,
                )
                leaves.append(part.digest)
                is_different = is_different or not is_whole
            self._packer.close_if_awaited()
        self._num_deltas += is_different
        return combine(leaves)

    def _confirm(self) -> None:
        deadline = Deadline(self._peers.timeout_s)
        try:
            while any(not peer.is_committed and peer.error is None for peer in self._participants):
                if not self._peers.pump(deadline):
                    break
        except SyncAbortedError:
            pass  # cancelled or closed while waiting: the commit stands, and unconfirmed receivers are reported as lost
        for peer in self._participants:
            if not peer.is_committed:
                self._peers.drop(peer)
