"""Server side of a remote client (`tcp`, `zmq`, `nixl`, `ray`), for values in the memory of the serving process.

Requests and replies are those of the service. In addition, a `put` carries its extent as payload, and the reply to
`fetch` carries values as payload: column after column, each zero-padded to a multiple of 64 bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rl_tq.columns.encode import INDEX
from rl_tq.columns.extent import ExtentView, as_bytes
from rl_tq.columns.gather import collect
from rl_tq.columns.schema import ColumnSchema, read_schema
from rl_tq.errors import QueueFullError, SchemaError
from rl_tq.protocol.framing import ALIGNMENT, Payload
from rl_tq.protocol.service import Message, error_reply, raise_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_tq.columns.extent import Opened
    from rl_tq.server.host import QueueHost, Reply

Send: TypeAlias = "Callable[[Message, Payload], None]"
"""Function that sends a message to a client, from any thread and without waiting."""

_FREE_ROWS = 1 << 16
"""Rows that a put may have whatever its size. A row costs the server 100 bytes, with values or without."""


class ClientConnection:
    """Server side of one client; `send` is called from any thread, and must not wait for the client."""

    def __init__(self, host: QueueHost, label: str, send: Send, *, max_waiting_bytes: int) -> None:
        """`max_waiting_bytes`: limit for the values of this client's puts that wait for room."""
        self._host = host
        self.label = label
        self._send = send
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes: dict[int, int] = {}
        """Size of puts that wait for room, by request."""
        self._pending: dict[int, Reply] = {}
        self.has_left = False
        """Whether it sent `bye`, and did not die."""

    def take(self, message: Message, payload: torch.Tensor | None) -> None:
        """Handle one message of the client.

        Raises:
            ValueError: it is not a valid message.
        """
        number, op = message.get("id"), message.get("op")
        if type(number) is not int or type(op) is not str:
            raise ValueError(f"a message is numbered and named, and this one is {number!r} and {op!r}")
        try:
            match op:
                case "bye":
                    self.has_left = True
                case "withdraw":
                    if (future := self._pending.pop(message["request"], None)) is not None:
                        self._host.abandon(future, "withdrawn")
                case "fetch":
                    what = "snapshot" if message.get("of") == "snapshot" else "locate"  # both never wait
                    reply, opened = self._host.locate({**message, "op": what}, self)
                    raise_error(reply)
                    self._send(*self.fetched(number, reply, opened))
                case "snapshot":
                    self._expect(number, self._host.snapshot(Path(message["path"]), self))
                case "put":
                    self._put(number, message, payload)
                case _:
                    self._expect(number, self._host.call(message, self))
        except Exception as error:  # noqa: BLE001 - any failure is reported to its caller; other clients go on
            self._send({**error_reply(error), "id": number}, [])

    def _put(self, number: int, message: Message, payload: torch.Tensor | None) -> None:
        waiting, nbytes = sum(self._waiting_bytes.values()), 0 if payload is None else len(payload)
        if waiting + nbytes > self._max_waiting_bytes:
            raise QueueFullError(
                f"puts of this client with {waiting} bytes wait for room already, and {nbytes} more would be over the "
                f"{self._max_waiting_bytes} bytes that the server keeps for one: wait for those first, or serve with a "
                "larger max_put_bytes"
            )
        self._waiting_bytes[number] = nbytes
        try:
            self._expect(number, self._host.publish(message, self.extent_of(message, payload), self))
        except BaseException:
            self._waiting_bytes.pop(number, None)
            raise

    def leave(self) -> None:
        """Clean up after the client: its requests, leases and credits."""
        for future in list(self._pending.values()):
            self._host.abandon(future, f"{self.label} is gone")
        self._host.leave(self, has_died=not self.has_left)

    def _expect(self, number: int, future: Reply) -> None:
        def answer(message: Message) -> None:
            self._pending.pop(number, None)
            self._waiting_bytes.pop(number, None)
            self._send({**message, "id": number}, [])

        if future.is_done:
            answer(future.result())
        else:
            self._pending[number] = future
            future.when_done(answer)

    def extent_of(self, message: Message, payload: torch.Tensor | None) -> Any:
        """Extent of a put, in the form that `fetched` needs.

        Raises:
            SchemaError: the payload is not a valid extent.
        """
        return checked_extent(message, payload)

    def fetched(self, number: int, reply: Message, opened: Opened) -> tuple[Message, Payload]:
        """Reply to a fetch whose extents were opened."""
        payload: Payload = []
        described: dict[str, Any] = {}
        for name, (schema, pieces, lengths) in located_parts(reply, opened).items():
            whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
            data = as_bytes(whole)
            described[name] = [schema, len(whole), len(data), lengths]
            payload.append(data)
            if gap := -len(data) % ALIGNMENT:
                payload.append(torch.zeros(gap, dtype=torch.uint8))
        return {"id": number, "columns": described}, payload


def located_parts(
    reply: Message, opened: Opened
) -> dict[str, tuple[Any, Sequence[torch.Tensor], Sequence[Any] | None]]:
    """Column name to its schema (as JSON), its values in pieces, and its row lengths."""
    columns = {
        name: (ColumnSchema.from_json(schema), reply["runs"][which])
        for name, (schema, which) in reply["columns"].items()
    }
    parts, bounds, turns = collect(columns, opened)
    lengths = {name: each.offsets.diff().tolist() for name, each in bounds.items()} | dict(turns)
    return {name: (reply["columns"][name][0], pieces, lengths.get(name)) for name, pieces in parts.items()}


def checked_extent(message: Message, payload: torch.Tensor | None) -> torch.Tensor:
    """Validated extent of a put; reading it is safe from then on, whatever the bytes are.

    Raises:
        SchemaError: it is not a valid extent, or differs from the announced rows and columns.
    """
    if payload is None:
        raise SchemaError("a put came without its values")
    extent = ExtentView(memory=payload, is_private=False)
    try:
        columns = {name for name in extent.views if INDEX not in name}
    except ValueError as error:
        raise SchemaError(f"a put's values cannot be read: {error}") from error
    num_rows, nbytes = message["num_rows"], message["nbytes"]
    found = {extent.num_rows(name) for name in columns}
    if found != {num_rows} or nbytes != len(payload):
        raise SchemaError(
            f"a put announces {num_rows} rows in {nbytes} bytes, and brings {sorted(found)} in {len(payload)} bytes"
        )
    if num_rows > max(_FREE_ROWS, nbytes):
        raise SchemaError(f"a put brings {num_rows} rows in {nbytes} bytes: rows without values come in smaller puts")
    announced = read_schema(message["schema"])
    if columns != announced.keys():
        raise SchemaError(f"a put announces the columns {sorted(announced)} and brings {sorted(columns)}")
    return payload
