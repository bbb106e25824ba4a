"""The one-forward-one-backward schedule (Narayanan et al., 2104.04473) over the stages of a pipeline.

Every stage knows every micro-batch, so shapes are not exchanged, and micro-batches may differ in size.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from rl_engine.backends.megatron._layout import Axis


class StageWork(Protocol):
    """What one stage does with micro-batch `index`."""

    def buffer(self, index: int) -> Tensor:
        """An empty tensor for what the stage before sends."""
        ...

    def forward(self, index: int, received: Tensor | None) -> Tensor | None:
        """The activation to send on, or on the last stage the loss (None: nothing to differentiate)."""
        ...


def run_pipeline(work: StageWork, count: int, stages: Axis, *, grad_group: Any, has_backward: bool) -> None:
    """Run micro-batches 0 to `count` - 1 through this rank's stage; gradients accumulate in the parameters.

    Args:
        work: The stage.
        count: Micro-batches, the same on every stage.
        stages: The pipeline; activations travel in its group.
        grad_group: Another group that holds these ranks, for gradients: NCCL runs what one group exchanges between
            two ranks in order, and an activation and a gradient that cross would each wait for the other.
        has_backward: Whether to differentiate.
    """
    pipe = _Pipe(work, stages, grad_group)
    warmup = min(count, stages.size - 1 - stages.rank) if has_backward else count
    for index in range(warmup):
        pipe.forward(index, keep=has_backward)
    if not has_backward:
        pipe.flush()
        return
    for index in range(warmup, count):
        pipe.forward(index, keep=True)
        pipe.backward()
    for _ in range(warmup):
        pipe.backward()
    pipe.flush()


class _Pipe:
    """Sends are started and waited for later, so that two neighbours sending to each other never wait in a circle."""

    def __init__(self, work: StageWork, stages: Axis, grad_group: Any) -> None:
        self._work, self._stages, self._grad_group = work, stages, grad_group
        self._before = stages.ranks[stages.rank - 1] if stages.rank else None
        self._after = stages.ranks[stages.rank + 1] if stages.rank + 1 < stages.size else None
        self._alive: deque[tuple[Tensor | None, Tensor | None]] = deque()
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def forward(self, index: int, *, keep: bool) -> None:
        received = None
        if self._before is not None:
            received = self._receive(self._work.buffer(index), self._before, self._stages.group).requires_grad_(keep)
        result = self._work.forward(index, received)
        if self._after is not None:
            assert result is not None
            self._send(result.detach(), self._after, self._stages.group)
        if keep:
            self._alive.append((received, result))

    def backward(self) -> None:
        received, result = self._alive.popleft()
        if self._after is not None:
            assert result is not None
            grad = self._receive(torch.empty_like(result), self._after, self._grad_group)
            torch.autograd.backward(result, grad)
        elif result is not None:
            result.backward()
        if self._before is not None:
            assert received is not None
            grad = torch.zeros_like(received) if received.grad is None else received.grad
            self._send(grad, self._before, self._grad_group)

    def flush(self) -> None:
        while self._sending:
            self._sending.popleft()[0].wait()

    def _send(self, value: Tensor, to: int, group: Any) -> None:
        value = value.contiguous()
        sent = dist.isend(value, to, group=group)
        assert sent is not None
        self._sending.append((sent, value))
        while len(self._sending) > self._stages.size:  # bounds what is kept alive
            self._sending.popleft()[0].wait()

    def _receive(self, buffer: Tensor, source: int, group: Any) -> Tensor:
        dist.recv(buffer, source, group=group)
        return buffer
