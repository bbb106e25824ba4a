"""Sandbox process: forks one child per run, and never loads user code. Started by path, it obeys hard limits.

Its standard input is a socket of packets. A run is a packet with descriptors: code, standard input, output, and a
socket for what needs one. The child gets these and nothing else; this process sees none of their content, so that no
child inherits what an earlier one was given. When the child has ended with all that it started, the answer repeats the
number that came in the packet after the run's, which was read after the fork.
"""

from __future__ import annotations

import _socket
import array
import gc
import json
import os
import resource
import select
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_agent.sandbox.process import execution, filters, isolation, judge, launches
else:  # this folder is the path of the process that it is started in
    import execution
    import filters
    import isolation
    import judge
    import launches

_MAX_DESCRIPTORS = 8
_NUM_FILES = 512
"""Most descriptors that one process may have open."""
_OWN_PROCESSES = 8
"""Processes in addition to those of a run."""
_VALUES = 3
"""Descriptor of a run's socket, if it has one."""


def main() -> None:
    """Serve runs until the socket is closed."""
    control = _socket.socket(fileno=os.dup(0))
    settings = json.loads(control.recv(1 << 16))
    _replace(0)
    isolation.die_with_parent()
    for path in settings["cgroups"]:
        with open(f"{path}/cgroup.procs", "w") as file:
            file.write("0")
    isolated: set[str] = set()
    watch = isolation.Watch(settings["memory_bytes"], settings["num_processes"]) if settings["is_watched"] else None
    if settings["may_isolate"]:
        places = {"folders": settings["folders"], "readable": settings["readable"]}
        isolated = isolation.enter(**places, scratch_bytes=settings["scratch_bytes"], watch=watch)
    else:
        isolation.stay(watch)
    if settings["service"] is not None:
        port, path = settings["service"]
        isolation.forward(port, path, isolated)
    if "files" not in isolated:
        os.chdir(settings["folders"][0][1] if settings["folders"] else "/tmp")
    isolation.adopt_orphans()
    _limit(settings, isolated)
    del sys.path[0]  # nothing of ours is imported from here on
    execution.warm_up()
    gc.collect()
    gc.freeze()  # pages of what is here are not copied into a child that collects
    isolation.hide()
    isolation.give_up_gains()
    try:
        calls = filters.CallFilter(has_memory_files=not settings["is_watched"])
    except OSError:
        calls = None
    has_rlimit = _counts_processes(isolated)
    reported = {"isolated": sorted(isolated), "is_filtered": calls is not None, "has_rlimit": has_rlimit}
    reported |= {"landlock": filters.landlock_version()}
    control.send(json.dumps(reported).encode())
    _replace(1)
    _replace(2)
    execution.open_streams()  # a run's files take the places of these descriptors
    while True:
        packet, descriptors = _receive(control)
        if not packet:
            return
        request = json.loads(packet)
        if "stop" not in request:  # else that run has ended by itself meanwhile
            _serve(request, descriptors, control, settings, isolated, watch, calls)


