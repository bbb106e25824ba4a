"""Rows from shared memory to a device: a column is copied as it lies, once, and put in order there.

Copying row by row would start a transfer per row, and joining the rows first would copy everything on the host, at a
fraction of the bus. Where the rows asked for are a small part of what lies between them, they are joined all the same.
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
"""A span is copied whole if it has at most so many times the bytes that are wanted of it."""
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_LOG = logging.getLogger(__name__)
_refused: list[int] = []
"""Errors of CUDA that kept memory from being registered: after one, it is not tried again."""


class Span(NamedTuple):
    """What lies between the first and the last row wanted of one memory."""

    memory: torch.Tensor
    """Rows, contiguous: shape (n, *row shape)."""
    start: int
    """Where it will begin among the rows of all spans."""


class Plan(NamedTuple):
    """How the rows of one column travel."""

    spans: list[Span]
    """Copied one after the other."""
    firsts: tuple[int, ...]
    """Of each piece: its first row among those of all spans."""
    lengths: tuple[int, ...]
    """Of each piece: its rows. Pieces follow one another in the batch."""

    @property
    def is_in_order(self) -> bool:
        """Whether the spans are the batch as they are."""
        ends = accumulate(self.lengths, initial=0)
        return all(first == end for first, end in zip(self.firsts, ends, strict=False)) and self.num_rows == sum(
            self.lengths
        )

    @property
    def num_rows(self) -> int:
        """Rows of all spans."""
        return sum(len(span.memory) for span in self.spans)


def plan(parts: Sequence[torch.Tensor]) -> Plan:
    """Plan for pieces of shape (n_i, *row shape), contiguous, on the host. Pieces without rows are left out."""
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
    """Moves the columns of one batch to a device. Call `finish` before the memory that they lie in may change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._indexes: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}

    def move(self, parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Lay the pieces one after the other into `target`, uint8 [n] on the device."""
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
        """Wait until all is there."""
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
        """Which staged row is each row of the batch; the same for columns whose rows lie alike."""
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
    """The widest integers that rows are made of: what is copied has bits, and no dtype that a device may not know."""
    nbytes = memory.nbytes // len(memory)
    return next(word for word in _WORDS if not nbytes % word.itemsize and not target.data_ptr() % word.itemsize)


def pin(memory: torch.Tensor) -> None:
    """Have the shared memory that a large part of is about to be read registered with CUDA, once, so that it is fast.

    A segment of which little is read is left alone: registering would give memory to all of it.
    """
    storage = memory.untyped_storage()
    address, nbytes = storage.data_ptr(), storage.nbytes()
    if 2 * memory.nbytes < nbytes or _refused or memory.is_pinned():
        return
    runtime: Any = torch.cuda.cudart()

    def release() -> None:
        runtime.cudaHostUnregister(address)

    if not before_unmap(address, release):
        return  # not ours to register
    answer = int(runtime.cudaHostRegister(address, nbytes, 0))
    if answer:
        before_unmap(address, None)
        _refused.append(answer)
        _LOG.warning("CUDA registers no shared memory here (error %d for %d bytes): gets are slower", answer, nbytes)
