"""Sandboxes of kind `podman`: one container of an image per sandbox, in which commands are executed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import resource
import secrets
import shlex
import shutil
import signal
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from rl_agent.errors import SandboxError
from rl_agent.sandbox.backends.bubblewrap import forwarder
from rl_agent.sandbox.base import Sandbox, SandboxKind, SandboxSpec, exit_status, run_program, script_of
from rl_agent.types import SandboxLimits

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from rl_agent.types import CodeResult

_CAPABILITIES = "CHOWN,DAC_OVERRIDE,FOWNER,FSETID,KILL,SETGID,SETUID"
"""Capabilities within the container that installing programs takes."""
_ADMIN = SandboxLimits(timeout_s=120.0, output_bytes=1 << 20)
"""Limits of podman's own commands."""


class PodmanSandboxes(SandboxKind):
    """Sandboxes by podman: containers of images that are on this machine, which it never pulls.

    Processes live until the container ends, or a command passes its deadline, at which all are killed.
    """

    name = "podman"
    builds_images = True

    async def check(self) -> str:
        """See `SandboxKind`."""
        if shutil.which("podman") is None:
            raise SandboxError("sandbox=podman needs the program podman: apt-get install podman")
        if self.image is None:
            said = await _podman("info", "--format", "{{.Host.OCIRuntime.Name}}")
            return f"in podman ({said.strip()}), with the images of the rows; network: {self.network}"
        await self.check_image(self.image)
        async with self._opened(SandboxSpec()) as sandbox:
            result = await sandbox.run("true")
        if result.kind != "ok":
            raise SandboxError(f"image {self.image!r} runs no bash: {(result.output or result.error).strip()}")
        return f"in podman, with image {self.image}; network: {self.network}"

    async def check_image(self, image: str) -> None:
        """Check that podman has the image."""
        if shutil.which("podman") is None:
            raise SandboxError("sandbox=podman needs the program podman: apt-get install podman")
        result = await run_program(["podman", "image", "exists", image], limits=_ADMIN)
        if exit_status(result) != 0:
            raise SandboxError(f"podman has no image {image!r} on this machine; podman pull or podman build it first")

    async def build(self, folder: Path, name: str) -> None:
        """Build the image of a folder with a Dockerfile, from images that are here; no-op if it exists.

        Raises:
            SandboxError: it cannot be built.
        """
        if exit_status(await run_program(["podman", "image", "exists", name], limits=_ADMIN)) == 0:
            return
        network = "host" if self.network == "open" else "none"
        limits = SandboxLimits(timeout_s=1800.0, output_bytes=1 << 20, file_bytes=1 << 30)
        options = [f"--network={network}", "--pull=never", *_ulimits(self.limits), "-t", name]
        result = await run_program(["podman", "build", "-q", *options, str(folder)], limits=limits)
        if result.kind != "ok":
            raise SandboxError(f"podman cannot build {folder}: {(result.output or result.error).strip()[-800:]}")

    @asynccontextmanager
    async def _opened(self, spec: SandboxSpec) -> AsyncGenerator[_PodmanSandbox]:
        image = spec.image or self.image
        if image is None:
            raise SandboxError("sandbox=podman needs an image: the row's field 'image', or sandbox={image: NAME}")
        name, limits = f"rl-agent-{os.getpid()}-{secrets.token_hex(6)}", self.limits
        options = ["--rm", "-i", "--name", name, "--pull=never", "--entrypoint=", "--user=0"]
        options += ["--network=host" if self.network == "open" else "--network=none"]
        options += ["--cap-drop=all", f"--cap-add={_CAPABILITIES}", "--security-opt=no-new-privileges"]
        options += [f"--memory={limits.memory_bytes}", f"--memory-swap={limits.memory_bytes}", *_ulimits(limits)]
        options += [
            f"--pids-limit={limits.num_processes + 4}",
            f"--tmpfs=/tmp:rw,exec,mode=1777,size={limits.scratch_bytes}",
        ]
        options += [f"--volume={path}:{path}:ro" for path in spec.readable]
        options += [f"--cpus={spec.num_cpus:g}"] if spec.num_cpus else []
        options += _folders(spec, limits)
        async with AsyncExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-agent-"))
            await stack.enter_async_context(_container(name, [*options, image], scratch))
            where = await _podman("inspect", "--format", "{{.State.Pid}} {{.Config.WorkingDir}}", name)
            pid, _, workdir = where.strip().partition(" ")
            if spec.service is not None and self.network == "proxy":
                await stack.enter_async_context(forwarder(int(pid), spec.service))
            sandbox = _PodmanSandbox(self, name, int(pid), spec, workdir or "/")
            await sandbox.load()
            if spec.extra and limits.folder_bytes is None:
                await sandbox.run(f"mkdir -p {shlex.join(spec.extra)}")
            yield sandbox


