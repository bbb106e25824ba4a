"""Files of a sandbox's folders on this machine, written and packed whatever commands left there."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from rl_agent.errors import RowError


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
