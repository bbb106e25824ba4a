"""rl-tq: journals and snapshots, read from a folder and played back."""

from _forms import files

from rl_tq.durability import journal, snapshot
from rl_tq.errors import TransferQueueError

EXPECTED = (TransferQueueError,)
_VERSION = b'["version", %d]\n' % journal.VERSION if isinstance(journal.VERSION, int) else b""


def seeds():
    yield b'["note_place", 1, "x", 0, 10, false]\n'
    yield b'["create", "a"]\n["put", 1, {}]\n'

    yield b"[" * 3000 + b"\n"


def one(data):
    with files(**{journal.NAME: _VERSION + data}) as root, snapshot.Snapshot(root) as opened:
        for number in list(opened.places)[:3]:
            opened.where(number)
