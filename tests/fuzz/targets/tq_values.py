"""rl-tq: values of the TransferQueue layer, on its wire and in its files, and schemas of columns."""

import io

import msgspec

from rl_tq.columns import schema
from rl_tq_transfer_queue.values import codec

EXPECTED = (ValueError, msgspec.DecodeError)


class File(io.BytesIO):
    name = "a file"


def seeds():
    yield codec.encode({"a": [1, "x", None, (2.5, b"y")]})
    file = File()
    codec.write_records(file, [1, {"b": 2}])
    yield file.getvalue()
    yield b"\x91" * 3000


def one(data):
    for read in (codec.decode, lambda data: list(codec.read_records(File(data))), schema.read_schema):
        try:
            read(data)
        except EXPECTED:
            continue
