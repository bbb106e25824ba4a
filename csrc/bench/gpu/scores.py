"""Log-probs of logits, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from csrc.bench.gpu.table import DEVICE, ROWS, VOCAB, Table, measure

from rl_csrc import cuda as ours

if TYPE_CHECKING:
    from collections.abc import Callable


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

    metric = f"forward+backward {ROWS}x{VOCAB} bf16"
    table.add(metric, "copy", limit, role="limit")

    def both() -> None:
        found = ours.logprobs_forward(logits, labels, 1.0, None, -100, None, False, False)
        ours.logprobs_backward(
            logits, labels, found[0], found[3], grads, None, None, 1.0, None, -100, None, 0, logits
        )  # fmt: skip

    table.add(metric, "rl_csrc.logprobs, gradient in place", measure(both, prepare=refill), goal=2.7)
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
