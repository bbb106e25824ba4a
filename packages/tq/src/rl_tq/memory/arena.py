"""The arena of a client: shared memory for its extents, anonymous or in files, used again once nobody reads it.

Anonymous memory lives as long as somebody holds a descriptor or a mapping, so nothing is left behind, however a process
ends. The first touch of a page costs many times a later one: segments are used again where they are.

Files are of a queue that outlives its processes (`file`): a server that takes it up removes those that its journal
does not name, which is what a process that died had not put.
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
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np

SEGMENT_BYTES = 64 << 20
"""Size of the segments that small extents share. Only what is written takes memory."""
PACKED_BYTES = 4 << 20
"""An extent of at most this many bytes shares a segment; a larger one has its own."""
_BACKED_AT_ONCE = 16 << 10
"""The kernel is asked for memory in multiples of this: small puts need not ask each."""


def create_segment(directory: Path | None, nbytes: int) -> tuple[SharedMemory, str | None]:
    """A segment of so many bytes, and its file in the queue's own directory; without one, of anonymous memory."""
    if directory is None:
        return SharedMemory.create(nbytes, name="rl-tq"), None
    name = f"{uuid.uuid4().hex}.segment"
    return SharedMemory.create_file(directory / name, nbytes), name


class Block(NamedTuple):
    """Memory for one extent."""

    segment: int
    """Number of its segment, among those of one arena."""
    offset: int
    """Where it starts in that segment; a multiple of 64."""
    memory: np.ndarray[Any, Any]
    """uint8 [nbytes], shared. An array, as cutting a small one off takes a tenth of what it does with a tensor."""
    is_alone: bool
    """Whether nothing else is in the segment."""


@dataclass(slots=True, eq=False)
class _Segment:
    memory: np.ndarray[Any, Any]
    address: int
    """Of the memory: asking numpy each time takes as long as the kernel does."""
    backed: int = 0
    """Bytes from its start that are there for certain."""
    cursor: int = 0
    """Bytes of a common segment that were given out."""
    num_unsettled: int = 0
    """Blocks of a common segment that were given and are not put yet: until then it is not sealed."""
    is_left: bool = False
    """Nothing more is given out of it."""


class Arena:
    """Where a client gets memory for its extents: small ones one after the other in a common segment, large ones alone.

    Thread-safe. `announce(number, segment, is_packed, file)` is called for every segment before any memory of it is
    given out, `seal(number)` when no more will be (a block that is alone is sealed by its caller), and
    `retire(number)` when the arena lets go of it. `reuse` gives a segment back that nobody reads any more.
    """

    def __init__(
        self,
        announce: Callable[[int, SharedMemory, bool, str | None], None],
        seal: Callable[[int], None],
        retire: Callable[[int], None],
        directory: Path | None = None,
    ) -> None:
        """`directory`: of the queue's files; None: its memory is anonymous."""
        self._announce, self._seal, self._retire = announce, seal, retire
        self._directory = directory
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._segments: dict[int, _Segment] = {}
        self._current = 0
        """The common segment that is being filled; 0: none."""
        self._spare: Reserve[int] = Reserve()
        """Segments that nobody reads."""

    def allocate(self, nbytes: int) -> Block:
        """Memory of `nbytes`. `settle` it once it is put.

        Raises:
            QueueFullError: there is none.
        """
        with self._lock:
            if nbytes > PACKED_BYTES:
                number = self._open(size_class(nbytes), is_packed=False)
                try:
                    self._back(number, nbytes)
                except QueueFullError:
                    self._seal(number)
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
            except QueueFullError:  # what is in it may be cleared, and its memory used again, once it is sealed
                self._leave(number)
                raise
            segment.cursor += nbytes + -nbytes % 64
            segment.num_unsettled += 1
            return Block(number, start, segment.memory[start : start + nbytes], is_alone=False)

    def settle(self, block: Block) -> None:
        """A block was put, or is not going to be. Call it once for each."""
        with self._lock:
            segment = self._segments.get(block.segment)
            if segment is not None and not block.is_alone:
                segment.num_unsettled -= 1
                if segment.is_left and not segment.num_unsettled:
                    self._seal(block.segment)

    def leave(self, number: int) -> None:
        """Put no more into a common segment."""
        with self._lock:
            if number == self._current:
                self._leave(number)

    def reuse(self, number: int) -> None:
        """Nobody looks at a segment any more: keep it for the next put."""
        with self._lock:
            if number in self._segments:
                self._spare.add(number, len(self._segments[number].memory), time.monotonic())
        self.trim(RESERVE_S)

    def trim(self, age_s: float) -> None:
        """Let go of spare segments that were not used for so long, and of those beyond the reserve."""
        with self._lock:
            gone = self._spare.trim(age_s, RESERVE_BYTES)
            for number in gone:
                del self._segments[number]
        for number in gone:
            self._retire(number)

    @property
    def has_spare(self) -> bool:
        """Whether there is anything to trim."""
        return bool(self._spare)

    def close(self) -> None:
        """Let go of everything. Blocks that were given stay valid."""
        with self._lock:
            self._segments.clear()
            self._spare = Reserve()
            self._current = 0

    def _leave(self, number: int) -> None:
        """Give nothing more out of a common segment; it is sealed once all that was given is put.

        A server uses a sealed segment again as soon as all that was put into it is cleared.
        """
        if not number:
            return
        segment = self._segments[number]
        self._current = 0
        segment.is_left = True
        if not segment.num_unsettled:
            self._seal(number)

    def _back(self, number: int, stop: int) -> None:
        """Have a segment's memory up to `stop` be there."""
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
