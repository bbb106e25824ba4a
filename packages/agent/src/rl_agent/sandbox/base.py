"""Interface of sandboxes: a machine per trajectory, in which commands run, files change, and nothing leaves.

A kind (`SandboxKind`) opens sandboxes; `rl_agent.registry.create_sandboxes` makes one by its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar, Literal

from rl_agent.errors import RowError, SandboxError
from rl_agent.sandbox.folders import bounded, pack, unpack, unpack_into, write_below
from rl_agent.types import CodeResult, CodeStatus, SandboxLimits

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
    from typing import Self

    from rl_agent.sandbox.worker import Service

Network = Literal["none", "proxy", "open"]
NETWORKS: tuple[Network, ...] = ("none", "proxy", "open")
WORKDIR = "/workspace"
_TAKEN = {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "proc", "dev", "sys", "tmp", "old"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Contents of one sandbox."""

    folder: Path | None = None
    """Folder of this machine whose files are in the working folder; None: those of the image."""
    workdir: str = WORKDIR
    """Path of the working folder inside."""
    extra: tuple[str, ...] = ()
    """Paths of further folders, empty at first, that commands may change."""
    image: str | None = None
    """Image of the row; None: the one that the kind was made with, or this machine's programs."""
    readable: tuple[Path, ...] = ()
    """Files and folders of this machine that commands may read, at `Sandbox.path_of` inside."""
    service: Service | None = None
    """Service of this process, at `127.0.0.1:port` inside."""
    num_cpus: float = 0
    """Processors that commands need; podman gives them no more. 0: all of the machine's."""
    storage_bytes: int = 0
    """Room for files that commands need."""


class Sandbox(ABC):
    """One sandbox. Files stay from command to command; `SandboxKind` says whether processes do."""

    workdir = WORKDIR
    """Path of the working folder inside."""

    @abstractmethod
    async def run(
        self, command: str, *, timeout_s: float | None = None, variables: Mapping[str, str] | None = None
    ) -> CodeResult:
        """Run a command with bash in the working folder; `exit_status` reads how it ended.

        Args:
            command: Command for bash.
            timeout_s: Deadline, seconds, past which everything that it started is killed; None: that of the limits.
            variables: Environment variables.

        Raises:
            SandboxError: the sandbox cannot run commands any more.
        """

    @abstractmethod
    async def write(self, path: str, data: bytes) -> None:
        """Write a file, by its absolute path or below the working folder, over what commands put there.

        Raises:
            RowError: the path is outside of the folders that commands may change.
        """

    @abstractmethod
    async def read(self, path: str) -> bytes:
        """Read a regular file, by its absolute path or below the working folder.

        Raises:
            FileNotFoundError: there is none, or it leads out of the sandbox.
        """

    async def run_code(self, code: str, *, timeout_s: float | None = None) -> CodeResult:
        """Run Python code in the working folder, with the first `python3` there is."""
        return await self.run(f"exec python3 -c {shlex.quote(code)}", timeout_s=timeout_s)

    async def load(self) -> None:
        """Copy the files of the folder of this machine to the working folder. The default: it is that folder."""
        return

    async def sync(self) -> None:
        """Copy the working folder's files to the folder of this machine. The default: it is that folder."""
        return

    def url_of(self, service: Service) -> str:
        """URL inside of `SandboxSpec.service`."""
        return f"http://127.0.0.1:{service.port}"

    def path_of(self, path: Path) -> str:
        """Path inside of a file or folder in `SandboxSpec.readable`."""
        return str(path)


