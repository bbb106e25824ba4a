"""Memory for what a get returns. Large blocks are used again: the first touch of a page costs many times a later one.

What no tensor looks at any more is kept for the next batch of about its size, and is the kernel's to take meanwhile
(MADV_FREE): it counts as this process's until the machine needs it, and never makes it run out.
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
"""From this size on, the C library maps every block anew; smaller ones it uses again by itself."""
RESERVE_BYTES = 2 << 30
"""What a reserve keeps at most."""
RESERVE_S = 10.0
"""How long it keeps what is not used."""
_HUGE_PAGE_BYTES = 2 << 20


class Reserve(Generic[Held]):
    """Free memory, kept for a while for the next need of its size. One thread at a time may call it."""

    def __init__(self) -> None:
        self._held: deque[tuple[Held, int, float]] = deque()
        """What is kept, its bytes, and since when; the oldest first."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(nbytes for _, nbytes, _ in list(self._held))

    def add(self, held: Held, nbytes: int, since: float) -> None:
        """Keep what is not used since then."""
        self._held.append((held, nbytes, since))

    def take(self, nbytes: int) -> Held | None:
        """What came last of those of so many bytes; None: there is none."""
        for each in reversed(self._held):
            if each[1] == nbytes:
                self._held.remove(each)
                return each[0]
        return None

    def trim(self, age_s: float, max_bytes: int) -> list[Held]:
        """Remove and return what was not used for so long, and the oldest of what is beyond the bound."""
        limit, left, gone = time.monotonic() - age_s, self.nbytes, list[Held]()
        while self._held and (self._held[0][2] <= limit or left > max_bytes):
            held, nbytes, _ = self._held.popleft()
            left -= nbytes
            gone.append(held)
        return gone


_BUSY = threading.Lock()
"""Held by whoever uses `_RESERVE`. Nobody waits for it: a finalizer may run inside, and a fork may copy it."""
_RESERVE: Reserve[mmap.mmap] = Reserve()
_RETURNED: deque[tuple[mmap.mmap, float]] = deque()
"""Memory, and since when it is free: appending is all that may be done by whoever drops a tensor."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def new_memory(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of this process, of any content. Its first touch is as fast as this machine makes it.

    Huge pages, where the kernel has some, are touched five times faster than small ones; it is a wish, so that nothing
    is lost where it is refused.
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
    weakref.finalize(view, _give_back, block).atexit = False  # every tensor of this memory holds the view
    return torch.frombuffer(view, dtype=torch.uint8, count=nbytes)


def size_class(nbytes: int) -> int:
    """Rounded up by at most an eighth, so that a later need of nearly this size fits."""
    step = max(4096, 1 << (nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def kept_bytes() -> int:
    """Bytes that are kept for later."""
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
    if _BUSY.acquire(blocking=False):  # else its holder tidies at the next call
        try:
            _tidy()
        finally:
            _BUSY.release()


def _tidy() -> None:
    while _RETURNED:
        block, since = _RETURNED.popleft()
        _RESERVE.add(block, len(block), since)
    _RESERVE.trim(RESERVE_S, RESERVE_BYTES)
