"""The CPU kernels beside eager torch, torch.compile and F.cross_entropy, and what memory or the GEMMs allow.

One thread. Limits are measured in the same run: reading or rewriting the same bytes once, memcpy, or bare `torch.mm`s.
Logits are 256 x 151936 here (78 MB in bfloat16, beyond the caches of one core); rows are independent, so that more of
them only take longer.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

import rl_csrc
from rl_csrc import _cpu, cpu

if TYPE_CHECKING:
    from rl_bench import Run

VOCAB = 151_936
SLOW = 3
"""Samples of peers that take a large part of a second: ours and the limits are sampled as often as always."""


def main(run: Run) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = 64 if run.quick else 256
    run.parameters(threads=1, rows=rows, vocab=VOCAB, level=_cpu.kernel_level())
    logits = torch.randn(rows, VOCAB).mul_(3).bfloat16()
    labels = torch.randint(VOCAB, (rows,))
    _forward(run, logits, labels)
    _backward(run, logits, labels)
    _call_overhead(run)
    for hidden_size in (2048, 4096):
        _linear(run, hidden_size)
    _tokens(run)
    _copies(run)


def _eager(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _forward(run: Run, logits: torch.Tensor, labels: torch.Tensor) -> None:
    compiled = torch.compile(_eager)
    for name, x, goal in (("bf16", logits, 2.0), ("fp32", logits.float(), 1.6)):

        def ours(x: torch.Tensor = x) -> object:
            return rl_csrc.logprobs(x, labels, entropy=True)

        def peer(x: torch.Tensor = x) -> object:
            return compiled(x, labels)

        run.compare(
            f"logprobs + entropy forward, {name}",
            {"rl_csrc": ours},
            peers={
                "eager": lambda x=x: _eager(x, labels),
                "torch.compile": peer,
                "F.cross_entropy (no entropy)": lambda x=x: functional.cross_entropy(x, labels, reduction="none"),
            },
            limit={"read": lambda x=x: _cpu.read_floor(x)},
            goal=f">= {1 / goal:.3f} of limit",
            peer_repetitions=SLOW,
        )


def _backward(run: Run, logits: torch.Tensor, labels: torch.Tensor) -> None:
    scratch, grad = logits.clone(), torch.randn(labels.shape[0])
    spare = torch.empty_like(logits)
    scored, entropy, _, lse = cpu.logprobs_forward(logits, labels, 1.0, None, -100, None, True, False)
    scoring = (1.0, None, -100, None, 0)

    def refill() -> None:
        scratch.copy_(logits)

    def backward() -> None:
        cpu.logprobs_backward(scratch, labels, scored, lse, grad, None, None, *scoring, scratch)

    def one_pass() -> None:
        outs = (scored, entropy, None, grad, None, scratch)
        _cpu.logprobs_with_grad(scratch, labels, 1.0, 0.0, -100, None, *outs, 1)

    def read_and_copy() -> None:
        _cpu.read_floor(logits)
        spare.copy_(logits)

    def cross_entropy() -> None:
        x = scratch.detach().requires_grad_()
        functional.cross_entropy(x, labels).backward()

    for limit_name, limit in (("read + copy", read_and_copy), ("rewrite in place", lambda: _cpu.rewrite_floor(spare))):
        goal = limit_name == "read + copy"
        run.compare(
            f"backward in place, bf16, against {limit_name}",
            {"rl_csrc": backward},
            limit={limit_name: limit},
            before=refill,
            goal=f">= {1 / 1.7:.3f} of limit" if goal else None,
        )
        run.compare(
            f"forward + backward in one pass, bf16, against {limit_name}",
            {"rl_csrc": one_pass},
            peers={"F.cross_entropy": cross_entropy} if goal else None,
            limit={limit_name: limit},
            before=refill,
            goal=f">= {1 / 1.5:.3f} of limit" if goal else None,
        )


def _call_overhead(run: Run) -> None:
    x, labels, out = torch.randn(1, 16), torch.tensor([3]), torch.empty(1)
    run.compare(
        "call overhead: 4 tensors, 16 logits",
        {"binding": lambda: _cpu.logprobs(x, labels, 1.0, 0.0, -100, None, out, None, None, out, 1)},
        unit="us",
        inner=20_000,
        goal="<= 1 us",
    )


def _linear(run: Run, width: int) -> None:
    amx = _cpu.kernel_level() == 4
    elements = 1 << (24 if run.quick else 26)  # of the weight: 128 MiB of bfloat16, far beyond the caches
    _linear_in(run, width, "bf16", torch.bfloat16, elements // width, goal=1.0 if amx else 1.1)
    _linear_in(run, width, "fp32", torch.float32, elements // width // 4, goal=1.1)


def _linear_in(run: Run, width: int, name: str, dtype: torch.dtype, vocab: int, *, goal: float) -> None:
    num = 128 if run.quick else 512
    run.parameters(**{f"linear_{width}_{name}": [num, width, vocab]})
    labels = torch.randint(vocab, (num,))
    hidden = torch.randn(num, width).to(dtype)
    weight = (torch.randn(vocab, width) / math.sqrt(width)).to(dtype)
    grad = torch.randn(num, vocab).to(dtype)
    out = torch.empty(num, vocab, dtype=dtype)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def gemms(count: int) -> None:
        for _ in range(count - 2 if count > 1 else 1):
            torch.mm(hidden, weight.T, out=out)
        if count > 1:
            torch.mm(grad, weight, out=d_hidden)
            torch.mm(grad.T, hidden, out=d_weight)

    def both_ways() -> None:
        a, b = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        rl_csrc.linear_logprobs(a, b, labels).logprobs.sum().backward()

    def peer() -> None:
        a, b = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        functional.cross_entropy((a @ b.T).float(), labels).backward()

    def with_loss() -> None:
        a, b = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        tokens = (torch.zeros(num), torch.ones(num), torch.ones(num), torch.tensor([0, num]))
        rl_csrc.linear_loss(
            a,
            b,
            labels,
            lambda scored, _: rl_csrc.policy_loss(scored, *tokens, rl_csrc.LossSpec(loss="reinforce")).loss,
        ).loss.backward()

    run.compare(
        f"linear_logprobs + entropy forward, {name}, H={width}",
        {
            "rl_csrc": lambda: rl_csrc.linear_logprobs(hidden, weight, labels, entropy=True),
            "rl_csrc, sum_pi_squared too": lambda: rl_csrc.linear_logprobs(
                hidden, weight, labels, entropy=True, sum_pi_squared=True
            ),
        },
        peers={"mm + cross_entropy": lambda: functional.cross_entropy((hidden @ weight.T).float(), labels)},
        limit={"torch.mm": lambda: gemms(1)},
        goal=f">= {1 / goal:.3f} of limit",
        peer_repetitions=SLOW,
    )
    run.compare(
        f"linear_logprobs forward + backward, {name}, H={width}",
        {"rl_csrc": both_ways},
        peers={"mm + cross_entropy": peer},
        limit={"4 x torch.mm": lambda: gemms(4)},
        goal=f">= {1 / 1.5:.3f} of limit",
        peer_repetitions=SLOW,
    )
    run.compare(
        f"linear_loss of a policy loss, {name}, H={width}",
        {"rl_csrc": with_loss},
        limit={"3 x torch.mm": lambda: gemms(3)},
        goal=f">= {1 / 1.2:.3f} of limit",
    )


def _tokens(run: Run) -> None:
    num = 65_536
    logprobs, old, advantages = (torch.randn(num) * 0.1 - 1 for _ in range(3))
    mask, cu = torch.rand(num) < 0.9, torch.arange(0, num + 1, 512)

    def eager() -> torch.Tensor:
        x = logprobs.detach().requires_grad_()
        ratio = (x - old).exp()
        losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        loss = torch.where(mask, losses, 0).sum() / mask.sum()
        loss.backward()
        return loss

    compiled = torch.compile(eager)
    run.compare(
        "policy_loss with gradient and metrics, 64k tokens",
        {"rl_csrc": lambda: rl_csrc.policy_loss(logprobs, old, advantages, mask, cu, num_tokens=60_000.0)},
        peers={"eager (ppo, no metrics)": eager, "torch.compile (ppo, no metrics)": compiled},
        unit="ms",
        inner=20,
        goal="<= 0.1 ms",
    )
    rewards, values = torch.randn(64 * 4096), torch.randn(64 * 4096)
    cu = torch.arange(0, 64 * 4096 + 1, 4096)
    mask = torch.rand(64 * 4096) < 0.9

    def padded_loop() -> torch.Tensor:
        r, v = rewards.view(64, 4096), values.view(64, 4096)
        out, carry, following = torch.empty_like(r), torch.zeros(64), torch.zeros(64)
        for t in reversed(range(4096)):
            carry = r[:, t] + 0.99 * following - v[:, t] + 0.95 * 0.99 * carry
            following, out[:, t] = v[:, t], carry
        return out

    for name, options in (("", {}), (" with tool tokens", {"loss_mask": mask})):
        run.compare(
            f"scan_reverse gae 64 x 4096{name}",
            {"rl_csrc": lambda o=options: rl_csrc.scan_reverse(rewards, values, cu, gamma=0.99, lam=0.95, **o)},
            peers=None if options else {"padded loop": padded_loop},
            unit="Mtok/s",
            amount=64 * 4096 / 1e6,
            goal=">= 400 Mtok/s",
        )
    rewards = torch.randn(4096)
    ids = torch.arange(4096) // 8
    run.compare(
        "group_norm, 4096 rewards",
        {"rl_csrc": lambda: rl_csrc.group_norm(rewards, ids)},
        peers={"reference": lambda: rl_csrc.reference.group_norm(rewards, ids)},
        unit="us",
        inner=50,
        goal="<= 60 us",
    )


def _copies(run: Run) -> None:
    sources = [torch.randn(n) for n in torch.randint(1000, 400_000, (300,)).tolist()]
    targets = [torch.empty_like(s) for s in sources]
    one, other = torch.cat(sources), torch.empty(sum(s.numel() for s in sources))
    run.compare(
        "bucket_copy, 300 tensors",
        {"rl_csrc": lambda: rl_csrc.bucket_copy(sources, targets)},
        peers={"copy_ each": lambda: [t.copy_(s) for s, t in zip(sources, targets, strict=True)]},
        limit={"memcpy": lambda: other.copy_(one)},
        goal=f">= {1 / 1.3:.3f} of limit",
    )


def gpu(run: Run) -> None:
    """Groups of `_gpu.py`: those that `RL_BENCH` names, with commas, or all."""
    from csrc.bench._gpu import GROUPS, ROWS, Table

    named = os.environ.get("RL_BENCH") or ",".join(list(GROUPS)[: 3 if run.quick else None])
    run.parameters(rows=ROWS, vocab=VOCAB, dtype="bfloat16")
    for name in named.split(","):
        GROUPS[name](Table(run))
        torch.cuda.empty_cache()
