"""Run locks: one process at a time writes to a folder.

The lock is `flock` on a file, which the kernel gives back when its holder ends, however it ends. The file also says who
holds it: host, boot, process and its start. That is what a refusal names, and what decides where the file system has no
`flock` or keeps it on each host alone, as some network file systems do.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_csrc.errors import FolderInUseError

if TYPE_CHECKING:
    from collections.abc import Generator

_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_MAX_BYTES = 4096


@contextmanager
def hold_lock(file: str | Path, what: str) -> Generator[None]:
    """Hold the lock `file` inside. A lock of a process of this host that is gone is taken over.

    Args:
        file: Is made if it is not there, and stays, empty.
        what: Name of what is held, for a refusal, such as `output_dir=out`.

    Raises:
        FolderInUseError: another process holds it, or one of another host did and never gave it back.
        OSError: the file cannot be written.
    """
    path = Path(file)
    descriptor = _locked(path, what)
    try:
        holder = _read(descriptor)
        if holder is not None and _may_live(holder):
            raise FolderInUseError(_refusal(path, what, holder))
        try:
            _write(descriptor, json.dumps(this_process()))
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        try:
            yield
        finally:
            _write(descriptor, "")
    finally:
        os.close(descriptor)


def _locked(path: Path, what: str) -> int:
    """Descriptor of the lock file, locked; opened again if its holder removed the file in the meantime."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(descriptor)
            os.close(descriptor)
            raise FolderInUseError(_refusal(path, what, holder)) from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                os.close(descriptor)
                raise
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
        os.close(descriptor)


def this_process() -> dict[str, Any]:
    """Record of this process, as a lock file holds it."""
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid": os.getpid(),
        "started": started(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _may_live(holder: dict[str, Any]) -> bool:
    """Whether the process is there, as far as this host can tell."""
    if holder.get("host") != socket.gethostname():
        return True
    is_same_boot = holder.get("boot") == _boot()
    return is_same_boot and holder.get("pid") != os.getpid() and started(holder.get("pid")) == holder.get("started")


def _refusal(path: Path, what: str, holder: dict[str, Any] | None) -> str:
    if holder is None:
        return f"{what} is in use by another process, which holds {path}; wait for it, or end it."
    who = f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"
    if holder.get("host") == socket.gethostname():
        return f"{what} is in use by {who}; wait for it, end it, or choose another folder."
    return (
        f"{what} is in use by {who}. If that process is gone (this host, {socket.gethostname()}, cannot tell), "
        f"delete {path} and try again."
    )


def _read(descriptor: int) -> dict[str, Any] | None:
    """Holder of the lock, as written; None without one, or where the record was cut short."""
    try:
        found = json.loads(os.pread(descriptor, _MAX_BYTES, 0))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    data, done = text.encode(), 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], done)
    os.fsync(descriptor)


def _boot() -> str:
    """A name of this start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def started(pid: Any) -> int | None:
    """Start time of a process of this host, clock ticks after the boot; None: there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
