"""Has shared memory be there before it is written: a page that a full file system cannot give is a SIGBUS."""

from __future__ import annotations

import ctypes
import errno
import mmap

from rl_tq.errors import QueueFullError

_MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def back(address: int, start: int, stop: int, where: str) -> None:
    """Have the kernel back bytes `start` to `stop` of the shared memory mapped at `address`, faster than one by one.

    Raises:
        QueueFullError: it cannot: `where` is full.
    """
    first = start - start % mmap.PAGESIZE
    nbytes = stop - first
    if _LIBC.madvise(address + first, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    if ctypes.get_errno() == errno.EINVAL:  # Linux before 5.14 does not know it
        return
    raise QueueFullError(
        f"{where} has no room for {nbytes} bytes more: clear rows, make it larger, or bound "
        "the partitions by max_bytes, so that a put waits"
    )
