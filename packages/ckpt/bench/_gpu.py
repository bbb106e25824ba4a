"""The rows that need a GPU: two processes on one, from the tensors of one into those of the other."""

import itertools
import sys
import time
import uuid
from contextlib import ExitStack

import torch
from packages.ckpt.bench._other import Other, say

import rl_ckpt
from rl_bench import has_card, missing

GROWTH_SYNCS = 50


def blocks(num_gib):
    """So many tensors of 1 GiB."""
    return {f"block.{i}": (1 << 29,) for i in range(num_gib)}


def dense(num_layers):
    """Qwen3-8B: hidden 4096, 32 query and 8 key-value heads of 128, inner width 12288, 36 layers."""
    layer = {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (1024, 4096),
        "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "mlp.gate_proj": (12288, 4096),
        "mlp.up_proj": (12288, 4096),
        "mlp.down_proj": (4096, 12288),
        "input_layernorm": (4096,),
        "post_attention_layernorm": (4096,),
    }
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in layer.items()}
    ends = {"model.embed_tokens.weight": (151_936, 4096), "lm_head.weight": (151_936, 4096)}
    return layers | ends | {"model.norm.weight": (4096,)}


def mixture_of_experts(num_layers):
    """Qwen3-30B-A3B: hidden 2048, 32 query and 4 key-value heads of 128, 128 experts of 768, 48 layers."""
    layer = {
        "self_attn.q_proj": (4096, 2048),
        "self_attn.k_proj": (512, 2048),
        "self_attn.v_proj": (512, 2048),
        "self_attn.o_proj": (2048, 4096),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "mlp.gate": (128, 2048),
        "input_layernorm": (2048,),
        "post_attention_layernorm": (2048,),
    }
    for expert in range(128):
        for name, shape in {"gate_proj": (768, 2048), "up_proj": (768, 2048), "down_proj": (2048, 768)}.items():
            layer[f"mlp.experts.{expert}.{name}"] = shape
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in layer.items()}
    ends = {"model.embed_tokens.weight": (151_936, 2048), "lm_head.weight": (151_936, 2048)}
    return layers | ends | {"model.norm.weight": (2048,)}


SIZES = {"blocks": blocks, "dense": dense, "mixture": mixture_of_experts}


def tensors(what, size, make):
    return {name: make(shape, dtype=torch.bfloat16, device="cuda") for name, shape in SIZES[what](size).items()}


def serve(system, what, size, where):
    """Take a version for every line, into tensors of this process."""
    mine = tensors(what, int(size), torch.zeros)
    if system == "rl-ckpt":
        engine = rl_ckpt.connect(where, role="receive")
    say("ready")
    for line in sys.stdin:
        if line == "memory\n":
            say("reserved", torch.cuda.memory_reserved())
        elif system == "rl-ckpt":
            engine.recv_into(mine)
            say("done")
        else:
            take_handles(mine, line.strip())


def take_handles(mine, path):
    """torch's own IPC: one handle for each tensor, pickled."""
    from pathlib import Path
    from pickle import loads

    handles = loads(Path(path).read_bytes())
    for name, (rebuild, arguments) in handles.items():
        mine[name].copy_(rebuild(*arguments))
    torch.cuda.synchronize()
    say("done")


def send_handles(other, weights, path):
    from pickle import dumps

    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.synchronize()
    path.write_bytes(dumps({name: reduce_tensor(tensor) for name, tensor in weights.items()}))
    other.ask(str(path))


def measure(run, folder):
    quick, total = run.quick, torch.cuda.get_device_properties(0).total_memory
    num_layers = 48 if total > 130 * 2**30 else 24  # both processes hold the weights
    for label, what, size, goal, copying_goal in (
        ("Qwen3-8B, 16.4 GB, one GPU", "dense", 1 if quick else 36, None, "<= 8 ms"),
        ("8 GiB, one GPU", "blocks", 1 if quick else 8, "<= 5.5 ms", None),
        (f"Qwen3-30B-A3B, {num_layers} layers, one GPU", "mixture", 1 if quick else num_layers, "<= 300 ms", None),
    ):
        with ExitStack() as stack:
            one_size(run, stack, label, what, size, goal, copying_goal, folder)
        torch.cuda.empty_cache()


def one_size(run, stack, label, what, size, goal, copying_goal, folder):
    can_tell = has_card("H200") and not run.quick
    weights = tensors(what, size, torch.randn)
    url = f"cuda-ipc://bench-{uuid.uuid4().hex[:8]}"
    sender = stack.enter_context(rl_ckpt.connect(url, role="send"))
    sender.register_source(weights)
    other, handles = Other("_gpu", "rl-ckpt", what, size, url), None
    stack.callback(other.close)
    other.hear("ready")
    reports, versions = [], itertools.count()

    def ours():
        other.tell()
        reports.append(sender.send(version=next(versions)))
        other.hear()

    if what != "mixture":  # with 18,900 tensors there is no memory for a third copy
        handles = Other("_gpu", "handles", what, size, url)
        stack.callback(handles.close)
        handles.hear("ready")
        copies = tensors(what, size, torch.zeros)
        limit = {"copy, one process": lambda: [copies[name].copy_(tensor) for name, tensor in weights.items()]}
    else:
        limit = None
    peers = {
        "torch IPC, a handle for each tensor": (lambda: send_handles(handles, weights, folder / "handles"))
        if handles
        else "no memory for it",
        "checkpoint-engine 0.4.2": missing("checkpoint_engine") or "its server and a vLLM worker are not started here",
    }
    run.compare(
        label, {"rl-ckpt cuda-ipc, registered": ours}, peers=peers, limit=limit, goal=goal, sync=torch.cuda.synchronize,
        can_tell=can_tell,
    )  # fmt: skip
    system = "rl-ckpt cuda-ipc, registered"
    wire, installed = [r.wall_s - r.install_s for r in reports[1:]], [r.install_s for r in reports[1:]]
    run.record(f"{label}: wire", system, wire, unit="s", goal="<= 0.15 s", can_tell=can_tell)
    run.record(f"{label}: install", system, installed, unit="s", goal="<= 0.15 s", can_tell=can_tell)
    digests = verification(run, label, weights, [report.wall_s for report in reports[1:]])
    copying = [1e3 * (r.wall_s - 2 * each) for r, each in zip(reports[1:], digests, strict=True)]
    metric = f"{label}: copying, the sync less the digests of both ends"
    run.record(metric, system, copying, unit="ms", goal=copying_goal, can_tell=can_tell)
    before = int(other.ask("memory", "reserved"))
    for _ in range(GROWTH_SYNCS):
        ours()
    growth = int(other.ask("memory", "reserved")) - before
    run.record(
        f"{label}: reserved memory's growth over {GROWTH_SYNCS} syncs",
        system,
        [growth],
        unit="bytes",
        goal="<= 0 bytes",
    )


def verification(run, label, weights, walls):
    """Record what the digests of one end take, as a share of a sync; returns seconds for each sync."""
    from rl_ckpt.tensors.digest import digests_of

    contents = [tensor.view(-1).view(torch.uint8) for tensor in weights.values()]
    taken = []
    for _ in walls:
        torch.cuda.synchronize()
        since = time.perf_counter()
        digests_of(contents)
        taken.append(time.perf_counter() - since)
    run.record(
        f"{label}: digests of one end, of a sync",
        "rl-ckpt cuda-ipc, registered",
        [seconds / wall for seconds, wall in zip(taken, walls, strict=True)],
        unit="share",
        goal="<= 0.15 share",
    )
    return taken


if __name__ == "__main__":
    serve(*sys.argv[1:])
