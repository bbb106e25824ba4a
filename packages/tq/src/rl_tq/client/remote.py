"""The client of a queue whose values lie in the serving process: what `tcp`, `zmq` and others share."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from rl_tq.client.client import QueueClient
from rl_tq.columns.gather import Collected, assemble, bounds_of
from rl_tq.columns.schema import ColumnKind, ColumnSchema
from rl_tq.protocol.stream import ALIGNMENT, Payload

if TYPE_CHECKING:
    from pathlib import Path

    from tensordict import TensorDict

    from rl_tq.columns.extent import Layout, Opened
    from rl_tq.columns.output import Bounds, Output
    from rl_tq.protocol.service import Message


class RemoteQueue(QueueClient):
    """A client of such a server, over `_request`."""

    @abstractmethod
    def _request(
        self, request: Message, payload: Payload, timeout_s: float, output: Output | None = None
    ) -> tuple[Message, torch.Tensor | None]:
        """Have a request answered, or raise the error it is answered with.

        `output`: where to receive the reply's payload, if it may lie there (see `output_memory`).
        """

    def _call(self, request: Message, timeout_s: float) -> Message:
        return self._request({"timeout_s": timeout_s, **request}, [], timeout_s)[0]

    def _store_extent(self, layout: Layout, request: Message, timeout_s: float) -> Message:
        memory = torch.empty(layout.nbytes, dtype=torch.uint8)
        layout.write(memory)
        return self._request(request, [memory], timeout_s)[0]

    def snapshot(self, path: str | Path, *, timeout_s: float | None = None) -> None:
        """See `TransferQueue.snapshot`."""
        self._call({"op": "snapshot", "path": str(path)}, self._limit(timeout_s))

    def _locate(self, request: Message, *, is_copied: bool) -> tuple[Message, Opened]:
        raise NotImplementedError("the values themselves are fetched: see _fetch")

    def _fetch(self, request: Message, num_rows: int, output: Output) -> TensorDict:
        reply, payload = self._request({"op": "fetch", **request}, [], self.timeout_s, output)
        return assembled(reply, payload, num_rows, output)


def assembled(reply: Message, payload: torch.Tensor | None, num_rows: int, output: Output) -> TensorDict:
    """A batch of fetched values."""
    schemas: dict[str, ColumnSchema] = {}
    parts: dict[str, list[torch.Tensor]] = {}
    bounds: dict[str, Bounds] = {}
    turns: dict[str, list[list[int]]] = {}
    start = 0
    for name, (schema_json, size, nbytes, sizes) in reply["columns"].items():
        schema = schemas[name] = ColumnSchema.from_json(schema_json)
        dtype = torch.uint8 if schema.dtype == "utf8" else getattr(torch, schema.dtype)
        data = torch.empty(0, dtype=torch.uint8) if payload is None else payload[start : start + nbytes]
        parts[name] = [data.view(dtype).view(size, *schema.shape)]
        if schema.kind is ColumnKind.TURNS:
            turns[name] = sizes
        elif sizes is not None:
            bounds[name] = bounds_of(sizes)
        start += nbytes + -nbytes % ALIGNMENT
    return assemble(schemas, Collected(parts, bounds, turns), dict.fromkeys(schemas, True), num_rows, output)


def output_memory(output: Output | None, message: Message, nbytes: int) -> torch.Tensor | None:
    """The caller's buffer, if the payload of such a reply can be received straight into it."""
    schemas = [ColumnSchema.from_json(column[0]) for column in message.get("columns", {}).values()]
    is_all_tensors = all(schema.is_tensor for schema in schemas)
    return output.take_over(nbytes) if output is not None and is_all_tensors else None
