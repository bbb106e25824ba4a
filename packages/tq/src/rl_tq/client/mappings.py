"""The shared memory that a client reads: segments whose descriptors it was sent, mapped when something in them is.

The server frees a segment once no row refers to it, and has it used again once every reader released it: which a reader
does when none of its tensors shares the memory any more, and no answer that names it is still to be opened.
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
    """One segment."""

    def __init__(self, segment: SharedMemory, *, is_packed: bool) -> None:
        self._segment = segment
        self._is_packed = is_packed
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None
        self._extents: dict[int, ExtentView] = {}
        self._num_pins = 0
        self._num_mapped = 0
        self._unmapped: list[None] = []
        """One item per mapping that ended: appending is all that may be done in the thread that drops a tensor."""

    def pin(self) -> None:
        """An answer that names this segment arrived: it will be opened."""
        with self._lock:
            self._num_pins += 1

    def unpin(self) -> None:
        """It was opened, or whoever asked is gone."""
        with self._lock:
            self._num_pins -= 1

    def open(self, extent: int, offset: int, nbytes: int, *, is_copied: bool) -> ExtentView:
        """An extent in it.

        Small ones, and those that are copied anyway, share a mapping that stays. A large one is mapped for this call
        alone, so that views of it may be given away: nobody else sees writes to them, and they stay valid after a
        clear.
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
        """The server freed it: no other answer will name it."""
        with self._lock:
            self._memory = None
            self._extents = {}

    @property
    def is_looked_at(self) -> bool:
        """Whether a tensor of this process still shares its memory, or is about to."""
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
    """Segments that stay where they are until `release`: whatever the server frees meanwhile is not used again."""

    __slots__ = ("_segments",)

    def __init__(self, segments: dict[int, MappedSegment | None]) -> None:
        self._segments = segments
        for readable in segments.values():
            if readable is not None:
                readable.pin()

    def open(self, segment: int, extent: int, offset: int, nbytes: int, *, is_copied: bool) -> ExtentView:
        """An extent in one of them.

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
        """What was to be opened is. Call it once."""
        for readable in self._segments.values():
            if readable is not None:
                readable.unpin()


NO_PIN = Pin({})


class MappedSegments:
    """All segments that a client knows, by the server's number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, MappedSegment | None] = {}
        self.freed: dict[int, MappedSegment | None] = {}
        """Those that the server freed, until `take_released` told of them."""

    def add(self, number: int, segment: SharedMemory | None, *, is_packed: bool) -> None:
        """The server sent a segment; None: its descriptor got lost."""
        self._known[number] = None if segment is None else MappedSegment(segment, is_packed=is_packed)

    def free(self, numbers: Iterable[int]) -> None:
        """The server freed segments."""
        with self._lock:
            for number in numbers:
                readable = self.freed[number] = self._known.pop(number)
                if readable is not None:
                    readable.let_go()

    def pin(self, numbers: Iterable[int]) -> Pin | None:
        """Segments by number; None if one of them is not known (any more)."""
        with self._lock:
            segments: dict[int, MappedSegment | None] = {}
            for number in numbers:
                if number not in self._known:
                    return None
                segments[number] = self._known[number]
            return Pin(segments)

    def take_released(self) -> list[int]:
        """Freed segments that are not looked at any more, each told once."""
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
