"""rl-ckpt: what a peer sends to the channel of a real connection, before and after it is trusted."""

import socket
from pathlib import Path

from rl_ckpt.errors import CkptError
from rl_ckpt.protocol import messages
from rl_ckpt.protocol.channel import Channel

EXPECTED = (CkptError,)


def seeds():
    yield b"\0" + messages.encode(messages.Hello(3, 1, 7), 1)
    yield b"\1" + messages.encode(messages.Manifest(0, ()), 1) + messages.encode(messages.Commit(2), 1)
    yield b"\1" + messages.encode(messages.Ready(1, 2, 3, 4), 1) * 3
    yield b"\3" + messages.encode(messages.Begin(1, 2), 1)


def one(data):
    if not data:
        return
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "the peer")
    try:
        with theirs:
            if data[0] & 1:
                channel.trust()
            if data[0] & 2:
                with Path("/dev/null").open("rb") as file:
                    socket.send_fds(theirs, [data[1:3] or b"x"], [file.fileno()])
            for start in range(1, len(data), 512):
                theirs.sendall(data[start : start + 512])
                channel.receive()
        channel.receive()
        assert channel.is_closed
    finally:
        channel.close()
