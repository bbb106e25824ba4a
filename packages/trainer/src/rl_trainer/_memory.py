"""How the C library keeps memory that was freed."""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""


def keep_freed_memory() -> None:
    """Have this process and those that it starts keep freed memory: touching a page anew costs far more than using it.

    The variables are read when a process starts; this one is told by mallopt(3), where the C library is glibc.
    """
    for name, parameter, size in (("MMAP", _M_MMAP_THRESHOLD, 32 * 2**20), ("TRIM", _M_TRIM_THRESHOLD, 2**31 - 1)):
        wanted = os.environ.setdefault(f"MALLOC_{name}_THRESHOLD_", str(size))
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).mallopt(parameter, int(wanted))