class SandboxKind(ABC):
    """Kind of sandboxes, with the limits that hold in each.

    Args:
        limits: Limits of one sandbox.
        max_running: Commands at the same time; more wait.
        network: `none`; `proxy`, the service of the spec alone; `open`, that of the machine.
        image: Image of sandboxes whose row has none.

    Raises:
        SandboxError: it cannot do one of them.
    """

    name: ClassVar[str]
    networks: ClassVar[tuple[Network, ...]] = NETWORKS
    """Policies of the network that this kind can hold."""
    image_needs: ClassVar[str] = ""
    """Advice for images, of a kind that takes none; empty: it takes them."""
    builds_images: ClassVar[bool] = False
    """Whether `build` makes images."""
    proxy_host = "127.0.0.1"
    """Interface of this machine at which the kind needs the proxy."""

    def __init__(
        self, *, limits: SandboxLimits, max_running: int, network: Network = "proxy", image: str | None = None
    ) -> None:
        self.limits, self.max_running, self.network, self.image = limits, max_running, network, image
        if network not in self.networks:
            raise SandboxError(f"sandbox {self.name} has network={', '.join(self.networks)}, and not {network!r}")
        if image is not None:
            self._check_takes_images(image)
        self.turns = asyncio.Semaphore(max_running)
        """Commands that may still start."""

    def _check_takes_images(self, image: str) -> None:
        if self.image_needs:
            raise SandboxError(f"sandbox {self.name} has no image {image!r}: {self.image_needs}")

    @abstractmethod
    async def check(self) -> str:
        """Start a sandbox; returns a line for the plan about what holds in it.

        Raises:
            SandboxError: none can be started; says what to install.
        """

    async def check_image(self, image: str) -> None:
        """Check that a row's image is here.

        Raises:
            SandboxError: it is not, or this kind takes none.
        """
        self._check_takes_images(image)

    async def check_room(self, spec: SandboxSpec) -> None:
        """Check that there are the processors and the room for files that a row needs.

        Raises:
            SandboxError: there are fewer; names the field.
        """
        cpus = len(os.sched_getaffinity(0))
        if spec.num_cpus > cpus:
            raise SandboxError(f"it wants cpus={spec.num_cpus:g}, and this machine has {cpus}")
        most, free = self.limits.folder_bytes, shutil.disk_usage(tempfile.gettempdir()).free
        if spec.storage_bytes > (free if most is None else most):
            there = f"{free >> 20} are free in {tempfile.gettempdir()}" if most is None else f"folder_bytes is {most}"
            raise SandboxError(f"it wants storage_mb={spec.storage_bytes >> 20}, and {there}")

    async def build(self, folder: Path, name: str) -> None:
        """Build the image of a folder with a Dockerfile; no-op if it exists.

        Raises:
            SandboxError: it cannot be built, or this kind builds none (the default).
        """
        del folder
        raise SandboxError(f"sandbox {self.name} cannot build the image {name}; take sandbox=podman")

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
        """Start a sandbox, which ends with the context.

        Raises:
            SandboxError: it cannot be started.
            RowError: a path is taken by the system, or the image is not here.
        """
        for path in (spec.workdir, *spec.extra):
            parts = PurePosixPath(path).parts
            if len(parts) < 2 or parts[0] != "/" or parts[1] in _TAKEN or ".." in parts:
                raise RowError(f"folder {path!r} of a sandbox is none that commands can have, such as {WORKDIR}")
        try:
            if spec.image is not None:
                await self.check_image(spec.image)
            await self.check_room(spec)
        except SandboxError as error:
            raise RowError(str(error)) from error
        async with self._opened(spec) as sandbox:
            yield sandbox

    @abstractmethod
    def _opened(self, spec: SandboxSpec) -> contextlib.AbstractAsyncContextManager[Sandbox]: ...

    async def close(self) -> None:
        """End what the kind has started."""
        return


