"""GPU figures of the kernels: ours, the peers and the limits in one run. Usage: kernels.py [--json FILE] [--only A,B].

Stands alone beside an installed rl_csrc built with RL_CSRC_CUDA=ON. Rows have the format of rl_bench.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timing import measure, measure_graph

from rl_csrc import _cuda
from rl_csrc import _impl_cuda as ours
from rl_csrc._impl_cuda.head import GRADIENT_ROWS
from rl_csrc._types import LossSpec

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, VOCAB = 8192, 151936
DEVICE = "cuda"
ALONE = "the products alone, without the kernels between them"
BEYOND = "peak beyond operands, returned gradients and (ours) the float32 accumulator; the op's own room is 0.65 GiB"


class Table:
    """Rows of the result, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        metric: str,
        system: str,
        samples: list[float] | None,
        *,
        role: str = "ours",
        unit: str = "ms",
        goal: float | None = None,
        goal_of_limit: float | None = None,
        note: str = "",
    ) -> None:
        """Add one line; `goal` in the row's unit, `goal_of_limit` as a share of the limit's speed."""
        row: dict[str, Any] = {"system": system, "metric": metric, "unit": unit, "role": role, "note": note}
        row |= {"median": None, "min": None, "max": None, "n": 0, "wall_s": None, "cpu_s": None}
        if samples:
            row |= {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "n": len(samples)}
        row["_goal"], row["_goal_of_limit"] = goal, goal_of_limit
        self.rows.append(row)
        if samples:
            print(f"{metric:44s} {system:28s} {row['median']:10.4f} {unit:5s} {row['min']:10.4f} {note}", flush=True)
        else:
            print(f"{metric:44s} {system:28s} missing: {note}", flush=True)

    def finished(self) -> list[dict[str, Any]]:
        """The rows with ratios to the limit and to the best peer of their metric, and whether the goal was met."""

        def best(metric: str, role: str, rate: bool) -> float | None:
            found = [r["median"] for r in self.rows if r["metric"] == metric and r["role"] == role and r["median"]]
            return (max if rate else min)(found) if found else None

        for row in self.rows:
            rate = row["unit"].endswith("/s")
            for role, key in (("limit", "ratio_to_limit"), ("peer", "ratio_to_best_peer")):
                base = best(row["metric"], role, rate)
                known = base and row["median"] and (role == "limit" or row["role"] == "ours")
                row[key] = (row["median"] / base if rate else base / row["median"]) if known else None
            goal, share = row.pop("_goal"), row.pop("_goal_of_limit")
            sign = ">=" if rate else "<="
            row["goal"] = f"{sign} {goal} {row['unit']}" if goal else f">= {share:.4g} of limit" if share else None
            row["met"] = None
            if row["median"] is not None and goal:
                row["met"] = row["median"] >= goal if rate else row["median"] <= goal
            elif row["ratio_to_limit"] is not None and share:
                row["met"] = row["ratio_to_limit"] >= share
        return self.rows


