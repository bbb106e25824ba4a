"""Isolation: Linux namespaces, and a watcher of memory and processes; none of it needs root.

The standard library alone, and no import of it that is not needed: it runs before every worker's first answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_RESERVED_IDS, _OWN_PROCESSES = 300, 16
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
_CAPABILITY_VERSION = 0x20080522
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = (
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/localtime"),
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf"),  # certificates, which every HTTP client loads
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_OVER = "/tmp"  # exists everywhere; what is needed from below it is opened before it is covered
_libc = ctypes.CDLL(None, use_errno=True)
_capset = _libc.capset  # looked up and made before the fork: a child pays for every page that it touches
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
_NO_CAPABILITIES = (ctypes.c_uint32 * 6)()


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def hide() -> None:
    """Forbid other processes of this user to trace this one, or to read its memory and descriptors."""
    _libc.prctl(_PR_SET_DUMPABLE, 0)


def is_root_outside() -> bool:
    """Whether this is root, whose processes RLIMIT_NPROC does not limit."""
    return os.getuid() == 0


def adopt_orphans() -> None:
    """Become the subreaper of this process's orphans, so that `descendants` finds them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Watch:
    """Watcher that kills a worker whose processes together exceed the limits, where the kernel does not limit them.

    It runs in the process that waits for the worker's, and looks while code runs only.

    Args:
        memory_bytes: Memory of all processes: what is theirs alone, their share of the rest, and shared memory whole.
        num_processes: At a time.
    """

    TOO_MUCH_MEMORY, TOO_MANY_PROCESSES = 97, 98
    """Exit statuses of a killed worker."""
    _PERIOD_S = 0.01
    _OWN_BYTES = 1 << 25

    def __init__(self, memory_bytes: int, num_processes: int) -> None:
        self._memory_bytes, self._num_processes = memory_bytes, num_processes
        self.reader, self._writer = os.pipe()
        self.raised_by = 0
        with contextlib.suppress(OSError):
            os.nice(-10)  # before there are namespaces: a user namespace does not allow it
            self.raised_by = 10

    def limit_ids(self) -> None:
        """Let the kernel bound the processes of this new namespace, of root too, if it can: from Linux 6.14 on.

        Ids below 300 are given once, so that as many processes more may run at most. In an older kernel the same file
        limits the whole machine.
        """
        major, minor = os.uname().release.split(".")[:2]
        if (int(major), int(minor.partition("-")[0])) >= (6, 14):
            with contextlib.suppress(OSError), open("/proc/sys/kernel/pid_max", "w") as file:
                file.write(str(_RESERVED_IDS + self._num_processes + _OWN_PROCESSES))

    def begin(self) -> None:
        """Start watching: code runs."""
        os.write(self._writer, b"1")

    def end(self) -> None:
        """Stop watching: code has ended."""
        os.write(self._writer, b"0")

    def has_own_proc(self) -> None:
        """Note that `/proc` shows the worker's namespace alone."""
        os.write(self._writer, b"n")

    def wait(self, child: int) -> int | None:
        """Watch until a child ends; returns an exit status if it was killed for exceeding a limit."""
        end = os.pidfd_open(child)
        is_on, root = False, child
        while True:
            ready, _, _ = select.select([end, self.reader], [], [], self._PERIOD_S if is_on else None)
            if end in ready:
                os.close(end)
                return None
            for sign in os.read(self.reader, 64) if self.reader in ready else b"":
                is_on = sign == ord("1") if sign != ord("n") else is_on
                root = 1 if sign == ord("n") else root
            if is_on and (status := self._excess(root)) is not None:
                os.kill(child, signal.SIGKILL)
                return status

    def _excess(self, root: int) -> int | None:
        own = 4  # the worker's
        if root == 1 and sum(name.isdigit() for name in os.listdir("/proc")) > self._num_processes + own:
            return self.TOO_MANY_PROCESSES
        found = [root, *descendants(root)]
        if len(found) > self._num_processes + own:
            return self.TOO_MANY_PROCESSES
        page = os.sysconf("SC_PAGESIZE")
        most = self._memory_bytes + self._OWN_BYTES
        if sum(_statm(pid)[0] for pid in found) * page <= most:
            return None
        might_be_too_much = sum(_statm(pid)[1] for pid in found) * page > most
        running = [pid for pid in found if pid != root] if might_be_too_much else []
        for pid in running:
            _kill(pid, signal.SIGSTOP)  # measuring takes milliseconds, in which they could allocate more
        shared: dict[bytes, int] = {}
        taken = 0
        for pid in found:
            taken += _own_bytes(pid, page)
            _add_shared(pid, shared)
        if taken + sum(shared.values()) > most:
            return self.TOO_MUCH_MEMORY
        for pid in running:
            _kill(pid, signal.SIGCONT)
        return None


