"""Frames, digest, buckets and delta beside safetensors, checksums and plain torch, memcpy and a read.

One thread. Frames are timed on three sizes of tensors, because their time must
not depend on the bytes.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib

import torch

import rl_csrc
from rl_bench import Run, missing
from rl_csrc import _cpu, bucket, delta, frames

GB = 1e9


def main(run: Run) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    nbytes = 1 << (24 if run.quick else 28)
    run.parameters(threads=1, level=_cpu.isa(), large_bytes=nbytes)
    for size in (256, 64 << 10, 0 if run.quick else 1 << 20):
        if size:
            _frames(run, size)
    data = torch.randint(-(2**62), 2**62, (nbytes // 8,)).view(torch.uint8)
    out = torch.ones_like(data)
    _digest(run, data)
    _copies(run, data, out)
    del out
    _delta(run, data)


def _frames(run: Run, size: int) -> None:
    tensors = {f"model.layers.{i}.mlp.down_proj.weight": torch.randn(size // 4) for i in range(300)}
    block = frames.encode(tensors).to_bytes()
    small = size <= 64 << 10
    what = f"300 tensors of {size} B"
    run.compare(
        f"frames encode + decode, {what}",
        {"rl_csrc": lambda: (frames.encode(tensors), frames.decode(block))},
        unit="us",
        inner=20 if small else 5,
        goal="<= 50 us",
    )
    one, sizes = torch.empty(300 * 64), [64] * 300
    run.compare(
        f"frames encode + decode with every tensor made, {what}",
        {"rl_csrc": lambda: (frames.encode(tensors), frames.decode(block).to_dict())},
        peers=_frame_peers(tensors) if small else None,
        limit={"torch makes 300 tensors (split)": lambda: torch.split(one, sizes)},
        unit="us",
        inner=20 if small else 5,
    )


def _frame_peers(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    peers: dict[str, object] = {"safetensors": missing("safetensors") or ""}
    if not peers["safetensors"]:
        from safetensors.torch import load, save

        saved = save(tensors)
        peers["safetensors"] = lambda: (save(tensors), load(saved))
    pickled = pickle.dumps(tensors)
    peers["pickle"] = lambda: (pickle.dumps(tensors), pickle.loads(pickled))
    return peers


def _digest(run: Run, data: torch.Tensor) -> None:
    view = memoryview(data.numpy())
    xxhash = missing("xxhash")
    if not xxhash:
        import xxhash as module

        xxhash = lambda: module.xxh3_64_intdigest(view)  # noqa: E731
    run.compare(
        "digest of a cold buffer",
        {"rl_csrc": lambda: rl_csrc.digest(data)},
        peers={"zlib.crc32": lambda: zlib.crc32(view), "blake2b": lambda: hashlib.blake2b(view), "xxh3_64": xxhash},
        limit={"read": lambda: data.view(torch.int64).sum()},
        unit="GB/s",
        amount=data.nbytes / GB,
        goal=">= 6 GB/s",
    )
    warm = data[: 1 << 20]
    warm_view = view[: 1 << 20]
    run.compare(
        "digest of 1 MiB in the cache",
        {"rl_csrc": lambda: rl_csrc.digest(warm)},
        peers={"zlib.crc32": lambda: zlib.crc32(warm_view)},
        unit="GB/s",
        amount=warm.nbytes / GB,
        inner=20,
        goal=">= 6 GB/s",
    )


def _copies(run: Run, data: torch.Tensor, out: torch.Tensor) -> None:
    weights = [1 + (i * 7919) % 401 for i in range(300)]
    unit = data.numel() // (sum(weights) + 300) // 8 * 8  # no multiple of the alignment: the gaps are part of the work
    sizes = [unit * weight for weight in weights]
    tensors = list(torch.split(data[: sum(sizes)], sizes))
    placing = bucket.BucketPlan(data.numel())
    pieces = [(tensor, 0, placing.place(tensor.numel())[0].bucket_offset, tensor.numel()) for tensor in tensors]
    source, target = data[: placing.offset], out[: placing.offset]
    named = {str(i): t for i, t in enumerate(tensors)}
    frame = frames.encode(named)
    run.compare(
        "300 tensors into one warm buffer",
        {
            "bucket.pack_leaves": lambda: bucket.pack_leaves(out, pieces, leaf_nbytes=4 << 20),
            "frames.write_into": lambda: frame.write_into(out),
            "frames.write_into with digest": lambda: frame.write_into(out, checksum=True),
        },
        peers={"torch.cat": lambda: torch.cat(tensors, out=out[: sum(t.numel() for t in tensors)])},
        limit={"memcpy": lambda: target.copy_(source)},
        unit="GB/s",
        amount=placing.offset / GB,
        goal=">= 0.77 of limit",
    )


def _delta(run: Run, data: torch.Tensor) -> None:
    base = data.view(torch.int16)
    fresh = base.clone()
    changed = torch.randint(0, base.numel(), (base.numel() // 100,))
    fresh[changed] += 1
    found = delta.encode(fresh, base)
    if found is None:
        raise RuntimeError("a delta of 1% must fit into half of the bytes")
    run.parameters(delta_bytes_fraction=round(found.nbytes / data.nbytes, 5))

    def by_torch() -> object:
        where = (fresh != base).nonzero()[:, 0]
        return where.to(torch.int32), fresh[where]

    run.compare(
        "delta encode, 1% of bfloat16 changed",
        {"rl_csrc": lambda: delta.encode(fresh, base)},
        peers={"torch nonzero + gather": by_torch},
        limit={"read both": lambda: (fresh.view(torch.int64).sum(), base.view(torch.int64).sum())},
        unit="GB/s",
        amount=data.nbytes / GB,
        goal=">= 3 GB/s",
    )
    where, values = (fresh != base).nonzero()[:, 0], found.values
    target = base.clone()

    def scatter() -> None:
        target[where] = values

    run.compare(
        "delta apply, 1% of bfloat16 changed",
        {"rl_csrc": lambda: delta.apply(target, found)},
        peers={"torch scatter": scatter},
        unit="GB/s",
        amount=data.nbytes / GB,
        goal=">= 3 GB/s",
    )
