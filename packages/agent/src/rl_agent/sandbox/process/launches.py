"""Launch script reader: runs bash on a script, isolated, with stand-ins for every other program.

One process per script. Its standard input is a request, its output the answer: what the stand-ins recorded, and what
bash complained about.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import select
import stat
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rl_agent.sandbox.process import filters, isolation
else:  # this folder is the path of the process that it is started in
    import filters
    import isolation

_RECORDS = "/records"
"""Folder of the records, each a file of words that end with a zero byte; it has its own size limit."""
_COMPLAINTS, _TRACE = f"{_RECORDS}/.complaints", "/trace/lines"
_TRACE_DESCRIPTOR = 199
"""Descriptor of bash's trace (`set -x`), which a script has no reason to use."""


def main() -> NoReturn:
    """Read a request, run its script, and write the answer; `{"isolated": false}` if it cannot be isolated here."""
    request = json.load(sys.stdin)
    isolation.die_with_parent()
    watch = isolation.Watch(request["memory_bytes"], request["num_processes"])
    roots = [request[name] for name in ("programs", "stand_ins", "folder", "folders", "scratch_bytes")]
    may_isolate = request["may_isolate"]
    isolated = isolation.enter_root(lambda: isolation.launch_root(*roots), watch) if may_isolate else set[str]()
    try:
        calls = filters.CallFilter(has_memory_files=True)
    except OSError:
        calls = None
    if len(isolated) < len({"network", "processes", "files"}) or calls is None:
        _answer({"isolated": False})
    isolation.adopt_orphans()
    isolation.hide()
    isolation.give_up_gains()
    watch.begin()
    child = os.fork()
    if child == 0:
        try:
            _run(request, calls)
        finally:
            os._exit(127)
    end = os.pidfd_open(child)
    is_late = not select.select([end], [], [], request["wall_s"])[0]
    status = None if is_late else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = request["grace_s"]
    while left > 0 and isolation.descendants(os.getpid()) and not is_late:
        isolation.reap()
        select.select([], [], [], 0.02)
        left -= 0.02
    names = sorted(name for name in os.listdir(_RECORDS) if name[0] != ".")
    records = [_whole(f"{_RECORDS}/{name}").split("\0")[:-1] for name in names]
    whole = _whole(_TRACE)
    trace = [line for line in whole.splitlines() if "@unknown" in line]
    answer = {"isolated": True, "status": status, "records": records, "complaints": _whole(_COMPLAINTS)}
    _answer(
        answer | {"trace": trace, "is_full": _is_full(_RECORDS), "is_cut": _is_full("/trace"), "digest": _digest(whole)}
    )


def _answer(answer: dict[str, Any]) -> NoReturn:
    """Write the answer, and end: the kernel ends what still runs in this namespace."""
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


def _run(request: dict[str, Any], calls: filters.CallFilter) -> None:
    """Become bash: with limits, without privileges, and with nothing of ours open."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    complaints, trace = (os.open(p, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600) for p in (_COMPLAINTS, _TRACE))
    for descriptor, target in ((nothing, 0), (nothing, 1), (complaints, 2), (trace, _TRACE_DESCRIPTOR)):
        os.dup2(descriptor, target)
    os.closerange(3, _TRACE_DESCRIPTOR)
    os.closerange(_TRACE_DESCRIPTOR + 1, os.sysconf("SC_OPEN_MAX"))
    limits = [(resource.RLIMIT_CPU, request["cpu_s"]), (resource.RLIMIT_FSIZE, request["scratch_bytes"])]
    limits += [(resource.RLIMIT_NOFILE, 256), (resource.RLIMIT_CORE, 0)]
    if not isolation.is_root_outside():
        limits.append((resource.RLIMIT_NPROC, request["num_processes"] + 8))  # and the processes that watch it
    for kind, value in limits:
        resource.setrlimit(kind, (value, value))
    os.chdir(request["cwd"])
    os.nice(10)  # or a bomb keeps the watcher from a processor
    isolation.drop_privileges()
    filters.confine(
        programs=(*request["programs"], *request["stand_ins"], "/stand_ins"),
        readable=("/proc",),
        writable=(*isolation.DEVICES, "/tmp", _RECORDS, "/trace", request["folder"], *request["folders"]),
    )
    calls.take_on()
    bash = request["programs"][0]
    traced = {"SHELLOPTS": "xtrace", "BASH_XTRACEFD": str(_TRACE_DESCRIPTOR)}
    os.execve(bash, [bash, request["script"], *request["arguments"]], request["environment"] | traced)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


def _is_full(folder: str) -> bool:
    return os.statvfs(folder).f_bavail == 0


def _whole(path: str) -> str:
    """Text of a regular file; empty for what else a script may have put there."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode):
                return os.pread(file, status.st_size, 0).decode(errors="replace")
        finally:
            os.close(file)
    return ""
