"""The one-forward-one-backward schedule (Narayanan et al., 2104.04473) over the stages of a pipeline.

With one piece of the model on each rank it is the plain schedule, with several the interleaved one: an activation
passes from rank to rank through the first pieces, then from the last rank back to the first and through the second
pieces. Every stage knows every micro-batch, so shapes are not exchanged, and micro-batches may differ in size.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from rl_engine.backends.megatron.layout import Layout


class StageWork(Protocol):
    """What one stage does with micro-batch `index`."""

    def buffer(self, index: int) -> Tensor:
        """An empty tensor for what the piece before sends."""
        ...

    def forward(self, chunk: int, index: int, received: Tensor | None) -> Tensor | None:
        """The activation to send on, or from the last piece of all the loss (None: nothing to differentiate)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One pass through one piece."""

    is_forward: bool
    """Else backward."""
    chunk: int
    """The piece, from 0."""
    index: int
    """The micro-batch."""


def schedule(count: int, *, stage: int, num_stages: int, num_chunks: int, has_backward: bool) -> list[Turn]:
    """What one rank does, in order, with micro-batches 0 to `count` - 1.

    Args:
        count: Micro-batches; with several pieces a multiple of `num_stages`.
        stage: The rank's place in the pipeline.
        num_stages: Ranks of the pipeline.
        num_chunks: Pieces on each.
        has_backward: Whether to differentiate.
    """
    groups = [range(first, min(first + num_stages, count)) for first in range(0, count, num_stages)]
    passes = [(chunk, index) for group in groups for chunk in range(num_chunks) for index in group]
    forward = [Turn(is_forward=True, chunk=chunk, index=index) for chunk, index in passes]
    if not has_backward:
        return forward
    backward = [Turn(is_forward=False, chunk=num_chunks - 1 - chunk, index=index) for chunk, index in passes]
    ahead = num_stages - 1 - stage
    warmup = min(len(passes), ahead if num_chunks == 1 else 2 * ahead + (num_chunks - 1) * num_stages)
    steady = [turn for pair in zip(forward[warmup:], backward, strict=False) for turn in pair]
    return [*forward[:warmup], *steady, *backward[len(passes) - warmup :]]


def run_pipeline(work: StageWork, count: int, layout: Layout, *, has_backward: bool) -> None:
    """Run `count` micro-batches or more through this rank's stage; gradients accumulate in the parameters.

    Args:
        work: The stage.
        count: Micro-batches, the same on every stage; with several pieces a few idle ones may come after them.
        layout: Where this rank stands.
        has_backward: Whether to differentiate.
    """
    stages, num_chunks = layout.pp, layout.vpp
    if num_chunks > 1:
        count = -(-count // stages.size) * stages.size
    pipe = _Pipe(work, layout)
    for turn in schedule(
        count, stage=stages.rank, num_stages=stages.size, num_chunks=num_chunks, has_backward=has_backward
    ):
        if turn.is_forward:
            pipe.forward(turn.chunk, turn.index, keep=has_backward)
        else:
            pipe.backward(turn.chunk)
    pipe.flush()


@dataclass(frozen=True, slots=True)
class _Edge:
    """A neighbour, and the groups in which activations and gradients travel to or from it.

    They are different groups: NCCL runs what one group exchanges between two ranks in order, and an activation and a
    gradient that cross would each wait for the other.
    """

    peer: int
    activations: Any
    gradients: Any


class _Pipe:
    """Sends are started and waited for later, so that two neighbours sending to each other never wait in a circle."""

    def __init__(self, work: StageWork, layout: Layout) -> None:
        self._work, self._layout = work, layout
        self._alive: list[deque[tuple[Tensor | None, Tensor | None]]] = [deque() for _ in range(layout.vpp)]
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._most_sending = 4 * layout.pp.size * layout.vpp  # more than a schedule has under way

    def forward(self, chunk: int, index: int, *, keep: bool) -> None:
        received = None
        if (before := self._before(chunk)) is not None:
            received = _receive(self._work.buffer(index), before.peer, before.activations).requires_grad_(keep)
        result = self._work.forward(chunk, index, received)
        if (after := self._after(chunk)) is not None:
            assert result is not None
            self._send(result.detach(), after.peer, after.activations)
        if keep:
            self._alive[chunk].append((received, result))

    def backward(self, chunk: int) -> None:
        received, result = self._alive[chunk].popleft()
        if (after := self._after(chunk)) is not None:
            assert result is not None
            grad = _receive(torch.empty_like(result), after.peer, after.gradients)
            torch.autograd.backward(result, grad)
        elif result is not None:
            result.backward()
        if (before := self._before(chunk)) is not None:
            assert received is not None
            grad = torch.zeros_like(received) if received.grad is None else received.grad
            self._send(grad, before.peer, before.gradients)

    def flush(self) -> None:
        while self._sending:
            self._sending.popleft()[0].wait()

    def _before(self, chunk: int) -> _Edge | None:
        stages = self._layout.pp
        if stages.rank:
            return _Edge(stages.ranks[stages.rank - 1], stages.group, self._layout.model.group)
        return _Edge(stages.ranks[-1], *self._layout.wraps) if chunk else None

    def _after(self, chunk: int) -> _Edge | None:
        stages = self._layout.pp
        if stages.rank + 1 < stages.size:
            return _Edge(stages.ranks[stages.rank + 1], stages.group, self._layout.model.group)
        return _Edge(stages.ranks[0], *self._layout.wraps) if chunk + 1 < self._layout.vpp else None

    def _send(self, value: Tensor, to: int, group: Any) -> None:
        value = value.contiguous()
        sent = dist.isend(value, to, group=group)
        assert sent is not None
        self._sending.append((sent, value))
        while len(self._sending) > self._most_sending:  # bounds what is kept alive
            self._sending.popleft()[0].wait()


def _receive(buffer: Tensor, source: int, group: Any) -> Tensor:
    dist.recv(buffer, source, group=group)
    return buffer
