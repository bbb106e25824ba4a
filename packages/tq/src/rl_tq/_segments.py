"""Anonymous shared memory: files in memory (memfd) that live as long as somebody holds a descriptor or a mapping.

Nothing has a name, so nothing is left behind, however a process ends.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

SEGMENT_BYTES = 64 << 20
"""Size of the segments that small extents share. Only what is written takes memory."""
PACKED_BYTES = 4 << 20
"""An extent of at most this many bytes shares a segment; a larger one has its own."""

_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # no more seals, no shrinking, no growing: a mapping can never run past the end


class Segment:
    """One memfd. Its descriptor is closed when the last user lets go of this object; mappings outlive it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """New memory of a fixed size, all zeros, none of it touched yet."""
        segment_fd = os.memfd_create("rl-tq", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(segment_fd, nbytes)
            fcntl.fcntl(segment_fd, _F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(segment_fd)
            raise
        return cls(segment_fd)

    def map(self, *, is_shared: bool) -> torch.Tensor:
        """The whole segment as uint8 [nbytes]. Writes reach everybody if it is shared, else nobody (copy on write)."""
        path = f"/proc/self/fd/{self.fd}"
        return torch.from_file(path, shared=is_shared, size=self.nbytes, dtype=torch.uint8)


class Block(NamedTuple):
    """Memory for one extent."""

    segment: int
    """Number of its segment, among those of one arena."""
    offset: int
    """Where it starts in that segment; a multiple of 64."""
    memory: torch.Tensor
    """uint8 [nbytes], shared."""
    is_alone: bool
    """Whether nothing else will ever be in the segment."""


class Arena:
    """Where a client gets memory for its extents: small ones one after the other in a common segment, large ones alone.

    Thread-safe. `announce(number, segment, is_packed)` is called for every segment before any memory of it is given
    out, and `seal(number)` when no more will be; who asked for a block that is alone seals it himself.
    """

    def __init__(self, announce: Callable[[int, Segment, bool], None], seal: Callable[[int], None]) -> None:
        self._announce = announce
        self._seal = seal
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._number = 0
        self._memory: torch.Tensor | None = None
        self._cursor = 0

    def allocate(self, nbytes: int) -> Block:
        """Memory of `nbytes`."""
        with self._lock:
            if nbytes > PACKED_BYTES:
                number, memory = self._open(nbytes, is_packed=False)
                return Block(number, 0, memory, is_alone=True)
            if self._memory is None or self._cursor + nbytes > len(self._memory):
                if self._memory is not None:
                    self._seal(self._number)
                self._number, self._memory = self._open(SEGMENT_BYTES, is_packed=True)
                self._cursor = 0
            start = self._cursor
            self._cursor += nbytes + -nbytes % 64
            return Block(self._number, start, self._memory[start : start + nbytes], is_alone=False)

    def close(self) -> None:
        """Let go of the common segment. Blocks that were given stay valid."""
        with self._lock:
            self._memory = None

    def _open(self, nbytes: int, *, is_packed: bool) -> tuple[int, torch.Tensor]:
        segment = Segment.create(nbytes)
        number = next(self._numbers)
        self._announce(number, segment, is_packed)
        return number, segment.map(is_shared=True)
