"""Limits of this machine that keep Ray from starting: checked before the start, and named."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

from rl_trainer.errors import PlacementError

_SOCKET_PATH, _RAY_PATH = 107, 62
"""Bytes of a UNIX socket's path, and of Ray's part of it: `/ray/session_<time>_<pid>/sockets/plasma_store`."""
_MIN_FILES, _WANTED_FILES = 1024, 65_536
_MIN_PROCESSES = 1024
OBJECT_STORE_BYTES = 256 * 2**20
"""Ray carries references and numbers in its object store, never tensors."""
_MIN_FREE_BYTES = 32 * 2**20
_SHARED_MEMORY = Path("/dev/shm")


def check_limits() -> None:
    """Raise the soft limit of open files as far as is allowed, and check what Ray's own processes need.

    Raises:
        PlacementError: names the limit, its value, and what to do.
    """
    variable = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"  # in the order in which Ray looks
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(os.fsencode(folder)) + _RAY_PATH > _SOCKET_PATH:
        raise PlacementError(
            f"{variable}={folder} has {len(os.fsencode(folder))} characters, too many for the sockets that Ray has in "
            f"it (at most {_SOCKET_PATH - _RAY_PATH}); set {variable} to a shorter folder, such as /tmp"
        )
    if not os.access(folder, os.W_OK):
        raise PlacementError(f"{variable}={folder} cannot be written; set it to a folder that can, such as /tmp")
    free = shutil.disk_usage(folder).free if Path(folder).is_dir() else _MIN_FREE_BYTES
    if free < _MIN_FREE_BYTES:
        raise PlacementError(
            f"{variable}={folder} has {free // 2**20} MiB free; Ray's sockets and logs need "
            f"{_MIN_FREE_BYTES // 2**20}: make room, or set {variable} to another folder"
        )
    if not os.access(_SHARED_MEMORY, os.W_OK):
        raise PlacementError(f"{_SHARED_MEMORY} cannot be written, where Ray and the weights have their shared memory")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    if files < _MIN_FILES:
        raise PlacementError(f"ulimit -n is {files} open files; Ray needs at least {_MIN_FILES}: raise it")
    num_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= num_bytes < OBJECT_STORE_BYTES:
        raise PlacementError(
            f"ulimit -f is {num_bytes // 1024} KiB per file; Ray's object store is a file of "
            f"{OBJECT_STORE_BYTES // 1024} KiB: raise it"
        )
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.getuid() and 0 <= processes < _MIN_PROCESSES:  # root has no such limit
        raise PlacementError(
            f"ulimit -u is {processes} processes and threads; Ray needs at least {_MIN_PROCESSES}: raise it"
        )
