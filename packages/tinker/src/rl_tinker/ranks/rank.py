"""Program of one training process: commands from the server, by rank 0 to all ranks, to a worker of rl-engine.

Every rank runs every command; the rows of a pass are dealt out, and their log-probs are gathered at rank 0.
"""

from __future__ import annotations

import select
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from rl_engine.errors import EngineError
from rl_engine.registry import auto_precision, create_loss, create_worker
from rl_engine.types import AdamParams, EngineConfig, LoraConfig, OptimizerConfig, Precision, TrainingRow
from rl_tinker.durable import sync_tree
from rl_tinker.errors import RequestError
from rl_tinker.ranks.__main__ import end_with_parent
from rl_tinker.ranks.modules import lora_modules
from rl_tinker.types import AdamParams as ClientAdam
from rl_tinker.types import Answer, Command, ServeConfig, Verb
from rl_tinker.wire.results import encode_forward_backward
from rl_tinker.wire.rows import Row, decode_forward_backward

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ALPHA = 32.0
"""LoRA's alpha, for every rank: the scale of an adapter is alpha / rank."""
TICK_S = 5.0
"""Seconds after which rank 0, without a command, sends the others an empty one, so that no collective times out."""
COLLECTIVE_S = 600.0


class Rank:
    """Worker of this process."""

    def __init__(self, config: ServeConfig, model_folder: str) -> None:
        self._config, self._model_folder = config, model_folder
        self._modules = lora_modules(Path(model_folder))
        self._worker: Any = self._build()
        self._is_fresh = True
        """Whether the weights are those of the base model, where all of them are trained."""
        self._control: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_S))
        self.index, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def _build(self) -> Any:
        precision = auto_precision()[0] if self._config.dtype == "auto" else Precision(self._config.dtype)
        config = EngineConfig(
            model_path=self._model_folder,
            optimizer=OptimizerConfig() if self._config.is_full else None,
            precision=precision,
        )
        return create_worker(config, self._config.backend, max_resident=self._config.max_adapters)

    def share(self, frame: bytes) -> bytes:
        """The frame of rank 0, on every rank."""
        if self.num_ranks == 1:
            return frame
        size = torch.tensor([len(frame)])
        dist.broadcast(size, 0, group=self._control)
        body = torch.frombuffer(bytearray(frame), dtype=torch.uint8) if self.index == 0 and frame else None
        if body is None:
            body = torch.empty(int(size), dtype=torch.uint8)
        if body.numel():
            dist.broadcast(body, 0, group=self._control)
        return body.numpy().tobytes()

    def run(self, command: Command) -> Answer:
        """Run a command; every rank gets the same one."""
        try:
            return getattr(self, f"_{command.verb}")(command)
        except (EngineError, RequestError) as error:
            return Answer(error=str(error))

    def _create(self, command: Command) -> Answer:
        if self._config.is_full:
            if not self._is_fresh:
                self._worker.close()
                self._worker = self._build()
            self._is_fresh = False
            return self._save(command)
        assert command.adapter is not None, "the server has checked it"
        lora = LoraConfig(rank=command.adapter.rank, alpha=ALPHA, target_modules=self._modules.of(command.adapter))
        key = self._key(command.model)
        if key in self._worker.adapters:  # left by a command whose outcome was not committed
            self._worker.remove_adapter(key)
        self._worker.add_adapter(key, lora, command.adapter.seed)
        return self._save(command) if command.verb == Verb.CREATE else Answer()

    def _restore(self, command: Command) -> Answer:
        if self._config.is_full:
            self._is_fresh = False
        else:
            self._create(command)
        try:
            self._worker.load_state(command.folder, self._key(command.model), optimizer=command.optimizer)
        except EngineError:
            self._drop(command)
            raise
        return Answer()

    def _drop(self, command: Command) -> Answer:
        if not self._config.is_full:  # else the next model takes its room
            self._worker.remove_adapter(self._key(command.model))
        return Answer()

    def _save(self, command: Command) -> Answer:
        self._worker.save_state(command.folder, self._key(command.model))
        if self.index == 0:
            sync_tree(Path(command.folder))
        return Answer()

    def _export(self, command: Command) -> Answer:
        self._worker.save_weights(command.folder)
        if self.index == 0:
            sync_tree(Path(command.folder))
        return Answer()

    def _optim_step(self, command: Command) -> Answer:
        given = msgspec.structs.asdict(command.adam or ClientAdam())
        adam = AdamParams(lr=given.pop("learning_rate"), **given)
        outcome = self._worker.optim_step(adam, self._key(command.model))
        self._save(command)
        return Answer(metrics={"grad_norm": outcome.grad_norm, "step": float(outcome.step)})

    def _key(self, model: str) -> str | None:
        """Name of a model's adapter in the engine, which allows no dots, colons or slashes; None: all weights."""
        return None if self._config.is_full else model.replace(":", "-").replace(".", "-")

    # Passes

    def _forward(self, command: Command) -> Answer:
        """Run the rows of all requests in one pass. Requests whose own rows are wrong fail alone."""
        requests = [decode_forward_backward(body) for _, body in command.requests]
        models = [self._key(model) for model, _ in command.requests]
        results, errors = [b""] * len(requests), [""] * len(requests)
        rows: list[tuple[int, TrainingRow]] = []
        losses: dict[str | None, Any] = {}
        for index, (model, request) in enumerate(zip(models, requests, strict=True)):
            mine = [training_row(model, row) for row in request.rows]
            try:
                losses[model] = create_loss(request.loss, request.settings)
                self._worker.check_rows(mine, {model: losses[model]})
            except EngineError as error:
                losses.pop(model, None)
                errors[index] = str(error)
            else:
                rows.extend((index, row) for row in mine)
        if rows:
            for index, result in self._pass(models, rows, losses, has_backward=command.backward):
                results[index] = result
        return Answer(results=results, errors=errors)

    def _pass(
        self,
        models: Sequence[str | None],
        rows: Sequence[tuple[int, TrainingRow]],
        losses: dict[str | None, Any],
        *,
        has_backward: bool,
    ) -> Iterator[tuple[int, bytes]]:
        """Run rows, each with the number of its request; yields the encoded output of each request."""
        run = self._worker.forward_backward_rows if has_backward else self._worker.forward_rows
        output = run([row for _, row in rows[self.index :: self.num_ranks]], losses)
        logprobs = self._gathered([each.numpy() for each in output.logprobs], rows)
        for index in dict.fromkeys(owner for owner, _ in rows):
            mine = [values for (owner, _), values in zip(rows, logprobs, strict=True) if owner == index]
            metrics = {f"{name}:sum": value for name, value in output.metrics[models[index]].items()}
            yield index, encode_forward_backward(mine, metrics)

    def _gathered(self, mine: list[np.ndarray], rows: Sequence[tuple[int, TrainingRow]]) -> list[np.ndarray]:
        """Log-probs of all rows, at rank 0, in the order of the rows."""
        if self.num_ranks == 1:
            return mine
        shapes = [np.shape(row.target_token_ids) for _, row in rows]
        sizes = [sum(int(np.prod(each)) for each in shapes[rank :: self.num_ranks]) for rank in range(self.num_ranks)]
        flat = torch.zeros(max(sizes))
        flat[: sizes[self.index]] = torch.from_numpy(np.concatenate([each.ravel() for each in mine] or [flat[:0]]))
        parts = [torch.empty_like(flat) for _ in range(self.num_ranks)]
        dist.all_gather(parts, flat, group=self._control)
        found: list[np.ndarray] = [np.empty(0)] * len(rows)
        for rank, part in enumerate(parts):
            begin = 0
            for index in range(rank, len(rows), self.num_ranks):
                size = int(np.prod(shapes[index]))
                found[index] = part[begin : begin + size].numpy().reshape(shapes[index])
                begin += size
        return found