def forward(table: Table) -> None:
    """Log-probs and entropies of 8192 x 151936 bfloat16."""
    metric = f"logprobs+entropy forward {ROWS}x{VOCAB} bf16"
    logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16, device=DEVICE).normal_(0, 3)
    labels = torch.randint(0, VOCAB, (ROWS,), device=DEVICE)
    flat = logits.view(-1)
    half = flat.numel() // 2
    copied = measure(lambda: flat[:half].copy_(flat[half:]))  # reads half, writes half: the bytes of one read
    table.add(metric, "copy of the same bytes", copied, role="limit")
    logits.normal_(0, 3)
    for entropy in (True, False):
        samples = measure(lambda e=entropy: ours.logprobs_forward(logits, labels, 1.0, None, -100, None, e, False))
        name = "rl_csrc.logprobs" if entropy else "rl_csrc.logprobs, no entropy"
        table.add(metric, name, samples, goal=0.70 if entropy else None)
    compiled = torch.compile(lambda x, y: torch.log_softmax(x.float(), -1).gather(1, y[:, None]))
    table.add(metric, "torch.compile", measure(lambda: compiled(logits, labels)), role="peer", note="no entropy")
    samples = measure(lambda: torch.nn.functional.cross_entropy(logits, labels, reduction="none"), repeats=7)
    table.add(metric, "F.cross_entropy", samples, role="peer", note="no entropy, bf16 result")
    samples = measure(lambda: torch.log_softmax(logits, -1).gather(1, labels[:, None]), repeats=7)
    table.add(metric, "log_softmax+gather", samples, role="peer", note="no entropy, bf16 result")
    odd = torch.empty(ROWS * (VOCAB - 1), dtype=torch.bfloat16, device=DEVICE).normal_(0, 3).view(ROWS, VOCAB - 1)
    samples = measure(
        lambda: ours.logprobs_forward(odd, labels.clamp(max=VOCAB - 2), 1.0, None, -100, None, True, False)
    )
    table.add(f"the same, {VOCAB - 1} columns", "rl_csrc.logprobs", samples, note="unaligned rows")


def train(table: Table) -> None:
    """Backward in place, and forward and backward in one pass."""
    logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16, device=DEVICE).normal_(0, 3)
    labels = torch.randint(0, VOCAB, (ROWS,), device=DEVICE)
    grads = torch.randn(ROWS, device=DEVICE) * 1e-4
    spare = torch.empty_like(logits)
    limit = measure(lambda: spare.copy_(logits))

    def refill() -> None:
        logits.normal_(0, 3)

    metric = f"logprobs backward in place {ROWS}x{VOCAB} bf16"
    table.add(metric, "copy", limit, role="limit")
    scored, entropies, _, lse = ours.logprobs_forward(logits, labels, 1.0, None, -100, None, True, False)
    for name, upstream, goal in (("rl_csrc.logprobs", None, 1.35), ("rl_csrc.logprobs, with entropy", grads, None)):
        samples = measure(
            lambda upstream=upstream: ours.logprobs_backward(
                logits, labels, scored, lse, grads, entropies, upstream, 1.0, None, -100, None, 0, logits
            ),
            prepare=refill,
        )
        table.add(metric, name, samples, goal=goal)

    metric = f"forward+backward in one pass {ROWS}x{VOCAB} bf16"
    table.add(metric, "copy", limit, role="limit")
    mask = torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
    cu_seqlens = torch.arange(0, ROWS + 1, 512, device=DEVICE)
    for name, spec, goal in (("ppo", LossSpec(), 1.5), ("ppo with entropy bonus", LossSpec(entropy_coef=0.01), None)):
        samples = measure(
            lambda spec=spec: ours.policy_loss_from_logits(
                logits, labels, scored, grads, mask, cu_seqlens, spec, float(ROWS), None, None, 1.0, None, None,
                False, logits,
            ),
            prepare=refill,
        )  # fmt: skip
        table.add(metric, f"rl_csrc.policy_loss_from_logits, {name}", samples, goal=goal)
    peers_train(table, metric, logits, labels)


