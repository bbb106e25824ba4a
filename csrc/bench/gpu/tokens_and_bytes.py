"""Per token: losses, recurrences, statistics. Per byte: copies, digests, deltas."""

from __future__ import annotations

from typing import Any

import torch
from csrc.bench.gpu.table import DEVICE, Table, measure, measure_graph

from rl_csrc import _cuda
from rl_csrc import cuda as ours
from rl_csrc.types import LossSpec


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
