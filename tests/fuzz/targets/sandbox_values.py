"""rl-agent: values that the process of a solution sends to the judge. It may end; nothing else may happen."""

import os
import socket
import struct
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(import_module("rl_agent.sandbox").__file__).with_name("process")))
judge = import_module("judge")
values = import_module("values")


class BrokenError(Exception):
    """The pipe cannot be used any more."""


class Peer(values.Peer):
    def end(self, why):
        raise BrokenError(why)


EXPECTED = (BrokenError, Exception)
"""What a solution raises is raised in the test: any exception is an answer, none is a crash."""


def seeds():
    for text in ('1', '["l", null, [1, ["t", null, [2]]]]', '["h", 3, "base"]', '["N", "P", ["x"], [1]]',
                 '["d", null, [["a", ["B", "int"]]]]', '["n", "Decimal", "1.5"]', '["x", [[1, "E"]], "ValueError"]',
                 '["R", 0, 3, 1]', '["i", "0xff"]', '["y", "00ff"]'):  # fmt: skip
        yield text.encode()


def one(data):
    for form in (b'{"answer":"%s","value":%s}', b'{"answer":"%s","raised":%s}'):
        piece = form % (b"00" * 8, data)
        if len(piece) <= 1 << 16:
            _hear(struct.pack("<I", len(piece)) + piece)


def _hear(piece):
    """A solution that answers once, and has ended when the judge asks what comes of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = Peer(ours.fileno(), judge.allow)
        token, os.urandom = os.urandom, lambda n: bytes(n)
        try:
            theirs.sendall(piece)
            theirs.shutdown(socket.SHUT_WR)
            found = peer.ask("get", 0, "x")
            if type(found) is not values.Remote:
                assert found != object()
        finally:
            os.urandom = token