def peers_train(table: Table, metric: str, logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Cross-entropy with its gradient, by others."""

    def backward_of(loss: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            leaf = logits.detach().requires_grad_()
            loss(leaf).backward()

        return run

    def fresh() -> None:
        logits.normal_(0, 3)

    samples = measure(backward_of(lambda x: torch.nn.functional.cross_entropy(x, labels)), repeats=7)
    table.add(metric, "F.cross_entropy", samples, role="peer")
    compiled = torch.compile(lambda x: -torch.log_softmax(x.float(), -1).gather(1, labels[:, None]).mean())
    table.add(metric, "torch.compile", measure(backward_of(compiled), repeats=7), role="peer")

    def eager(x: torch.Tensor) -> torch.Tensor:
        return -torch.log_softmax(x.float(), -1).gather(1, labels[:, None]).mean()

    table.add(metric, "eager", measure(backward_of(eager), repeats=7), role="peer")
    try:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    except ImportError as error:
        table.add(metric, "Liger", None, role="peer", note=str(error))
        return

    def liger(x: torch.Tensor) -> torch.Tensor:
        found = LigerCrossEntropyFunction.apply(x, labels, None)
        return found[0] if isinstance(found, tuple) else found

    try:
        samples = measure(backward_of(liger), repeats=7, prepare=fresh)
        table.add(metric, "Liger", samples, role="peer", note="gradient in place")
    except Exception as error:  # noqa: BLE001  # a peer that fails is a row that says so
        table.add(metric, "Liger", None, role="peer", note=repr(error)[:200])


def linear(table: Table) -> None:
    """The LM head: forward, backward by recompute, and the three-product form with the loss inside."""
    for width in (2048, 4096):
        linear_at(table, width)


def products(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[list[float], list[float]]:
    """Times of the head's product, and of the two products of its backward together."""
    logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16, device=DEVICE)
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)
    one = measure(lambda: torch.mm(hidden, weight.t(), out=logits), repeats=11)

    def pair() -> None:
        torch.mm(logits, weight, out=dhidden)
        torch.mm(logits.t(), hidden, out=dweight)

    return one, measure(pair, repeats=11)


