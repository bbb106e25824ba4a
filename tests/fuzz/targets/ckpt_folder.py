"""rl-ckpt: manifests of versions that the backend `file` publishes in a folder."""

from _forms import files

from rl_ckpt.backends.file.folder import Folder
from rl_ckpt.errors import CkptError

EXPECTED = (CkptError,)
NAME = f"version-{1:020d}.json"


def seeds():
    yield b'{"format": "rl-ckpt", "version": 1, "digest": "00", "tensors": []}'
    yield b'{"format": 1, "version": 1, "digest": "0", "tensors": [{"name": "a", "file": "../x", "digest": "0"}]}'
    yield b"[" * 3000


def one(data):
    with files(**{NAME: data}) as root:
        Folder(root).read(1)
