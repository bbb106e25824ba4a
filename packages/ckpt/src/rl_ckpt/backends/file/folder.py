"""The folder of `file://`, or a prefix of an object store: its versions, each of which is there whole or not at all.

A version is one or more safetensors files and, written last and renamed into place, a manifest that says what is in
them. Readers go by manifests alone, so a writer that died has published nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors

from rl_ckpt.errors import AddressError, BackendError, CkptError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

FORMAT = "rl-ckpt 2"
CHAINED = "rl-ckpt 3"
"""Field of a version that is a difference from another."""
_MANIFEST = re.compile(r"version-([0-9]{20})\.json")
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Entry of one tensor in a manifest."""

    name: str
    """Under which it is handed out."""
    file: str
    """Name of the safetensors file, in the same folder."""
    digest: str
    """Digest of its elements, as WIRE.md defines it, 16 hexadecimal digits."""
    stored_as: str
    """Name in its file: its own, or that of the tensor whose memory it shares at the sender."""
    is_difference: bool = False
    """Whether what is stored is the difference from the version that its own is one from."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Manifest of a version: its tensors and what it is a difference from."""

    version: int
    """Its number."""
    digest: str
    """Tree digest of all tensors, 16 hexadecimal digits."""
    tensors: tuple[Entry, ...]
    """Entries in the order in which the tensors were sent."""
    base: int | None = None
    """The version before, where this one is a difference from it."""

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The tensors by name."""
        return {entry.name: entry for entry in self.tensors}

    @property
    def files(self) -> list[str]:
        """Names of the files, each once."""
        return list(dict.fromkeys(entry.file for entry in self.tensors))


class Folder:
    """A folder with versions. Any number of readers, one writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path: Path | str = path
        self._path = path
        self._lock = -1

    def lock(self) -> None:
        """Become the writer until `unlock`, or until this process ends in whatever way; forget what a dead one left.

        Raises:
            AddressError: another process is the writer, or the folder cannot be made.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._path / ".writer", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.unlock()
            raise AddressError(f"{self.path} cannot be written, or another sender writes to it: {error}") from error
        self._forget_unpublished()

    def _forget_unpublished(self) -> None:
        published = {name for version in self.versions() for name in self.read(version).files}
        for name in self.names():
            if name.endswith(_PARTIAL) or (name.endswith(".safetensors") and name not in published):
                self.delete(name)

    def unlock(self) -> None:
        """Let another be the writer. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def versions(self) -> list[int]:
        """Versions that are published, in rising order."""
        found = (_MANIFEST.fullmatch(name) for name in self.names())
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
        path = f"{self.path}/{_manifest_name(version)}"
        data = self.read_bytes(_manifest_name(version))
        try:
            fields: dict[str, Any] = json.loads(data)
            manifest = Manifest(
                version=fields["version"],
                digest=fields["digest"],
                tensors=tuple(Entry(**entry) for entry in fields["tensors"]),
                base=fields.get("base"),
            )
            if any(type(value) is not str for entry in manifest.tensors for value in _text_of(entry)):
                raise TypeError("an entry of a tensor holds something else than text")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProtocolError(f"{path} is not a manifest of rl-ckpt: {error!r}") from error
        wanted = FORMAT if manifest.base is None else CHAINED
        if fields.get("format") != wanted or manifest.version != version:
            raise ProtocolError(f"{path} is {fields.get('format')!r} of version {manifest.version}; wanted {wanted!r}")
        if manifest.base is not None and not 0 <= manifest.base < version:
            raise ProtocolError(f"{path} is a difference from version {manifest.base}, which does not come before it")
        if any("/" in name or name.startswith(".") for name in manifest.files):
            raise ProtocolError(f"{path} names files outside of its folder")
        return manifest

    def chain(self, version: int, held: int | None = None) -> list[Manifest]:
        """A version, its base, and so on, up to a whole one or the one after `held`.

        Raises:
            FileNotFoundError, ProtocolError: as `read`.
        """
        manifests = [self.read(version)]
        while (base := manifests[-1].base) is not None and base != held:
            manifests.append(self.read(base))
        return manifests

    def publish(self, manifest: Manifest) -> None:
        """Make a version whose files are in place visible, at once and for good."""
        fields = asdict(manifest)
        if manifest.base is None:  # as readers of that format know it
            del fields["base"]
            for entry in fields["tensors"]:
                del entry["is_difference"]
        text = json.dumps({"format": FORMAT if manifest.base is None else CHAINED, **fields})
        self.put(_manifest_name(manifest.version), lambda path: path.write_text(text, encoding="utf-8"))
        self._sync_folder()

    def prune(self, keep: int) -> None:
        """Take away all versions but the last ones, and those that they are differences from."""
        versions = self.versions()
        needed = {manifest.version for version in versions[-keep:] for manifest in self.chain(version)}
        for version in versions:
            if version not in needed:
                self.remove(version)

    def remove(self, version: int) -> None:
        """Remove a version, its manifest first. Readers that have opened it go on."""
        files = self.read(version).files
        self.delete(_manifest_name(version))
        for name in files:
            self.delete(name)

    def remove_files(self, names: list[str]) -> None:
        """Take files away that no manifest names."""
        for name in names:
            self.delete(name)
            self.delete(name + _PARTIAL)

    # ---- what another kind of storage does otherwise

    def names(self) -> list[str]:
        """Names of all files."""
        return [path.name for path in self._path.iterdir()] if self._path.is_dir() else []

    def read_bytes(self, name: str) -> bytes:
        """A small file."""
        return (self._path / name).read_bytes()

    def open(self, name: str) -> safetensors.safe_open:
        """A file of tensors, which goes on to be readable when it is removed."""
        return safetensors.safe_open(self._path / name, framework="pt")

    def put(self, name: str, write: Callable[[Path], object]) -> None:
        """Let `write(path)` make a file, and put it in place on the disk.

        Raises:
            CkptError: it cannot be written; names the file, which the errors of safetensors do not.
        """
        partial = self._path / (name + _PARTIAL)
        try:
            write(partial)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(self._path / name)
        except (OSError, safetensors.SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise CkptError(f"{self._path / name} cannot be written: {error}") from error

    def delete(self, name: str) -> None:
        """Take a file away, if there is one."""
        (self._path / name).unlink(missing_ok=True)

    def _sync_folder(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ObjectStore(Folder):
    """A prefix of an object store, or of any other filesystem of fsspec. The caller must be the only writer.

    Args:
        protocol: Protocol of fsspec: `s3`, `gs`, `memory`.
        path: Bucket and prefix.

    Raises:
        AddressError: fsspec knows no such protocol.
        BackendError: what it needs is not installed.
    """

    def __init__(self, protocol: str, path: str) -> None:
        import fsspec

        super().__init__(Path(path))
        self.path = f"{protocol}://{path.rstrip('/')}"
        try:
            self._files, self._prefix = fsspec.url_to_fs(self.path)
        except ValueError as error:
            raise AddressError(f"file+{protocol}:// is not a filesystem of fsspec: {error}") from error
        except ImportError as error:
            raise BackendError(f"file+{protocol}:// needs another package: {error}") from error

    def lock(self) -> None:
        """Forget what a writer before has left; an object store has no locks."""
        self._files.makedirs(self._prefix, exist_ok=True)
        self._forget_unpublished()

    def names(self) -> list[str]:
        """See `Folder`."""
        self._files.invalidate_cache()
        try:
            return [str(path).rpartition("/")[2] for path in self._files.ls(self._prefix, detail=False)]
        except FileNotFoundError:
            return []

    def read_bytes(self, name: str) -> bytes:
        """See `Folder`."""
        return self._files.cat_file(f"{self._prefix}/{name}")

    def open(self, name: str) -> safetensors.safe_open:
        """See `Folder`. It is fetched whole."""
        with tempfile.TemporaryDirectory(prefix="rl-ckpt-") as folder:
            self._files.get_file(f"{self._prefix}/{name}", f"{folder}/{name}")
            return safetensors.safe_open(f"{folder}/{name}", framework="pt")

    def put(self, name: str, write: Callable[[Path], object]) -> None:
        """See `Folder`. An object appears when all of it is there."""
        with tempfile.TemporaryDirectory(prefix="rl-ckpt-") as folder:
            write(Path(folder) / name)
            self._files.put_file(f"{folder}/{name}", f"{self._prefix}/{name}")

    def delete(self, name: str) -> None:
        """See `Folder`."""
        if self._files.exists(f"{self._prefix}/{name}"):
            self._files.rm_file(f"{self._prefix}/{name}")

    def _sync_folder(self) -> None:
        pass


def _manifest_name(version: int) -> str:
    return f"version-{version:020d}.json"


def _text_of(entry: Entry) -> tuple[str, ...]:
    return entry.name, entry.file, entry.digest, entry.stored_as
