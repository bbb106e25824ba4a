"""What is moved, the process that serves it, and the systems that it is measured beside."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from rl_bench import missing

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVER = """
import gc, os, select, socket, sys, threading
import torch, rl_tq
torch.set_num_threads(1)
shm, tcp = rl_tq.serve("shm://"), rl_tq.serve("tcp://127.0.0.1:0")
gc.collect()
gc.freeze()  # else each full collection walks all that torch's import left
listener = socket.create_server(("127.0.0.1", 0))
data = bytearray(os.urandom(1 << 20) * 256)
def plain():
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := connection.recv(8):
            connection.sendall(memoryview(data)[:int.from_bytes(request, "little")])
threading.Thread(target=plain, daemon=True).start()
echo = socket.socket(socket.AF_UNIX)
echo.bind(chr(0) + f"rl-tq-bench-{os.getpid()}")
echo.listen(1)
def repeat():
    buffer = memoryview(bytearray(1 << 16))
    while True:
        connection, _ = echo.accept()
        poll = select.epoll()
        poll.register(connection, select.EPOLLIN)
        while poll.poll() and (size := connection.recvmsg_into([buffer], 64)[0]):
            connection.send(buffer[:size])
threading.Thread(target=repeat, daemon=True).start()
print(shm.address, tcp.address, listener.getsockname()[1], flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextmanager
def server() -> Iterator[tuple[str, str, int]]:
    """A process that serves queues, and the same bytes by a raw socket."""
    os.environ.setdefault("RL_TQ_TOKEN", secrets.token_hex(32))  # both processes need it
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        shm, tcp, port = process.stdout.readline().split()
        yield shm, tcp, int(port)
    finally:
        process.stdin.close()
        process.wait(30)


@contextmanager
def ray_store() -> Iterator[Any]:
    """Ray with zero-copy tensors, or the sentence that says why not."""
    why_not = missing("ray")
    if why_not:
        yield why_not
        return
    os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
    import ray

    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=2 << 30,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def transfer_queue(ray: Any) -> Iterator[Any]:
    """TransferQueue with two storage units, or the sentence that says why not."""
    why_not = ray if isinstance(ray, str) else missing("transfer_queue")
    if why_not:
        yield why_not
        return
    logging.disable(logging.WARNING)
    import transfer_queue

    transfer_queue.init()
    try:
        yield transfer_queue
    finally:
        transfer_queue.close()


def save(tensors: dict[str, torch.Tensor], path: str) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)


def load(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


# What is moved


def text(num_rows: int) -> TensorDict:
    lengths = torch.randint(512, 4097, (num_rows,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    columns = {
        "token_ids": torch.nested.nested_tensor_from_jagged(torch.randint(0, 151_936, (total,)), offsets),
        "rollout_logprobs": torch.nested.nested_tensor_from_jagged(-torch.rand(total), offsets.clone()),
    }
    return TensorDict(columns, batch_size=[num_rows])


def images(num_rows: int) -> TensorDict:
    return TensorDict({"images": torch.randint(0, 256, (num_rows, 1 << 20), dtype=torch.uint8)}, batch_size=[num_rows])


def scalars(num_rows: int) -> TensorDict:
    return TensorDict({f"column_{i}": torch.rand(num_rows) for i in range(32)}, batch_size=[num_rows])


def plain(data: TensorDict) -> dict[str, torch.Tensor]:
    """Every column as ordinary tensors, for systems that know no others."""
    found: dict[str, torch.Tensor] = {}
    for name, value in data.items():
        if value.is_nested:
            found |= {f"{name}.values": value.values(), f"{name}.offsets": value.offsets()}
        else:
            found[name] = value
    return found


def copied(data: TensorDict, out: torch.Tensor) -> TensorDict:
    """What a get into a buffer returns, by torch's own functions: values in `out`, and a batch of views of it."""
    views: dict[str, torch.Tensor] = {}
    start = 0
    for name, column in data.items():
        values = column.values() if column.is_nested else column
        place = out[start : start + values.nbytes].view(values.dtype).view(values.shape)
        start += values.nbytes + -values.nbytes % 64
        place.copy_(values)
        if column.is_nested:
            place = torch.nested.nested_tensor_from_jagged(place, column.offsets().clone())
        views[name] = place
    return TensorDict(views, batch_size=data.batch_size)