def _replace(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def _receive(control: _socket.socket) -> tuple[bytes, list[int]]:
    size = array.array("i").itemsize * _MAX_DESCRIPTORS
    packet, ancillary, _, _ = control.recvmsg(1 << 16, _socket.CMSG_SPACE(size))
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return packet, list(descriptors)


def _limit(limits: dict[str, int], isolated: set[str]) -> None:
    """Set hard limits, which code cannot raise again."""
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, min(_NUM_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    most = limits["file_bytes"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most + execution.MAX_REPORT_BYTES))
    if _counts_processes(isolated):
        number = limits["num_processes"] + _OWN_PROCESSES
        resource.setrlimit(resource.RLIMIT_NPROC, (number, number))


def _counts_processes(isolated: set[str]) -> bool:
    """Whether the kernel limits the processes of this namespace alone, and does so for this user."""
    return "processes" in isolated and not isolation.is_root_outside()


def _serve(
    run: dict[str, Any],
    descriptors: list[int],
    control: _socket.socket,
    settings: dict[str, Any],
    isolated: set[str],
    watch: isolation.Watch | None,
    calls: filters.CallFilter | None,
) -> None:
    """Execute one run, from the fork to the end of all its descendants."""
    if watch is not None:
        watch.begin()
    has_namespace = "processes" in isolated
    if run["mode"] == "judge" and "files" in isolated:
        has_namespace = False  # a test is trusted with the worker's own, and its processes are found in its own /proc
    child = isolation.fresh_child(isolated if has_namespace else set(), settings["scratch_bytes"], settings["readable"])
    if child == 0:
        try:
            control.close()
            _run(run, descriptors, settings, calls)
        finally:
            os._exit(1)
    for descriptor in descriptors:
        os.close(descriptor)
    number = ""
    end = os.pidfd_open(child)
    while not number or end not in select.select([control, end], [], [])[0]:
        packet = control.recv(1 << 16)
        if not packet:
            os._exit(0)
        request = json.loads(packet)
        number = request.get("number", number)
        if request.get("stop") == number:  # the deadline is over
            os.kill(child, signal.SIGKILL)
            break
    os.close(end)
    _, status = os.waitpid(child, 0)
    if not has_namespace:
        isolation.kill_descendants(os.getpid())
        isolation.reap()  # or the ended orphans of a fork bomb would be counted as processes of the next run
    if watch is not None:
        watch.end()
    code = os.waitstatus_to_exitcode(status)
    killed = -code if code < 0 else code - 128 if has_namespace and 128 < code <= 192 else 0  # as a shell reports it
    control.send(json.dumps({"number": number, "signal": killed}).encode())


def _run(
    run: dict[str, Any], descriptors: list[int], settings: dict[str, Any], calls: filters.CallFilter | None
) -> None:
    """Set up the child: only standard streams stay open, and a socket if the run has one."""
    code, given, output, *sockets = descriptors
    text = _whole(code)
    high = [os.dup2(descriptor, 100 + i) for i, descriptor in enumerate((given, output, output, *sockets))]
    for i, descriptor in enumerate(high):
        os.dup2(descriptor, i)
    os.closerange(len(high), os.sysconf("SC_OPEN_MAX"))
    folders = [path for pair in settings["folders"] for path in pair]
    if settings["is_watched"]:
        os.nice(10)
    isolation.drop_privileges()
    filters.confine(
        programs=(*isolation.PROGRAMS, sys.base_prefix, *settings["readable"], *folders),
        readable=(*isolation.SETTINGS, "/proc"),
        writable=(*isolation.DEVICES, "/dev/shm", "/tmp", *folders),
        port=settings["service"] and settings["service"][0],
    )
    if calls is not None:
        calls.take_on()
    if run["mode"] == "code":
        execution.run(text, vars(execution.own_main_module()), is_last=True)
        os._exit(0)
    if run["mode"] == "session":
        _keep(_socket.socket(fileno=_VALUES))
        os._exit(0)
    (judge.run_test if run["mode"] == "judge" else judge.hold_solution)(text, _VALUES)
    os._exit(0)


def _keep(requests: _socket.socket) -> None:
    """Run the calls of one trajectory in one namespace, in its own process."""
    namespace = vars(execution.own_main_module())
    while True:
        packet, descriptors = _receive(requests)
        if not packet:
            return
        code, given, output = descriptors
        text = _whole(code)
        for descriptor, target in ((given, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        for descriptor in descriptors:
            os.close(descriptor)
        execution.open_streams()
        execution.run(text, namespace, is_last=False)
        requests.send(packet)


def _whole(descriptor: int) -> str:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="surrogatepass")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["launches"]:
            launches.main()
        case ["forward", pid, port, path]:
            isolation.forward_into(int(pid), int(port), path)
        case _:
            main()
