"""Arena: allocator of shared memory for a client's extents, in anonymous segments or files that are reused.

Anonymous memory exists while a process holds a descriptor or mapping, so nothing is left behind, however processes end.
The first touch of a page costs many times a later one, which is why segments are reused.

Files belong to a queue that outlives its processes (`file`). A server that reopens it removes the files that its
journal does not name: those whose put was not complete when its process died.
"""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_csrc import ipc
from rl_csrc.ipc import SharedMemory
from rl_tq.errors import QueueFullError
from rl_tq.memory.pool import RESERVE_BYTES, RESERVE_S, Reserve, size_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import numpy as np

SEGMENT_BYTES = 64 << 20
"""Size of segments shared by small extents. Only written pages take memory."""
PACKED_BYTES = 4 << 20
"""An extent of at most this many bytes shares a segment; a larger one has its own."""
_BACKED_AT_ONCE = 16 << 10
"""Granularity in which pages are allocated, so that not every small put needs a system call."""


def create_segment(directory: Path | None, nbytes: int) -> tuple[SharedMemory, str | None]:
    """New segment of `nbytes`, and its file name in the queue's directory; None: anonymous memory."""
    if directory is None:
        return SharedMemory.create(nbytes, name="rl-tq"), None
    name = f"{uuid.uuid4().hex}.segment"
    return SharedMemory.create_file(directory / name, nbytes), name


class Block(NamedTuple):
    """Block of an arena: memory for one extent."""

    segment: int
    """Number of its segment in the arena."""
    offset: int
    """Offset in the segment, bytes; a multiple of 64."""
    memory: np.ndarray[Any, Any]
    """uint8 [nbytes], shared. A numpy array, because slicing one takes a tenth of the time of slicing a tensor."""
    is_alone: bool
    """Whether it is the only block of its segment."""


@dataclass(slots=True, eq=False)
class _Segment:
    memory: np.ndarray[Any, Any]
    address: int
    """Address of the memory; cached, because numpy takes microseconds to give it."""
    backed: int = 0
    """Bytes from its start whose pages are allocated."""
    cursor: int = 0
    """Bytes of a shared segment that are allocated."""
    num_unsettled: int = 0
    """Blocks of a shared segment that are allocated and not settled; it is sealed only after that."""
    is_left: bool = False
    """Whether nothing more is allocated from it."""


class Arena:
    """Allocator of a client's extents: small ones share a segment, large ones get their own. Thread-safe.

    Calls `announce(number, segment, is_packed, file)` for every segment before allocating from it, `seal(number)` once
    nothing more is allocated from it (the caller seals a block that is alone), and `retire(number)` when the arena
    drops it. `reuse` returns a segment that has no readers any more.
    """

    def __init__(
        self,
        announce: Callable[[int, SharedMemory, bool, str | None], None],
        seal: Callable[[int], None],
        retire: Callable[[int], None],
        directory: Path | None = None,
    ) -> None:
        """`directory`: the queue's directory of segment files; None: anonymous memory."""
        self._announce, self._seal, self._retire = announce, seal, retire
        self._directory = directory
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._segments: dict[int, _Segment] = {}
        self._current = 0
        """Number of the shared segment being filled; 0: none."""
        self._spare: Reserve[int] = Reserve()
        """Segments without readers."""

    def allocate(self, nbytes: int) -> Block:
        """Allocate a block of `nbytes`. Call `settle` once it is put.

        Raises:
            QueueFullError: there is no memory left.
        """
        with self._lock:
            if nbytes > PACKED_BYTES:
                number = self._open(size_class(nbytes), is_packed=False)
                try:
                    self._back(number, nbytes)
                except QueueFullError:
                    self._seal(number)
                    self._drop([number])  # it took the room that was left
                    raise
                return Block(number, 0, self._segments[number].memory[:nbytes], is_alone=True)
            number = self._current
            if not number or self._segments[number].cursor + nbytes > SEGMENT_BYTES:
                self._leave(number)
                number = self._current = self._open(SEGMENT_BYTES, is_packed=True)
            segment = self._segments[number]
            start = segment.cursor
            try:
                self._back(number, start + nbytes)
            except QueueFullError:  # sealed, so that its memory can be reused once its extents are cleared
                self._leave(number)
                if not start:
                    self._drop([number])
                raise
            segment.cursor += nbytes + -nbytes % 64
            segment.num_unsettled += 1
            return Block(number, start, segment.memory[start : start + nbytes], is_alone=False)

    def settle(self, block: Block) -> None:
        """Note that a block was put, or will not be. Call it once per block."""
        with self._lock:
            segment = self._segments.get(block.segment)
            if segment is not None and not block.is_alone:
                segment.num_unsettled -= 1
                if segment.is_left and not segment.num_unsettled:
                    self._seal(block.segment)

    def leave(self, number: int) -> None:
        """Stop allocating from a shared segment."""
        with self._lock:
            if number == self._current:
                self._leave(number)

    def reuse(self, number: int) -> None:
        """Keep a segment that has no readers any more for the next put."""
        with self._lock:
            if number in self._segments:
                self._spare.add(number, len(self._segments[number].memory), time.monotonic())
        self.trim(RESERVE_S)

    def trim(self, age_s: float) -> None:
        """Drop spare segments that were unused for `age_s`, and the oldest beyond the reserve's limit."""
        with self._lock:
            self._drop(self._spare.trim(age_s, RESERVE_BYTES))

    @property
    def has_spare(self) -> bool:
        """Whether there are spare segments."""
        return bool(self._spare)

    def close(self) -> None:
        """Drop all segments. Allocated blocks stay valid."""
        with self._lock:
            self._segments.clear()
            self._spare = Reserve()
            self._current = 0

    def _drop(self, numbers: Iterable[int]) -> None:
        """Free empty segments that are sealed."""
        for number in numbers:
            del self._segments[number]
            self._retire(number)

    def _leave(self, number: int) -> None:
        """Stop allocating from a shared segment; it is sealed once all of its blocks are settled.

        The server reuses a sealed segment as soon as all of its extents are cleared.
        """
        if not number:
            return
        segment = self._segments[number]
        self._current = 0
        segment.is_left = True
        if not segment.num_unsettled:
            self._seal(number)

    def _back(self, number: int, stop: int) -> None:
        """Allocate the pages of a segment up to `stop`."""
        segment = self._segments[number]
        start = segment.backed
        if stop > start:
            stop = min(len(segment.memory), stop + -stop % _BACKED_AT_ONCE)
            try:  # a page that a full file system cannot give would be a SIGBUS later
                ipc.populate(segment.address + start, stop - start)
            except OSError as error:
                where = (
                    "this host's shared memory" if self._directory is None else f"the file system of {self._directory}"
                )
                raise QueueFullError(
                    f"{where} has no room for {stop - start} bytes more: clear rows, make it larger, or bound the "
                    "partitions by max_bytes, so that a put waits"
                ) from error
            segment.backed = stop

    def _open(self, nbytes: int, *, is_packed: bool) -> int:
        spare = self._spare.take(nbytes)
        if spare is not None:
            self._segments[spare].cursor, self._segments[spare].is_left = 0, False
            return spare
        shared, name = create_segment(self._directory, nbytes)
        number = next(self._numbers)
        memory = shared.map(is_shared=True)
        self._segments[number] = _Segment(memory.numpy(), memory.data_ptr())
        try:
            self._announce(number, shared, is_packed, name)
        except BaseException:
            del self._segments[number]
            raise
        return number
