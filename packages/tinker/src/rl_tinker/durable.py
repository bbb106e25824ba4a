"""Folders that survive a crash: their files and entries are on disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Write the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Write the files of a folder, and its entries, to disk."""
    for each in [*folder.rglob("*"), folder, folder.parent]:
        sync_folder(each) if each.is_dir() else _sync_file(each)


def _sync_file(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
