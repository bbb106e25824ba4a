"""Shared memory in pieces of fixed size: anonymous (memfd), or files of a directory that outlive every process.

Anonymous memory lives as long as somebody holds a descriptor or a mapping, so nothing is left behind, however a process
ends. The first touch of a page costs many times a later one: pieces are used again where they are.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import time
import uuid
import weakref
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rl_tq._backing import back
from rl_tq._warm import size_class
from rl_tq.errors import QueueFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SEGMENT_BYTES = 64 << 20
"""Size of the segments that small extents share. Only what is written takes memory."""
PACKED_BYTES = 4 << 20
"""An extent of at most this many bytes shares a segment; a larger one has its own."""
_BACKED_AT_ONCE = 16 << 10
"""The kernel is asked for memory in multiples of this: small puts need not ask each."""
RESERVE_BYTES = 2 << 30
"""Freed segments that a client keeps for its next puts, at most."""
RESERVE_S = 10.0
"""How long it keeps one that it does not use."""

# The mmap of Python (before 3.13) keeps a descriptor per mapping, of which a process has few.
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value

_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # no more seals, no shrinking, no growing: a mapping can never run past the end


class Segment:
    """One memfd or file. Its descriptor is closed when the last user lets go of this object; mappings outlive it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, nbytes: int, path: Path | None = None) -> Segment:
        """New memory of a fixed size, all zeros, none of it touched yet; a file if there is a path."""
        if path is None:
            segment_fd = os.memfd_create("rl-tq", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            segment_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(segment_fd, nbytes)
            if path is None:
                fcntl.fcntl(segment_fd, _F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(segment_fd)
            raise
        return cls(segment_fd)

    @property
    def resident_nbytes(self) -> int:
        """Memory (or disk) that it takes: what was written of it, in whole pages."""
        return 512 * os.fstat(self.fd).st_blocks

    def map(self, *, is_shared: bool, when_gone: Callable[[], None] | None = None) -> torch.Tensor:
        """The whole segment as uint8 [nbytes]. Writes reach everybody if it is shared, else nobody (copy on write).

        `when_gone` is called, in whatever thread, once no tensor looks at this mapping any more.
        """
        flags = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE
        address = _LIBC.mmap(None, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, self.fd, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"mapping {self.nbytes} bytes of shared memory failed: {os.strerror(number)}")
        _MAPPED[address] = None
        mapping = (ctypes.c_uint8 * self.nbytes).from_address(address)
        weakref.finalize(mapping, _unmap, address, self.nbytes, when_gone).atexit = False
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def close(self) -> None:
        """Close the descriptor now."""
        self._close()


_MAPPED: dict[int, Callable[[], object] | None] = {}
"""Address of each mapping to what is to be done before it ends."""


def before_unmap(address: int, work: Callable[[], object] | None) -> bool:
    """Have something done before the mapping at an address ends; whether there is one."""
    if address not in _MAPPED:
        return False
    _MAPPED[address] = work
    return True


def _unmap(address: int, nbytes: int, when_gone: Callable[[], None] | None) -> None:
    work = _MAPPED.pop(address)
    if work is not None:
        work()
    _LIBC.munmap(address, nbytes)
    if when_gone is not None:
        when_gone()


class Source(NamedTuple):
    """Where an arena's segments come from."""

    create: Callable[[int], tuple[Segment, str | None]]
    """A segment of so many bytes, and the file that the server is to name it by, if it outlives its processes."""
    where: str
    """In words."""


def _memory(nbytes: int) -> tuple[Segment, None]:
    return Segment.create(nbytes), None


MEMORY = Source(_memory, "this host's shared memory")


def files_of(directory: Path) -> Source:
    """Files of a queue's own directory."""

    def create(nbytes: int) -> tuple[Segment, str]:
        name = f"{uuid.uuid4().hex}.segment"
        return Segment.create(nbytes, directory / name), name

    return Source(create, f"the file system of {directory}")


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


@dataclass(slots=True)
class _Spare:
    number: int
    since: float


class Arena:
    """Where a client gets memory for its extents: small ones one after the other in a common segment, large ones alone.

    Thread-safe. `announce(number, segment, is_packed, file)` is called for every segment before any memory of it is
    given out, `seal(number)` when no more will be (who asked for a block that is alone seals it himself), and
    `retire(number)` when the arena lets go of it. `reuse` gives a segment back that nobody reads any more.
    """

    def __init__(
        self,
        announce: Callable[[int, Segment, bool, str | None], None],
        seal: Callable[[int], None],
        retire: Callable[[int], None],
        source: Source = MEMORY,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._announce = announce
        self._seal = seal
        self._retire = retire
        self._source = source
        self._lock = threading.Lock()
        self._numbers = count(1) if numbers is None else numbers
        self._current = 0
        self._array = np.empty(0, np.uint8)
        """The memory of the current segment."""
        self._cursor = 0
        self._memory: dict[int, np.ndarray[Any, Any]] = {}
        self._spare: deque[_Spare] = deque()
        self._backed: dict[int, int] = {}
        """Bytes of each segment, from its start, that are there for certain."""

    def allocate(self, nbytes: int) -> Block:
        """Memory of `nbytes`.

        Raises:
            QueueFullError: there is none.
        """
        with self._lock:
            if nbytes > PACKED_BYTES:
                number, memory = self._open(size_class(nbytes), is_packed=False)
                try:
                    self._back(number, nbytes)
                except QueueFullError:
                    self._seal(number)
                    raise
                return Block(number, 0, memory[:nbytes], is_alone=True)
            if not self._current or self._cursor + nbytes > SEGMENT_BYTES:
                if self._current:
                    self._seal(self._current)
                self._current = 0
                self._current, self._array = self._open(SEGMENT_BYTES, is_packed=True)
                self._cursor = 0
            start = self._cursor
            try:
                self._back(self._current, start + nbytes)
            except QueueFullError:  # what is in it may be cleared, and its memory used again, once it is sealed
                self._seal(self._current)
                self._current = 0
                raise
            self._cursor += nbytes + -nbytes % 64
            return Block(self._current, start, self._array[start : start + nbytes], is_alone=False)

    def leave(self, number: int) -> None:
        """Put no more into a common segment."""
        with self._lock:
            if number == self._current:
                self._current = 0
                self._seal(number)

    def reuse(self, number: int) -> None:
        """Nobody looks at a segment any more: keep it for the next put."""
        with self._lock:
            if number in self._memory:
                self._spare.append(_Spare(number, time.monotonic()))
        self.trim(RESERVE_S)

    def trim(self, age_s: float) -> None:
        """Let go of spare segments that were not used for so long, and of those beyond the reserve."""
        with self._lock:
            limit = time.monotonic() - age_s
            held = sum(len(self._memory[spare.number]) for spare in self._spare)
            gone: list[int] = []
            while self._spare and (self._spare[0].since <= limit or held > RESERVE_BYTES):
                spare = self._spare.popleft()
                held -= len(self._memory.pop(spare.number))
                self._backed.pop(spare.number, None)
                gone.append(spare.number)
        for number in gone:
            self._retire(number)

    @property
    def has_spare(self) -> bool:
        """Whether there is anything to trim."""
        return bool(self._spare)

    def close(self) -> None:
        """Let go of everything. Blocks that were given stay valid."""
        with self._lock:
            self._memory.clear()
            self._backed.clear()
            self._spare.clear()
            self._current, self._array = 0, np.empty(0, np.uint8)

    def _back(self, number: int, stop: int) -> None:
        """Have a segment's memory up to `stop` be there."""
        start = self._backed.get(number, 0)
        if stop > start:
            stop = min(len(self._memory[number]), stop + -stop % _BACKED_AT_ONCE)
            back(self._memory[number].ctypes.data, start, stop, self._source.where)
            self._backed[number] = stop

    def _open(self, nbytes: int, *, is_packed: bool) -> tuple[int, np.ndarray[Any, Any]]:
        for spare in reversed(self._spare):
            memory = self._memory[spare.number]
            if len(memory) == nbytes:
                self._spare.remove(spare)
                return spare.number, memory
        segment, name = self._source.create(nbytes)
        number = next(self._numbers)
        memory = self._memory[number] = segment.map(is_shared=True).numpy()
        try:
            self._announce(number, segment, is_packed, name)
        except BaseException:
            del self._memory[number]
            raise
        return number, memory
