"""The values that rl-ckpt takes and gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Role(StrEnum):
    """Which end of a session an engine is."""

    SEND = "send"
    RECEIVE = "receive"


class Capability(StrEnum):
    """What a backend may promise beyond verified versions. `connect`, or the call, refuses what is not promised."""

    VOTES = "votes"
    """The sender knows its receivers: it waits for `num_peers`, has their receipts, and all commit or none."""
    DELTA = "delta"
    """Bit-exact differences to receivers that hold the version before (`delta=True`, `zstd=True`)."""
    VIEWS = "views"
    """Tensors are handed out as views of buckets, several at a time; `debug=True` finds one that is kept too long."""


class ReceiverState(StrEnum):
    """Where an end stands in the transaction of one sync."""

    IDLE = "idle"
    """No sync has reached it yet."""
    PREPARING = "preparing"
    """It knows the manifest and waits for buckets."""
    STAGED = "staged"
    """Every bucket landed and was verified; the consumer has seen every tensor."""
    COMMITTED = "committed"
    """The sender committed this version on all receivers."""
    POISONED = "poisoned"
    """A sync failed after tensors were handed out: what the consumer holds may be mixed, so it must not serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """What `connect` was asked for: all that a backend needs to open one end of a session."""

    address: str
    """The URL, whole."""
    name: str
    """The URL behind `scheme://`."""
    role: Role
    """Which end to open."""
    timeout_s: float
    """Longest wait for a peer, seconds; every wait has its own."""
    bucket_bytes: int | None = None
    """Size of one transfer bucket, bytes; a multiple of 256. None: the backend's own. A receiver's is not used."""
    delta: bool = False
    """Whether a sender keeps a copy of what it sent, to send differences to receivers that hold it."""
    zstd: bool = False
    """Whether a sender compresses the differences."""
    debug: bool = False
    """Whether a receiver hands out copies that turn into NaN when they are not valid any more."""
    token: str | None = None
    """Secret that both ends know, for backends whose peers the kernel cannot vouch for."""
    options: tuple[tuple[str, str], ...] = ()
    """The backend's own options of the URL, as names and values."""

    def option(self, name: str, default: str = "") -> str:
        """Value of an option of the backend, as the URL gives it."""
        return dict(self.options).get(name, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What one end tells the other before the first sync."""

    address: str
    """URL under which this end is reached."""
    peer: str
    """Name of this end in messages, e.g. `receiver pid 4242`."""
    bucket_bytes: int | None
    """Size of one transfer bucket, bytes. None at an end that does not decide it: the sender's is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a receiver attests after a commit."""

    peer: str
    """Name of the receiver."""
    version: int
    """Weight version it now holds."""
    digest: int
    """Tree digest of the weights: of what landed and, if `is_attested`, of what its engine holds."""
    num_tensors: int
    """Tensors that landed, were verified, and were taken by its consumer."""
    is_attested: bool
    """Whether the receiver has looked into its engine (`CheckpointEngine.attest_with`)."""
    num_bound: int
    """Tensors of this sync that the engine was found to hold, under their names; 0 if not attested."""
    num_expected: int
    """Tensors that the engine has in all; 0 if not attested. More than `num_bound` after a sync of a part."""
    verify_s: float = 0.0
    """Its time in checking what landed and, in the same pass, copying it to where it belongs, seconds."""
    install_s: float = 0.0
    """Its time in applying differences and in whatever its consumer did with tensors, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One finished weight sync, as one end saw it."""

    version: int
    """Weight version that was committed."""
    digest: int = 0
    """Tree digest of what was sent, as `rl_ckpt.tree_digest` computes it; to stamp rollouts with."""
    num_tensors: int
    """Tensors sent."""
    num_bytes: int
    """Size of the tensors, bytes; of tied ones for each name."""
    num_wire_bytes: int = 0
    """Payload that each receiver was sent, bytes: the tensors or their differences, tied ones once, with the gaps."""
    num_deltas: int = 0
    """Tensors that were sent as differences from the version before."""
    export_s: float
    """Waiting for the source iterator, seconds."""
    pack_s: float
    """Copying into buckets, with the digests that are made in passing, and finding differences, seconds."""
    wire_s: float
    """Waiting for a free bucket or a peer, seconds."""
    verify_s: float
    """Computing the digests that need a pass of their own, seconds."""
    install_s: float = 0.0
    """The longest `install_s` of a receipt, seconds."""
    pause_s: float = 0.0
    """From the announcement of the sync to the last receipt: how long receivers were between two versions, seconds."""
    wall_s: float
    """From the first call to the last receipt, seconds."""
    limit_gb_per_s: float | None = None
    """What one core of the sender copies, as probed when the session was opened, 1e9 bytes per second."""
    receipts: tuple[Receipt, ...] = field(default=())
    """One per receiver that confirmed the commit."""
    lost: tuple[str, ...] = field(default=())
    """Receivers that fell silent between their vote and confirming the commit. Each holds this version or refuses."""

    @property
    def gb_per_s(self) -> float:
        """Payload over wall time, 1e9 bytes per second."""
        return self.num_bytes / self.wall_s / 1e9 if self.wall_s > 0 else 0.0

    @property
    def fraction_of_limit(self) -> float | None:
        """`gb_per_s` of the probed limit; above 1 where differences were sent. None where nothing was probed."""
        return None if not self.limit_gb_per_s else self.gb_per_s / self.limit_gb_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Which part of a tensor one rank holds: a box in the coordinates of the whole tensor."""

    name: str
    """Of the tensor, the same at both ends."""
    shape: tuple[int, ...]
    """Elements of the whole tensor along each axis."""
    offsets: tuple[int, ...]
    """Where the box starts along each axis, elements."""
    sizes: tuple[int, ...]
    """Its length along each axis, elements; 0 if the rank holds nothing of the tensor."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if the box is not one inside the tensor."""
        is_inside = len(self.shape) == len(self.offsets) == len(self.sizes) and all(
            start >= 0 and size >= 0 and start + size <= whole
            for start, size, whole in zip(self.offsets, self.sizes, self.shape, strict=True)
        )
        if not is_inside:
            raise ValueError(
                f"the shard of {self.name!r} starts at {self.offsets} and is {self.sizes} long; "
                f"the tensor is {self.shape}"
            )

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
            name: Of the tensor.
            shape: Elements of the whole tensor along each axis.
            mesh: Ranks along each axis of the mesh, for example (replicas, shards) for HSDP.
            placements: For each axis of the mesh the axis of the tensor that is cut over it, or None: replicated. An
                axis that is cut twice is cut by the first axis of the mesh first.
            coordinate: Of the rank in the mesh.

        Raises:
            ValueError: the mesh, the placements and the coordinate do not fit one another, or the tensor.
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
