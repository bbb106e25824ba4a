"""Filters that a process takes on for good, with its descendants: seccomp over calls, Landlock over files; no root.

The standard library alone, as in `isolation`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_PR_SET_NO_NEW_PRIVS = 38
_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}

# architecture: (audit number, clone, clone3, memory files, all others)
_KNOWN = {
    "x86_64": (0xC000003E, 56, 435, (319, 447), (
        101, 310, 311, 312, 438,  # ptrace, process_vm_readv, process_vm_writev, kcmp, pidfd_getfd
        272, 308, 165, 166, 155, 161, 428, 429, 430, 431, 432, 433, 442,  # unshare, setns, mounts and roots
        29, 30, 31, 68, 71, 64, 240,  # System V shared memory, queues and semaphores; mq_open
        298, 321, 323, 425, 426, 427, 304, 303,  # perf, bpf, userfaultfd, io_uring, handles of files
        248, 249, 250, 246, 320, 175, 313, 169, 167, 168,  # keys, kexec, modules, reboot, swap
    )),
    "aarch64": (0xC00000B7, 220, 435, (279, 447), (
        117, 270, 271, 272, 438,
        97, 268, 40, 39, 41, 51, 428, 429, 430, 431, 432, 433, 442,
        194, 195, 196, 186, 187, 190, 180,
        241, 280, 282, 425, 426, 427, 265, 264,
        217, 218, 219, 104, 294, 105, 273, 142, 224, 225,
    )),
}  # fmt: skip


def filter_program(*, has_memory_files: bool) -> bytes:
    """Program of a `CallFilter`, as bubblewrap takes it too.

    Raises:
        OSError: this machine's numbers are not known.
    """
    if (machine := os.uname().machine) not in _KNOWN:
        raise OSError(errno.ENOSYS, f"seccomp: the calls of {machine} are not known")
    audit, clone, clone3, memory_files, others = _KNOWN[machine]
    refused = [*others, *(() if has_memory_files else memory_files)]
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    code.append((_AT_LEAST, 0, 1, 0x40000000))  # the numbers of x32
    code.append((_RETURN, 0, 0, _KILL))
    code.append((_EQUAL, len(refused) + 5, 0, clone3))  # jumps are relative: to the last line, and the last but one
    for i, number in enumerate(refused):
        code.append((_EQUAL, len(refused) - i + 3, 0, number))
    code.append((_EQUAL, 0, 2, clone))
    code.append((_LOAD, 0, 0, 16))
    code.append((_SET, 1, 0, _NEW_NAMESPACES))
    code.append((_RETURN, 0, 0, _ALLOW))
    code.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    code.append((_RETURN, 0, 0, _ERRNO | errno.ENOSYS))  # clone3: glibc falls back to clone, whose flags are seen
    return b"".join(struct.pack("HBBI", *line) for line in code)


class CallFilter:
    """Seccomp filter: refuses calls that reach into other processes, or allocate memory that is not counted.

    It is classic BPF by the numbers of the architecture, built once and taken on by each process that runs code.

    Args:
        has_memory_files: Allow `memfd_create`: the caller counts what is in such files.

    Raises:
        OSError: this machine's numbers are not known, or its kernel has no such filters; a child has tried.
    """

    def __init__(self, *, has_memory_files: bool) -> None:
        program = filter_program(has_memory_files=has_memory_files)
        self._program = ctypes.create_string_buffer(program)
        num_lines = len(program) // struct.calcsize("HBBI")
        self._header = ctypes.c_char_p(struct.pack("HxxxxxxQ", num_lines, ctypes.addressof(self._program)))
        child = os.fork()
        if child == 0:
            _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            try:
                self.take_on()
            except OSError:
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            raise OSError(errno.ENOSYS, "seccomp: the kernel takes no filter from this user")

    def take_on(self) -> None:
        """Install the filter for this process and all its descendants, irrevocably."""
        if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, self._header, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "seccomp: the kernel takes no filter from this user")


_CREATE, _ADD, _RESTRICT = 444, 445, 446  # calls of Landlock, on every architecture
_READ, _EXECUTE = 0b1100, 1  # files and folders
_PORT, _CONNECT = 2, 2  # kind of a rule, and its right
_OF_FILES = 1 << 15 | 1 << 14 | 0b111  # ioctl, truncate, read, write, execute: the others are a folder's
_SINCE = ((2, 13), (3, 14), (5, 15))  # (version, right): rename to another folder, truncate, ioctl of devices


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 where it has none, or does not let this process use it."""
    return max(_call(_CREATE, None, 0, 1), 0)


def confine(
    *, programs: Iterable[str], readable: Iterable[str], writable: Iterable[str], port: int | None = None
) -> bool:
    """Refuse all files but those given, whatever is mounted, for this process and its descendants, irrevocably.

    No TCP connection is made, but to one port, or accepted either, and no signal reaches a process outside, where the
    kernel's Landlock knows of these. Paths that do not exist are left out.

    Args:
        programs: Files and folders that may be read and executed.
        readable: Those that may be read.
        writable: Those that may be read and changed in every way.
        port: TCP port that may be connected to.

    Returns:
        Whether the kernel has Landlock; without it nothing is refused.

    Raises:
        OSError: it has, and takes no rule.
    """
    if not (version := landlock_version()):
        return False
    known = (1 << 13) - 1 | sum(1 << right for since, right in _SINCE if version >= since)
    handled = struct.pack("QQQ", known, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    rules = _checked(_call(_CREATE, handled, 24 if version >= 6 else 16 if version >= 4 else 8, 0))
    groups = ((programs, _READ | _EXECUTE), (readable, _READ), (writable, known & ~_EXECUTE))
    for path, allowed in ((path, allowed) for paths, allowed in groups for path in paths):
        try:
            below = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        is_folder = stat.S_ISDIR(os.fstat(below).st_mode)
        rule = struct.pack("=Qi", allowed if is_folder else allowed & _OF_FILES, below)
        _checked(_call(_ADD, rules, 1, rule, 0))
        os.close(below)
    if port is not None and version >= 4:
        _checked(_call(_ADD, rules, _PORT, struct.pack("=QQ", _CONNECT, port), 0))
    _checked(_call(_RESTRICT, rules, 0))
    os.close(rules)
    return True


def _call(number: int, *arguments: int | bytes | None) -> int:
    return _libc.syscall(*(ctypes.c_long(each) if isinstance(each, int) else each for each in (number, *arguments)))


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
