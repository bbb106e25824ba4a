"""The folder of `file://`: which versions lie in it, and how one appears in it whole or not at all.

A version is one or more safetensors files and, written last and renamed into place, a manifest that says what is in
them. Readers go by manifests alone, so a writer that died has published nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rl_ckpt.errors import AddressError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMAT = "rl-ckpt 2"
_MANIFEST = re.compile(r"version-([0-9]{20})\.json")
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a version."""

    name: str
    """Under which it is handed out."""
    file: str
    """Name of the safetensors file, in the same folder."""
    digest: str
    """Digest of its elements, as WIRE.md defines it, 16 hexadecimal digits."""
    stored_as: str
    """Name in its file: its own, or that of the tensor whose memory it shares at the sender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a version consists of."""

    version: int
    """Its number."""
    digest: str
    """Tree digest of all tensors, 16 hexadecimal digits."""
    tensors: tuple[Entry, ...]
    """In the order in which they were sent."""

    @property
    def files(self) -> list[str]:
        """Names of the files, each once."""
        return list(dict.fromkeys(entry.file for entry in self.tensors))


class Folder:
    """A folder with versions. Any number of readers, one writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    def lock(self) -> None:
        """Become the writer until `unlock`, or until this process ends in whatever way; forget what a dead one left.

        Raises:
            AddressError: another process is the writer, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".writer", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.unlock()
            raise AddressError(f"{self.path} cannot be written, or another sender writes to it: {error}") from error
        published = {name for version in self.versions() for name in self.read(version).files}
        for path in self.path.iterdir():
            if path.name.endswith(_PARTIAL) or (path.suffix == ".safetensors" and path.name not in published):
                path.unlink(missing_ok=True)

    def unlock(self) -> None:
        """Let another be the writer. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def versions(self) -> list[int]:
        """Versions that are published, in rising order."""
        if not self.path.is_dir():
            return []
        found = (_MANIFEST.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def file_name(self, version: int, number: int) -> str:
        """Name of a file of a version."""
        return f"version-{version:020d}-{number:05d}.safetensors"

    def read(self, version: int) -> Manifest:
        """The manifest of a published version.

        Raises:
            FileNotFoundError: it was removed meanwhile.
            ProtocolError: it is no manifest.
        """
        path = self._manifest(version)
        data = path.read_bytes()
        try:
            fields: dict[str, Any] = json.loads(data)
            manifest = Manifest(
                version=fields["version"],
                digest=fields["digest"],
                tensors=tuple(Entry(**entry) for entry in fields["tensors"]),
            )
            if any(type(value) is not str for entry in fields["tensors"] for value in entry.values()):
                raise TypeError("an entry of a tensor holds something else than text")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProtocolError(f"{path} is no manifest of rl-ckpt: {error!r}") from error
        if fields.get("format") != FORMAT or manifest.version != version:
            raise ProtocolError(f"{path} is {fields.get('format')!r} of version {manifest.version}; wanted {FORMAT!r}")
        if any("/" in name or name.startswith(".") for name in manifest.files):
            raise ProtocolError(f"{path} names files outside of its folder")
        return manifest

    def publish(self, manifest: Manifest) -> None:
        """Make a version whose files are in place visible, at once and for good."""
        path = self._manifest(manifest.version)
        partial = path.with_name(path.name + _PARTIAL)
        with partial.open("w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **asdict(manifest)}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        self._sync_folder()

    def put(self, name: str, write: Callable[[Path], object]) -> None:
        """Let `write(path)` make a file, and put it in place on the disk."""
        partial = self.path / (name + _PARTIAL)
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(self.path / name)

    def remove(self, version: int) -> None:
        """Take a version away, its manifest first. Whoever reads it already goes on."""
        files = self.read(version).files
        self._manifest(version).unlink()
        for name in files:
            (self.path / name).unlink(missing_ok=True)

    def remove_files(self, names: list[str]) -> None:
        """Take files away that no manifest names."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)
            (self.path / (name + _PARTIAL)).unlink(missing_ok=True)

    def _manifest(self, version: int) -> Path:
        return self.path / f"version-{version:020d}.json"

    def _sync_folder(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
