"""Extent memory of a host: private to the serving process, or shared with the processes of its machine."""

from __future__ import annotations

import contextlib
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rl_tq.client.mappings import MappedSegments
from rl_tq.columns.extent import ExtentView
from rl_tq.memory.arena import Arena, Block
from rl_tq.memory.pool import RESERVE_S
from rl_tq.server.segment_table import Client, SegmentTable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from rl_csrc.ipc import SharedMemory
    from rl_tq.columns.extent import Layout
    from rl_tq.durability import Snapshot
    from rl_tq.metadata.state import State
    from rl_tq.protocol.service import Message

Turn: TypeAlias = "Callable[[], AbstractContextManager[None]]"


class HeapMemory:
    """Extents in private memory of this process, one block each; lost when it ends.

    As in `SegmentMemory`, the host's lock is held at every call except `take`, `write`, `settle` and `catch_up`.
    """

    where = None
    """None: clients cannot read extents without a request."""
    has_segments = False
    """Whether several extents share a segment that is freed as a whole."""

    def __init__(self, *, is_compacted: bool = True) -> None:
        """`is_compacted`: extents are tensors, which compaction may copy when most of their rows are cleared."""
        self.extents: dict[int, ExtentView] = {}
        self.freed: Mapping[int, Any] = {}
        """Freed segments that `tidy` releases once they have no readers."""
        self._is_compacted = is_compacted
        self.place: Callable[[torch.Tensor], Any] | None = None
        """Converts an extent of a snapshot to what is stored instead; None: the tensor itself."""
        self._numbers = count(1)
        self._live: dict[int, int] = {}
        self._aliased: set[int] = set()
        """Extents whose memory has an alias, so that compaction cannot free it."""

    def begin(self, turn: Turn, wake: Callable[[], None]) -> None:
        """Attach to the host: `turn` takes its lock; `wake` has `catch_up` called soon."""

    def take(self, values: Any) -> Any:
        """Store the values of a put, uint8 [n].

        Raises:
            QueueFullError: out of memory.
        """
        return values

    def write(self, layout: Layout) -> Any:
        """Write and store an extent given by its layout."""
        memory = torch.empty(layout.nbytes, dtype=torch.uint8)
        layout.write(memory)
        return self.take(memory)

    def settle(self, taken: Any) -> None:
        """Note that a result of `take` or `write` was entered, or will not be. Call it once."""

    def enter(self, taken: Any) -> int:
        """Number a new extent."""
        number = next(self._numbers)
        self.extents[number] = ExtentView(memory=taken, is_private=False)
        return number

    def alias(self, extent: int) -> int:
        """Alias: second number for an extent's memory, which is freed with the last of them."""
        number = next(self._numbers)
        self.extents[number] = self.extents[extent]
        self._aliased.add(extent)
        return number

    def open(self, extents: Iterable[int]) -> dict[int, ExtentView]:
        """Open extents by number; they stay readable whatever is freed."""
        return {number: self.extents[number] for number in extents}

    def change(self, extent: int) -> None:
        """Note that rows of an extent were cleared or moved."""

    def free(self, extents: Iterable[int]) -> None:
        """Free extents without rows."""
        for extent in extents:
            del self.extents[extent]
            self._live.pop(extent, None)
            self._aliased.discard(extent)

    def tidy(self) -> None:
        """Release freed segments that have no readers any more."""

    def catch_up(self) -> float | None:
        """Trim memory cached for puts; returns seconds until the next trim, or None. Call it without the lock."""
        return None

    def segment_of(self, extent: int) -> int:
        """Segment of an extent: the unit of freeing."""
        return extent

    def shrink(self, extent: int, live_nbytes: int) -> None:
        """Set the live bytes of an extent."""
        self._live[extent] = live_nbytes

    def usage(self, segment: int) -> tuple[Collection[int], int, int]:
        """Extents of a segment, the oldest first, its live bytes and all bytes; no extents: not to be compacted."""
        if not self._is_compacted or segment not in self.extents or segment in self._aliased:
            return (), 0, 0
        return (segment,), self._live[segment], len(self.extents[segment].memory)

    def ask_to_seal(self, segment: int) -> None:
        """Ask for a segment to be sealed: nothing more is put into it."""

    def counts(self) -> Message:
        """Memory statistics, for `stats`."""
        return {}

    def restore(self, state: State, snapshot: Snapshot) -> None:
        """Restore the extents of a state from a snapshot."""
        known: dict[tuple[str, int], ExtentView] = {}
        for number in state.extents:
            where = snapshot.where(number)
            if where not in known:
                values = snapshot.extent(number)
                taken = self.place(values) if self.place else values
                known[where] = ExtentView(memory=taken, is_private=False)
            self.extents[number] = known[where]
        self._numbers = count(max(snapshot.places, default=0) + 1)

    def close(self) -> None:
        """Free everything."""
        self.extents.clear()


