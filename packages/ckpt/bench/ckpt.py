"""Weights from one process into another process's tensors: rl-ckpt over shared memory, and how else it is done.

Every system moves the same tensors, in the shapes of Qwen3-0.6B, and is done when the other process holds them in
memory of its own and has said so. The limit is one copy of the same tensors inside one process.
"""

import itertools
import subprocess
import sys
import tempfile
import uuid
from datetime import timedelta
from pathlib import Path

import torch

import rl_ckpt

TIMEOUT = timedelta(seconds=60)


def shapes(num_layers, vocab_size):
    """Qwen3: hidden 1024, 16 query and 8 key-value heads of 128, intermediate 3072. The 0.6B has 28 layers."""
    layer = {
        "self_attn.q_proj": (2048, 1024),
        "self_attn.k_proj": (1024, 1024),
        "self_attn.v_proj": (1024, 1024),
        "self_attn.o_proj": (1024, 2048),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "mlp.gate_proj": (3072, 1024),
        "mlp.up_proj": (3072, 1024),
        "mlp.down_proj": (1024, 3072),
        "input_layernorm": (1024,),
        "post_attention_layernorm": (1024,),
    }
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (vocab_size, 1024), **layers, "model.norm.weight": (1024,)}


def tensors(size, make):
    return {name: make(shape, dtype=torch.bfloat16) for name, shape in shapes(*size).items()}


def copy_into(mine, items):
    for name, tensor in items:
        mine[name].copy_(tensor)


def join_group(rank, file):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2, timeout=TIMEOUT)
    return dist


class Child:
    """This file as a process that takes weights by one system: a line to it starts a sync, a line back ends it."""

    def __init__(self, system, size, where):
        command = [sys.executable, __file__, system, *map(str, size), str(where)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def tell(self):
        self.process.stdin.write("go\n")

    def hear(self):
        if self.process.stdout.readline() != "done\n":
            raise RuntimeError(f"the receiving process {self.process.args} died")

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


def child(system, num_layers, vocab_size, where):
    """Take a sync for every line on stdin, into tensors of this process."""
    torch.set_num_threads(1)
    mine = tensors((int(num_layers), int(vocab_size)), torch.zeros)
    if system == "ckpt":
        engine = rl_ckpt.connect(where, role="receive")
    elif system == "gloo":
        dist = join_group(1, where)
    for _ in sys.stdin:
        if system == "ckpt":
            copy_into(mine, engine.recv())
        elif system == "gloo":
            for tensor in mine.values():
                dist.recv(tensor, src=0)
        else:
            from safetensors.torch import load_file

            copy_into(mine, load_file(where).items())
        print("done", flush=True)


def main(run):
    size = (4, 9_496) if run.quick else (28, 151_936)
    weights, mine = tensors(size, torch.randn), tensors(size, torch.zeros)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    run.parameters(num_bytes=num_bytes, num_tensors=len(weights), shapes="Qwen3-0.6B", threads=torch.get_num_threads())
    address, versions, reports = f"shm://bench-{uuid.uuid4().hex[:8]}", itertools.count(), []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rl-bench-") as folder,
        rl_ckpt.connect(address, role="send") as engine,
    ):
        file, store = Path(folder) / "weights.safetensors", Path(folder) / "store"
        ckpt, gloo, files = Child("ckpt", size, address), Child("gloo", size, store), Child("files", size, file)
        dist = join_group(0, str(store))

        def by_ckpt():
            ckpt.tell()
            reports.append(engine.send(weights.items(), version=next(versions)))
            ckpt.hear()

        def by_gloo():
            gloo.tell()
            for tensor in weights.values():
                dist.send(tensor, dst=1)
            gloo.hear()

        def by_files():
            from safetensors.torch import save_file

            save_file(weights, file)
            files.tell()
            files.hear()

        try:
            run.compare(
                "weights into another process",
                {"rl-ckpt shm": by_ckpt},
                peers={"gloo send/recv": by_gloo, "safetensors in /dev/shm": by_files},
                limit={"memcpy, one process": lambda: copy_into(mine, weights.items())},
                unit="GB/s",
                amount=num_bytes / 1e9,
                goal=">= 0.75 of limit",
            )
        finally:
            dist.destroy_process_group()
            for process in (ckpt, gloo, files):
                process.close()
    run.record(
        "sender's time in digests, of the sync",
        "rl-ckpt shm",
        [report.verify_s / report.wall_s for report in reports[1:]],
        unit="share",
        goal="<= 0.1 share",
    )
    run.record("first sync, touching the ring", "rl-ckpt shm", [reports[0].wall_s], unit="s")


if __name__ == "__main__":
    child(*sys.argv[1:])
