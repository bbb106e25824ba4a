"""Manifests: a JSON file next to written files, with a digest of each of them and of itself.

A file's digest is BLAKE2b with 256 bits, which `b2sum -l 256 FILE` prints too. It finds damage: bits that flipped,
files that end early, lines that were edited. It is no signature: who rewrites files and manifest is believed.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_engine.errors import CheckpointError, naming

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_DIGEST_BYTES = 32
_SELF = "digest"
_FILES = "files"
_THREADS = 8


def new_digest() -> Any:
    """A BLAKE2b object as `hashlib` has it, of the size that manifests hold."""
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def digest_files(folder: str | Path, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
    """Size and digest of files, by their paths relative to `folder`; by default of every file under it.

    Raises:
        OSError: a file cannot be read.
    """
    root = Path(folder)
    if names is None:
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    chosen = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:  # hashlib lets other threads run
        return dict(zip(chosen, pool.map(_digest_file, [root / name for name in chosen]), strict=True))


def write_manifest(file: str | Path, fields: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `fields` (JSON), the digests of `files` and a digest of it all; the file appears whole or not at all.

    Args:
        file: The manifest; paths in `files` are relative to its folder.
        fields: Further fields; not `files` and not `digest`.
        files: Digests from `digest_files`.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(file)
    content = json.loads(json.dumps({**fields, _FILES: {name: dict(entry) for name, entry in files.items()}}))
    content[_SELF] = _digest_of(content)
    draft = target.with_name(f"{target.name}.unfinished")
    with naming(draft), draft.open("w") as stream:
        stream.write(_text_of(content))
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(target)


def read_manifest(file: str | Path) -> dict[str, Any]:
    """The fields of a manifest, and `files`.

    Raises:
        CheckpointError: it is not there, is no manifest, or its digest is not that of what it says.
    """
    path = Path(file)
    try:
        text = path.read_text()
        content = json.loads(text)
        is_as_written = text == _text_of(content)
        is_whole = content.pop(_SELF) == _digest_of(content) and is_as_written and _are_entries(content[_FILES])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not a manifest ({_short(error)}).") from error
    if not is_whole:
        raise CheckpointError(f"{path} is damaged: its digest is not that of what it says.")
    return content


def find_damage(file: str | Path, names: Iterable[str] | None = None) -> list[str]:
    """A line for every damaged file of a manifest, the manifest included; none where everything is as it was written.

    Args:
        file: The manifest.
        names: Names of the files to look at; by default all.
    """
    path = Path(file)
    try:
        entries: dict[str, Any] = read_manifest(path)[_FILES]
    except CheckpointError as error:
        return [str(error).removesuffix(".")]
    chosen = list(entries if names is None else names)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(_damage_of, [path.parent / name for name in chosen], [entries[name] for name in chosen])
        return [line for line in found if line is not None]


def _are_entries(files: Any) -> bool:
    """Whether all are files under the manifest's folder, each with a size and a digest."""
    return all(
        entry.keys() == {"bytes", "blake2b"} and not (Path(name).is_absolute() or ".." in Path(name).parts)
        for name, entry in files.items()
    )


def _damage_of(path: Path, entry: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    try:
        now = _digest_file(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if now["bytes"] != entry["bytes"]:
        return f"{path} is damaged: it has {now['bytes']} bytes, and {entry['bytes']} were written"
    if now != entry:
        return f"{path} is damaged: its digest is not the one that was written"
    return None


def _digest_file(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, new_digest)
        return {"bytes": stream.tell(), "blake2b": digest.hexdigest()}


def _text_of(content: Mapping[str, Any]) -> str:
    return json.dumps(content) + "\n"


def _digest_of(content: Mapping[str, Any]) -> str:
    """Digest of the JSON with sorted keys and no spaces."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = new_digest()
    digest.update(text.encode())
    return digest.hexdigest()


def _short(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
