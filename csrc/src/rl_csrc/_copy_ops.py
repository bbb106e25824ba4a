"""Public ragged copies. Legend: `B` sequences, `L` padded length, `T` packed tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from rl_csrc import reference
from rl_csrc._arguments import booleans, check_same_length, integers, optional_integers, wants_grad
from rl_csrc._dispatch import copier, kernel
from rl_csrc.errors import ArgumentError
from rl_csrc.types import Packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def pack(padded: Tensor, lengths: Tensor, *, starts: Tensor | None = None, total: int | None = None) -> Packed:
    """Padded rows `[B, L, ...]` to packed values `[T, ...]` and cu_seqlens `[B + 1]`.

    Row b gives `padded[b, starts[b] : starts[b] + lengths[b]]`; starts are 0 unless given (padding on the right).
    Any dtype; differentiable in `padded`. `total`, the sum of the lengths where known, saves a wait for the device.
    """
    if padded.dim() < 2 or lengths.shape != padded.shape[:1]:
        raise ArgumentError(
            f"padded has shape {list(padded.shape)} and lengths {list(lengths.shape)}; "
            "wanted [rows, steps, ...] and [rows]."
        )
    padded, lengths, starts = _plain(padded), integers(lengths), optional_integers(starts)
    if torch.compiler.is_compiling():
        return Packed(*torch.ops.rl_csrc.pack(padded, lengths, starts, total))
    if wants_grad(padded):
        return reference.pack(padded, lengths, starts=starts)
    return Packed(*copier("pack", padded)(padded, lengths, starts, total))


def unpack(
    values: Tensor,
    cu_seqlens: Tensor,
    *,
    length: int,
    padding_value: float = 0,
    side: Literal["left", "right"] = "right",
) -> Tensor:
    """Packed values `[T, ...]` to rows `[B, length, ...]`, padded on `side` with `padding_value`.

    Any dtype; differentiable in `values`.
    """
    if side not in ("left", "right"):
        raise ArgumentError(f"side is {side!r}; allowed are left, right.")
    values, cu_seqlens = _plain(values), integers(cu_seqlens)
    if torch.compiler.is_compiling():
        return torch.ops.rl_csrc.unpack(values, cu_seqlens, length, float(padding_value), side == "left")
    if not wants_grad(values):
        return copier("unpack", values)(values, cu_seqlens, length, padding_value, side == "left")
    return reference.unpack(values, cu_seqlens, length=length, padding_value=padding_value, side=side)


def bucket_copy(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Copy each source into its destination, many tensors per call. No gradient.

    Shapes must agree pairwise; dense pairs of one real dtype are copied together, the others one by one by torch. A
    destination may be its source, but must not overlap it in part.
    """
    if len(sources) != len(destinations):
        raise ArgumentError(f"{len(sources)} sources for {len(destinations)} destinations; give as many of both.")
    if not sources:
        return
    if torch.compiler.is_compiling():
        torch.ops.rl_csrc.bucket_copy(list(sources), list(destinations))
        return
    copier("bucket_copy", sources[0])(sources, destinations)
    torch.autograd.graph.increment_version(destinations)


def roll_labels(
    token_ids: Tensor, cu_seqlens: Tensor, *, loss_mask: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """Next-token labels `[T]` of packed sequences: `labels[t] = token_ids[t + 1]` inside a sequence.

    The last token of a sequence, and tokens whose target is masked out (`loss_mask[t + 1]` is 0), get `ignore_index`.
    """
    check_same_length("token_ids", token_ids, token_ids.shape[0])
    check_same_length("loss_mask", loss_mask, token_ids.shape[0])
    options = (integers(cu_seqlens), booleans(loss_mask), ignore_index)
    token_ids = integers(token_ids)
    if torch.compiler.is_compiling():
        return torch.ops.rl_csrc.roll_labels(token_ids, *options)
    return kernel("roll_labels", token_ids)(token_ids, *options)


def cp_slice(x: Tensor, cu_seqlens: Tensor, *, cp_rank: int, cp_size: int) -> Packed:
    """This context-parallel rank's share of packed tokens `[T, ...]`, balanced for causal attention.

    Each sequence is cut into 2 * cp_size equal chunks; rank r takes chunk r and its mirror 2 * cp_size - 1 - r. The
    lengths must divide by 2 * cp_size. Returns `[T / cp_size, ...]` and its cu_seqlens.
    Any dtype; differentiable in `x`.
    """
    if not 0 <= cp_rank < cp_size:
        raise ArgumentError(f"cp_rank is {cp_rank}; allowed are 0 to cp_size - 1 = {cp_size - 1}.")
    x, cu_seqlens = _plain(x), integers(cu_seqlens)
    if torch.compiler.is_compiling():
        return Packed(*torch.ops.rl_csrc.cp_slice(x, cu_seqlens, cp_rank, cp_size))
    if not wants_grad(x):
        return Packed(*copier("cp_slice", x)(x, cu_seqlens, cp_rank, cp_size))
    return reference.cp_slice(x, cu_seqlens, cp_rank=cp_rank, cp_size=cp_size)


def _plain(x: Tensor) -> Tensor:
    """Return x with nothing left to conjugate or negate, which its bytes would not show."""
    return x.resolve_conj().resolve_neg()
