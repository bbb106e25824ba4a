"""Memory pool for the results of get: large blocks are reused, as the first touch of a page costs many times a later.

A block that no tensor uses any more is kept for the next batch of about its size. Meanwhile the kernel may reclaim it
(MADV_FREE): it counts as this process's memory, but never makes the machine run out.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import weakref
from collections import deque
from typing import Generic, TypeVar

import torch

Held = TypeVar("Held")

LARGE_BYTES = 32 << 20
"""From this size on, the C library maps a new block every time; it reuses smaller ones itself."""
RESERVE_BYTES = 2 << 30
"""Largest size of a reserve."""
RESERVE_S = 10.0
"""Seconds for which unused memory is kept."""
_HUGE_PAGE_BYTES = 2 << 20


class Reserve(Generic[Held]):
    """Cache of free memory blocks by size, released after a while. Not thread-safe."""

    def __init__(self) -> None:
        self._held: deque[tuple[Held, int, float]] = deque()
        """(block, size in bytes, time since it is free), the oldest first."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Total size in bytes."""
        return sum(nbytes for _, nbytes, _ in list(self._held))

    def add(self, held: Held, nbytes: int, since: float) -> None:
        """Add a block that is free since then."""
        self._held.append((held, nbytes, since))

    def take(self, nbytes: int) -> Held | None:
        """Remove and return the newest block of this size; None if there is none."""
        for each in reversed(self._held):
            if each[1] == nbytes:
                self._held.remove(each)
                return each[0]
        return None

    def trim(self, age_s: float, max_bytes: int) -> list[Held]:
        """Remove and return blocks unused for `age_s`, and the oldest ones beyond `max_bytes`."""
        limit, left, gone = time.monotonic() - age_s, self.nbytes, list[Held]()
        while self._held and (self._held[0][2] <= limit or left > max_bytes):
            held, nbytes, _ = self._held.popleft()
            left -= nbytes
            gone.append(held)
        return gone


_BUSY = threading.Lock()
"""Lock of `_RESERVE`. Only tried, never waited for: a finalizer may run inside, and a fork may copy it locked."""
_RESERVE: Reserve[mmap.mmap] = Reserve()
_RETURNED: deque[tuple[mmap.mmap, float]] = deque()
"""(block, time since it is free). A thread that destroys a tensor may only append."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def new_memory(nbytes: int) -> torch.Tensor:
    """Uninitialized private memory, uint8 [nbytes], reused or backed by huge pages where possible.

    The first touch of huge pages is five times faster than of small ones. They are a hint (`madvise`) that the kernel
    may ignore.
    """
    if nbytes < LARGE_BYTES:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        start = -(-memory.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        stop = (memory.data_ptr() + nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if stop > start:
            _LIBC.madvise(start, stop - start, mmap.MADV_HUGEPAGE)
        return memory
    size = size_class(nbytes)
    block = _take(size) or mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(block)
    weakref.finalize(view, _give_back, block).atexit = False  # every tensor of this memory refers to the view
    return torch.frombuffer(view, dtype=torch.uint8, count=nbytes)


def size_class(nbytes: int) -> int:
    """Size rounded up by at most an eighth, so that a block fits a later request of nearly the same size."""
    step = max(4096, 1 << (nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def kept_bytes() -> int:
    """Size of the memory cached for reuse, bytes."""
    return _RESERVE.nbytes + sum(len(block) for block, _ in list(_RETURNED))


def _take(size: int) -> mmap.mmap | None:
    if not _BUSY.acquire(blocking=False):
        return None
    try:
        _tidy()
        return _RESERVE.take(size)
    finally:
        _BUSY.release()


def _give_back(block: mmap.mmap) -> None:
    block.madvise(mmap.MADV_FREE)
    _RETURNED.append((block, time.monotonic()))
    if _BUSY.acquire(blocking=False):  # else the next call does it
        try:
            _tidy()
        finally:
            _BUSY.release()


def _tidy() -> None:
    while _RETURNED:
        block, since = _RETURNED.popleft()
        _RESERVE.add(block, len(block), since)
    _RESERVE.trim(RESERVE_S, RESERVE_BYTES)