class SegmentMemory(SegmentTable):
    """Extents in shared-memory segments; this process is a client of its own segment table."""

    has_segments = True

    def __init__(self, directory: Path | None) -> None:
        """`directory`: for segment files, which outlive every process; None: anonymous memory."""
        super().__init__(self._send_here, directory)
        self.send_to_client: Callable[[Any, Message, SharedMemory | None], None] = _ignore_message
        """Sends a message to a client of another process, with the descriptor of a segment."""
        self._here = Client()
        self._mapped = MappedSegments()
        self.freed = self._mapped.freed
        self._reusable: deque[int] = deque()
        self._to_seal: deque[int] = deque()
        self._arena = Arena(self._announce, self._seal, self._retire, directory)

    def begin(self, turn: Turn, wake: Callable[[], None]) -> None:
        """See `HeapMemory`."""
        self._turn, self._wake = turn, wake

    def take(self, values: torch.Tensor) -> Block:
        """See `HeapMemory`."""
        block = self._allocate(len(values))
        block.memory[:] = values.numpy()
        return block

    def write(self, layout: Layout) -> Block:
        """See `HeapMemory`."""
        block = self._allocate(layout.nbytes)
        layout.write(block.memory)
        return block

    def settle(self, taken: Block) -> None:
        """See `HeapMemory`."""
        self._arena.settle(taken)

    def enter(self, taken: Block) -> int:
        """See `HeapMemory`."""
        return self.add(self._here, taken.segment, taken.offset, len(taken.memory), is_last=taken.is_alone)

    def open(self, extents: Iterable[int]) -> dict[int, ExtentView]:
        """See `HeapMemory`."""
        places = self.announce(self._here, extents)
        pin = self._mapped.pin({segment for _, segment, _, _ in places})
        assert pin is not None
        try:
            return {
                extent: pin.open(segment, extent, offset, nbytes, is_copied=True)
                for extent, segment, offset, nbytes in places
            }
        finally:
            pin.release()

    def change(self, extent: int) -> None:
        """See `HeapMemory`."""
        self.generations.change(extent)

    def tidy(self) -> None:
        """See `HeapMemory`."""
        self.release(self._here, self._mapped.take_released())

    def catch_up(self) -> float | None:
        """See `HeapMemory`."""
        for numbers, work in ((self._to_seal, self._arena.leave), (self._reusable, self._arena.reuse)):
            with contextlib.suppress(IndexError):  # another thread does the same
                while numbers:
                    work(numbers.popleft())
        if not self._arena.has_spare:
            return None
        self._arena.trim(RESERVE_S)
        return RESERVE_S / 4

    def close(self) -> None:
        """See `HeapMemory`."""
        self._arena.close()
        self._mapped.clear()
        super().close()

    def _allocate(self, nbytes: int) -> Block:
        self.catch_up()
        return self._arena.allocate(nbytes)

    def _announce(self, number: int, segment: SharedMemory, is_packed: bool, file: str | None) -> None:
        with self._turn():
            self.admit(self._here, number, segment, is_packed=is_packed, file=file)

    def _seal(self, number: int) -> None:
        with self._turn():
            self.seal(self._here, number)

    def _retire(self, number: int) -> None:
        with self._turn():
            self.retire(self._here, number)

    def _send_here(self, client: Any, message: Message, segment: SharedMemory | None) -> None:
        """Send a message to a client; handle it here if the client is this process."""
        if client is not self._here:
            self.send_to_client(client, message, segment)
            return
        match message["op"]:
            case "segment":
                self._mapped.add(message["segment"], segment, is_packed=message["is_packed"])
            case "freed":
                self._mapped.free(message["segments"])
            case "reuse":
                self._reusable.append(message["segment"])
                self._wake()
            case _:
                self._to_seal.append(message["segment"])
                self._wake()


def _ignore_message(*_: object) -> None:
    """Callback before there is a front."""


ExtentMemory: TypeAlias = HeapMemory | SegmentMemory
"""Memory of a host's extents."""
