"""The LM head: log-probs and policy losses of hidden states."""

from __future__ import annotations

import os
import statistics
from typing import TYPE_CHECKING

import torch
from table import DEVICE, ROWS, VOCAB, Table
from timing import measure

from rl_csrc import cuda as ours
from rl_csrc.cuda.linear_logprobs import GRADIENT_ROWS, _block_shape, _blocks  # pyright: ignore[reportPrivateUsage]
from rl_csrc.types import LossSpec

if TYPE_CHECKING:
    from collections.abc import Callable

ALONE = "the products alone, without the kernels between them"
BEYOND = "peak beyond operands, returned gradients and, of linear_loss, its float32 total; our room is 0.65 GiB"


def tuning(table: Table) -> None:
    """The LM head's ops by the shapes of their blocks: which of them should be the constants of `linear_logprobs.py`.

    RL_HEAD_MIB (default 335,670,1340): room for logits and gradients, MiB. RL_HEAD_ROWS (256,512,1024): rows of logits
    where a loss stands between them and their gradient. RL_HEAD_WIDTHS (2048,4096): hidden sizes.
    """
    from rl_csrc.cuda import linear_logprobs as op

    def of(name: str, default: str) -> list[int]:
        return [int(each) for each in os.environ.get(name, default).split(",")]

    before = op.CHUNK_BYTES, op.GRADIENT_ROWS
    try:
        for width in of("RL_HEAD_WIDTHS", "2048,4096"):
            hidden = torch.randn(ROWS, width, device=DEVICE, dtype=torch.bfloat16)
            weight = torch.randn(VOCAB, width, device=DEVICE, dtype=torch.bfloat16) * 0.02
            labels = torch.randint(0, VOCAB, (ROWS,), device=DEVICE)
            product, two = products(hidden, weight)
            one, pair = statistics.median(product), statistics.median(two)
            for name, limit in (("forward", one), ("forward and backward", 2 * one + pair), ("loss", one + pair)):
                table.add(f"tuning: {name} H={width}", "its torch.mm", [limit], role="limit")
            for mib in of("RL_HEAD_MIB", "335,670,1340"):
                op.CHUNK_BYTES = mib << 20
                tuning_at(table, width, f"{mib} MiB", hidden, weight, labels)
                for rows in of("RL_HEAD_ROWS", "256,512,1024"):
                    op.GRADIENT_ROWS = rows
                    tuning_loss(table, width, f"{mib} MiB, {rows} rows", hidden, weight, labels)
    finally:
        op.CHUNK_BYTES, op.GRADIENT_ROWS = before


def tuning_at(
    table: Table, width: int, shape: str, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> None:
    """Forward, and forward with the backward by recompute."""
    how = (1.0, None, -100, True, False, None, False)
    grads = torch.randn(ROWS, device=DEVICE) * 1e-4

    def both() -> None:
        scored, entropies, _, lse = ours.linear_logprobs_forward(hidden, weight, labels, None, *how)
        back = (None, scored, lse, grads, entropies, None, 1.0, None, -100, None, False, (True, True, False))
        ours.linear_logprobs_backward(hidden, weight, labels, *back)

    forward = measure(lambda: ours.linear_logprobs_forward(hidden, weight, labels, None, *how), repeats=7)
    table.add(f"tuning: forward H={width}", shape, forward, goal_of_limit=1 / 1.07)
    table.add(f"tuning: forward and backward H={width}", shape, measure(both, repeats=7), goal_of_limit=1 / 1.10)


def tuning_loss(
    table: Table, width: int, shape: str, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> None:
    """The loss inside: three products."""
    old, advantages = -torch.rand(ROWS, device=DEVICE), torch.randn(ROWS, device=DEVICE) * 1e-4
    mask = torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
    tokens = (old, advantages, mask, torch.arange(0, ROWS + 1, 512, device=DEVICE), LossSpec(), float(ROWS))

    def loss(scored: torch.Tensor, entropies: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, None]:
        value, _, grad, _ = ours.policy_loss(scored, *tokens, entropies, None, None)
        return value, grad, None

    how = (1.0, None, -100, False, None, (True, True), 0, None)
    samples = measure(lambda: ours.linear_loss(hidden, weight, labels, loss, *how), repeats=7)
    table.add(f"tuning: loss H={width}", shape, samples, goal_of_limit=1 / 1.08)


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
    recomputed_products(table, metric, hidden, weight)
    with_memory(table, metric, "rl_csrc.linear_logprobs", recompute, gradients, 1 / 1.10)
    metric = f"linear_loss of a policy loss, 3 products {shape}"
    own_products(table, metric, hidden, weight)
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


def recomputed_products(table: Table, metric: str, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """The products of `linear_logprobs`, forward and backward, in their shapes and types, without what is between."""
    height, width = _block_shape(hidden, VOCAB, None, False)
    assert height == ROWS
    forward = torch.empty(ROWS // 8, VOCAB, device=DEVICE)
    logits = torch.empty(height * width, device=DEVICE)
    gradient = torch.empty(height * width, dtype=torch.bfloat16, device=DEVICE).normal_(0, 1e-3)
    total = torch.zeros(hidden.shape, device=DEVICE)
    dweight = torch.empty_like(weight)

    def backward() -> None:
        for columns in _blocks(VOCAB, width):
            shape = height, columns.stop - columns.start
            size = shape[0] * shape[1]
            part, grad = weight[columns], gradient[:size].view(shape)
            torch.mm(hidden, part.t(), out_dtype=torch.float32, out=logits[:size].view(shape))
            torch.addmm(total, grad, part, out_dtype=torch.float32, out=total)
            torch.mm(grad.t(), hidden, out=dweight[columns])

    def both() -> None:
        for part in hidden.split(ROWS // 8):
            torch.mm(part, weight.t(), out_dtype=torch.float32, out=forward)
        backward()

    table.add(metric, "its torch.mm, in its blocks", measure(both, repeats=7), note=ALONE)
    table.add(metric, "those of the backward", measure(backward, repeats=7), note=ALONE)


def own_products(table: Table, metric: str, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """The products of `linear_loss`, in their shapes and types, without what is between."""
    rows, held = GRADIENT_ROWS, 2 * GRADIENT_ROWS  # what the op's room holds at this vocabulary
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

    table.add(metric, "its torch.mm, in its chunks", measure(run, repeats=7), note=ALONE)


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
