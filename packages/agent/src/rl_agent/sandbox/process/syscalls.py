"""A seccomp filter: calls by which code could reach into other processes, or keep memory that nobody counts.

The standard library alone: the filter is written as classic BPF, by the numbers of the architecture.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

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


def is_known() -> bool:
    """Whether there is a filter for this machine, tried by a child."""
    if os.uname().machine not in _KNOWN:
        return False
    child = os.fork()
    if child == 0:
        try:
            ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # no_new_privs
            refuse(has_memory_files=False)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def refuse(*, has_memory_files: bool) -> None:
    """Refuse these calls to this process and all that it starts, for ever.

    Args:
        has_memory_files: Allow `memfd_create`: somebody counts what is in such files.

    Raises:
        OSError: the kernel has no such filters.
    """
    audit, clone, clone3, memory_files, others = _KNOWN[os.uname().machine]
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
    code.append((_RETURN, 0, 0, _ERRNO | errno.ENOSYS))  # clone3: glibc falls back to clone, whose flags can be read
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    header = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(header), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
