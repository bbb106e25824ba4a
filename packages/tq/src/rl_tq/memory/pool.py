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

import torch

LARGE_BYTES = 32 << 20
"""From this size on, the C library maps every block anew; smaller ones it uses again by itself."""
KEPT_BYTES = 2 << 30
"""Kept for later, at most."""
KEPT_S = 10.0
"""What was not used for so long is let go of, once anything else comes or goes."""
_HUGE_PAGE_BYTES = 2 << 20

_BUSY = threading.Lock()
"""Held by whoever looks through `_KEPT`. Nobody waits for it: a finalizer may run inside, and a fork may copy it."""
_KEPT: deque[tuple[mmap.mmap, float]] = deque()
"""Memory, and since when it is not used; the oldest first."""
_RETURNED: deque[tuple[mmap.mmap, float]] = deque()
"""The same, not among the others yet: appending is all that may be done by whoever drops a tensor."""

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
    return sum(len(block) for blocks in (_KEPT, _RETURNED) for block, _ in list(blocks))


def _take(size: int) -> mmap.mmap | None:
    if not _BUSY.acquire(blocking=False):
        return None
    try:
        _tidy()
        found = next((i for i in range(len(_KEPT) - 1, -1, -1) if len(_KEPT[i][0]) == size), None)
        if found is None:
            return None
        block, _ = _KEPT[found]
        del _KEPT[found]
        return block
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
        _KEPT.append(_RETURNED.popleft())
    limit = time.monotonic() - KEPT_S
    held = sum(len(block) for block, _ in _KEPT)
    while _KEPT and (_KEPT[0][1] <= limit or held > KEPT_BYTES):
        held -= len(_KEPT.popleft()[0])
