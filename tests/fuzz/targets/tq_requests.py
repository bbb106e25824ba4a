"""rl-tq: requests of an authenticated client to a queue that is served over tcp, through its socket and its store."""

import contextlib
import json
import socket
import struct

import torch

import rl_tq
from rl_tq.protocol import handshake
from rl_tq.protocol.codec import decode, encode

EXPECTED = ()
TOKEN = "the token of this target"
_queue = _connection = None
_count = 0


def seeds():
    for message in (
        {"op": "put", "partition": "p", "rows": 2, "columns": {"a": 1}},
        {"op": "get_meta", "partition": "p", "columns": ["a"], "batch_size": 1, "task": "t", "timeout_s": 0.0},
        {"op": "ack", "partition": "p", "rows": [[0, 1]], "task": "t", "lease": 1},
        {"op": "fetch", "partition": "p", "rows": [[0, 1]], "columns": ["a"]},
        {"op": "clear", "partition": "p"},
        {"op": "withdraw", "request": 1},
        {"op": "restore", "partition": "p", "step": 1, "task": "t"},
    ):
        yield b"\0" + json.dumps(message).encode()
    yield b"\1" + encode({"id": 1, "op": "stats"})
    yield b"\2" + struct.pack("<4sIQ", b"RLTQ", 3, 9) + b"abc"


def _dial():
    global _queue, _connection
    if _queue is None:
        _queue = rl_tq.serve("tcp://127.0.0.1:0", token=TOKEN, timeout_s=10.0)
        _queue.put({"a": torch.arange(4)}, partition="p")
    host, port = _queue.address.removeprefix("tcp://").split("?")[0].split(":")
    _connection = socket.create_connection((host, int(port)), timeout=8.0)
    handshake.introduce(_connection, _queue.address, 8.0, TOKEN.encode())


def _framed(data):
    """As a client frames it: JSON of a request as MessagePack, MessagePack as it is, or bytes that are no frame."""
    if data[0] % 3 == 2:
        return data[1:], False
    text = data[1:]
    if data[0] % 3 == 0:
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            return None, False
        # Nothing that writes where it is told to, or waits because it is asked to
        if not isinstance(message, dict) or message.get("op") == "snapshot" or "timeout_s" in str(message):
            return None, False
        with contextlib.suppress(Exception):
            text = encode({"id": 1, **message})
    return struct.pack("<4sIQ", b"RLTQ", len(text), 0) + text, True


def one(data):
    global _connection, _count
    if not data or b"snapshot" in data:
        return
    frame, _ = _framed(data)
    if frame is None:
        return
    if _connection is None:
        _dial()
    try:
        _connection.sendall(frame)
        _connection.settimeout(0.02)  # a request that waits, or half a frame, has no answer
        head = _connection.recv(16)
        if len(head) == 16:
            _, text_bytes, _ = struct.unpack("<4sIQ", head)
            _connection.settimeout(8.0)
            decode(_connection.recv(text_bytes, socket.MSG_WAITALL))
        if not head or data[0] % 3 == 2:
            raise ConnectionError
    except TimeoutError:
        _connection.close()
        _connection = None
    except ConnectionError:
        _connection.close()
        _connection = None
    _count += 1
    if _count % 64 == 0:  # whatever it was asked, it serves the others
        meta = _queue.put({"b": torch.ones(2)}, partition="well")
        assert _queue.get(meta)["b"].tolist() == [1.0, 1.0]
        _queue.clear("well")
