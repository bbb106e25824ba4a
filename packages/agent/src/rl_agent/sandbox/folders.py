"""Files of a sandbox's folders on this machine, written and packed whatever commands left there."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tarfile
from contextlib import asynccontextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from rl_agent.errors import RowError, SandboxError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

_MOUNT = (
    'for each in "$@"; do mount -t tmpfs -o size="$0",mode=0755 tmpfs "$each" || exit 1; done; echo ready; exec cat'
)
_MOUNT_S = 30.0


def write_below(folder: Path, name: str, data: bytes) -> None:
    """Write a file below a folder and nowhere else, replacing what a model put at its path.

    Raises:
        RowError: the name leads out of the folder, or is none that a file can have.
    """
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/"):
        raise RowError(f"file {name!r} of the row is outside of the working copy")
    path = folder
    try:
        for part in parts[:-1]:
            path /= part
            if path.is_symlink() or path.is_file():
                path.unlink()
            path.mkdir(exist_ok=True)
        path /= parts[-1]
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
    except ValueError as error:  # a NUL
        raise RowError(f"file {name!r} of the row has no name that a file can have: {error}") from error


def pack(folder: Path) -> bytes:
    """A folder's files, as a tar file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """Replace a folder and its files with those of a tar file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    unpack_into(data, folder)


def unpack_into(data: bytes, folder: Path) -> None:
    """Write the files of a tar file into a folder; links and paths out of it are left out."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            try:
                archive.extract(member, folder, filter="data")
            except tarfile.FilterError:  # a model's link to /etc/passwd is no file of the working folder
                continue


@asynccontextmanager
async def bounded(folders: Iterable[Path], size_bytes: int) -> AsyncGenerator[int]:
    """File systems of a size over folders of this machine, in a mount namespace that ends with the context.

    Yields:
        Process id of the namespace: `entering` has the words to run a program there, `/proc/PID/root` its files.

    Raises:
        SandboxError: this user cannot mount.
    """
    words = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount", "sh", "-c", _MOUNT]
    try:
        process = await asyncio.create_subprocess_exec(
            *(*words, str(size_bytes), *map(str, folders)),
            stdin=asyncio.subprocess.PIPE,  # its end, when this process is gone, ends the namespace
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
        )
    except OSError as error:
        raise SandboxError(f"folder_bytes={size_bytes} needs the program unshare: {error}") from error
    assert process.stdout is not None, "a pipe"
    assert process.stderr is not None, "a pipe"
    try:
        async with asyncio.timeout(_MOUNT_S):
            if await process.stdout.readline() != b"ready\n":
                said = (await process.stderr.read()).decode(errors="replace").strip()[-300:]
                raise SandboxError(
                    f"folder_bytes={size_bytes} needs a mount namespace, which this user cannot make here ({said}); "
                    "take sandbox=podman, or leave it out"
                )
        yield process.pid
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def entering(pid: int | None) -> list[str]:
    """Words before a command line that runs in the namespace of `bounded`; none without one."""
    if pid is None:
        return []
    users = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", f"--target={pid}", *users, "--mount", "--"]