class MountedSandbox(Sandbox):
    """Base class of sandboxes whose folders are folders of this machine, and whose processes end with each command.

    With a bound on their size the folders are file systems of a namespace of their own, to and from which the files of
    `spec.folder` are copied.
    """

    def __init__(self, kind: SandboxKind, spec: SandboxSpec, scratch: Path) -> None:
        self._spec, self.workdir, self._scratch = spec, spec.workdir, scratch
        given = spec.folder if kind.limits.folder_bytes is None else None
        self.folders: dict[str, Path] = {spec.workdir: given or scratch / "work"}
        """Folders of this machine by their path inside; the working folder first."""
        self.folders |= {inside: scratch / str(number) for number, inside in enumerate(spec.extra)}
        for folder in self.folders.values():
            folder.mkdir(exist_ok=True)
        self.namespace: int | None = None
        """Process whose namespace has the folders; None: this one."""

    @classmethod
    @asynccontextmanager
    async def opened(cls, kind: SandboxKind, spec: SandboxSpec) -> AsyncGenerator[Self]:
        """Open a sandbox of a kind.

        Raises:
            SandboxError: its folders cannot be bounded.
        """
        most = kind.limits.folder_bytes
        async with AsyncExitStack() as stack:
            made = tempfile.TemporaryDirectory(prefix="rl-agent-", ignore_cleanup_errors=True)
            sandbox = cls(kind, spec, Path(stack.enter_context(made)))
            if most is not None:
                sandbox.namespace = await stack.enter_async_context(bounded(sandbox.folders.values(), most))
                await sandbox.load()
            yield sandbox

    async def load(self) -> None:
        """See `Sandbox`."""
        if self.namespace is not None and self._spec.folder is not None:
            packed = await asyncio.to_thread(pack, self._spec.folder)
            await asyncio.to_thread(unpack_into, packed, self._seen(self.folders[self.workdir]))

    async def sync(self) -> None:
        """See `Sandbox`."""
        if self.namespace is not None and self._spec.folder is not None:
            packed = await asyncio.to_thread(pack, self._seen(self.folders[self.workdir]))
            await asyncio.to_thread(unpack, packed, self._spec.folder)

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`."""
        folder, below = self._below(path)
        await asyncio.to_thread(write_below, self._seen(folder), below, data)

    async def read(self, path: str) -> bytes:
        """See `Sandbox`."""
        folder, below = self._below(path)
        with tempfile.TemporaryDirectory(dir=self._scratch) as copied:
            if self.namespace is not None:  # links within the namespace cannot be followed from here
                await asyncio.to_thread(lambda: unpack_into(pack(self._seen(folder)), Path(copied)))
                folder = Path(copied)
            file = (folder / below).resolve()
            if not file.is_relative_to(folder.resolve()) or not file.is_file():
                raise FileNotFoundError(f"sandbox: there is no file {path}")
            return await asyncio.to_thread(file.read_bytes)

    def _seen(self, folder: Path) -> Path:
        return folder if self.namespace is None else Path(f"/proc/{self.namespace}/root{folder}")

    def _below(self, path: str) -> tuple[Path, str]:
        whole = str(PurePosixPath(self._spec.workdir) / path)
        for inside, folder in self.folders.items():
            if whole.startswith(f"{inside}/"):
                return folder, whole.removeprefix(f"{inside}/")
        raise RowError(f"file {path!r} is outside of the working copy, which is in {', '.join(self.folders)}")


def script_of(command: str, variables: Mapping[str, str] | None, programs: Sequence[str | Path] = ()) -> str:
    """Script for bash that runs a command with variables, and with the programs of some folders first."""
    path = "".join(f"{folder}:" for folder in programs)
    lines = [f'export PATH={shlex.quote(path)}"$PATH"'] if path else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in (variables or {}).items()]
    return "\n".join([*lines, command])


def exit_status(result: CodeResult) -> int | None:
    """Exit status of a command; None where it did not end by itself."""
    if result.kind == "ok":
        return 0
    _, mark, status = result.error.rpartition("SystemExit: ")
    return int(status) if mark else None


async def run_program(
    arguments: Sequence[str],
    *,
    limits: SandboxLimits,
    timeout_s: float | None = None,
    stdin: bytes = b"",
    end: Callable[[], Awaitable[None]] | None = None,
    pass_fds: Sequence[int] = (),
) -> CodeResult:
    """Run a program of this machine that runs a command in a sandbox, and read its output up to the limit.

    Args:
        arguments: Its command line.
        limits: Limits of output and time.
        timeout_s: Deadline, seconds; None: that of the limits.
        stdin: Standard input.
        end: Ends what the command has started, once it is past a limit.
        pass_fds: Descriptors that the program inherits.

    Raises:
        SandboxError: it cannot be started.
    """
    start, timeout_s = time.perf_counter(), timeout_s or limits.timeout_s
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
            env={name: os.environ[name] for name in _PASSED if name in os.environ},  # no secret of ours reaches it
            cwd="/",
        )
    except (OSError, ValueError) as error:
        raise SandboxError(f"{arguments[0]} cannot be started: {error}") from error
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    kept, total, kind = bytearray(), 0, ""
    feeding = asyncio.create_task(_feed(process.stdin, stdin))
    try:
        async with asyncio.timeout(timeout_s):
            while chunk := await process.stdout.read(1 << 16):
                total += len(chunk)
                kept += chunk[: max(limits.output_bytes - len(kept), 0)]
                if total > limits.file_bytes:
                    kind = "output"
                    break
            else:
                await process.wait()
    except TimeoutError:
        kind = "timeout"
    finally:
        feeding.cancel()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if end is not None:
                await asyncio.shield(end())
            await asyncio.shield(_exit_of(process, process.stdout))
        with contextlib.suppress(asyncio.CancelledError):
            await feeding
    status = process.returncode or 0
    killed = f"the process was killed by signal {-status}" if status < 0 else f"SystemExit: {status}"
    found: dict[str, tuple[CodeStatus, str]] = {
        "timeout": ("timeout", f"no end within {timeout_s:g} s"),
        "output": ("output", "too much output"),
    }
    by_status: tuple[CodeStatus, str] = ("ok", "") if status == 0 else ("died" if status < 0 else "error", killed)
    kind, error = found.get(kind, by_status)
    text = kept.decode(errors="replace")
    wall_s = time.perf_counter() - start
    return CodeResult(kind=kind, output=text, error=error, num_output_bytes=total, wall_s=wall_s)


async def _exit_of(process: asyncio.subprocess.Process, output: asyncio.StreamReader) -> None:
    """Wait for a killed process. Its output is read to the end: `wait` returns only when the pipe is closed."""
    while await output.read(1 << 16):
        pass
    await process.wait()


_PASSED = ("PATH", "HOME", "LANG", "XDG_RUNTIME_DIR", "CONTAINERS_CONF", "TMPDIR")
"""Variables of this process that programs of sandboxes get."""


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
        stream.close()
