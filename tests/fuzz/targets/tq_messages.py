"""rl-tq: messages as its sockets deliver them."""

import socket

from rl_tq.protocol import framing

EXPECTED = (ConnectionError,)


def seeds():
    yield framing.pack({"op": "hello", "n": [1, 2.5, None, "x"]})
    yield framing.pack({}) * 2
    yield bytes.fromhex("1a0000000000000082a26f70a568656c6c6fa16e9401cb4004000000000000c0a1c8")  # text that is no UTF-8
    yield bytes.fromhex("010000000100000080")  # a descriptor that does not come


def one(data):
    if not data:
        return
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = framing.Inbox(ours)
        for start in range(0, min(len(data), 4096), 1024):
            theirs.sendall(data[start : start + 1024])
            inbox.receive()
        inbox.close()
