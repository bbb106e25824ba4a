"""`SourceMap`: zero-copy send of a registered source, which receivers map and read in place.

The sender announces once its memory segments and the tensors in them (`Sources`); then, for each sync, only that
tensors are ready, with their digests (`Mapped`). A receiver copies them directly to its targets and compares the
digests there.
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
"""Size of tensors announced together, bytes: a receiver that iterates needs a copy of as much."""
MAX_TENSORS_PER_CHUNK = 1 << 14
"""Most tensors announced together."""
_generations = count(1)


@dataclass(frozen=True, slots=True)
class MappedChunk:
    """Consecutive tensors of a source that are announced together."""

    first: int
    """Index of the first among all mappable tensors."""
    specs: tuple[TensorSpec, ...]
    """Specs of the tensors."""
    contents: tuple[Tensor, ...]
    """Memory of the tensors, uint8 [num_bytes] each."""


@dataclass(slots=True)
class SourceMap:
    """Map of the tensors of a registered source that receivers can read in place; made once per registration."""

    items: Sequence[tuple[str, Tensor]]
    """Items of the source at that time."""
    segments: list[tuple[bytes, int]] = field(default_factory=list[tuple[bytes, int]])
    """(handle, size in bytes) of each memory segment."""
    locations: list[tuple[TensorSpec, int, int]] = field(default_factory=list[tuple[TensorSpec, int, int]])
    """(spec, segment, offset in bytes) of each mappable tensor."""
    steps: list[MappedChunk | tuple[str, Tensor]] = field(default_factory=list["MappedChunk | tuple[str, Tensor]"])
    """The source in order: chunks announced together, and single tensors that have to be packed."""
    generation: int = field(default_factory=lambda: next(_generations))
    """Generation, by which receivers that know the map are recognized."""


def map_source(
    items: Sequence[tuple[str, Tensor]],
    segment_of: Callable[[str, Tensor], tuple[int, int] | None],
    export: Callable[[int], bytes],
) -> SourceMap:
    """Build the map of a source, with one handle per allocation, however many tensors are in it.

    Args:
        items: Items of the source.
        segment_of: Returns address and size in bytes of a tensor's allocation; None: it cannot be mapped.
        export: Returns the handle of the allocation at an address.
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
        if run and (num_bytes + spec.num_bytes > CHUNK_BYTES or len(run) == MAX_TENSORS_PER_CHUNK):
            close()
        found.locations.append((spec, numbers[address], tensor.data_ptr() - address))
        run.append((spec, as_bytes(tensor)))
        num_bytes += spec.num_bytes
    close()
    return found
