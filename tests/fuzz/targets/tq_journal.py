"""rl-tq: journals and snapshots, read from a folder and played back."""

from _forms import files

from rl_tq import durability
from rl_tq.errors import TransferQueueError

EXPECTED = (TransferQueueError,)
_VERSION = b'["version", %d]\n' % durability.VERSION if isinstance(durability.VERSION, int) else b""


def seeds():
    yield b'["note_place", 1, "x", 0, 10, false]\n'
    yield b'["create", "a"]\n["put", 1, {}]\n'

    yield b"[" * 3000 + b"\n"


def one(data):
    with files(**{durability.NAME: _VERSION + data}) as root, durability.Snapshot(root) as opened:
        for number in list(opened.places)[:3]:
            opened.where(number)
