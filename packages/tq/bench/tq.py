"""The queue over shared memory and TCP, beside TransferQueue, `ray.put`, safetensors, a raw socket and memcpy.

text = 256 rows of {ragged int64, ragged float32}, 512-4096 values; images = 256 rows of 1 MB; scalars = 256 rows x 32.
The server is a process of its own. Put and get are measured from two clients of one other process. TransferQueue is
measured where it is installed; this leaves torch as it is: `uv pip install --no-deps TransferQueue==0.1.11 pyzmq
hydra-core omegaconf msgspec psutil prometheus_client antlr4-python3-runtime==4.9.3`.
"""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from packages.tq.bench._control import control, one_row, other_rows
from packages.tq.bench._systems import (
    copied,
    images,
    load,
    plain,
    ray_store,
    save,
    scalars,
    server,
    text,
    transfer_queue,
)

import rl_tq
from rl_bench import Run, missing
from rl_tq.types import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDict


def main(run: Run) -> None:
    num_rows = 32 if run.quick else 256
    run.parameters(num_rows=num_rows, torch_threads=torch.get_num_threads())
    torch.manual_seed(0)
    payloads = {"text": text(num_rows), "images": images(num_rows), "scalars": scalars(num_rows)}
    with server() as (shm, tcp, plain_port):
        with rl_tq.connect(shm) as queue, rl_tq.connect(shm) as peer:
            with ray_store() as ray, transfer_queue(ray) as other:
                for name, data in payloads.items():
                    values(run, name, data, queue, peer, ray, other)
                if not isinstance(other, str):
                    other_rows(run, other)
            one_row(run, queue, peer)
            control(run, queue, peer)
        restart(run)
        loopback(run, payloads["images"], tcp, plain_port)
    if torch.cuda.is_available():
        gpu(run)


def gpu(run: Run) -> None:
    """Ragged and shuffled rows to a GPU."""
    num_rows = 32 if run.quick else 256
    with server() as (shm, *_), rl_tq.connect(shm) as queue, rl_tq.connect(shm) as peer:
        to_device(run, {"text": text(num_rows), "images": images(num_rows)}, queue, peer)


def values(
    run: Run, name: str, data: TensorDict, queue: rl_tq.TransferQueue, peer: rl_tq.TransferQueue, ray: Any, other: Any
) -> None:
    """Put, get, and get into a buffer that is used again."""
    tensors = plain(data)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    run.parameters(**{f"{name}_bytes": nbytes})
    source = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()])
    target = torch.empty(len(source) + 4096, dtype=torch.uint8)
    kept = data.clone()
    safetensors = missing("safetensors")
    refs: list[Any] = []
    keys = [f"row{i}" for i in range(len(data))]
    is_there: list[bool] = []

    def put_other() -> None:
        other.kv_batch_put(keys=keys, partition_id="bench", fields=data)
        is_there.append(True)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = str(Path(folder) / "batch.safetensors")

        def reset() -> None:
            queue.clear("bench")
            refs.clear()
            if is_there:
                other.kv_clear(keys=keys, partition_id="bench")
                is_there.clear()
            target.fill_(0xAA)

        run.compare(
            f"put {name}",
            {"rl-tq shm": lambda: queue.put(data, partition="bench")},
            peers={
                "TransferQueue": other if isinstance(other, str) else put_other,
                "ray.put": ray if isinstance(ray, str) else lambda: refs.append(ray.put(tensors)),
                "safetensors /dev/shm": safetensors or (lambda: save(tensors, path)),
            },
            limit={"memcpy, warm": lambda: target[: len(source)].copy_(source)},
            unit="GB/s" if nbytes > 1 << 20 else "us",
            amount=nbytes / 1e9 if nbytes > 1 << 20 else None,
            before=reset,
            goal={"text": ">= 0.6 of limit", "images": ">= 0.65 of limit"}.get(name),
            can_tell=not run.quick,
        )
        reset()
        meta = queue.put(data, partition="bench")
        ref = None if isinstance(ray, str) else ray.put(tensors)
        getters: dict[str, Callable[[], dict[str, torch.Tensor]]] = {}
        if ref is not None:
            getters["ray.get"] = lambda: ray.get(ref)
        if not isinstance(other, str):
            put_other()
            getters["TransferQueue"] = lambda: plain(other.kv_batch_get(keys=keys, partition_id="bench"))
        if not safetensors:
            save(tensors, path)
            getters["safetensors /dev/shm"] = lambda: load(path)
        absent = {
            which: why
            for which, why in (("ray.get", ray), ("TransferQueue", other), ("safetensors /dev/shm", safetensors))
            if isinstance(why, str)
        }
        run.compare(
            f"get {name}",
            {"rl-tq shm": lambda: peer.get(meta)},
            peers={**getters, **absent},
            unit="ms",
            goal="<= 0.25 ms" if name == "scalars" else "<= 0.8 ms",
            can_tell=not run.quick,
        )

        def land(got: dict[str, torch.Tensor]) -> None:
            start = 0
            for tensor in got.values():
                part = tensor.reshape(-1).view(torch.uint8)
                target[start : start + len(part)].copy_(part)
                start += len(part)

        shuffled = meta.reorder(torch.randperm(len(meta)).tolist())
        run.compare(f"get {name}, shuffled", {"rl-tq shm": lambda: peer.get(shuffled)}, unit="ms")
        if nbytes > 1 << 20:
            for where, out in (("a used buffer", target), ("a Buffer, rows as long as before", Buffer(target))):
                run.compare(
                    f"get {name} into {where}",
                    {"rl-tq shm": lambda out=out: peer.get(meta, out=out)},
                    peers={
                        **{which: lambda get=get: land(get()) for which, get in getters.items()},
                        "torch alone, of a copy in this process": lambda: copied(kept, target),
                        **absent,
                    },
                    limit={"memcpy, warm": lambda: target[: len(source)].copy_(source)},
                    unit="GB/s",
                    amount=nbytes / 1e9,
                    before=lambda: target.fill_(0xAA),
                    goal=">= 0.8 of limit",
                    can_tell=not run.quick,
                )
        reset()