def _statm(pid: int) -> tuple[int, int]:
    """Numbers of mapped and of resident pages of a process."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            size, resident, *_ = file.read().split()
    except (OSError, ValueError):
        return 0, 0
    return int(size), int(resident)


def _own_bytes(pid: int, page: int) -> int:
    """Memory of a process, with its share of shared pages (PSS); with all of them where the kernel has no PSS."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            fields = dict(line.split(b":") for line in file.read().splitlines()[1:])
    except (OSError, ValueError):
        return _statm(pid)[1] * page
    return sum(int(fields[name].split()[0]) << 10 for name in (b"Pss_Anon",) if name in fields)


def _add_shared(pid: int, shared: dict[bytes, int]) -> None:
    """Size of shared memory by file; pages that are not mapped at the moment count too."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        places, flags, _, device, number, *path = line.split(maxsplit=5)
        if flags[3:4] == b"s" and path and path[0].startswith((b"/dev/zero", b"/memfd:", b"/SYSV", b"/dev/shm")):
            first, _, last = places.partition(b"-")
            key = device + number
            shared[key] = max(shared.get(key, 0), int(last, 16) - int(first, 16))


def stay(watch: Watch | None) -> None:
    """Continue without namespaces."""
    adopt_orphans()
    if watch is not None:
        _go_on_in_child(watch, has_orphans=True)
        adopt_orphans()


def enter(
    *, folders: list[tuple[str, str]], readable: list[str], scratch_bytes: int, watch: Watch | None = None
) -> set[str]:
    """Isolate this process, and continue as its grandchild; returns the isolated resources.

    `network`: there is no interface. `processes`: every process that is started dies with this one, whatever it does,
    and sees no other. `files`: there are the system's programs and `readable`, both read-only, an empty `/tmp`, and
    `folders`, pairs of a path inside and a folder of this machine.
    """
    return enter_root(lambda: _own_root(folders, [*readable, sys.base_prefix], scratch_bytes), watch)


def enter_root(own_root: Callable[[], None], watch: Watch | None = None) -> set[str]:
    """Isolate this process as `enter` does, with the files of a root filesystem that `own_root` builds."""
    if not _permits_namespaces():
        stay(watch)
        return set()
    _make_namespaces()
    _go_on_in_child(watch)  # the first process of the namespace: with it every other ends
    if watch is not None:
        watch.limit_ids()
    isolated = {"network", "processes"}
    try:
        own_root()
        isolated.add("files")
        if watch is not None:
            watch.has_own_proc()
    except OSError:
        _libc.umount2(_OVER.encode(), _MNT_DETACH)
    _go_on_in_child()  # the first process of a namespace obeys no signal of its own; code has to be able to die
    return isolated


def fresh_child(isolated: set[str], scratch_bytes: int, readable: Sequence[str] = ()) -> int:
    """Fork like `os.fork`; the child's descendants die with it, and it has its own `/tmp`, with `readable` of there."""
    if "processes" not in isolated:
        child = os.fork()
        if child == 0:
            os.setsid()  # a group that ends at once
        return child
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
        here = os.getcwd()
        _checked(_libc.unshare(_NEWNS), "unshare")
        below = [(path, os.open(path, os.O_PATH)) for path in readable if path.startswith("/tmp/")]
        _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={scratch_bytes},mode=1777")
        for path, descriptor in below:
            _bind(descriptor, path, is_folder=os.path.isdir(f"/proc/self/fd/{descriptor}"), is_writable=False)
            os.close(descriptor)
        os.chdir(here)
    _go_on_in_child()
    return 0


def forward(port: int, socket_path: str, isolated: set[str]) -> None:
    """Make a UNIX socket outside reachable as `127.0.0.1:port` in this network namespace, by a process of its own.

    Without a namespace of networks nothing is needed: the listener at the socket listens at the port too.
    """
    if "network" not in isolated:
        return
    listener = listen(port)
    if os.fork():
        listener.close()
        return
    die_with_parent()
    hide()
    os.closerange(0, listener.fileno())
    os.closerange(listener.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    pass_connections(listener, socket_path)


def forward_into(pid: int, port: int, socket_path: str) -> NoReturn:
    """As `forward`, for the network namespace of another process, until this one is killed; prints a line at first."""
    die_with_parent()
    spaces = [(_NEWUSER, "user"), (_NEWNET, "net")]
    opened = [(kind, os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)) for kind, name in spaces]
    for kind, space in opened:
        if _libc.setns(space, kind) != 0 and kind == _NEWNET:  # a process cannot enter its own user namespace
            _checked(-1, f"setns to the network of process {pid}")
    listener = listen(port)
    hide()
    os.write(1, b"ready\n")
    pass_connections(listener, socket_path)


