"""Sandboxes of kind `bubblewrap`: namespaces by bwrap, memory and processes by control groups, calls by our filter."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_agent.errors import SandboxError
from rl_agent.sandbox.backends.process import LOCAL_VARIABLES, local_programs
from rl_agent.sandbox.base import MountedSandbox, SandboxKind, SandboxSpec, run_program, script_of
from rl_agent.sandbox.folders import entering
from rl_agent.sandbox.limits import ControlGroup
from rl_agent.sandbox.process.filters import filter_program
from rl_agent.sandbox.process.isolation import PROGRAMS, SETTINGS
from rl_agent.sandbox.worker import PROGRAM, PYTHON

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from contextlib import AbstractAsyncContextManager

    from rl_agent.sandbox.worker import Service
    from rl_agent.types import CodeResult

_LIMITED = (
    'for group in {groups}; do echo 0 > "$group/cgroup.procs" || exit 125; done; '
    'ulimit -f {blocks} -n 512 -c 0; exec "$@"'
)
_START_S = 30.0


class BubblewrapSandboxes(SandboxKind):
    """Sandboxes by `bwrap`, of this machine's programs or of the root file system in a folder, both read-only.

    A command's processes end with it. Memory and processes are limited by control groups.

    Args:
        venv: A virtual environment whose programs come first; commands may read it.
        **common: Arguments of every kind; see `SandboxKind`. An image is a folder with a root file system.
    """

    name = "bubblewrap"

    def __init__(self, *, venv: Path | None = None, **common: Any) -> None:
        super().__init__(**common)
        self.venv = venv

    async def check(self) -> str:
        """See `SandboxKind`."""
        if shutil.which("bwrap") is None:
            raise SandboxError("sandbox=bubblewrap needs the program bwrap: apt-get install bubblewrap")
        if self.image is not None:
            await self.check_image(self.image)
        async with self._opened(SandboxSpec()) as sandbox:
            result = await sandbox.run("true")
        if result.kind != "ok":
            raise SandboxError(f"sandbox=bubblewrap cannot start: {(result.output or result.error).strip()}")
        return f"in bubblewrap, {self.image or 'with the programs of this machine'}; network: {self.network}"

    async def check_image(self, image: str) -> None:
        """Check that the image is a folder with a shell."""
        if not await asyncio.to_thread(
            lambda: any(Path(image, name).exists() for name in ("bin/bash", "usr/bin/bash"))
        ):
            raise SandboxError(
                f"sandbox bubblewrap has no image {image!r}: an image is a folder with a root file system that has bash"
            )

    def _opened(self, spec: SandboxSpec) -> AbstractAsyncContextManager[_BubblewrapSandbox]:
        return _BubblewrapSandbox.opened(self, spec)

    async def run(
        self, arguments: list[str], service: Service | None, timeout_s: float | None, namespace: int | None
    ) -> CodeResult:
        """Run bwrap with arguments that it does not have by itself, in a control group of its own."""
        try:
            group = ControlGroup(self.limits)
        except (OSError, ValueError) as error:
            raise SandboxError(
                f"sandbox=bubblewrap limits memory and processes by control groups, which this user cannot make "
                f"({error}); use sandbox=process"
            ) from error
        calls, info, block = os.memfd_create("calls"), os.pipe(), os.pipe()
        os.write(calls, filter_program(has_memory_files=True))
        os.lseek(calls, 0, os.SEEK_SET)
        given = [f"--seccomp {calls}", *([f"--info-fd {info[1]}", f"--block-fd {block[0]}"] if service else [])]
        limited = _LIMITED.format(groups=" ".join(map(str, group.paths)), blocks=self.limits.file_bytes >> 10)
        command = ["bash", "-c", limited, "bwrap", *entering(namespace), "bwrap", *" ".join(given).split(), *arguments]
        forwarding = asyncio.create_task(_forwarder(service, info[0], block[1])) if service else None
        try:
            result = await run_program(
                command, limits=self.limits, timeout_s=timeout_s, pass_fds=(calls, info[1], block[0])
            )
            is_killed = result.kind in ("error", "timeout", "died") and group.num_kills()
        finally:
            try:
                if forwarding is not None:
                    forwarding.cancel()
                    with suppress(asyncio.CancelledError):
                        await forwarding  # raises where the service could not be made reachable
            finally:
                for descriptor in (calls, *info, *block):
                    os.close(descriptor)
                await asyncio.to_thread(group.remove)
        if is_killed:
            return replace(result, kind="memory", error="the memory limit of all processes was reached")
        return result


class _BubblewrapSandbox(MountedSandbox):
    def __init__(self, kind: BubblewrapSandboxes, spec: SandboxSpec, scratch: Path) -> None:
        super().__init__(kind, spec, scratch)
        self._kind, self._image = kind, spec.image or kind.image

    async def run(
        self, command: str, *, timeout_s: float | None = None, variables: Mapping[str, str] | None = None
    ) -> CodeResult:
        """See `Sandbox`."""
        kind, spec = self._kind, self._spec
        programs = local_programs(kind.venv) if self._image is None else []
        script = script_of(command, {**LOCAL_VARIABLES, **(variables or {})}, programs)
        service = spec.service if kind.network == "proxy" else None
        arguments = ["--unshare-all", *(["--share-net"] if kind.network == "open" else [])]
        arguments += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
        arguments += ["--setenv", "PATH", os.defpath, "--setenv", "LANG", "C.UTF-8"]
        arguments += [*self._root(), "--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]
        arguments += ["--size", str(kind.limits.scratch_bytes)]
        arguments += ["--tmpfs", "/tmp"]
        for path in (*spec.readable, *([] if kind.venv is None else [kind.venv])):
            arguments += ["--ro-bind", str(path), str(path)]
        for inside, folder in self.folders.items():
            arguments += ["--bind", str(folder), inside]
        arguments += ["--chdir", self.workdir, "--", "bash", "-c", script]
        async with kind.turns:
            return await kind.run(arguments, service, timeout_s, self.namespace)

    def _root(self) -> list[str]:
        if self._image is not None:
            folders = [folder for folder in sorted(Path(self._image).iterdir()) if folder.name not in _OWN]
            return [word for each in folders for word in ("--ro-bind", str(each), f"/{each.name}")]
        paths = {path: Path(path) for path in (*PROGRAMS, *SETTINGS, sys.base_prefix)}
        arguments = list[str]()
        for path, there in paths.items():
            if there.is_symlink() and path in PROGRAMS:  # /bin, where it is /usr/bin
                arguments += ["--symlink", str(there.readlink()), path]
            elif there.exists():
                arguments += ["--ro-bind", path, path]
        return arguments


_OWN = ("proc", "dev", "tmp", "sys")


async def _forwarder(service: Service, info: int, block: int) -> None:
    """Make the service reachable once the sandbox has a network, and let its command begin; runs until cancelled."""
    loop, report, has_more = asyncio.get_running_loop(), b"", asyncio.Event()
    loop.add_reader(info, has_more.set)
    try:
        while not report.rstrip().endswith(b"}"):
            await has_more.wait()
            has_more.clear()
            report += os.read(info, 1 << 12)
    finally:
        loop.remove_reader(info)
    try:
        async with forwarder(json.loads(report)["child-pid"], service):
            os.write(block, b"1")
            await asyncio.Event().wait()
    except SandboxError:
        os.write(block, b"1")  # it ends by itself, without the service
        raise


@asynccontextmanager
async def forwarder(pid: int, service: Service) -> AsyncGenerator[None]:
    """Make a service reachable in the network namespace of a process.

    Raises:
        SandboxError: that cannot be entered.
    """
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-I", "-S", str(PROGRAM), "forward", str(pid), str(service.port), str(service.socket)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None, "a pipe"
    assert process.stderr is not None, "a pipe"
    try:
        async with asyncio.timeout(_START_S):
            if not await process.stdout.readline():
                said = (await process.stderr.read()).decode(errors="replace").strip()[-500:]
                raise SandboxError(f"the network of a sandbox cannot be entered for the proxy: {said}")
        yield
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
