"""Output memory of a get: new memory, a buffer of the caller, or a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass

from rl_csrc import frames, rows
from rl_tq.columns.device import DeviceCopier
from rl_tq.columns.extent import lay
from rl_tq.columns.schema import ColumnSchema
from rl_tq.memory.pool import new_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nested._internal.nested_tensor import NestedTensor

    from rl_tq.types import Buffer

_WORTH_A_THREAD = range(1 << 20, 32 << 20)
"""Sizes in bytes for which copying in a background thread pays: below, waking it costs more; above, little overlaps."""


class Bounds(NamedTuple):
    """Row bounds of a ragged column: offsets into its values."""

    offsets: torch.Tensor
    """int64 [B + 1], on the CPU."""
    longest: int
    """Values in the longest row."""


class Lengths(NamedTuple):
    """Row lengths shared by one or more columns, in the form that `_jagged` takes."""

    bounds: Bounds
    offsets: torch.Tensor
    """Offsets on the device of the values; on the CPU, those of the bounds."""
    longest: torch.Tensor


class BufferCache:
    """Cache of the tensors of the last batch in a `Buffer`, reused for the next one."""

    def __init__(self) -> None:
        self.lengths: Sequence[Lengths] = ()
        """Row lengths of the last batch."""
        self._places: dict[int, torch.Tensor] = {}
        """Start of a column's values in the buffer, to the view of them."""
        self._nested: dict[str, NestedTensor] = {}

    def keep(
        self, places: dict[int, torch.Tensor], nested: dict[str, NestedTensor], lengths: Sequence[Lengths]
    ) -> None:
        """Replace the cached batch."""
        self._places, self._nested, self.lengths = places, nested, lengths

    def view(self, start: int, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Cached view that begins at `start`, if it has the dtype and shape of these parts; else None."""
        placed = self._places.get(start)
        if placed is None or placed.requires_grad or placed.is_inference() != torch.is_inference_mode_enabled():
            return None
        first = parts[0]
        size = len(first) if len(parts) == 1 else sum(map(len, parts))
        is_alike = placed.dtype is first.dtype and len(placed) == size and placed.shape[1:] == first.shape[1:]
        return placed if is_alike else None

    def nested(self, name: str, values: torch.Tensor, offsets: torch.Tensor) -> NestedTensor | None:
        """Cached nested tensor of a column, if it has the very same values and offsets; else None."""
        nested: Any = self._nested.get(name)
        if nested is None or nested._values is not values or nested._offsets is not offsets:
            return None
        with DisableTorchFunctionSubclass():  # thirty times faster than through __torch_function__
            return None if nested.requires_grad else nested


class Output:
    """Output of a get: places the values of a batch in new memory, in the caller's buffer, or on a device."""

    def __init__(self, out: torch.Tensor | Buffer | None, device: torch.device | str | None) -> None:
        self.kept = BufferCache()
        """Cache of the last batch in the caller's buffer."""
        if out is not None and not isinstance(out, torch.Tensor):
            self.kept = out.kept = out.kept or self.kept
            out = out.memory
        if out is not None and device is not None:
            raise ValueError(f"out is a buffer on {out.device} and device is {device!r}: give one of them")
        if out is not None and (out.dtype is not torch.uint8 or out.dim() != 1 or not out.is_contiguous()):
            raise ValueError(
                f"out is a {out.dtype} tensor of shape {tuple(out.shape)}: it must be uint8 [n] and contiguous"
            )
        if out is not None and out.storage_offset() % frames.ALIGNMENT:
            raise ValueError(
                f"out begins {out.storage_offset()} bytes into its storage: it must be at a multiple of "
                f"{frames.ALIGNMENT}"
            )
        self._device = None if device is None else torch.device(device)
        self._out = out
        self._cursor = 0
        self._copier: DeviceCopier | None = None
        self._to_copy: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []
        self._joining: rows.Joining | None = None
        self._places: dict[int, torch.Tensor] = {}
        self.is_taken = False
        """Whether a payload is or was received directly into the caller's buffer."""

    @property
    def is_given(self) -> bool:
        """Whether the caller gave a buffer or a device."""
        return self._out is not None or self._device is not None

    def take_over(self, reply: Mapping[str, Any], nbytes: int) -> torch.Tensor | None:
        """The caller's buffer, if a reply's payload of `nbytes` can be received directly into it; else None."""
        schemas = [ColumnSchema.from_json(column[0]) for column in reply.get("columns", {}).values()]
        if (
            self._out is None
            or not self._out.is_cpu
            or len(self._out) < nbytes
            or not all(s.is_tensor for s in schemas)
        ):
            return None
        buffer, self._out, self.is_taken = self._out[:nbytes], None, True
        return buffer

    def reserve(self, sizes: Sequence[int]) -> None:
        """Prepare memory for tensors of these sizes in bytes.

        Raises:
            ValueError: the caller's buffer is too small.
        """
        total = sum(size + -size % frames.ALIGNMENT for size in sizes)
        if self._device is not None:
            self._out = torch.empty(total, dtype=torch.uint8, device=self._device)
        if self._out is not None and len(self._out) < total:
            raise ValueError(f"out has {len(self._out)} bytes, and these columns of these rows take {total}")
        if self._out is not None and (self._device is not None or not self._out.is_cpu):
            self._copier = DeviceCopier(self._out.device)

    def place(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Next output tensor; it holds the concatenated parts once `finish` returns."""
        nbytes = sum(part.nbytes for part in parts)
        if self._out is None:
            placed = _shaped(new_memory(nbytes), parts)
            self._to_copy.append((parts, placed))
            return placed
        start, self._cursor = self._cursor, self._cursor + nbytes + -nbytes % frames.ALIGNMENT
        placed = self.kept.view(start, parts)
        if placed is None:
            placed = _shaped(self._out[start : start + nbytes], parts)
        self._places[start] = placed
        if self._copier is not None:
            self._copier.move(parts, self._out[start : start + nbytes])
        else:
            self._to_copy.append((parts, placed))
        return placed

    def begin(self) -> None:
        """Start copying: for megabytes, a thread of rl-csrc copies while this one continues."""
        if sum(placed.nbytes for _, placed in self._to_copy) in _WORTH_A_THREAD:
            self._joining = rows.begin_joins(self._to_copy)

    def finish(self) -> None:
        """Complete all copies."""
        if self._joining is not None:
            self._joining.finish()
        else:
            for parts, placed in self._to_copy:
                lay(parts, placed)
        if self._copier is not None:
            self._copier.finish()

    def keep(self, nested: dict[str, NestedTensor], lengths: Sequence[Lengths]) -> None:
        """Cache what the next batch in the caller's buffer can reuse."""
        self.kept.keep(self._places, nested, lengths)


def _shaped(memory: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """View of uint8 memory with the dtype and shape of the concatenated parts."""
    values = memory.view(parts[0].dtype)
    shape = parts[0].shape[1:]
    return values.view(sum(map(len, parts)), *shape) if shape else values
