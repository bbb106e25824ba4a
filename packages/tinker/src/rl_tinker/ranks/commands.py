"""Frames between the server and rank 0: a length, and a command or an answer in msgpack."""

from __future__ import annotations

import struct

import msgspec

from rl_tinker.types import Answer, Command

LENGTH = struct.Struct(">Q")
"""Header of a frame: the bytes that follow."""
encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
