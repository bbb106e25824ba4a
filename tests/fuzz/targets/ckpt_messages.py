"""rl-ckpt: control messages of a session, as they come off a socket."""

from rl_ckpt import ProtocolError
from rl_ckpt.protocol import messages

EXPECTED = (ProtocolError,)


def seeds():
    for message in (messages.Hello(3, 1, 7), messages.Ready(1, 2, 3, 4), messages.Begin(1, 2), messages.Free((1,))):
        yield messages.encode(message, 1)
    yield messages.encode(messages.Manifest(0, ()), 1) + messages.encode(messages.Commit(2), 1)


def one(data):
    decoder = messages.Decoder(max_body_bytes=1 << 16)
    for start in range(0, len(data), 37):
        decoder.feed(data[start : start + 37])
