"""Shared-memory segments that a client reads: descriptors received from the server, mapped on first use.

The server frees a segment once no row refers to it, and reuses it once every reader has released it. A reader releases
it when none of its tensors shares the memory any more and no pending reply names it.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from rl_tq.columns.extent import ExtentView
from rl_tq.errors import TransferQueueError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from rl_csrc.ipc import SharedMemory


class MappedSegment:
    """Segment that this client can map."""

    def __init__(self, segment: SharedMemory, *, is_packed: bool) -> None:
        self._segment = segment
        self._is_packed = is_packed
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None
        self._extents: dict[int, ExtentView] = {}
        self._num_pins = 0
        self._num_mapped = 0
        self._unmapped: list[None] = []
        """One item per mapping that ended. The thread that destroys a tensor may only append to it."""

    def pin(self) -> None:
        """Count a received reply that names this segment and is not opened yet."""
        with self._lock:
            self._num_pins += 1

    def unpin(self) -> None:
        """Undo `pin`: the reply was opened or dropped."""
        with self._lock:
            self._num_pins -= 1

    def open(self, extent: int, offset: int, nbytes: int, *, is_copied: bool) -> ExtentView:
        """Open an extent of this segment.

        Small extents, and those that are copied out, share one lasting mapping. A large one gets a private mapping of
        its own, so that views of it can be returned to the caller: nobody else sees writes to them, and they stay valid
        after a clear.
        """
        with self._lock:
            if not self._is_packed and not is_copied:
                return ExtentView(memory=self._map(is_shared=False)[:nbytes], is_private=True)
            if self._memory is None:
                self._memory = self._map(is_shared=True)
            if extent not in self._extents:
                self._extents[extent] = ExtentView(memory=self._memory[offset : offset + nbytes], is_private=False)
            return self._extents[extent]

    def let_go(self) -> None:
        """Drop the shared mapping: the server freed the segment, and no later reply names it."""
        with self._lock:
            self._memory = None
            self._extents = {}

    @property
    def is_looked_at(self) -> bool:
        """Whether a tensor of this process shares its memory, or a pending reply names it."""
        with self._lock:
            if self._num_pins:
                return True
            self._memory, self._extents = None, {}
            return len(self._unmapped) < self._num_mapped

    def _map(self, *, is_shared: bool) -> torch.Tensor:
        self._num_mapped += 1
        unmapped = self._unmapped
        return self._segment.map(is_shared=is_shared, when_gone=lambda: unmapped.append(None))


class Pin:
    """Pinned segments: until `release`, the server does not reuse them, even if it frees them."""

    __slots__ = ("_segments",)

    def __init__(self, segments: dict[int, MappedSegment | None]) -> None:
        self._segments = segments
        for readable in segments.values():
            if readable is not None:
                readable.pin()

    def open(self, segment: int, extent: int, offset: int, nbytes: int, *, is_copied: bool) -> ExtentView:
        """Open an extent in one of the pinned segments.

        Raises:
            TransferQueueError: its descriptor could not be received.
        """
        readable = self._segments[segment]
        if readable is None:
            raise TransferQueueError(
                f"process {os.getpid()} could not receive a segment of its queue: it has no file descriptor left; "
                "raise `ulimit -n`"
            )
        return readable.open(extent, offset, nbytes, is_copied=is_copied)

    def release(self) -> None:
        """Unpin the segments. Call it once."""
        for readable in self._segments.values():
            if readable is not None:
                readable.unpin()


NO_PIN = Pin({})


class MappedSegments:
    """Segments known to a client, by the server's number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, MappedSegment | None] = {}
        self.freed: dict[int, MappedSegment | None] = {}
        """Segments that the server freed and `take_released` has not returned yet."""

    def add(self, number: int, segment: SharedMemory | None, *, is_packed: bool) -> None:
        """Add a segment that the server sent; None: its descriptor was lost."""
        self._known[number] = None if segment is None else MappedSegment(segment, is_packed=is_packed)

    def free(self, numbers: Iterable[int]) -> None:
        """Note that the server freed segments."""
        with self._lock:
            for number in numbers:
                readable = self.freed[number] = self._known.pop(number)
                if readable is not None:
                    readable.let_go()

    def pin(self, numbers: Iterable[int]) -> Pin | None:
        """Pin segments by number; None if one of them is not known (any more)."""
        with self._lock:
            segments: dict[int, MappedSegment | None] = {}
            for number in numbers:
                if number not in self._known:
                    return None
                segments[number] = self._known[number]
            return Pin(segments)

    def take_released(self) -> list[int]:
        """Numbers of freed segments that nothing in this process uses any more; each is returned once."""
        with self._lock:
            done = [n for n, readable in self.freed.items() if readable is None or not readable.is_looked_at]
            for number in done:
                del self.freed[number]
        return done

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._known.clear()
            self.freed.clear()
