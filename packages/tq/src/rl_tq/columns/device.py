"""Host-to-device copies of columns: the span that contains the rows is copied once, and gathered on the device.

Copying row by row would start a transfer per row; joining the rows first would copy everything on the host, at a
fraction of the bus bandwidth. Rows that are a small part of their span are joined on the host nevertheless.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rl_csrc.ipc import before_unmap

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_WASTE = 2.0
"""A span is copied whole if it has at most this many times the bytes of the wanted rows."""
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_LOG = logging.getLogger(__name__)
_refused: list[int] = []
"""CUDA error codes of failed memory registrations: after one, no other is tried."""


class Span(NamedTuple):
    """Span of one memory block from its first to its last wanted row."""

    memory: torch.Tensor
    """Rows, contiguous: shape (n, *row shape)."""
    start: int
    """Index of its first row among the rows of all spans."""


class Plan(NamedTuple):
    """Copy plan of one column."""

    spans: list[Span]
    """Copied one after the other."""
    firsts: tuple[int, ...]
    """Per piece, the index of its first row among the rows of all spans."""
    lengths: tuple[int, ...]
    """Per piece, its number of rows. Pieces are consecutive in the batch."""

    @property
    def is_in_order(self) -> bool:
        """Whether the concatenated spans are the batch, without a gather."""
        ends = accumulate(self.lengths, initial=0)
        return all(first == end for first, end in zip(self.firsts, ends, strict=False)) and self.num_rows == sum(
            self.lengths
        )

    @property
    def num_rows(self) -> int:
        """Rows of all spans."""
        return sum(len(span.memory) for span in self.spans)


def plan(parts: Sequence[torch.Tensor]) -> Plan:
    """Copy plan for pieces of shape (n_i, *row shape), contiguous, on the host. Pieces without rows are left out."""
    row_nbytes = parts[0][:1].nbytes or max(part.nbytes // max(1, len(part)) for part in parts)
    whole = [part for part in parts if part.nbytes]
    bounds: dict[int, tuple[int, int]] = {}
    origins = [part.untyped_storage().data_ptr() for part in whole]
    for origin, part in zip(origins, whole, strict=True):
        low, high = bounds.get(origin, (part.data_ptr(), 0))
        bounds[origin] = min(low, part.data_ptr()), max(high, part.data_ptr() + part.nbytes)
    wanted = sum(part.nbytes for part in whole)
    if sum(high - low for low, high in bounds.values()) > _MAX_WASTE * wanted or any(
        (part.data_ptr() - bounds[origin][0]) % row_nbytes for origin, part in zip(origins, whole, strict=True)
    ):
        joined = torch.cat(whole)
        return Plan([Span(joined, 0)], (0,), (len(joined),))
    spans: dict[int, Span] = {}
    start = 0
    for origin, part in zip(origins, whole, strict=True):
        if origin not in spans:
            low, high = bounds[origin]
            num_rows = (high - low) // row_nbytes
            offset = part.storage_offset() - (part.data_ptr() - low) // part.element_size()
            memory = part.as_strided((num_rows, *part.shape[1:]), part.stride(), offset)
            spans[origin] = Span(memory, start)
            start += num_rows
    firsts = [
        spans[origin].start + (part.data_ptr() - bounds[origin][0]) // row_nbytes
        for origin, part in zip(origins, whole, strict=True)
    ]
    return Plan([*spans.values()], tuple(firsts), tuple(map(len, whole)))


class DeviceCopier:
    """Copies the columns of one batch to a device. Call `finish` before the host memory may change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._indexes: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}

    def move(self, parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Concatenate the pieces in `target`, uint8 [n] on the device."""
        if not len(target):
            return
        planned = plan(parts)
        words = _words(planned.spans[0].memory, target)
        if planned.is_in_order:
            self._copy(planned, target)
            return
        staged = torch.empty(planned.num_rows * _row_nbytes(planned), dtype=torch.uint8, device=self._device)
        self._copy(planned, staged)
        rows = (-1, _row_nbytes(planned) // words.itemsize)
        index = self._index(planned)
        torch.index_select(staged.view(words).view(rows), 0, index, out=target.view(words).view(rows))

    def finish(self) -> None:
        """Wait until all copies are complete."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _copy(self, planned: Plan, out: torch.Tensor) -> None:
        nbytes = _row_nbytes(planned)
        for memory, start in planned.spans:
            if self._device.type == "cuda":
                pin(memory)
            source = memory.reshape(-1).view(torch.uint8)
            out[start * nbytes : start * nbytes + len(source)].copy_(source, non_blocking=True)

    def _index(self, planned: Plan) -> torch.Tensor:
        """Gather index of the batch's rows among the staged rows; cached for columns with the same plan."""
        key = planned.firsts, planned.lengths
        if key not in self._indexes:
            ends = list(accumulate(planned.lengths))
            shifts = [first - end + length for first, end, length in zip(key[0], ends, key[1], strict=True)]
            moved = torch.tensor([shifts, planned.lengths]).to(self._device)
            index = torch.repeat_interleave(moved[0], moved[1], output_size=ends[-1])
            self._indexes[key] = index + torch.arange(ends[-1], device=self._device)
        return self._indexes[key]


def _row_nbytes(planned: Plan) -> int:
    memory = planned.spans[0].memory
    return memory.nbytes // len(memory)


def _words(memory: torch.Tensor, target: torch.Tensor) -> torch.dtype:
    """Widest integer dtype that divides a row: rows are copied as bits, as the device may not support their dtype."""
    nbytes = memory.nbytes // len(memory)
    return next(word for word in _WORDS if not nbytes % word.itemsize and not target.data_ptr() % word.itemsize)


def pin(memory: torch.Tensor) -> None:
    """Pin shared memory: register a segment with CUDA, once, if a large part of it is about to be copied.

    A segment of which little is read is not registered: registration would allocate all of its pages.
    """
    storage = memory.untyped_storage()
    address, nbytes = storage.data_ptr(), storage.nbytes()
    if 2 * memory.nbytes < nbytes or _refused or memory.is_pinned():
        return
    runtime: Any = torch.cuda.cudart()

    def release() -> None:
        runtime.cudaHostUnregister(address)

    if not before_unmap(address, release):
        return  # not a mapping of rl_csrc.ipc
    answer = int(runtime.cudaHostRegister(address, nbytes, 0))
    if answer:
        before_unmap(address, None)
        _refused.append(answer)
        _LOG.warning("CUDA registers no shared memory here (error %d for %d bytes): gets are slower", answer, nbytes)
