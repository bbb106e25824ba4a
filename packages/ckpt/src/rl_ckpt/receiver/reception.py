"""`Reception`: one sync at a receiving end, up to the commit; `HeldVersion`: what the end holds between syncs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from rl_ckpt.errors import DigestError, ProtocolError, SyncAbortedError, TensorError
from rl_ckpt.protocol.messages import NO_VERSION, Bucket, Commit, Committed, Mapped, Ready, Seal, Staged
from rl_ckpt.receiver.unpacker import is_base, readable_codecs
from rl_ckpt.tensors.aliasing import AliasCheck
from rl_ckpt.tensors.digest import tree_digest
from rl_ckpt.types import ReceiverState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from rl_ckpt.protocol.channel import Canceller
    from rl_ckpt.receiver.connection import Connection
    from rl_ckpt.receiver.mapped import MappedSource
    from rl_ckpt.receiver.unpacker import Unpacker
    from rl_csrc.ipc import Waker


class RelayPipe(Protocol):
    """Relay that is notified of verified tensors, and passes them on."""

    @property
    def outcome(self) -> Waker:
        """Waker that fires when its own receivers have voted or failed."""
        ...

    def landed(self) -> None:
        """Note that more tensors may be verified; raises the error that ended the sync below."""
        ...

    def end(self) -> None:
        """Note that all tensors are verified."""
        ...

    def require_votes(self, digest: int) -> None:
        """Raise unless its receivers voted for this digest."""
        ...

    @property
    def attests(self) -> bool | None:
        """Whether the engine was seen to hold what landed, where the consumer compares; None: it is to be read."""
        ...


@dataclass(slots=True, eq=False)
class HeldVersion:
    """Version that a receiving end holds, from one sync to the next."""

    state: ReceiverState = ReceiverState.IDLE
    version: int | None = None
    """Version of the last committed sync."""
    digest: int | None = None
    """Tree digest of the last committed sync."""
    base: Mapping[str, Tensor] | None = None
    """Targets of the last committed sync, if deltas can be applied to them."""
    read_engine: Callable[[], Mapping[str, Tensor] | None] | None = None
    """Reads the weights of the engine before a vote. See `WeightReceiver.attest_with`."""
    alias_check: AliasCheck = field(default_factory=AliasCheck)

    def request(self, targets: Mapping[str, Tensor] | None, *, is_staged: bool) -> Ready:
        """Request of the next sync, into these targets; says which version deltas may be against."""
        is_committed = self.state is ReceiverState.COMMITTED
        has = NO_VERSION if self.version is None or not is_committed else self.version
        is_held = targets is not None and targets is self.base and not is_staged
        return Ready(has if is_held else NO_VERSION, has, self.digest or 0, codecs=readable_codecs())

    def commit(self, unpacker: Unpacker, digest: int) -> None:
        """Note a committed version."""
        self.version, self.digest, self.state = unpacker.version, digest, ReceiverState.COMMITTED
        self.base = None
        if unpacker.staging is not None:
            unpacker.staging.clear()
        elif unpacker.targets is not None and is_base(unpacker.targets):
            self.base = unpacker.targets

    def give_up(self, unpacker: Unpacker) -> None:
        """Note that a sync was not committed; restores the old weights if they were replaced from staging memory."""
        self.base = None
        if unpacker.staging is None:
            is_mixed = unpacker.is_touched
        else:
            is_in_doubt = self.state is ReceiverState.STAGED and not unpacker.is_called_off  # it may be committed
            is_mixed = is_in_doubt
            try:
                unpacker.staging.undo()
            except Exception:  # noqa: BLE001  # the error that ended the sync is raised; the state shows this one
                is_mixed = True
        self.state = ReceiverState.POISONED if is_mixed else unpacker.previous


class Reception:
    """One sync at a receiving end."""

    def __init__(self, connection: Connection, unpacker: Unpacker, held: HeldVersion, canceller: Canceller) -> None:
        self.unpacker = unpacker
        self.pipe: RelayPipe | None = None
        """Relay pipe that is notified of verified tensors; None unless this is a relay."""
        self._connection, self._held, self._canceller = connection, held, canceller
        self._handed_at: float | None = None
        """Time at which the consumer got its last tensors."""

    def advance(self, *, strict: bool) -> list[tuple[str, Tensor]] | None:
        """Free the bucket yielded last; return the tensors of the next one, or None after the commit."""
        connection, unpacker = self._connection, self.unpacker
        if self._handed_at is not None:
            unpacker.install_s += time.perf_counter() - self._handed_at
            self._handed_at = None
        connection.free(unpacker.held_buckets.recycle())
        while True:
            if unpacker.begun:
                sequence = unpacker.begun[0].bucket.sequence
                if tensors := self._finish_bucket():
                    self._handed_at = time.perf_counter()
                    return unpacker.held_buckets.hand_out(sequence, tensors)
                connection.free([sequence])
                if self.pipe is not None:
                    self.pipe.landed()
                continue
            message = connection.receive("sent nothing more")
            if isinstance(message, Bucket) and connection.reader is not None:
                is_stop = self.pipe is not None or connection.is_batch_end(message)
                unpacker.begin(message, connection.reader, is_stop=is_stop)
            elif isinstance(message, Mapped) and connection.mapped_source is not None:
                if tensors := self._copy_mapped(connection.mapped_source, message):
                    return unpacker.held_buckets.hand_out(message.sequence, tensors)
                connection.free([message.sequence])
            elif isinstance(message, Seal):
                connection.free(unpacker.held_buckets.close())
                self._finish(message, strict)
                return None
            else:
                raise ProtocolError(f"{connection.peer} sent {type(message).__name__} inside a sync")
            if self.pipe is not None and not unpacker.begun:
                self.pipe.landed()

    def _finish_bucket(self) -> list[tuple[str, Tensor]]:
        """Finish the oldest bucket, after beginning those that are announced and can be unpacked meanwhile."""
        connection, unpacker, reader = self._connection, self.unpacker, self._connection.reader
        assert reader is not None, "a bucket was begun"
        is_ahead = reader.reads_ahead and unpacker.targets is not None

        def begin() -> None:
            while is_ahead and (ahead := connection.announced(unpacker.can_begin)) is not None:
                unpacker.begin(ahead, reader, is_stop=self.pipe is not None or connection.is_batch_end(ahead))

        begin()
        return unpacker.finish(reader, meanwhile=begin)

    def _copy_mapped(self, mapped_source: MappedSource, message: Mapped) -> list[tuple[str, Tensor]]:
        since = time.perf_counter()
        tensors = mapped_source.unpack(self.unpacker, message)
        self._handed_at = time.perf_counter()
        self.unpacker.verify_s += self._handed_at - since
        if not tensors:
            self._handed_at = None
        return tensors

    def _finish(self, seal: Seal, strict: bool) -> None:
        """Check completeness, vote, and wait for the commit."""
        connection, unpacker = self._connection, self.unpacker
        digest = unpacker.digest
        landed = (unpacker.num_buckets, len(unpacker.digests), unpacker.num_bytes, digest)
        if landed != (seal.num_buckets, seal.num_tensors, seal.num_bytes, seal.digest) or not unpacker.is_whole():
            raise DigestError(f"{connection.peer} sent {seal}; (buckets, tensors, bytes, digest) here {landed}")
        if strict and (missing := unpacker.missing()):
            raise TensorError(
                f"{len(missing)} tensors were to be received into and did not come, {missing[0]!r} the first; "
                "strict=False allows that"
            )
        if self.pipe is not None:
            self.pipe.end()
            connection.until_woken(self.pipe.outcome)
            self.pipe.require_votes(digest)
        vote = Staged(
            unpacker.version,
            digest,
            len(unpacker.digests),
            verify_ns=int((unpacker.verify_s + connection.busy_s) * 1e9),
            install_ns=int(unpacker.install_s * 1e9),
        )
        if unpacker.staging is not None:
            unpacker.staging.install(spec.name for spec in unpacker.digests)
        if unpacker.targets is not None:
            targets = unpacker.targets if unpacker.staging is None else unpacker.staging.targets
            self._held.alias_check.require_equal(targets, unpacker.digests.items())
        vote = self._attest(vote)
        self._held.state = ReceiverState.STAGED
        connection.send(vote)
        try:
            verdict = connection.receive("gave no verdict")
        except SyncAbortedError:
            unpacker.is_called_off = not self._canceller.is_cancelled
            raise
        if verdict != Commit(unpacker.version):
            raise ProtocolError(f"{connection.peer} sent {verdict} where a verdict on {unpacker.version} is due")
        unpacker.is_over = True
        self._held.commit(unpacker, digest)
        connection.channel.try_send(Committed(unpacker.version), connection.sync)

    def _attest(self, vote: Staged) -> Staged:
        """Add the attestation to a vote: the digest of what the engine holds."""
        if self.pipe is not None and (is_equal := self.pipe.attests) is not None:
            count = len(self.unpacker.digests)
            fields = {"is_attested": 1, "held_digest": vote.digest, "num_bound": count, "num_expected": count}
            return replace(vote, **fields) if is_equal else vote
        read = self._held.read_engine
        held = None if read is None else read()
        if held is None:
            return vote
        sent = {spec.name for spec in self.unpacker.digests}
        bound = [name for name in held if name in sent]
        digest = tree_digest((name, held[name]) for name in bound)  # one by one, as they may be copied from a device
        return replace(vote, is_attested=1, held_digest=digest, num_bound=len(bound), num_expected=len(held))
