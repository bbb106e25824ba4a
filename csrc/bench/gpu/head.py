"""The LM head: log-probs and policy losses of hidden states."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch
from csrc.bench.gpu.table import DEVICE, ROWS, VOCAB, Table, measure

from rl_csrc import cuda as ours
from rl_csrc.types import LossSpec

if TYPE_CHECKING:
    from collections.abc import Callable

BEYOND = "peak beyond operands, returned gradients and, of linear_loss, its float32 total; our room is 0.65 GiB"


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
    with_memory(table, metric, "rl_csrc.linear_logprobs", recompute, gradients, 1 / 1.10)
    metric = f"linear_loss of a policy loss, 3 products {shape}"
    accumulator = 4 * weight.numel() + gradients
    table.add(metric, "its 3 torch.mm", [one + pair], role="limit")
    mask = torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
    cu_seqlens = torch.arange(0, ROWS + 1, 512, device=DEVICE)

    tokens = (scored, grads, mask, cu_seqlens, LossSpec(), float(ROWS))

    def loss(scored: torch.Tensor, entropies: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, None]:
        value, _, grad, _ = ours.policy_loss(scored, *tokens, entropies, None, None)
        return value, grad, None

    def at_once(chunk: int | None = None) -> None:
        ours.linear_loss(
            hidden, weight, labels, loss, 1.0, None, -100, False, chunk, (True, True), 0, None
        )  # fmt: skip

    with_memory(table, metric, "rl_csrc.linear_loss", at_once, accumulator, 1 / 1.08)
    with_memory(table, metric, "rl_csrc.linear_loss, chunk 512", lambda: at_once(512), accumulator, None)
    peers_linear(table, metric, hidden, weight, labels)


def with_memory(
    table: Table, metric: str, system: str, run: Callable[[], None], accumulator: int, share: float | None,
    role: str = "ours", repeats: int = 7,
) -> None:  # fmt: skip
    """Time, and memory beyond operands, gradients returned and a float32 total."""
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
