"""Digest, delta and bucket-copy kernels for CUDA tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_csrc.cuda.launch import counter_on, native, on_its_device, stream_of
from rl_csrc.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@on_its_device
def digest_sum(raw: Tensor, offset: int = 0) -> int:
    """Unfinished digest of the uint8 `[N]` piece at `offset` bytes of its stream. Synchronizes with the device."""
    return int(digest_sum_async(raw, offset)) & ((1 << 64) - 1)


@on_its_device
def digest_sum_async(raw: Tensor, offset: int = 0) -> Tensor:
    """Unfinished digest as an int64 scalar on the device (the bits of the sum), without synchronization."""
    total = torch.empty(1, dtype=torch.int64, device=raw.device)
    partials = torch.empty(native.digest_blocks(raw.numel()), dtype=torch.int64, device=raw.device)
    native.digest(raw, raw.numel(), offset // 8, total, partials, counter_on(raw.device), stream_of(raw))
    return total[0]


@on_its_device
def digest_many(pieces: Sequence[Tensor]) -> list[int]:
    """Unfinished digests of uint8 `[N]` pieces, each from byte 0 of a stream. Synchronizes with the device once."""
    totals = torch.zeros(len(pieces), dtype=torch.int64, device=pieces[0].device)
    addresses, sizes = [piece.data_ptr() for piece in pieces], [piece.numel() for piece in pieces]
    native.digest_many(addresses, sizes, totals, stream_of(totals))
    return [total & ((1 << 64) - 1) for total in totals.tolist()]


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _delta_starts(table: Tensor) -> Tensor:
    """Start of each chunk's values and gap bytes, `[chunks + 1, 2]`; the last line holds the totals."""
    starts = torch.zeros(table.shape[0] + 1, 2, dtype=torch.int64, device=table.device)
    torch.cumsum(table, 0, dtype=torch.int64, out=starts[1:])
    return starts


@on_its_device
def delta_encode(fresh: Tensor, base: Tensor, max_fraction: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """Table, gaps and values of `rl_csrc.delta`, or None if they would be too large. Synchronizes once."""
    item, num = fresh.element_size(), fresh.numel()
    table = torch.empty(-(-num // 65536), 2, dtype=torch.int32, device=fresh.device)
    masks = torch.empty(table.shape[0], 2048, dtype=torch.int32, device=fresh.device)
    operands = fresh, base, num, item, masks, table
    native.delta_encode(*operands, None, None, None, stream_of(fresh))
    starts = _delta_starts(table)
    num_changed, num_gaps = starts[-1].tolist()
    if num_gaps + num_changed * item > int(fresh.nbytes * max_fraction) // item * item:
        return None
    gaps = torch.empty(num_gaps, dtype=torch.uint8, device=fresh.device)
    values = torch.empty(num_changed, dtype=_WORDS[item], device=fresh.device)
    native.delta_encode(*operands, starts, gaps, values, stream_of(fresh))
    return table, gaps, values


@on_its_device
def delta_apply(target: Tensor, table: Tensor, gaps: Tensor, values: Tensor) -> bool:
    """Overwrite the changed elements; False, with nothing written, if the delta does not fit. Synchronizes."""
    item, num = target.element_size(), target.numel()
    if table.shape != (-(-num // 65536), 2):
        return False
    starts = _delta_starts(table)
    bad = (table < 0).any().int().reshape(1)
    if bool(bad) or starts[-1].tolist() != [values.numel(), gaps.numel()]:
        return False
    parts = table, starts, gaps, values
    native.delta_apply(target, num, item, *parts, bad, stream_of(target))
    if bool(bad):
        return False
    native.delta_apply(target, num, item, *parts, None, stream_of(target))
    return True


@on_its_device
def bucket_copy(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Copy each source into its destination, with one launch per thousand tensors."""
    plain: list[tuple[int, int, int]] = []
    device = sources[0].device if sources else None
    for source, destination in zip(sources, destinations, strict=True):
        is_lazy = source.is_complex() or source.is_neg() or destination.is_neg()  # a complex tensor may be conjugated
        dense = not is_lazy and source.is_contiguous() and destination.is_contiguous()
        if dense and source.dtype == destination.dtype and source.device == destination.device == device:
            span = source.data_ptr(), destination.data_ptr(), source.nbytes
            if 0 < abs(span[0] - span[1]) < span[2]:
                raise ArgumentError("a destination overlaps its source; give the destination separate memory.")
            plain.append(span)
        else:
            destination.copy_(source)
    if plain:
        native.CopyPlan(*map(list, zip(*plain, strict=True))).run(stream_of(sources[0]))
