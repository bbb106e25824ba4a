"""The sending side of checkpoint-engine's worker protocol (0.4.2): for servers that speak that and not rl-ckpt.

vLLM with `--worker-extension-cls checkpoint_engine.worker.VllmColocateWorkerExtension` takes weights over CUDA IPC from
a process on the same GPU: a ZeroMQ socket says what lies in a shared buffer, and the worker loads it before it answers.
One `WorkerSender` serves the worker of one GPU:

    sender = WorkerSender(device_uuid, bucket_bytes=2 << 30)
    update = pool.submit(server.collective_rpc, "update_weights_from_ipc", args=(sender.handles,))
    sender.send(weights)
    update.result()

That protocol has neither digests nor votes: a worker that fails in the middle holds mixed weights, nothing reports
which weights a worker has, and what this end sends is pickled, as the protocol wants it. What it receives is never
unpickled. Use rl-ckpt's own plug-in where you can. Needs `pip install 'rl-ckpt[checkpoint-engine]'`.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import zmq
from torch.multiprocessing.reductions import reduce_tensor

from rl_ckpt.errors import PeerTimeoutError, SyncAbortedError, TensorError, UsageError
from rl_ckpt.tensors.spec import TensorSpec, as_bytes, spec_of
from rl_csrc.buffers.bucket import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    from torch import Tensor

_Item: TypeAlias = tuple[TensorSpec, int]
"""Tensor in the buffer: its name, dtype and shape, and its start, bytes."""
_numbers = itertools.count()


def cuda_buffer(num_bytes: int) -> tuple[Tensor, Any]:
    """uint8 [num_bytes] on the current GPU, and what another process rebuilds it from."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return buffer, reduce_tensor(buffer)


class WorkerSender:
    """Sends to the worker of one GPU, update after update. A context manager that closes.

    Args:
        device_uuid: UUID of the GPU, as vLLM's `current_platform.get_device_uuid` gives it.
        bucket_bytes: Size of each half of the buffer; the largest tensor must fit.
        timeout_s: Longest wait for the worker, seconds: it loads a bucket before it answers.
        buffer: Makes the memory of a size, and what the worker rebuilds it from.
    """

    def __init__(
        self,
        device_uuid: str,
        *,
        bucket_bytes: int = 1 << 30,
        timeout_s: float = 600.0,
        buffer: Callable[[int], tuple[Tensor, Any]] = cuda_buffer,
    ) -> None:
        self._peer = f"the checkpoint-engine worker of {device_uuid}"
        self._bucket_bytes = aligned(bucket_bytes)
        self._timeout_s = timeout_s
        self._make_buffer = buffer
        self._context = zmq.Context()
        self._uuid = device_uuid
        self._address = ""
        self._socket: Any = None
        self._bind()

    @property
    def handles(self) -> dict[str, str]:
        """Handles for the next `update_weights_from_ipc`, of this GPU: merge those of all."""
        return {self._uuid: self._address}

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Send an update to the worker that has, or is about to get, `handles`; returns the tensors' bytes.

        Raises:
            SyncAbortedError: the source or the worker failed; the worker may hold mixed weights.
            PeerTimeoutError: the worker did not answer; likewise.
            TensorError: a tensor is larger than `bucket_bytes`, or cannot be sent.
        """
        if self._socket is None:
            raise UsageError(f"the sender to {self._peer} is closed; make another")
        memory, handle = self._make_buffer(2 * self._bucket_bytes)
        try:
            self._ask(handle)
            num_bytes = self._stream(weights, memory)
            del memory, handle
            for _ in range(2):  # let go of the buffer; finish the weights
                self._ask(None)
        except BaseException as error:
            self._give_up(error)
            raise
        return num_bytes

    def close(self) -> None:
        """Free the socket. Idempotent."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bind(self) -> None:
        """Take an address: another each time, because ZeroMQ gives one back when it likes."""
        self._address = f"ipc://@rl-ckpt-{self._uuid}-{os.getpid()}-{next(_numbers)}.sock"
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self._address)
        self._is_waiting = False

    def _stream(self, weights: Iterable[tuple[str, Tensor]], memory: Tensor) -> int:
        """Fill one half of the buffer while the worker loads from the other."""
        num_bytes = 0
        for number, items in enumerate(self._buckets(weights, memory)):
            if memory.is_cuda:
                torch.cuda.synchronize(memory.device)
            if number:
                self._hear()
            self._say(
                [
                    {"name": spec.name, "shape": torch.Size(spec.shape), "dtype": spec.dtype, "offset": offset}
                    for spec, offset in items
                ]
            )
            num_bytes += sum(spec.num_bytes for spec, _ in items)
        if num_bytes == 0:
            raise TensorError("the source yielded no tensor; an iterator that was drained before yields none")
        self._hear()
        return num_bytes

    def _buckets(self, weights: Iterable[tuple[str, Tensor]], memory: Tensor) -> Iterator[list[_Item]]:
        half = used = 0
        items: list[_Item] = []
        for name, tensor in weights:
            spec = spec_of(name, tensor)
            if spec.num_bytes > self._bucket_bytes:
                raise TensorError(
                    f"{name!r} has {spec.num_bytes} bytes, and this protocol sends no tensor in parts: pass a "
                    f"bucket_bytes of at least as much; it is {self._bucket_bytes}"
                )
            if used + spec.num_bytes > self._bucket_bytes:
                yield items
                items, used, half = [], 0, 1 - half
            start = half * self._bucket_bytes + used
            memory[start : start + spec.num_bytes].copy_(as_bytes(tensor))
            items.append((spec, start))
            used += aligned(spec.num_bytes)
        if items:
            yield items

    def _ask(self, payload: object) -> None:
        self._say(payload)
        self._hear()

    def _say(self, payload: object) -> None:
        if not self._socket.poll(self._timeout_s * 1000, zmq.POLLOUT):
            raise PeerTimeoutError(f"{self._peer} did not connect to {self._address} within {self._timeout_s:g} s")
        self._socket.send_pyobj(payload)
        self._is_waiting = True

    def _hear(self) -> None:
        if not self._socket.poll(self._timeout_s * 1000, zmq.POLLIN):
            raise PeerTimeoutError(f"{self._peer} did not answer within {self._timeout_s:g} s")
        said: bytes = self._socket.recv()
        self._is_waiting = False
        if said:
            raise SyncAbortedError(f"{self._peer} failed: {said.decode(errors='replace')}")

    def _give_up(self, error: BaseException) -> None:
        """Have the worker raise the error instead of waiting for more, and be ready for the next update."""
        if self._is_waiting and self._socket.poll(self._timeout_s * 1000, zmq.POLLIN):
            self._socket.recv()
            self._is_waiting = False
        if not self._is_waiting and self._socket.poll(0, zmq.POLLOUT):
            self._socket.send_pyobj(RuntimeError(f"the sender gave up: {error}"))
            self._socket.close(linger=1000)
        else:
            self._socket.close(linger=0)
        self._bind()
