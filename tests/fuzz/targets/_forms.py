"""Inputs of several shapes out of the fuzzer's bytes."""

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path


def text_of(data):
    return data.decode(errors="replace")


def json_of(data):
    """What a parser behind JSON gets; None where the bytes are none (and `is_json` is False)."""
    try:
        return True, json.loads(data)
    except (ValueError, RecursionError):
        return False, None


_folder = None


@contextmanager
def files(**contents):
    """A folder with files; the same one each time, for speed."""
    global _folder
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="rl-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    root = Path(_folder.name)
    for name, data in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    yield root