def training_row(model: str | None, row: Row) -> TrainingRow:
    """Row of a request as the worker takes it."""
    return TrainingRow(
        adapter=model,
        token_ids=row.tokens.tolist(),
        target_token_ids=row.targets.tolist(),
        inputs={name: column.tolist() for name, column in row.inputs.items()},
    )


def main() -> None:
    """Connect to the server at `sys.argv[2]` once the model is loaded, and run its commands until it closes."""
    parent, path, model_folder, config = sys.argv[1:]
    end_with_parent(int(parent))
    rank = Rank(msgspec.json.decode(config, type=ServeConfig), model_folder)
    connection: socket.socket | None = None
    if rank.index == 0:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
    while True:
        frame = rank.share(_next_frame(connection))
        if frame == _CLOSED:
            return
        if frame != _TICK:
            answer = msgspec.msgpack.encode(rank.run(msgspec.msgpack.decode(frame, type=Command)))
            if connection is not None:
                connection.sendall(len(answer).to_bytes(8) + answer)


_TICK, _CLOSED = b"", b"closed"


def _next_frame(connection: socket.socket | None) -> bytes:
    """Next command at rank 0: a tick if none came in time, `_CLOSED` if the server is gone."""
    if connection is None:
        return _TICK
    if not select.select([connection], [], [], TICK_S)[0]:
        return _TICK
    try:
        header = connection.recv(8, socket.MSG_WAITALL)
        return connection.recv(int.from_bytes(header), socket.MSG_WAITALL) if len(header) == 8 else _CLOSED
    except ConnectionError:
        return _CLOSED


if __name__ == "__main__":
    main()
