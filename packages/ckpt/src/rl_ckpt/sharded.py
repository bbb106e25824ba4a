"""Weights from shard to shard: every rank of a trainer sends what it holds, every rank of a server takes its slices.

One transaction over all pairs of ranks. Each pair has a session, each rank of the server votes when what it takes from
all of them has landed and was verified, and whoever drives the trainer's ranks decides for all of them at once:

    addresses = await sender.prepare()                                 # every rank of the trainer, once
    share = await sender.stage(engine.get_local_shards, version=7)     # every rank of the trainer: all have voted
    digest = join_digest(shares)                                       # one process, which has the shares of all ranks
    report = await sender.commit(digest)                               # every rank; or abort("why")

    version = await receiver.receive_into(parameters)                  # every rank of a server, meanwhile
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterable, Mapping, Set
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

from rl_ckpt.base import ShardSender
from rl_ckpt.errors import SyncAbortedError, TensorError, UsageError, VersionError
from rl_ckpt.relay.pipe import Forwarding
from rl_ckpt.resharding import Resharding, common, cut, volume
from rl_ckpt.session import capabilities, connect
from rl_ckpt.tensors.digest_share import DigestShare, join_digest
from rl_ckpt.types import Address, Capability, Shard, ShardSpec, SyncReport, merge_reports, session_of
from rl_csrc.ipc import Waker

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from typing import Self

    from torch import Tensor

    from rl_ckpt.receiver.receiver import Receiver
    from rl_ckpt.receiver.unpacker import Unpacker
    from rl_ckpt.resharding import Box, Move
    from rl_ckpt.sender.sender import PreparedVersion, Sender

T = TypeVar("T")
_SLICE = re.compile(r"(?P<name>.*)\[(?P<box>[0-9:,]*)\]", re.DOTALL)


def _require_votes(url: str) -> None:
    """Raise `UsageError` if the backend of a URL does not know its receivers."""
    if Capability.VOTES not in capabilities(url):
        raise UsageError(f"slices need votes, and {url} has none: send whole tensors to it")


def _token_for(address: str, token: str | None) -> str | None:
    """The token, for a session at `host:port`: a name inside a host has none."""
    return token if ":" in address.partition("://")[2] else None


def spec_of_shard(shard: Shard) -> ShardSpec:
    """Spec of a shard as this package's own type."""
    return ShardSpec(name=shard.name, shape=shard.shape, offsets=shard.offsets, sizes=shard.sizes)


def _spec_of_whole(name: str, shape: tuple[int, ...]) -> ShardSpec:
    return ShardSpec(name=name, shape=shape, offsets=(0,) * len(shape), sizes=shape)


class ShardPlan:
    """Plan of who sends which slice to whom: made once, used until a side is cut anew. Picklable.

    Args:
        sources: For each rank of the trainer, what it holds.
        targets: For each rank of one replica of the server, what it takes; None: one rank takes the whole model. All
            replicas are cut alike, and those of a rank's number share what is sent to it.

    Raises:
        TensorError: nobody holds a part that is wanted, or the two sides disagree about a shape.
    """

    def __init__(self, sources: Sequence[Sequence[Shard]], targets: Sequence[Sequence[Shard]] | None = None) -> None:
        held = [[spec_of_shard(shard) for shard in shards] for shards in sources]
        shapes = {spec.name: spec.shape for specs in held for spec in specs}
        whole = [_spec_of_whole(name, shape) for name, shape in shapes.items()]
        wanted = [whole] if targets is None else [[spec_of_shard(shard) for shard in shards] for shards in targets]
        self.num_sources, self.num_targets = len(held), len(wanted)
        self.moves = Resharding(held, wanted)
        """The slices, by pair of ranks."""
        self._counted = self.moves if targets is None else Resharding(held, [whole])

    def counted(self, source: int) -> Sequence[Move]:
        """Slices whose digest a rank of the source reports: over all ranks, each element of the model once."""
        return self._counted.moves(source, 0)

    def num_elements(self, source: int, target: int) -> int:
        """Elements that go from one rank to another in every sync."""
        return sum(move.num_elements for move in self.moves.moves(source, target))


