"""Blocks of shared memory that are allocated once, reused, and pinned by their readers.

One process owns an arena: it allocates and frees. Others attach and look at blocks without asking it: a view pins its
block for as long as any tensor over it lives, in this process or another, and a process that dies loses its pins. A
freed block is used again when its last pin is gone; a reference made before that raises ``StaleBlockError``.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from rl_csrc import _cpu
from rl_csrc._sharing import receive_fd, send_fd
from rl_csrc.errors import ArenaFullError, ArgumentError, StaleBlockError

if TYPE_CHECKING:
    import socket

    import torch

GRANULE_BYTES = 4096
"""Blocks start and end at multiples of a page."""


class BlockRef(NamedTuple):
    """Names a block to any process: two integers that fit into a message."""

    block: int
    """Index of the block's line."""
    generation: int
    """Odd. Changes when the block is freed, so that an old reference is recognised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStats:
    """Where an arena's bytes are. Bytes are of whole size classes."""

    total_bytes: int
    live_bytes: int
    """Allocated and not freed."""
    retired_bytes: int
    """Freed, and not yet usable: pinned by a reader, or not looked at since."""
    free_bytes: int
    largest_free_bytes: int
    num_live: int
    num_retired: int


class FreeExtents:
    """Best fit over free extents that merge with their neighbours. Pure bookkeeping: offsets in, offsets out."""

    def __init__(self, nbytes: int) -> None:
        self._by_start: dict[int, int] = {}
        self._by_stop: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self.free_bytes = 0
        if nbytes:
            self.give(0, nbytes)

    @property
    def largest(self) -> int:
        """Bytes of the largest extent."""
        return self._by_size[-1][0] if self._by_size else 0

    def extents(self) -> list[tuple[int, int]]:
        """Return (offset, bytes) of every free extent."""
        return list(self._by_start.items())

    def take(self, nbytes: int) -> int | None:
        """Return the offset of ``nbytes`` out of the smallest extent that has them, or None."""
        at = bisect.bisect_left(self._by_size, (nbytes, -1))
        if at == len(self._by_size):
            return None
        size, start = self._by_size[at]
        self._remove(start, size)
        if size > nbytes:
            self._insert(start + nbytes, size - nbytes)
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Take an extent back and merge it with the free ones beside it."""
        if (size := self._by_start.get(start + nbytes)) is not None:
            self._remove(start + nbytes, size)
            nbytes += size
        if (left := self._by_stop.get(start)) is not None:
            size = self._by_start[left]
            self._remove(left, size)
            start, nbytes = left, nbytes + size
        self._insert(start, nbytes)

    def _insert(self, start: int, size: int) -> None:
        self._by_start[start] = size
        self._by_stop[start + size] = start
        bisect.insort(self._by_size, (size, start))
        self.free_bytes += size

    def _remove(self, start: int, size: int) -> None:
        del self._by_start[start]
        del self._by_stop[start + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, start))]
        self.free_bytes -= size


def size_class(nbytes: int) -> int:
    """Round up to a size class: whole pages, and at most one eighth above what was asked."""
    pages = max(1, -(-nbytes // GRANULE_BYTES))
    step = 1 << max(0, pages.bit_length() - 4)
    return -(-pages // step) * step * GRANULE_BYTES


class Arena:
    """The owner's end. One process; not safe to call from several threads at once (views may be dropped by any)."""

    def __init__(self, nbytes: int, *, max_blocks: int = 16384, name: str = "rl-arena", prefault: bool = True) -> None:
        """Reserve ``nbytes`` of shared memory for up to ``max_blocks`` blocks. ``OSError`` if the machine has less."""
        if nbytes < 1 or max_blocks < 1:
            raise ArgumentError(
                f"nbytes={nbytes}, max_blocks={max_blocks}: an arena has at least one byte and one block"
            )
        self._native = _cpu.ArenaMapping(name, nbytes, max_blocks, prefault)
        self._extents = FreeExtents(self._native.nbytes)
        self._free_blocks = list(range(max_blocks - 1, -1, -1))
        self._live: dict[int, tuple[int, int, int]] = {}  # block -> generation, offset, bytes
        self._retired: dict[int, tuple[int, int]] = {}  # block -> offset, bytes

    @property
    def fd(self) -> int:
        """The memfd. Stays owned by this object."""
        return self._native.fd

    def share(self, connection: socket.socket) -> None:
        """Send the arena's descriptor over a UNIX socket (``ArenaClient.receive`` is the other end)."""
        send_fd(connection, self.fd)

    def alloc(self, nbytes: int) -> BlockRef:
        """Allocate a block of ``nbytes``, with old content. ``ArenaFullError`` if ``reclaim`` makes no room either."""
        size = size_class(nbytes)
        offset = self._extents.take(size) if self._free_blocks else None
        if offset is None:
            self.reclaim()
            offset = self._extents.take(size) if self._free_blocks else None
        if offset is None:
            raise ArenaFullError(
                f"no {size} bytes for a block of {nbytes}: {self.stats()}. Free blocks, or drop the views that pin them"
            )
        block = self._free_blocks.pop()
        generation = self._native.open(block, offset, nbytes)
        self._live[block] = (generation, offset, size)
        return BlockRef(block, generation)

    def free(self, ref: BlockRef) -> None:
        """End a block's life. Existing views stay valid; its memory is used again once the last of them is gone."""
        live = self._live.get(ref.block)
        if live is None or live[0] != ref.generation:
            raise StaleBlockError(f"{ref} was freed before: free a block once")
        del self._live[ref.block]
        self._native.retire(ref.block)
        self._retired[ref.block] = live[1:]
        if not self._native.pins(ref.block):
            self._reuse(ref.block)

    def reclaim(self) -> int:
        """Drop the pins of processes that died, and take back what nobody pins any more. Returns the bytes regained."""
        self._native.drop_dead_clients()
        before = self._extents.free_bytes
        for block in [block for block in self._retired if not self._native.pins(block)]:
            self._reuse(block)
        return self._extents.free_bytes - before

    def view(self, ref: BlockRef) -> torch.Tensor:
        """Return a block's memory, uint8 [nbytes], and pin it until the last tensor over it is gone."""
        return _view(self._native, ref)

    def trim(self) -> int:
        """Give the pages of free extents back to the machine (their next use faults again). Returns the bytes given."""
        for start, size in self._extents.extents():
            self._native.discard(start, size)
        return self._extents.free_bytes

    def stats(self) -> ArenaStats:
        """Return where the bytes are."""
        return ArenaStats(
            total_bytes=self._native.nbytes,
            live_bytes=sum(size for _, _, size in self._live.values()),
            retired_bytes=sum(size for _, size in self._retired.values()),
            free_bytes=self._extents.free_bytes,
            largest_free_bytes=self._extents.largest,
            num_live=len(self._live),
            num_retired=len(self._retired),
        )

    def _reuse(self, block: int) -> None:
        self._extents.give(*self._retired.pop(block))
        self._free_blocks.append(block)


