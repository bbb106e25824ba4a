"""The arena of a client: shared memory for its extents, anonymous or in files, used again once nobody reads it.

Anonymous memory lives as long as somebody holds a descriptor or a mapping, so nothing is left behind, however a process
ends. The first touch of a page costs many times a later one: segments are used again where they are.

Partitions that are told to spill have values in files instead. The files of a queue whose processes it does not outlive
lose their name before anything is written. Those of a queue that outlives its processes (`file`) are named after its
directory, and a server that takes it up removes those that its journal does not name: what a process that died had not
put.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl_csrc import ipc
from rl_csrc.ipc import SharedMemory
from rl_tq.errors import QueueFullError
from rl_tq.memory.pool import size_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

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


class Source(NamedTuple):
    """Where an arena's segments come from."""

    create: Callable[[int], tuple[SharedMemory, str | None]]
    """A segment of so many bytes, and the file that the server is to name it by, if it outlives its processes."""
    where: str
    """In words."""


def _memory(nbytes: int) -> tuple[SharedMemory, None]:
    return SharedMemory.create(nbytes, name="rl-tq"), None


MEMORY = Source(_memory, "this host's shared memory")


def files_of(directory: Path) -> Source:
    """Files of a queue's own directory."""

    def create(nbytes: int) -> tuple[SharedMemory, str]:
        name = f"{uuid.uuid4().hex}.segment"
        return SharedMemory.create_file(directory / name, nbytes), name

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
        announce: Callable[[int, SharedMemory, bool, str | None], None],
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
            populate(self._memory[number].ctypes.data + start, stop - start, self._source.where)
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


def populate(address: int, nbytes: int, where: str) -> None:
    """Have the kernel back mapped memory with pages now: a page that a full file system cannot give is a SIGBUS later.

    Raises:
        QueueFullError: it cannot: `where` is full.
    """
    try:
        ipc.populate(address, nbytes)
    except OSError as error:
        raise QueueFullError(
            f"{where} has no room for {nbytes} bytes more: clear rows, make it larger, or bound "
            "the partitions by max_bytes, so that a put waits"
        ) from error


def source_of(directory: Path | None, spill: str | None) -> Source:
    """Where values lie: those that are spilled, or those of the queue of a directory, or of none."""
    if spill is not None:
        return _spilling(Path(spill), directory)
    return files_of(directory) if directory is not None else MEMORY


class Arenas:
    """A client's arena, and another one for each directory that it spills to. Thread-safe, as an `Arena`."""

    def __init__(
        self,
        announce: Callable[[int, SharedMemory, bool, str | None], None],
        seal: Callable[[int], None],
        retire: Callable[[int], None],
        directory: Path | None,
    ) -> None:
        numbers = count(1)
        self._open: Callable[[Source], Arena] = lambda source: Arena(announce, seal, retire, source, numbers)
        self._directory = directory
        self._arenas: dict[str | None, Arena] = {None: self._open(source_of(directory, None))}

    def allocate(self, nbytes: int, spill: str | None) -> Block:
        """Memory of `nbytes`; of a file in the directory `spill`, if one is given.

        Raises:
            QueueFullError: there is none.
        """
        arena = self._arenas.get(spill)
        if arena is None:
            arena = self._arenas.setdefault(spill, self._open(source_of(self._directory, spill)))
        return arena.allocate(nbytes)

    def leave(self, number: int) -> None:
        """See `Arena`."""
        for arena in list(self._arenas.values()):
            arena.leave(number)

    def reuse(self, number: int) -> None:
        """See `Arena`."""
        for arena in list(self._arenas.values()):
            arena.reuse(number)

    def trim(self, age_s: float) -> None:
        """See `Arena`."""
        for arena in list(self._arenas.values()):
            arena.trim(age_s)

    @property
    def has_spare(self) -> bool:
        """See `Arena`."""
        return any(arena.has_spare for arena in list(self._arenas.values()))

    def close(self) -> None:
        """See `Arena`."""
        for arena in list(self._arenas.values()):
            arena.close()


def spilled_files(directory: Path, spill: str) -> Iterator[Path]:
    """The files in `spill` of the queue of a directory."""
    return Path(spill).glob(f"{_mark(directory)}*.segment")


def write_spilled(memory: torch.Tensor, spill: str) -> torch.Tensor:
    """A copy of uint8 [n], in a file without a name that lasts as long as the copy.

    Raises:
        QueueFullError: the file system has no room.
    """
    source = _spilling(Path(spill), None)
    segment, _ = source.create(len(memory))
    copy = segment.map(is_shared=True)
    populate(copy.data_ptr(), len(memory), source.where)
    copy.numpy()[:] = memory.numpy()
    return copy


def _spilling(spill: Path, directory: Path | None) -> Source:
    """Files in `spill`; with names, if they are of the queue of a directory."""

    def create(nbytes: int) -> tuple[SharedMemory, str | None]:
        path = spill / f"{_mark(directory) if directory else ''}{uuid.uuid4().hex}.segment"
        try:
            spill.mkdir(mode=0o700, parents=True, exist_ok=True)
            segment = SharedMemory.create_file(path, nbytes)
            if directory is None:
                path.unlink()
        except OSError as error:
            raise QueueFullError(
                f"no file can be made in the spill_directory {spill}: {error.strerror}; make room or give access "
                "there, or configure another one"
            ) from error
        return segment, str(path) if directory else None

    return Source(create, f"the file system of {spill}")


def _mark(directory: Path) -> str:
    return hashlib.sha256(str(directory).encode()).hexdigest()[:16] + "-"