class ShardedSender(ShardSender):
    """Sender of one rank of the trainer, with a session to each rank of the server that it has slices for.

    `plan` is the same on every rank; the other arguments are those of `rl_ckpt.registry.create_sender`.
    """

    def __init__(
        self,
        plan: ShardPlan,
        rank: int,
        url: Callable[[int], str],
        *,
        timeout_s: float = 60.0,
        token: str | None = None,
    ) -> None:
        self._plan, self._rank = plan, rank
        self._ends: dict[int, Sender] = {}
        self._urls = {target: url(target) for target in plan.moves.targets_of(rank)}
        for target, own in self._urls.items():
            _require_votes(own)
            self._ends[target] = cast("Sender", connect(own, role="send", timeout_s=timeout_s, token=token))
        self._moves = {target: _by_name(plan.moves.moves(rank, target)) for target in self._ends}
        self._counted = _by_name(plan.counted(rank))
        self._share: dict[str, DigestShare] = {}
        self._prepared: list[PreparedVersion] = []

    async def prepare(self) -> dict[int, str]:
        """See `ShardSender.prepare`."""
        await _all(end.prepare() for end in self._ends.values())
        return {target: _with_options(end.address, self._urls[target]) for target, end in self._ends.items()}

    async def stage(
        self,
        shards: Callable[[], Iterable[tuple[Shard, Tensor]]],
        *,
        version: int,
        num_replicas: int | Mapping[int, int] = 1,
    ) -> dict[str, DigestShare]:
        """See `ShardSender.stage`."""
        self._share = {}
        targets = list(self._ends)
        counts = dict.fromkeys(targets, num_replicas) if isinstance(num_replicas, int) else num_replicas
        work = [
            self._ends[target].prepare_version(
                version, num_peers=counts[target], weights=self._slices(shards, target, is_first=target == targets[0])
            )
            for target in targets
        ]
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            await _settle(tasks)
        except BaseException as error:
            self._prepared = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
            await asyncio.shield(self.abort(f"another session of rank {self._rank} failed: {error}"))
            raise
        self._prepared = [task.result() for task in tasks]
        if not targets:
            await asyncio.to_thread(lambda: [None for _ in self._slices(shards, -1, is_first=True)])
        return self._share

    def join_digest(self, shares: Iterable[Mapping[str, object]]) -> int:
        """See `ShardSender.join_digest`."""
        return join_digest(cast("Iterable[Mapping[str, DigestShare]]", shares))

    async def commit(self, digest: int, version: int) -> SyncReport:
        """See `ShardSender.commit`."""
        prepared, self._prepared = self._prepared, []
        reports = await asyncio.gather(*(asyncio.to_thread(each.commit) for each in prepared))
        return merge_reports(reports, version=version, digest=digest)

    async def abort(self, text: str) -> None:
        """See `ShardSender.abort`."""
        prepared, self._prepared = self._prepared, []
        await asyncio.gather(*(asyncio.to_thread(each.abort, text) for each in prepared))

    async def dismiss(self, text: str) -> None:
        """See `ShardSender.dismiss`."""
        await asyncio.gather(*(end.dismiss(text) for end in self._ends.values()))

    async def close(self) -> None:
        """See `ShardSender.close`."""
        await asyncio.gather(*(end.close() for end in self._ends.values()))

    def _slices(
        self, shards: Callable[[], Iterable[tuple[Shard, Tensor]]], target: int, *, is_first: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Slices that go to one rank of the server. The first session's pass counts the digest as well."""
        moves, left = self._moves.get(target, {}), set(self._moves.get(target, {}))
        for shard, tensor in shards():
            spec = spec_of_shard(shard)
            if tuple(tensor.shape) != spec.sizes:
                raise TensorError(
                    f"the shard of {spec.name!r} is {tuple(tensor.shape)}; its ShardSpec says {spec.sizes}"
                )
            counted = self._counted.get(spec.name, ()) if is_first else ()
            if counted or 0 in spec.shape:
                self._share.setdefault(spec.name, DigestShare(tensor.dtype, spec.shape))
            for move in counted:
                self._require_same(spec, move)
                self._share[spec.name].add(cut(tensor, spec, move.box), move.box)
            for move in moves.get(spec.name, ()):
                self._require_same(spec, move)
                yield move.name, cut(tensor, spec, move.box)
            left.discard(spec.name)
        if left:
            raise TensorError(f"rank {self._rank} does not hold {min(left)!r} any more, which the plan has it send")

    def _require_same(self, spec: ShardSpec, move: Move) -> None:
        if spec != move.source:
            raise TensorError(
                f"rank {self._rank} holds {spec}, and the plan was made of {move.source}; make another plan"
            )


@dataclass(slots=True)
class _JointVote:
    """Joint state of one receiver's sessions during a sync: they vote together, or not at all."""

    num_ends: int
    on_landed: Callable[[Sequence[Unpacker]], bool | None]
    """Called once, when all have landed; returns what every session attests (`ShardedReceiver.receive_into`)."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    gates: list[_VoteBarrier] = field(default_factory=list["_VoteBarrier"])
    landed: list[Unpacker] = field(default_factory=list["Unpacker"])
    error: BaseException | None = None
    has_voted: bool = False
    attests: bool | None = None

    def land(self, unpacker: Unpacker) -> None:
        """Note that all that one session brings is there and verified; called in its thread."""
        with self.lock:
            self.landed.append(unpacker)
            if len(self.landed) < self.num_ends or self.error is not None:
                return
            try:
                if len({each.version for each in self.landed}) > 1:
                    versions = ", ".join(f"{each.version} from {each.sender}" for each in self.landed)
                    raise VersionError(f"slices of different versions came: {versions}")
                self.attests = self.on_landed(self.landed)
                self.has_voted = True
            except BaseException as error:  # noqa: BLE001 - every session raises it
                self.error = error
            for gate in self.gates:
                gate.wake_if_decided()

    def fail(self, error: BaseException) -> None:
        """Note that one session has failed: before the vote, so have all; after it, the others' verdict counts."""
        with self.lock:
            self.error = self.error if self.has_voted else self.error or error
            for gate in self.gates:
                gate.wake_if_decided()


class _VoteBarrier:
    """Barrier at which a session waits for the others, and for those that it is sent on to, before it votes."""

    def __init__(self, joint: _JointVote, unpacker: Unpacker, below: tuple[Sender, int] | None) -> None:
        self.outcome = Waker()
        self.forwarding = None if below is None else Forwarding(below[0], unpacker, below[1], self._voted_below)
        self._joint, self._unpacker = joint, unpacker
        with joint.lock:
            joint.gates.append(self)
            self.wake_if_decided()

    def wake_if_decided(self) -> None:
        """Wake the receiving thread if there is nothing to wait for any more; under the lock."""
        is_below = self.forwarding is None or self.forwarding.has_votes
        if self._joint.error is not None or (self._joint.has_voted and is_below):
            self.outcome.wake()

    def _voted_below(self) -> None:
        with self._joint.lock:
            if self in self._joint.gates:
                self.wake_if_decided()

    def landed(self) -> None:
        if self._joint.error is not None:
            raise SyncAbortedError(f"another session of this receiver failed: {self._joint.error}")
        if self.forwarding is not None:
            self.forwarding.pipe.landed()

    def end(self) -> None:
        if self.forwarding is not None:
            self.forwarding.pipe.end()
        self._joint.land(self._unpacker)

    def require_votes(self, digest: int) -> None:
        if self._joint.error is not None:
            raise SyncAbortedError(f"another session of this receiver failed: {self._joint.error}")
        if self.forwarding is not None:
            self.forwarding.pipe.require_votes(digest)

    @property
    def attests(self) -> bool | None:
        return self._joint.attests

    def close(self) -> None:
        with self._joint.lock:
            self._joint.gates.remove(self)
        self.outcome.close()
        if self.forwarding is not None:
            self.forwarding.close()


class ShardedReceiver:
    """Receiver of one rank of a server, with a session to every rank of the trainer that has slices for it.

    Args:
        addresses: Of the sessions, as the `prepare` of each sender returns them for this rank. One that
            `relay_address` made of it is sent on while it arrives, to the receivers of its own session, which vote
            before this one does.
        timeout_s: Longest wait for a peer, seconds.
        token: Of the sessions that are at a port; those inside a host take none.
    """

    def __init__(
        self, addresses: Sequence[Address | str], *, timeout_s: float = 60.0, token: str | None = None
    ) -> None:
        sessions = [session_of(address) for address in addresses]
        self.address = " ".join(session.url for session in sessions)
        self._ends: list[Receiver] = []
        self._below: dict[Receiver, tuple[Sender, int]] = {}
        """Sender and number of receivers of each session that is sent on."""
        for url in (url for session in sessions for url in (session.url, session.below) if url):
            _require_votes(url)
        for session in sessions:
            above = connect(session.url, role="receive", timeout_s=timeout_s, token=_token_for(session.url, token))
            self._ends.append(end := cast("Receiver", above))
            if below := session.below:
                sender = connect(below, role="send", timeout_s=timeout_s, token=_token_for(below, token))
                self._below[end] = (cast("Sender", sender), session.num_below)
        self._views: dict[Receiver, _Slices] = {}
        self._checked: tuple[int, bool, list[str]] | None = None
        """Targets and slices of the last check, which need none when they come again."""
        self._came: Set[str] = frozenset()
        """Names of the targets that they cover."""
        self._version: int | None = None

    @property
    def sends_on(self) -> bool:
        """Whether other receivers are sent what lands here, from where it lands."""
        return bool(self._below)

    @property
    def version(self) -> int | None:
        """Version of the last committed sync, or of the one that is landing."""
        return next((end.version for end in self._ends if end.version != self._version), self._version)

    async def receive_into(
        self,
        targets: Mapping[str, Tensor],
        shards: Mapping[str, Shard] | None = None,
        *,
        strict: bool = True,
        on_landed: Callable[[Set[str]], bool | None] | None = None,
    ) -> int:
        """Receive one sync into tensors of the caller, and return its version. Ends normally only after the commit.

        Args:
            targets: Name to tensor: whole ones, or the parts that `shards` describes. The same mapping as before can
                take differences.
            shards: By name, which part of it a target is; those that it leaves out are whole.
            strict: Whether every target must come; of targets that are one memory (tied weights) one is enough.
            on_landed: Called with the names of the targets that came, when all is there and verified, before the vote.
                None: the targets are what the engine computes with, and are read to attest it. True: it was compared,
                bit for bit, with targets that are not; these may be overwritten from then on, unless this end
                `sends_on`. False: nobody has looked.

        Raises:
            TensorError: a slice belongs to no target or is of another dtype, or a target came in part, or not at all.
            VersionError: the senders began different versions.
            CkptError: as `WeightReceiver.receive_into`; what it wrote to `targets` is worthless then.
        """
        shards = shards or {}

        def check(landed: Sequence[Unpacker]) -> bool | None:
            slices = [spec.name for each in landed for spec in each.digests]
            if self._checked != (id(targets), strict, slices):
                self._came = _require_whole(targets, shards, slices, strict=strict)
                self._checked = (id(targets), strict, slices)
            return None if on_landed is None else on_landed(self._came)

        joint = _JointVote(len(self._ends), check)
        tasks = [asyncio.ensure_future(self._take(end, joint, targets, shards)) for end in self._ends]
        try:
            await _settle(tasks, is_kept=lambda: joint.has_voted)
        except BaseException as error:
            committed = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
            if isinstance(error, asyncio.CancelledError) or not (committed or joint.error):
                raise
            if joint.error is not None:
                raise joint.error from error  # why all failed
            self._version = committed[0]  # the decision is one for all: who lost its sender has heard it here
        else:
            self._version = tasks[0].result()
        return self._version

    async def close(self) -> None:
        """Leave all sessions. Idempotent."""
        await asyncio.gather(*(end.close() for end in self._ends))
        await asyncio.gather(*(sender.close() for sender, _ in self._below.values()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _take(
        self, end: Receiver, joint: _JointVote, targets: Mapping[str, Tensor], shards: Mapping[str, Shard]
    ) -> int:
        """Run one session of the sync, to the commit."""
        views = self._views.get(end)
        if views is None or views.targets is not targets:
            views = self._views[end] = _Slices(targets, shards, end.address)
            end.attest_with(lambda: views)
        forwarding = None
        try:
            below = self._below.get(end)
            if below is not None:
                await below[0].prepare()
            unpacker = await end.begin(views)
            with closing(_VoteBarrier(joint, unpacker, below)) as gate:
                forwarding = gate.forwarding
                await end.take(unpacker, strict=False, pipe=gate)
        except BaseException as error:
            joint.fail(error)
            text = f"its relay has not got the version itself: {error!r}"
            if forwarding is not None:
                await forwarding.call_off(text)
            elif (waiting := self._below.get(end)) is not None:
                await waiting[0].dismiss(text)
            raise
        if forwarding is not None:
            await forwarding.commit()
        return unpacker.version


def _require_whole(
    targets: Mapping[str, Tensor], shards: Mapping[str, Shard], landed: Sequence[str], *, strict: bool
) -> Set[str]:
    """The names of the targets that slices came for, each of which they must cover."""
    boxes: dict[str, list[Box]] = {}
    for name, box in map(_parse, landed):
        boxes.setdefault(name, []).append(box)
    tied = {_memory_of(targets[name]) for name in boxes}
    for name, target in targets.items():
        own = boxes.get(name, [])
        if not own and (not strict or not target.numel() or _memory_of(target) in tied):
            continue
        count = sum(volume(box) for box in own)
        twice = any(common(a, b) is not None for index, a in enumerate(own) for b in own[:index])
        if count != target.numel() or twice:
            part = f" (part {shards[name].offsets} + {shards[name].sizes})" if name in shards else ""
            raise TensorError(
                f"{count} elements of {name!r}{part} came, and it has {target.numel()}"
                f"{': some came twice' if twice else ''}; the plan was made for another layout than this receiver's"
            )
    return frozenset(boxes)


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class _Slices(Mapping[str, "Tensor"]):
    """The caller's tensors by the names that slices travel under; views are made when they are asked for."""

    def __init__(self, targets: Mapping[str, Tensor], shards: Mapping[str, Shard], address: str) -> None:
        self.targets = targets
        self._shards, self._address = shards, address
        self._views: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if (view := self._views.get(name)) is not None:
            return view
        whole, box = _parse(name)
        target = self.targets[whole]
        shard = self._shards.get(whole)
        spec = _spec_of_whole(whole, tuple(target.shape)) if shard is None else spec_of_shard(shard)
        is_inside = len(box) == target.ndim and all(
            start <= first and end <= start + size
            for (first, end), start, size in zip(box, spec.offsets, spec.sizes, strict=True)
        )
        if not is_inside or tuple(target.shape) != spec.sizes:
            raise TensorError(
                f"{name!r} came over {self._address}; this receiver holds {spec.sizes} at {spec.offsets} of {whole!r}, "
                f"{spec.shape} in all: it has another layout than it declared"
            )
        view = self._views[name] = cut(target, spec, box)
        return view

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (_SLICE.fullmatch(name) is not None) and _parse(name)[0] in self.targets

    def __bool__(self) -> bool:
        return True  # the names are not known before they come

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


async def _all(work: Iterable[Coroutine[object, object, T]]) -> list[T]:
    tasks = [asyncio.ensure_future(each) for each in work]
    await _settle(tasks)
    return [task.result() for task in tasks]


async def _settle(tasks: Sequence[asyncio.Future[T]], *, is_kept: Callable[[], bool] = lambda: False) -> None:
    """Wait for all; if one fails, cancel the others (unless `is_kept()`) and raise its error."""
    left, first = set(tasks), None
    try:
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task.exception() for task in done if not task.cancelled() and task.exception() is not None]
            if failed and first is None:
                first = failed[0]
                if not is_kept():
                    for task in left:
                        task.cancel(str(first))
    except asyncio.CancelledError:
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        raise
    if first is not None:
        raise first


def _with_options(address: str, url: str) -> str:
    """Address of a sender with the options that its URL had: a port that was found has none."""
    options = url.partition("?")[2]
    return address if not options or "?" in address else f"{address}?{options}"


def _by_name(moves: Iterable[Move]) -> dict[str, list[Move]]:
    found: dict[str, list[Move]] = {}
    for move in moves:
        found.setdefault(move.source.name, []).append(move)
    return found


def _parse(name: str) -> tuple[str, Box]:
    """Tensor and box that `Move.name` encodes."""
    match = _SLICE.fullmatch(name)
    if match is None:
        raise TensorError(
            f"{name!r} came where slices are due, named `tensor[first:end,...]`; send them by a ShardPlan"
        )
    ends = [tuple(map(int, pair.split(":"))) for pair in match["box"].split(",") if pair]
    return match["name"], cast("Box", tuple(ends))