def listen(port: int) -> Any:
    """Listen on loopback of this network namespace, which is brought up."""
    import socket
    import struct
    from fcntl import ioctl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(PermissionError):
        ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    return socket.create_server(("127.0.0.1", port), backlog=1024)


def pass_connections(listener: Any, socket_path: str) -> NoReturn:
    """Pass every connection on to a UNIX socket, until this process is killed."""
    import socket
    import threading

    threading.stack_size(1 << 17)
    while True:
        near, _ = listener.accept()
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(socket_path)
        except OSError:
            near.close()
            far.close()
            continue
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()


def _pass_on(source: Any, target: Any) -> None:
    """Copy one direction of a connection; the end of either side is the end of both."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(2)


def give_up_gains() -> None:
    """Forbid all programs that this process or a descendant starts to gain privileges (no_new_privs)."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # the kernel knows no more of them, or this process has none to give up
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def drop_privileges() -> None:
    """Drop all capabilities, for good after `give_up_gains`."""
    _libc.prctl(_PR_SET_DUMPABLE, 1)  # its own processes may look at one another
    _checked(_capset(_CAPABILITY_HEADER, _NO_CAPABILITIES), "capset")


KILL_S = 60.0
"""Seconds after which processes that were killed and are still there are an error."""


def descendants(pid: int) -> list[int]:
    """Descendants of a process, from /proc."""
    return list(_family(pid))