class _PodmanSandbox(Sandbox):
    def __init__(self, kind: PodmanSandboxes, name: str, pid: int, spec: SandboxSpec, workdir: str) -> None:
        self._kind, self._name, self._pid = kind, name, pid
        self.workdir = spec.workdir if spec.folder is not None else workdir
        self._folder = spec.folder
        """Folder whose files are copied; None: it is mounted, or there is none."""
        if kind.limits.folder_bytes is None:
            self._folder = None

    async def load(self) -> None:
        """See `Sandbox`."""
        if self._folder is not None:
            await _podman("cp", f"{self._folder}/.", f"{self._name}:{self.workdir}")

    async def sync(self) -> None:
        """See `Sandbox`."""
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            self._folder.mkdir()
            await _podman("cp", f"{self._name}:{self.workdir}/.", str(self._folder))

    async def run(
        self, command: str, *, timeout_s: float | None = None, variables: Mapping[str, str] | None = None
    ) -> CodeResult:
        """See `Sandbox`."""
        script = script_of(command, variables)
        async with self._kind.turns:
            return await self._execute(["bash", "-c", script], self._kind.limits, timeout_s)

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`."""
        place = str(PurePosixPath(self.workdir) / path)
        made = 'for d in "$@"; do [ -d "$d" ] || { rm -rf "$d"; mkdir "$d"; }; done; rm -rf "$0"; cat > "$0"'
        parents = [str(each) for each in reversed(PurePosixPath(place).parents)][1:]
        result = await self._execute(["sh", "-c", made, place, *parents], _ADMIN, None, data)
        if result.kind != "ok":
            raise SandboxError(f"file {path} could not be written to container {self._name}: {result.output}")

    async def read(self, path: str) -> bytes:
        """See `Sandbox`."""
        place = str(PurePosixPath(self.workdir) / path)
        limits = SandboxLimits(timeout_s=_ADMIN.timeout_s, output_bytes=1 << 28, file_bytes=1 << 28)
        found = await self._execute(["sh", "-c", '[ -f "$0" ] && exec base64 "$0"', place], limits, None)
        if found.kind != "ok":
            raise FileNotFoundError(f"sandbox: there is no file {path}")
        return base64.b64decode(found.output)

    async def _execute(
        self, words: Sequence[str], limits: SandboxLimits, timeout_s: float | None, data: bytes = b""
    ) -> CodeResult:
        command = ["podman", "exec", "-i", "--workdir", self.workdir, self._name, *words]
        return await run_program(command, limits=limits, timeout_s=timeout_s, stdin=data, end=self._end)

    async def _end(self) -> None:
        """Kill all processes but the container's first: frozen, they start no others."""
        await run_program(["podman", "pause", self._name], limits=_ADMIN)
        await asyncio.to_thread(_kill_others, self._pid)
        await run_program(["podman", "unpause", self._name], limits=_ADMIN)


def _kill_others(pid: int) -> None:
    """Kill the other processes of a process's namespace."""
    own = Path(f"/proc/{pid}/ns/pid").readlink()
    for each in Path("/proc").iterdir():
        if each.name.isdigit() and each.name != str(pid):
            with suppress(OSError):
                if (each / "ns/pid").readlink() == own:
                    os.kill(int(each.name), signal.SIGKILL)


@asynccontextmanager
async def _container(name: str, options: Sequence[str], folder: str) -> AsyncGenerator[None]:
    """A container whose first process reaps the others, and ends with this process, when it has no more to read."""
    process = await asyncio.create_subprocess_exec(
        *("podman", "run", *options, "bash", "-c", "echo ready; read"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        cwd=folder,  # conmon leaves a file there when a container is out of memory
    )
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    assert process.stderr is not None, "a pipe"
    try:
        async with asyncio.timeout(_ADMIN.timeout_s):
            if await process.stdout.readline() != b"ready\n":
                said = (await process.stderr.read()).decode(errors="replace").strip()[-800:]
                raise SandboxError(f"podman cannot start a container: {said}{_advice(said)}")
        yield
    except TimeoutError as error:
        raise SandboxError(f"podman has started no container within {_ADMIN.timeout_s:g} s") from error
    finally:
        process.stdin.close()
        with contextlib.suppress(SandboxError):
            await run_program(["podman", "rm", "-f", "-t", "0", name], limits=_ADMIN)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _folders(spec: SandboxSpec, limits: SandboxLimits) -> list[str]:
    """Options for the folders that commands may change: with a bound, these and `/tmp` are all that they may."""
    most, place = limits.folder_bytes, [] if spec.folder is None else [f"--workdir={spec.workdir}"]
    if most is None:
        return place if spec.folder is None else [f"--volume={spec.folder}:{spec.workdir}", *place]
    if spec.folder is None:  # the working folder is the image's own
        return [f"--storage-opt=size={most}"]
    folders = (spec.workdir, *spec.extra)
    return ["--read-only", *place, *(f"--tmpfs={each}:rw,exec,mode=0755,size={most}" for each in folders)]


def _advice(said: str) -> str:
    if "storage-opt" in said or "pquota" in said or "project quota" in said:
        return "; folder_bytes of an image's own folder needs podman's storage on xfs with pquota: leave it out"
    if "hybrid mode" in said:
        return '; apt-get install runc, and set runtime="runc" of [engine] in containers.conf'
    return ""


def _ulimits(limits: SandboxLimits) -> list[str]:
    """Limits of processes, none above those of this one: podman's own default needs a privilege to raise them."""
    wanted = {"nofile": (resource.RLIMIT_NOFILE, 1024), "nproc": (resource.RLIMIT_NPROC, 1 << 14)}
    found = {name: (most, resource.getrlimit(kind)[1]) for name, (kind, most) in wanted.items()}
    values = {name: most if hard < 0 else min(most, hard) for name, (most, hard) in found.items()}
    values["fsize"] = limits.file_bytes
    return [f"--ulimit={name}={value}:{value}" for name, value in values.items()]


async def _podman(*words: str) -> str:
    """Output of a command of podman.

    Raises:
        SandboxError: it fails.
    """
    result = await run_program(["podman", *words], limits=_ADMIN)
    if result.kind != "ok":
        raise SandboxError(f"podman {words[0]}: {(result.output or result.error).strip()}")
    return result.output