def linear_at(table: Table, width: int) -> None:
    hidden = torch.randn(ROWS, width, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(VOCAB, width, device=DEVICE, dtype=torch.bfloat16) * 0.02
    labels = torch.randint(0, VOCAB, (ROWS,), device=DEVICE)
    product, two = products(hidden, weight)
    shape = f"H={width}"
    metric = f"linear_logprobs forward {shape}"
    table.add(metric, "one torch.mm, bf16 result", product, role="limit")
    for chunk in (1024,):
        buffer = torch.empty(chunk, VOCAB, device=DEVICE)

        def chunks(chunk: int = chunk, buffer: torch.Tensor = buffer) -> None:
            for part in hidden.split(chunk):
                torch.mm(part, weight.t(), out_dtype=torch.float32, out=buffer)

        table.add(metric, f"torch.mm to f32, chunks of {chunk}", measure(chunks, repeats=7), note=ALONE)
        del buffer
    empty_peak = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for chunk, goal in ((None, 1 / 1.07), (512, None)):
        samples = measure(
            lambda chunk=chunk: ours.linear_logprobs_forward(
                hidden, weight, labels, None, 1.0, None, -100, True, False, chunk, False
            ),
            repeats=11,
        )
        table.add(metric, f"rl_csrc.linear_logprobs, chunk {chunk}", samples, goal_of_limit=goal)
        extra = (torch.cuda.max_memory_allocated() - empty_peak) / 2**30
        torch.cuda.reset_peak_memory_stats()
        table.add(f"{metric}, memory", f"rl_csrc.linear_logprobs, chunk {chunk}", [extra], unit="GiB", goal=0.7)

    metric = f"linear_logprobs forward+backward, 4 products {shape}"
    one, pair = statistics.median(product), statistics.median(two)
    table.add(metric, "its 4 torch.mm", [2 * one + pair], role="limit")
    how = (1.0, None, -100, True, False, None, False)
    scored, entropies, _, _ = ours.linear_logprobs_forward(hidden, weight, labels, None, *how)
    grads = torch.randn(ROWS, device=DEVICE) * 1e-4

    def recompute() -> None:
        found = ours.linear_logprobs_forward(hidden, weight, labels, None, *how)
        ours.linear_logprobs_backward(
            hidden, weight, labels, None, found[0], found[3], grads, entropies, None, 1.0, None, -100, None, False,
            (True, True, False),
        )  # fmt: skip

    gradients = hidden.nbytes + weight.nbytes
    accumulator = 4 * weight.numel() + gradients
    own_products(table, hidden, weight)
    with_memory(table, metric, "rl_csrc.linear_logprobs", recompute, accumulator, 1 / 1.10)
    metric = f"policy_loss_from_hidden, 3 products {shape}"
    table.add(metric, "its 3 torch.mm", [one + pair], role="limit")
    mask = torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
    cu_seqlens = torch.arange(0, ROWS + 1, 512, device=DEVICE)

    def fused(chunk: int | None = None) -> None:
        ours.policy_loss_from_hidden(
            hidden, weight, labels, scored, grads, mask, cu_seqlens, LossSpec(), float(ROWS), None, None, 1.0, None,
            False, chunk, (True, True),
        )  # fmt: skip

    with_memory(table, metric, "rl_csrc.policy_loss_from_hidden", fused, accumulator, 1 / 1.08)
    with_memory(table, metric, "rl_csrc.policy_loss_from_hidden, chunk 512", lambda: fused(512), accumulator, None)
    peers_linear(table, metric, hidden, weight, labels)


def own_products(table: Table, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """The products that the gradient ops make, in the shapes and types they make them, without what is between."""
    rows, held = GRADIENT_ROWS, 1792
    logits = torch.empty(rows, VOCAB, device=DEVICE)
    gradient = torch.empty(held, VOCAB, dtype=torch.bfloat16, device=DEVICE).normal_(0, 1e-3)
    total = torch.zeros(weight.shape, device=DEVICE)
    dhidden = torch.empty_like(hidden)

    def run() -> None:
        for part in hidden.split(rows):
            torch.mm(part, weight.t(), out_dtype=torch.float32, out=logits[: part.shape[0]])
        for part, out in zip(hidden.split(held), dhidden.split(held), strict=True):
            torch.mm(gradient[: part.shape[0]], weight, out=out)
            torch.addmm(total, gradient[: part.shape[0]].t(), part, out_dtype=torch.float32, out=total)

    metric = f"policy_loss_from_hidden, 3 products H={hidden.shape[1]}"
    table.add(metric, "its torch.mm, in its chunks", measure(run, repeats=7), note=ALONE)


def with_memory(
    table: Table, metric: str, system: str, run: Callable[[], None], accumulator: int, share: float | None,
    role: str = "ours", repeats: int = 7,
) -> None:  # fmt: skip
    """Time, and memory beyond operands, gradients returned and (ours) the float32 accumulator."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    samples = measure(run, repeats=repeats, warmup=1)
    extra = (torch.cuda.max_memory_allocated() - before - accumulator) / 2**30
    table.add(metric, system, samples, goal_of_limit=share, role=role)
    table.add(
        f"{metric}, memory", system, [extra], unit="GiB", goal=0.7 if role == "ours" else None, role=role, note=BEYOND
    )


def peers_linear(table: Table, metric: str, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> None:
    """The LM head with cross-entropy, forward and backward, by others."""
    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]

    def plain() -> None:
        logits = leaves[0] @ leaves[1].t()
        torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels), leaves)

    gradients = hidden.nbytes + weight.nbytes
    with_memory(table, metric, "torch, mm + F.cross_entropy", plain, gradients, None, role="peer", repeats=5)
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def liger() -> None:
            found = LigerFusedLinearCrossEntropyFunction.apply(leaves[0], leaves[1], labels)
            torch.autograd.grad(found[0] if isinstance(found, tuple) else found, leaves)

        with_memory(table, metric, "Liger fused linear", liger, gradients, None, role="peer", repeats=5)
    except Exception as error:  # noqa: BLE001  # a peer that fails is a row that says so
        table.add(metric, "Liger fused linear", None, role="peer", note=repr(error)[:200])


def losses(table: Table) -> None:
    """Policy loss, recurrences and statistics: short launches, inputs rotated beyond the L2 cache."""
    for num, goal in ((1 << 16, None), (1 << 20, 0.012)):
        sets = []
        for _ in range(8):
            logprobs = -torch.rand(num, device=DEVICE)
            arrays = (logprobs, logprobs + 0.1 * torch.randn(num, device=DEVICE), torch.randn(num, device=DEVICE))
            mask = torch.rand(num, device=DEVICE) < 0.9
            sets.append((*arrays, mask, torch.arange(0, num + 1, 4096, device=DEVICE)))
        for name, spec, limit in (("ppo", LossSpec(), goal), ("gspo", LossSpec(loss="gspo"), None)):
            runs = [
                lambda s=s, spec=spec, num=num: ours.policy_loss(*s, spec, float(num), None, None, None) for s in sets
            ]
            table.add(f"policy_loss {name} {num} tokens", "rl_csrc.policy_loss", measure_graph(runs), goal=limit)
    num = 64 * 4096
    sets = [
        (torch.randn(num, device=DEVICE), torch.randn(num, device=DEVICE), torch.rand(num, device=DEVICE) < 0.9)
        for _ in range(16)
    ]
    boundaries = torch.arange(0, num + 1, 4096, device=DEVICE)
    for kind, goal in (("gae", 0.008), ("vtrace", None)):
        runs = [
            lambda s=s, kind=kind: ours.scan_reverse(
                s[0], s[1], boundaries, s[2], kind, 0.99, 0.95, None, "hold", None, 1.0, 1.0
            )
            for s in sets
        ]
        table.add(f"scan_reverse {kind} 64x4096", "rl_csrc.scan_reverse", measure_graph(runs), goal=goal)
    rewards = torch.randn(4096, device=DEVICE)
    ids = torch.arange(4096, device=DEVICE) // 8
    groups = torch.arange(0, 4097, 8, device=DEVICE)
    shuffled = ids[torch.randperm(4096, device=DEVICE)]
    for name, given in (("cu_groups", (None, groups)), ("ids", (ids, None)), ("shuffled ids", (shuffled, None))):
        samples = measure_graph([lambda given=given: ours.group_norm(rewards, *given, "grpo", 1e-6)], rounds=32)
        table.add(f"group_norm 4096, {name}", "rl_csrc.group_norm", samples, goal=0.006)
    x, mask = torch.randn(1 << 20, device=DEVICE), torch.rand(1 << 20, device=DEVICE) < 0.9
    samples = measure_graph([lambda: ours.masked_moments(x, mask)], rounds=32)
    table.add("masked_moments 1M", "rl_csrc.masked_moments", samples)
    table.add("whiten 1M", "rl_csrc.whiten", measure_graph([lambda: ours.whiten(x, mask, True, 1e-8, None)], rounds=32))


def copies(table: Table) -> None:
    """Copies and digests, in bytes moved (copies: read and written) over time."""
    total = 2 << 30
    source = torch.empty(total, dtype=torch.uint8, device=DEVICE).random_(0, 255)
    target = torch.empty_like(source)

    def rate(samples: list[float], nbytes: int) -> list[float]:
        return [nbytes / x / 1e6 for x in samples]

    limit = rate(measure(lambda: target.copy_(source)), 2 * total)
    sizes = {"300 tensors": total // 300 // 256 * 256, "3000 tensors of 64 KiB": 65536, "300 odd tensors": 7_000_003}
    for name, size in sizes.items():
        num = 3000 if size == 65536 else 300
        sources = [source[i * size : (i + 1) * size] for i in range(num)]
        shift = 3 if "odd" in name else 0
        targets = [target[shift + i * size : shift + (i + 1) * size] for i in range(num)]
        addresses = [[x.data_ptr() for x in sources], [x.data_ptr() for x in targets], [size] * num]
        plan = _cuda.CopyPlan(*addresses)

        def run(plan: Any = plan) -> None:
            plan.run(torch.cuda.current_stream().cuda_stream)

        metric = f"bucket_copy, {name}"
        table.add(metric, "copy", limit, role="limit", unit="GB/s")
        table.add(metric, "rl_csrc.bucket_copy", rate(measure(run), 2 * size * num), unit="GB/s", goal_of_limit=0.85)
        peer = measure(lambda s=sources, t=targets: torch._foreach_copy_(t, s))
        table.add(metric, "torch._foreach_copy_", rate(peer, 2 * size * num), role="peer", unit="GB/s")
    width, rows, length = 512, 256, 4096
    padded = source.view(torch.bfloat16)[: rows * length * width].view(rows, length, width)
    lengths = torch.randint(length // 4, length, (rows,), device=DEVICE)
    tokens = int(lengths.sum())
    values, boundaries = ours.pack(padded, lengths, None, tokens)
    moved = 2 * tokens * width * 2
    starts = torch.zeros_like(lengths)

    def packed() -> None:
        _cuda.pack(
            padded.data_ptr(), boundaries.data_ptr(), starts.data_ptr(), rows, length, tokens, width * 2,
            values.data_ptr(), torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    def unpacked() -> None:
        _cuda.unpack(
            values.data_ptr(), boundaries.data_ptr(), rows, length, tokens, width * 2, False, padded.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    for name, run in (("pack", packed), ("unpack", unpacked)):
        table.add(f"{name} 256 rows", "copy", limit, role="limit", unit="GB/s")
        table.add(f"{name} 256 rows", f"rl_csrc.{name}", rate(measure(run), moved), unit="GB/s", goal_of_limit=0.85)
    samples = measure(lambda: ours.digest_sum_async(source))
    table.add("digest of 2 GiB", "rl_csrc.digest", rate(samples, total), unit="GB/s", goal=3000)
    samples = measure(lambda: ours.digest_sum_async(source[1:]))
    table.add("digest of 2 GiB, unaligned", "rl_csrc.digest", rate(samples, total), unit="GB/s")


def deltas(table: Table) -> None:
    """Delta of 1 GiB of bfloat16 weights, 1% changed: bytes of an operand over time, the wait for sizes included."""
    base = torch.randn(1 << 29, device=DEVICE).to(torch.bfloat16).view(torch.int16)
    fresh = torch.where(torch.rand(1 << 29, device=DEVICE) < 0.01, base + 1, base)
    found = ours.delta_encode(fresh, base, 0.5)
    assert found is not None
    for name, run in (
        ("delta encode", lambda: ours.delta_encode(fresh, base, 0.5)),
        ("delta apply", lambda: ours.delta_apply(base, *found)),
    ):
        rates = [base.nbytes / x / 1e6 for x in measure(run)]
        table.add(f"{name} at 1% of 1 GiB", "rl_csrc", rates, unit="GB/s", goal=500)
        base.copy_(torch.where(torch.rand(1 << 29, device=DEVICE) < 0.01, fresh - 1, fresh))


GROUPS = {"deltas": deltas, "forward": forward, "train": train, "linear": linear, "losses": losses, "copies": copies}


def main() -> None:
    """Run the groups asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--only", default=",".join(GROUPS))
    options = parser.parse_args()
    table = Table()
    for name in options.only.split(","):
        try:
            GROUPS[name](table)
        except Exception as error:  # noqa: BLE001  # the other groups' figures must not be lost with this one
            print(f"{name} FAILED: {error!r}", flush=True)
        torch.cuda.empty_cache()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    properties = torch.cuda.get_device_properties(0)
    result = {
        "name": "kernels_gpu",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "gpu": [properties.name],
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "driver": driver.stdout.split(),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
        },
        "commit": os.environ.get("RL_COMMIT", "unknown"),
        "parameters": {"rows": ROWS, "vocab": VOCAB},
        "rows": table.finished(),
    }
    for row in result["rows"]:
        if row["goal"]:
            print(f"{row['metric']:44s} {row['system']:40s} {row['median']:10.4f} {row['goal']:20s} met: {row['met']}")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