def _family(pid: int) -> dict[int, int]:
    """Descendants of a process, with the process group of each."""
    parents: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it has ended
            if fields[0] not in (b"Z", b"X"):
                parents.setdefault(int(fields[1]), []).append((int(name), int(fields[2])))
    found: dict[int, int] = {}
    queue = [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found.update(children)
        queue += [child for child, _ in children]
    return found


def kill_descendants(pid: int) -> None:
    """Kill all descendants of a subreaper, in several rounds if they keep forking.

    By group first: the kernel ends a whole group at once, forks in the making included.
    """
    own, deadline = os.getpgid(pid), time.monotonic() + KILL_S
    while found := _family(pid):
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {pid} has {len(found)} descendants {KILL_S:.0f} s after they were killed")
        for group in set(found.values()) - {own, 0}:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        for each in found:
            _kill(each, signal.SIGKILL)
        os.sched_yield()  # a killed process ends once it gets a processor


def reap() -> None:
    """Reap all children that have ended: until then the kernel counts them."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _permits_namespaces() -> bool:
    """Try user namespaces in a child: some kernels create them, and then refuse to map a user."""
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


def _go_on_in_child(watch: Watch | None = None, *, has_orphans: bool = False) -> None:
    """Fork; the child returns, and this process waits for it and ends with its status. SIGTERM ends the child.

    The first process of a namespace has ended for its parent when all the others have; where there is no namespace,
    `has_orphans`, they are looked for.
    """
    child = os.fork()
    if child == 0:
        die_with_parent()
        if watch is not None:
            os.nice(watch.raised_by)
        return

    def end(*_: object) -> None:
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    most = os.sysconf("SC_OPEN_MAX")
    if watch is None:
        os.closerange(3, most)  # what the child was given is the child's
    else:
        os.closerange(3, watch.reader)
        os.closerange(watch.reader + 1, most)
        status = watch.wait(child)
        if has_orphans:
            kill_descendants(os.getpid())
        if status is not None:
            os.waitpid(child, 0)  # a namespace's processes have all ended with its first
            os._exit(status)
    while True:
        ended, status = os.wait()  # orphans too
        if ended == child:
            os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _own_root(folders: list[tuple[str, str]], readable: list[str], scratch_bytes: int) -> None:
    """Build a root filesystem of bind mounts, and pivot to it."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    opened = {
        path: os.open(path, os.O_PATH) for path in (*PROGRAMS, *SETTINGS, *DEVICES, *readable) if os.path.exists(path)
    }
    given = [(inside, os.open(folder, os.O_PATH)) for inside, folder in folders]
    _mount("tmpfs", _OVER, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    os.mkdir(f"{_OVER}/tmp")
    _mount("tmpfs", f"{_OVER}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={scratch_bytes},mode=1777")
    for path, descriptor in sorted(opened.items()):
        if os.path.islink(path):  # /bin, where it is /usr/bin
            os.symlink(os.readlink(path), _OVER + path)
            continue
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")  # not by its path, which may be covered
        _bind(descriptor, _OVER + path, is_folder=is_folder, is_writable=path in DEVICES)
    for inside, descriptor in given:
        _bind(descriptor, _OVER + inside, is_folder=True, is_writable=True)
    for name in ("proc", "old"):
        os.mkdir(f"{_OVER}/{name}")
    _link_streams()
    os.symlink("/tmp", _OVER + "/dev/shm")  # for multiprocessing's semaphores
    _mount("proc", f"{_OVER}/proc", "proc", _MS_NOSUID | _MS_NODEV)
    _mount("none", f"{_OVER}/proc", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    for descriptor in (*opened.values(), *(each for _, each in given)):
        os.close(descriptor)
    _pivot(0)
    os.chdir(folders[0][0] if folders else "/tmp")


def launch_root(
    programs: list[str], stand_ins: dict[str, str], folder: str, folders: list[str], scratch_bytes: int
) -> None:
    """Build the root filesystem of a launch script that is read, and pivot to it.

    Nothing can be executed but `programs` and `stand_ins`: by path a script, or the path of the program that it is.
    `/tmp` is the scratch folder, `/records` is for stand-ins, `/trace` for bash. `folder` can be read, and what is
    written there goes to the scratch folder; `folders` are empty folders of the scratch folder. All else is read-only.
    """
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    opened = {path: os.open(path, os.O_PATH) for path in (*programs, *DEVICES)}
    below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    flags = _MS_NOSUID | _MS_NODEV
    _mount("tmpfs", _OVER, "tmpfs", flags, "size=4m,mode=755")
    for path, descriptor in opened.items():
        _bind(descriptor, _OVER + path, is_folder=False, is_writable=path in DEVICES)
    for name in ("proc", "tmp", "old", "stand_ins", "records", "trace", "usr/bin", "bin"):
        os.makedirs(f"{_OVER}/{name}", exist_ok=True)
    _link_streams()
    _mount("proc", f"{_OVER}/proc", "proc", flags | _MS_NOEXEC)
    _mount("tmpfs", f"{_OVER}/stand_ins", "tmpfs", flags, "size=1m,mode=755")
    texts: dict[str, str] = {}
    for path, text in stand_ins.items():
        if text.startswith("/"):
            texts[text] = text
        elif text not in texts:
            texts[text] = f"/stand_ins/.{len(texts)}"
            with open(os.open(_OVER + texts[text], os.O_CREAT | os.O_WRONLY, 0o555), "w") as file:
                file.write(text)
        if not os.path.lexists(_OVER + path):
            os.makedirs(os.path.dirname(_OVER + path), exist_ok=True)
            os.symlink(texts[text], _OVER + path)
    _mount("none", f"{_OVER}/stand_ins", None, flags | _MS_REMOUNT | _MS_BIND | _MS_RDONLY)
    for name, size in (("tmp", scratch_bytes), ("records", scratch_bytes), ("trace", scratch_bytes // 2)):
        _mount("tmpfs", f"{_OVER}/{name}", "tmpfs", flags | _MS_NOEXEC, f"size={size},mode=1777")
    for i, path in enumerate((folder, *folders)):
        upper, work = (f"{_OVER}/tmp/.{name}{i}" for name in ("upper", "work"))
        os.makedirs(upper)
        os.makedirs(work)
        if i and os.path.lexists(_OVER + path):
            continue
        os.makedirs(_OVER + path, exist_ok=True)
        if i:
            _mount(upper, _OVER + path, None, _MS_BIND)
            continue
        try:
            layers = f"lowerdir=/proc/self/fd/{below},upperdir={upper},workdir={work},userxattr"
            _mount("overlay", _OVER + path, "overlay", flags | _MS_NOEXEC, layers)
        except (
            OSError
        ):  # a kernel without overlays for this user: what is there cannot be changed, new files can be made
            _mount(upper, _OVER + path, None, _MS_BIND)
            _bind_entries(below, _OVER + path)
    for descriptor in (*opened.values(), below):
        os.close(descriptor)
    _pivot(_MS_NOEXEC)


def _bind_entries(folder: int, target: str) -> None:
    """Bind everything in a folder, read-only and not executable, into another one."""
    for name in os.listdir(folder):
        if os.path.islink(f"/proc/self/fd/{folder}/{name}"):
            os.symlink(os.readlink(name, dir_fd=folder), f"{target}/{name}")
            continue
        entry = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
        is_folder = os.path.isdir(f"/proc/self/fd/{entry}")
        _bind(entry, f"{target}/{name}", is_folder=is_folder, is_writable=False)
        flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        _mount("none", f"{target}/{name}", None, flags)
        os.close(entry)


def _link_streams() -> None:
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{_OVER}/dev/{name}")


def _pivot(flags: int) -> None:
    """Make the tree that was built the root, read-only; the old one is gone."""
    _checked(_libc.pivot_root(_OVER.encode(), f"{_OVER}/old".encode()), "pivot_root")
    os.chdir("/")
    _checked(_libc.umount2(b"/old", _MNT_DETACH), "umount2")
    os.rmdir("/old")
    _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | flags)


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
