"""Paged attention of a decode step, by rows and context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from csrc.bench.gpu.table import DEVICE, Table, measure, measure_graph

from rl_csrc.inference import paged

if TYPE_CHECKING:
    from collections.abc import Callable

KV_HEADS, SIZE, PAGE = 8, 128, 16
CASES = [(128, 80, 16), (128, 192, 16), (128, 256, 16), (128, 320, 16), (256, 192, 16), (32, 2048, 16), (128, 192, 32)]
"""(rows, tokens of context, query heads): of Qwen3-0.6B and 1.7B, and the last of Qwen3-8B."""


def attention(table: Table) -> None:
    """A new token of each row, bfloat16, beside a copy that moves the bytes of the keys and values that it reads."""
    for rows, context, heads in CASES:
        metric = f"paged attention {rows} x {context}, {heads} / {KV_HEADS} heads"
        read = rows * context * KV_HEADS * SIZE * 4
        source = torch.empty(read // 2, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        copied = measure(lambda source=source, target=target: target.copy_(source))
        table.add(metric, "copy of half the bytes", copied, role="limit")
        table.add(metric, "rl_csrc.paged.attention", measure_graph([_call(rows, context, heads)], rounds=20))


def _call(rows: int, context: int, heads: int) -> Callable[[], object]:
    pages = -(-context // PAGE)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).bfloat16()

    caches = [normal(rows * pages, PAGE, KV_HEADS, SIZE) for _ in range(2)]
    tables = torch.randperm(rows * pages, device=DEVICE).view(rows, pages)
    new = normal(rows, heads, SIZE), normal(rows, KV_HEADS, SIZE), normal(rows, KV_HEADS, SIZE)
    where = tables, torch.arange(rows, device=DEVICE), torch.full((rows,), context - 1, device=DEVICE)
    return lambda: paged.attention(*new, *caches, *where, scaling=SIZE**-0.5)
