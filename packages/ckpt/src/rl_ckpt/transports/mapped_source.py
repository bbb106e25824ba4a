"""A registered source that receivers read where it is: which of its tensors, where, and what is said of them per sync.

The sender says once which memory of its own can be mapped, and what lies where in it (`Sources`); then, for each sync,
only that tensors are ready, and their digests (`Mapped`). A receiver copies them straight to where they belong, and
compares the digests of what is there then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from rl_ckpt.tensors.spec import TensorSpec, as_bytes, is_plain, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


CHUNK_BYTES = 256 << 20
"""Tensors of so much are told of together: a receiver that iterates has a copy of as much."""
MAX_TOLD = 1 << 14
"""Most tensors that are told of together."""
_generations = count(1)


@dataclass(frozen=True, slots=True)
class MappedChunk:
    """Consecutive tensors of a source that are told of together."""

    first: int
    """Number of the first among all that can be mapped."""
    specs: tuple[TensorSpec, ...]
    """What they are."""
    contents: tuple[Tensor, ...]
    """uint8 [num_bytes] each: their memory."""


@dataclass(slots=True)
class SourceMap:
    """What of a registered source receivers can map. Made once for each call of `register_source`."""

    items: Sequence[tuple[str, Tensor]]
    """The source, as it was when this was made."""
    segments: list[tuple[bytes, int]] = field(default_factory=list[tuple[bytes, int]])
    """Handle and size of each piece of memory, bytes."""
    locations: list[tuple[TensorSpec, int, int]] = field(default_factory=list[tuple[TensorSpec, int, int]])
    """Of each tensor that can be mapped: what it is, its segment, and where it starts there, bytes."""
    steps: list[MappedChunk | tuple[str, Tensor]] = field(default_factory=list["MappedChunk | tuple[str, Tensor]"])
    """The source in its order: what is told of together, and single tensors that have to be packed."""
    generation: int = field(default_factory=lambda: next(_generations))
    """By which it is known who was told of it."""


def map_source(
    items: Sequence[tuple[str, Tensor]],
    segment_of: Callable[[str, Tensor], tuple[int, int] | None],
    export: Callable[[int], bytes],
) -> SourceMap:
    """Find out what of a source can be mapped: one handle for each piece of memory, however many tensors lie in it.

    Args:
        items: The source.
        segment_of: The address and the size, bytes, of the allocation that a tensor lies in; None: it is none to map.
        export: The handle of the allocation at an address.
    """
    found = SourceMap(items)
    numbers: dict[int, int] = {}
    run: list[tuple[TensorSpec, Tensor]] = []
    num_bytes = 0

    def close() -> None:
        nonlocal num_bytes
        if run:
            specs, contents = zip(*run, strict=True)
            found.steps.append(MappedChunk(len(found.locations) - len(run), specs, contents))
        run.clear()
        num_bytes = 0

    for name, tensor in items:
        spec = spec_of(name, tensor)
        segment = segment_of(name, tensor) if is_plain(tensor) and spec.num_bytes else None
        if segment is None:
            close()
            found.steps.append((name, tensor))
            continue
        address, size = segment
        if address not in numbers:
            numbers[address] = len(found.segments)
            found.segments.append((export(address), size))
        if run and (num_bytes + spec.num_bytes > CHUNK_BYTES or len(run) == MAX_TOLD):
            close()
        found.locations.append((spec, numbers[address], tensor.data_ptr() - address))
        run.append((spec, as_bytes(tensor)))
        num_bytes += spec.num_bytes
    close()
    return found
