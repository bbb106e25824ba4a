"""rl-tq: journals and snapshots, read from a folder and played back."""

from _forms import files

from rl_tq import _journal, _snapshot
from rl_tq._recovery import Recovery  # noqa: F401 - what reads them; its parts are used below
from rl_tq.errors import TransferQueueError

EXPECTED = (TransferQueueError,)
_VERSION = b'["version", %d]\n' % _journal.VERSION if isinstance(_journal.VERSION, int) else b""


def seeds():
    yield b'["note_place", 1, "x", 0, 10, false]\n'
    yield b'["create", "a"]\n["put", 1, {}]\n'

    yield b"[" * 3000 + b"\n"


def one(data):
    with files(**{_journal.NAME: _VERSION + data}) as root, _snapshot.Snapshot(root) as snapshot:
        for number in list(snapshot.places)[:3]:
            snapshot.where(number)