def to_device(run: Run, payloads: dict[str, TensorDict], queue: rl_tq.TransferQueue, peer: rl_tq.TransferQueue) -> None:
    """Ragged and shuffled rows to a GPU, beside one copy of as many bytes from pinned memory."""
    for name, data in payloads.items():
        nbytes = sum(tensor.nbytes for tensor in plain(data).values())
        meta = queue.put(data, partition="device")
        shuffled = meta.reorder(torch.randperm(len(meta)).tolist())
        out = torch.empty(nbytes + (1 << 20), dtype=torch.uint8, device="cuda")
        source = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        run.compare(
            f"get {name} shuffled to a GPU",
            {"rl-tq shm": lambda shuffled=shuffled, out=out: peer.get(shuffled, out=out)},
            limit={"one pinned copy": lambda out=out, source=source: out[: len(source)].copy_(source)},
            unit="GB/s",
            amount=nbytes / 1e9,
            sync=torch.cuda.synchronize,
            goal=">= 40 GB/s",
            can_tell=not run.quick,
        )
        queue.clear("device")


def loopback(run: Run, data: TensorDict, address: str, plain_port: int) -> None:
    """The images over TCP of this host: a get of them, and as many bytes by a raw socket."""
    nbytes = data["images"].nbytes
    target = torch.empty(nbytes, dtype=torch.uint8)
    with rl_tq.connect(address) as queue, socket.create_connection(("127.0.0.1", plain_port)) as plain_socket:
        meta = queue.put(data, partition="bench")

        def raw(out: torch.Tensor = target) -> None:
            plain_socket.sendall(nbytes.to_bytes(8, "little"))
            view = memoryview(out.numpy())
            while view:
                view = view[plain_socket.recv_into(view) :]

        run.compare(
            "get images, TCP loopback",
            {"rl-tq tcp": lambda: queue.get(meta), "rl-tq tcp, used buffer": lambda: queue.get(meta, out=target)},
            peers={"raw socket, new memory": lambda: raw(torch.empty(nbytes, dtype=torch.uint8))},
            limit={"raw socket, used buffer": raw},
            unit="GB/s",
            amount=nbytes / 1e9,
            goal=">= 0.85 of limit",
            can_tell=not run.quick,
        )


def restart(run: Run) -> None:
    """Serving a directory again that holds 100,000 rows."""
    num_rows = 10_240 if run.quick else 102_400
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        address = f"file://{folder}/queue"
        with rl_tq.serve(address) as queue:
            for i in range(num_rows // 256):
                tags = [{"group_id": 32 * i + j // 8, "weight_version_min": 1} for j in range(256)]
                queue.put({"a": torch.ones(256), "b": torch.zeros(256)}, partition="p", tags=tags)
        times: list[float] = []
        for _ in range(7):
            start = time.perf_counter()
            queue = rl_tq.serve(address)
            times.append(time.perf_counter() - start)
            queue.close()
    run.record(f"restart with {num_rows} rows", "rl-tq file", times, unit="s", goal="<= 1 s", can_tell=not run.quick)