class ArenaClient:
    """Another process's end: it views blocks by reference, without a message to the owner."""

    def __init__(self, fd: int, *, prefault: bool = True) -> None:
        """Attach to the arena behind a descriptor (duplicated). ``ArgumentError`` if it holds none or is full."""
        try:
            self._native = _cpu.ArenaMapping(fd, prefault)
        except (ValueError, RuntimeError) as error:
            raise ArgumentError(f"descriptor {fd} cannot be attached as an arena: {error}") from error

    @classmethod
    def receive(cls, connection: socket.socket, *, timeout_s: float, prefault: bool = True) -> Self:
        """Take the descriptor that ``Arena.share`` sends, and attach."""
        with receive_fd(connection, timeout_s=timeout_s) as fd:
            return cls(fd, prefault=prefault)

    def view(self, ref: BlockRef) -> torch.Tensor:
        """Return a block's memory, uint8 [nbytes], writable, and pin it until the last tensor over it is gone.

        Raises ``StaleBlockError`` if the block was freed since the reference was made.
        """
        return _view(self._native, ref)


def _view(native: _cpu.ArenaMapping, ref: BlockRef) -> torch.Tensor:
    tensor = native.view(ref.block, ref.generation)
    if tensor is None:
        raise StaleBlockError(
            f"{ref} is not live: it was freed since the reference was made; ask its owner for a new one"
        )
    return tensor
