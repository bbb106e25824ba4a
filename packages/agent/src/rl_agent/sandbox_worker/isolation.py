"""Shuts code off from this machine by Linux namespaces, as far as the kernel lets this user; needs no root.

The standard library alone, and no import of it that is not needed: it runs before every worker's first answer.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_CAPABILITY_VERSION = 0x20080522
_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_OVER = "/tmp"  # exists everywhere; what is needed from below it is opened before it is covered
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Have orphans of this process become its own children, however they left it, so that `descendants` finds them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def enter(*, workspace: str | None, readable: list[str], scratch_bytes: int) -> set[str]:
    """Shut this process off and go on as a child of a child of it; what is isolated now.

    `network`: there is no interface. `processes`: every process that is started dies with this one, whatever it does,
    and sees no other. `files`: there are the system's programs and `readable`, both read-only, an empty `/tmp`, and the
    workspace as `/workspace`.
    """
    if not _permits_namespaces():
        adopt_orphans()
        return set()
    _make_namespaces()
    _go_on_in_child()  # the first process of the namespace: with it every other ends
    isolated = {"network", "processes"}
    try:
        _own_root(workspace, [*readable, sys.base_prefix], scratch_bytes)
        isolated.add("files")
    except OSError:
        _libc.umount2(_OVER.encode(), _MNT_DETACH)
    _go_on_in_child()  # the first process of a namespace obeys no signal of its own; code has to be able to die
    return isolated


def fresh_child(isolated: set[str], scratch_bytes: int) -> int:
    """As `os.fork`; what the child starts dies with it, and it has a `/tmp` of its own."""
    if "processes" not in isolated:
        return os.fork()
    ours = os.open("/proc/self/ns/pid", os.O_RDONLY) if os.path.exists("/proc/self/ns/pid") else -1
    if ours < 0 or _libc.unshare(_NEWPID) != 0:  # no /proc here: the worker's end is the end of what is started
        return os.fork()
    child = os.fork()
    if child:
        _checked(_libc.setns(ours, _NEWPID), "setns")
        os.close(ours)
        return child
    os.close(ours)
    die_with_parent()
    if "files" in isolated:
        _checked(_libc.unshare(_NEWNS), "unshare")
        _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={scratch_bytes},mode=1777")
        os.chdir("/workspace" if os.path.isdir("/workspace") else "/tmp")
    _go_on_in_child()
    return 0


def drop_privileges() -> None:
    """Give up what the namespaces gave: code can undo none of it, whoever it runs as."""
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def descendants(pid: int) -> list[int]:
    """Children of a process, theirs, and so on, as /proc tells now."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it has ended
            if fields[0] not in (b"Z", b"X"):
                parents.setdefault(int(fields[1]), []).append(int(name))
    found, queue = list[int](), [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def kill_descendants(pid: int) -> None:
    """End all descendants of a process that orphans come back to; it takes several rounds if they go on forking."""
    for _ in range(1000):
        found = descendants(pid)
        if not found:
            return
        for each in found:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                continue
    raise RuntimeError(f"process {pid} still has descendants after 1000 rounds of killing them")


def _permits_namespaces() -> bool:
    """Tried by a child: some kernels let a user make namespaces, and then refuse to let it be anybody in them."""
    child = os.fork()
    if child == 0:
        try:
            _make_namespaces()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _make_namespaces() -> None:
    uid, gid = os.getuid(), os.getgid()
    _checked(_libc.unshare(_NEWUSER | _NEWNET | _NEWNS | _NEWPID | _NEWIPC), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _go_on_in_child() -> None:
    """Fork; the child returns, this process waits for it and ends as it did. SIGTERM ends the child.

    The first process of a namespace has ended for its parent when all the others have.
    """
    child = os.fork()
    if child == 0:
        die_with_parent()
        return

    def end(*_: object) -> None:
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    while True:
        ended, status = os.wait()  # orphans too
        if ended == child:
            os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _own_root(workspace: str | None, readable: list[str], scratch_bytes: int) -> None:
    """Make a root of its own out of bind mounts, and leave the old one."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    opened = {
        path: os.open(path, os.O_PATH)
        for path in (*_PROGRAMS, *_SETTINGS, *_DEVICES, *readable)
        if os.path.exists(path)
    }
    work = os.open(workspace, os.O_PATH) if workspace else -1
    _mount("tmpfs", _OVER, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path, descriptor in sorted(opened.items()):
        if os.path.islink(path):  # /bin, where it is /usr/bin
            os.symlink(os.readlink(path), _OVER + path)
            continue
        _bind(descriptor, _OVER + path, is_folder=os.path.isdir(path), is_writable=path in _DEVICES)
    if workspace:
        _bind(work, f"{_OVER}/workspace", is_folder=True, is_writable=True)
    for name in ("proc", "tmp", "old"):
        os.mkdir(f"{_OVER}/{name}")
    os.symlink("/proc/self/fd", _OVER + "/dev/fd")
    _mount("proc", f"{_OVER}/proc", "proc", _MS_NOSUID | _MS_NODEV)
    _mount("tmpfs", f"{_OVER}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={scratch_bytes},mode=1777")
    for descriptor in (*opened.values(), work):
        if descriptor >= 0:
            os.close(descriptor)
    _checked(_libc.pivot_root(_OVER.encode(), f"{_OVER}/old".encode()), "pivot_root")
    os.chdir("/")
    _checked(_libc.umount2(b"/old", _MNT_DETACH), "umount2")
    os.rmdir("/old")
    _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir("/workspace" if workspace else "/tmp")


def _bind(descriptor: int, target: str, *, is_folder: bool, is_writable: bool) -> None:
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder and not os.path.exists(target):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(f"/proc/self/fd/{descriptor}", target, None, _MS_BIND | _MS_REC)
    attributes = (ctypes.c_uint64 * 4)(2 if is_writable else 3, 0, 0, 0)  # nosuid, and read-only
    given = (_AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, ctypes.c_size_t(32))
    _checked(_libc.mount_setattr(*given), f"mount_setattr {target}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    given = (source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags))
    _checked(_libc.mount(*given, data.encode() or None), f"mount {target}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
