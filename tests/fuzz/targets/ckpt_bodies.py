"""rl-ckpt: bodies of control messages, behind their digest."""

from rl_ckpt import ProtocolError
from rl_ckpt.protocol import messages

EXPECTED = (ProtocolError,)


def seeds():
    for message in (messages.Hello(3, 1, 7), messages.Session(1, 2, 3, 4, b"x"), messages.Manifest(0, ())):
        data = messages.encode(message, 1)
        for kind in range(1, 20):
            yield bytes([kind]) + data[-16:]


def one(data):
    if data and data[0] in messages.KINDS:  # the decoder has looked
        messages.decode(data[0], data[1:])
