"""Public types: roles, capabilities, states, session configuration, addresses, receipts and reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from rl_ckpt.errors import AddressError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

PLAN_FORMAT = "rl-ckpt plan 1"


class Role(StrEnum):
    """Role of an end in a session."""

    SEND = "send"
    RECEIVE = "receive"


class Capability(StrEnum):
    """Capability of a backend beyond verified versions; `connect`, or the call, raises if one is missing."""

    VOTES = "votes"
    """The sender knows its receivers: it waits for `num_peers`, has their receipts, and all commit or none."""
    DELTA = "delta"
    """Bit-exact deltas to receivers that hold the previous version (`delta=True`, `zstd=True`)."""
    VIEWS = "views"
    """Tensors are yielded as views of buckets, several at a time; `debug=True` detects views kept too long."""


class ReceiverState(StrEnum):
    """State of an end in the transaction of a sync."""

    IDLE = "idle"
    """No sync has reached it yet."""
    PREPARING = "preparing"
    """A sync has begun; buckets are being received."""
    STAGED = "staged"
    """Every bucket is verified and every tensor was taken; the vote is cast."""
    COMMITTED = "committed"
    """The sender committed this version on all receivers."""
    POISONED = "poisoned"
    """A sync failed after the consumer got tensors: its weights may be mixed, so it must not serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Configuration of one end of a session, from `connect`."""

    address: str
    """Complete URL."""
    name: str
    """Part of the URL after `scheme://`, without options."""
    role: Role
    """Role of this end."""
    timeout_s: float
    """Deadline of every single wait for a peer, seconds."""
    bucket_bytes: int | None = None
    """Size of a transfer bucket, bytes; a multiple of 256. None: the backend's default. Ignored at a receiver."""
    delta: bool = False
    """Whether a sender keeps a copy of what it sent, to send deltas against it."""
    zstd: bool = False
    """Whether a sender compresses deltas with zstd."""
    debug: bool = False
    """Whether a receiver yields copies that turn into NaN once they are no longer valid."""
    token: str | None = None
    """Shared secret, for backends whose peers the kernel cannot authenticate."""
    options: tuple[tuple[str, str], ...] = ()
    """Options of the backend from the URL, as (name, value) pairs."""

    def option(self, name: str, default: str = "") -> str:
        """Value of an option of the backend from the URL, or the default."""
        return dict(self.options).get(name, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Result of `prepare`: address, name and bucket size of this end."""

    address: str
    """URL under which this end is reached."""
    peer: str
    """Name of this end in messages, e.g. `receiver pid 4242`."""
    bucket_bytes: int | None
    """Size of one transfer bucket, bytes. None at an end that does not decide it: the sender's is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Receipt of a receiver after a commit."""

    peer: str
    """Name of the receiver."""
    version: int
    """Committed weight version."""
    digest: int
    """Tree digest of the received weights and, if `is_attested`, of what its engine holds."""
    num_tensors: int
    """Tensors received, verified, and taken by its consumer."""
    is_attested: bool
    """Whether the engine's weights were checked (`WeightReceiver.attest_with`)."""
    num_bound: int
    """Tensors of this sync that the engine holds under their names; 0 if not attested."""
    num_expected: int
    """Number of all tensors of the engine; 0 if not attested. More than `num_bound` after a partial sync."""
    verify_s: float = 0.0
    """Time for verifying bytes and copying them in the same pass, seconds."""
    install_s: float = 0.0
    """Time for applying deltas and of the consumer itself, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Report of a committed sync: sizes, timings and receipts."""

    version: int
    """Weight version that was committed."""
    digest: int = 0
    """Tree digest of what was sent (`rl_ckpt.tree_digest`); can be recorded with rollouts."""
    num_tensors: int
    """Tensors sent."""
    num_bytes: int
    """Size of the tensors, bytes; of tied ones for each name."""
    num_wire_bytes: int = 0
    """Payload per receiver, bytes: tensors or deltas, tied tensors once, including padding."""
    num_deltas: int = 0
    """Tensors sent as deltas against the previous version."""
    export_s: float
    """Waiting for the source iterator, seconds."""
    pack_s: float
    """Packing buckets, with digests in the same pass, and computing deltas, seconds."""
    wire_s: float
    """Waiting for a free bucket or a peer, seconds."""
    verify_s: float
    """Digests that need a separate pass, seconds."""
    install_s: float = 0.0
    """The longest `install_s` of a receipt, seconds."""
    pause_s: float = 0.0
    """Seconds from the announcement of the sync to the last receipt: receivers are between two versions."""
    wall_s: float
    """Seconds from the first call to the last receipt."""
    limit_gb_per_s: float | None = None
    """Copy bandwidth of one core of the sender, measured when the session was opened, 1e9 bytes per second."""
    receipts: tuple[Receipt, ...] = field(default=())
    """Receipts, one per receiver that confirmed the commit."""
    lost: tuple[str, ...] = field(default=())
    """Receivers lost between vote and confirmation of the commit. Each holds this version or refuses to serve."""

    @property
    def gb_per_s(self) -> float:
        """Payload over wall time, 1e9 bytes per second."""
        return self.num_bytes / self.wall_s / 1e9 if self.wall_s > 0 else 0.0

    @property
    def fraction_of_limit(self) -> float | None:
        """`gb_per_s` as a fraction of `limit_gb_per_s`; above 1 with deltas. None without a measured limit."""
        return None if not self.limit_gb_per_s else self.gb_per_s / self.limit_gb_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Shard of a tensor on one rank: a box in coordinates of the whole tensor."""

    name: str
    """Name of the tensor, the same on both sides."""
    shape: tuple[int, ...]
    """Elements of the whole tensor along each axis."""
    offsets: tuple[int, ...]
    """Start of the box along each axis, elements."""
    sizes: tuple[int, ...]
    """Size of the box along each axis, elements; 0 if the rank holds nothing of the tensor."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if the box is outside the tensor."""
        is_inside = len(self.shape) == len(self.offsets) == len(self.sizes) and all(
            start >= 0 and size >= 0 and start + size <= whole
            for start, size, whole in zip(self.offsets, self.sizes, self.shape, strict=True)
        )
        if not is_inside:
            raise ValueError(
                f"the shard of {self.name!r} starts at {self.offsets} and is {self.sizes} long; "
                f"the tensor is {self.shape}"
            )

    def of(self, whole: Tensor) -> Tensor:
        """The part, as a view of the whole tensor."""
        return whole[tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))]

    @classmethod
    def on_mesh(
        cls,
        name: str,
        shape: Sequence[int],
        *,
        mesh: Sequence[int],
        placements: Sequence[int | None],
        coordinate: Sequence[int],
    ) -> ShardSpec:
        """The shard of one rank of a device mesh, cut as `torch.distributed.tensor` cuts: the first ranks get more.

        Args:
            name: Name of the tensor.
            shape: Elements of the whole tensor along each axis.
            mesh: Ranks along each axis of the mesh, for example (replicas, shards) for HSDP.
            placements: For each axis of the mesh, the axis of the tensor that is sharded over it, or None: replicated.
                An axis sharded twice is cut by the first axis of the mesh first.
            coordinate: Coordinate of the rank in the mesh.

        Raises:
            ValueError: mesh, placements and coordinate do not match each other or the tensor.
        """
        if not len(mesh) == len(placements) == len(coordinate):
            raise ValueError(f"a mesh of {len(mesh)} axes has {len(placements)} placements and coordinate {coordinate}")
        offsets, sizes = [0] * len(shape), list(shape)
        for num_ranks, axis, rank in zip(mesh, placements, coordinate, strict=True):
            if not 0 <= rank < num_ranks or (axis is not None and not 0 <= axis < len(shape)):
                raise ValueError(
                    f"rank {rank} of {num_ranks} cuts axis {axis} of {name!r}, whose shape is {tuple(shape)}"
                )
            if axis is not None:
                chunk = -(-sizes[axis] // num_ranks)
                start = min(rank * chunk, sizes[axis])
                sizes[axis] = min(chunk, sizes[axis] - start)
                offsets[axis] += start
        return cls(name=name, shape=tuple(shape), offsets=tuple(offsets), sizes=tuple(sizes))


class Shard(Protocol):
    """A `ShardSpec`, or another package's description of a shard with the same fields."""

    @property
    def name(self) -> str:
        """Name of the tensor, the same on both sides."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements of the whole tensor along each axis."""
        ...

    @property
    def offsets(self) -> tuple[int, ...]:
        """Start of the box along each axis, elements."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of the box along each axis, elements."""
        ...


@dataclass(frozen=True, slots=True)
class Address:
    """Session that a receiver takes part in; with `below`, as a relay."""

    url: str
    """URL that the receiver dials."""
    below: str = ""
    """URL of a session that it sends on to what it takes; empty: it is not a relay."""
    num_below: int = 0
    """Receivers of that session, all of which must vote."""

    def __post_init__(self) -> None:
        """Check that `below` and `num_below` agree."""
        if bool(self.below) != (self.num_below > 0):
            raise AddressError(f"{self} is not an address of a relay; make it by rl_ckpt.relay_address")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Sessions of every rank of a replica, one to each rank of the trainer that has slices for it."""

    ranks: tuple[tuple[Address, ...], ...]
    """By rank of the replica."""

    def of(self, rank: int) -> tuple[Address, ...]:
        """Sessions of one rank.

        Raises:
            AddressError: there is no such rank.
        """
        if not 0 <= rank < len(self.ranks):
            raise AddressError(f"{self.to_json()} is for {len(self.ranks)} ranks; this is rank {rank}")
        return self.ranks[rank]

    def to_json(self) -> str:
        """Text that is passed where a server takes a URL."""
        return json.dumps({"ranks": [[asdict(address) for address in addresses] for addresses in self.ranks]})

    @classmethod
    def from_json(cls, text: str) -> Addresses | None:
        """Read what `to_json` wrote; None if it is the URL of a single session.

        Raises:
            AddressError: it is something else.
        """
        if not text.startswith("{"):
            return None
        try:
            ranks: list[list[dict[str, Any]]] = json.loads(text)["ranks"]
            return cls(tuple(tuple(Address(**address) for address in addresses) for addresses in ranks))
        except (ValueError, TypeError, KeyError) as error:
            raise AddressError(f"{text!r} holds no addresses ({error}); pass Addresses.to_json()") from error


def join_addresses(addresses: Sequence[Mapping[int, Address | str]], num_targets: int) -> Addresses:
    """Addresses of all receivers of a replica, of what the `prepare` of each rank of the trainer returned."""
    return Addresses(
        tuple(tuple(session_of(each[target]) for each in addresses if target in each) for target in range(num_targets))
    )


def relay_address(address: str, below: str, num_receivers: int) -> Address:
    """Address of a session for a receiver that sends on what it takes of it: as a relay.

    Args:
        address: Of the session that it takes part in.
        below: URL of a session of its own, which as many other receivers dial instead.
        num_receivers: They vote as well, or nothing is committed.
    """
    return Address(address, below, num_receivers)


def session_of(address: Address | str) -> Address:
    """Session at an address that is no relay's, or as it is."""
    return Address(address) if isinstance(address, str) else address


def merge_reports(reports: Sequence[SyncReport], *, version: int, digest: int) -> SyncReport:
    """Merge the reports of several pairs: sums of bytes, the longest of each time, every receipt."""
    if not reports:
        zero = dict.fromkeys(("export_s", "pack_s", "wire_s", "verify_s", "wall_s"), 0.0)
        return SyncReport(version=version, digest=digest, num_tensors=0, num_bytes=0, **zero)
    longest = {
        name: max(getattr(each, name) for each in reports)
        for name in ("export_s", "pack_s", "wire_s", "verify_s", "install_s", "pause_s", "wall_s")
    }
    summed = {
        name: sum(getattr(each, name) for each in reports)
        for name in ("num_tensors", "num_bytes", "num_wire_bytes", "num_deltas")
    }
    return replace(
        reports[0],
        version=version,
        digest=digest,
        receipts=tuple(receipt for each in reports for receipt in each.receipts),
        lost=tuple(dict.fromkeys(name for each in reports for name in each.lost)),
        **longest,
        **summed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Ranks of both sides, what each has of the weights, and the nodes that they are on."""

    sizes: Mapping[str, int]
    """Bytes of an element, by tensor."""
    sources: Sequence[Sequence[Shard]]
    """Shards that each rank of the trainer holds."""
    targets: Sequence[Sequence[Shard]] | None
    """Slices that each rank of a replica of the server takes; None: one rank takes all."""
    source_nodes: Sequence[str]
    """Node of each rank of the trainer."""
    target_nodes: Sequence[Sequence[str]]
    """Node of each rank of each replica."""
    has_relays: bool = False
    """Whether one receiver of a node takes a slice for all of them and sends it on inside the node."""

    def groups(self, source: int, target: int) -> list[list[int]]:
        """Replicas that take a pair's slice from the trainer, each before those that it sends it on to."""
        nodes = [nodes[target] for nodes in self.target_nodes]
        if not self.has_relays:
            return [[replica] for replica in range(len(nodes))]
        return relay_groups(source, self.source_nodes[source], nodes)

    def save(self, path: Path) -> None:
        """Write it as JSON, for `rl-ckpt plan`."""
        fields = {
            "format": PLAN_FORMAT,
            "sizes": dict(self.sizes),
            "sources": [encoded(shards) for shards in self.sources],
            "targets": None if self.targets is None else [encoded(shards) for shards in self.targets],
            "source_nodes": list(self.source_nodes),
            "target_nodes": [list(nodes) for nodes in self.target_nodes],
            "has_relays": self.has_relays,
        }
        path.write_text(json.dumps(fields))

    @classmethod
    def load(cls, path: Path) -> Placement:
        """Read what `save` wrote.

        Raises:
            UsageError: it is something else.
        """
        try:
            fields: dict[str, Any] = json.loads(path.read_text())
            if fields.pop("format") != PLAN_FORMAT:
                raise ValueError(f"its format is not {PLAN_FORMAT!r}")
            fields["sources"] = [decoded(shards) for shards in fields["sources"]]
            fields["targets"] = None if fields["targets"] is None else [decoded(shards) for shards in fields["targets"]]
            return cls(**fields)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"{path} is not a plan ({error!r}); give weights-plan.json of the output folder of a run"
            ) from error


def relay_groups(source: int, source_node: str, nodes: Sequence[str]) -> list[list[int]]:
    """Replicas by who takes a slice from the trainer: the first of each group does, and sends it on to the rest.

    On a node that is not the sender's, all are one group, so that one copy crosses the network. Each rank of the
    trainer has another one of them as its relay. A group of one sends on to nobody.

    Args:
        source: Rank of the trainer.
        source_node: Its node.
        nodes: By replica, that of its receiver.
    """
    groups: dict[str | int, list[int]] = {}
    for replica, node in enumerate(nodes):
        groups.setdefault(replica if node == source_node else node, []).append(replica)
    return [group[source % len(group) :] + group[: source % len(group)] for group in groups.values()]


def encoded(shards: Iterable[Shard]) -> list[tuple[str, list[int], list[int], list[int]]]:
    """Shards as JSON has them."""
    return [(each.name, list(each.shape), list(each.offsets), list(each.sizes)) for each in shards]


def decoded(shards: Sequence[tuple[str, list[int], list[int], list[int]]]) -> list[ShardSpec]:
    """What `encoded` wrote."""
    return [
        ShardSpec(name=name, shape=tuple(shape), offsets=tuple(offsets), sizes=tuple(sizes))
        for name, shape, offsets, sizes in shards
    ]
