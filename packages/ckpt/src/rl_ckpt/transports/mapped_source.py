"""A registered source that receivers read where it is: which of its tensors, where, and what is said of them per sync.

The sender says once which memory of its own can be mapped, and what lies where in it (`Sources`); then, for each sync,
only that tensors are ready, and their digests (`Mapped`). A receiver copies them straight to where they belong, and
compares the digests of what is there then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import torch

import rl_csrc
from rl_ckpt.tensors.digest import digests_of
from rl_ckpt.receiver.unpacker import is_plain_on
from rl_ckpt.tensors.spec import TensorSpec, as_bytes, from_bytes, is_plain, spec_of
from rl_ckpt.errors import DigestError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from rl_ckpt.receiver.unpacker import Landing
    from rl_ckpt.protocol.messages import Mapped, Sources

CHUNK_BYTES = 256 << 20
"""Tensors of so much are told of together: a receiver that iterates has a copy of as much."""
MAX_TOLD = 1 << 14
"""Most tensors that are told of together."""
_generations = count(1)


@dataclass(frozen=True, slots=True)
class Told:
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
    places: list[tuple[TensorSpec, int, int]] = field(default_factory=list[tuple[TensorSpec, int, int]])
    """Of each tensor that can be mapped: what it is, its segment, and where it starts there, bytes."""
    steps: list[Told | tuple[str, Tensor]] = field(default_factory=list["Told | tuple[str, Tensor]"])
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
            found.steps.append(Told(len(found.places) - len(run), specs, contents))
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
        found.places.append((spec, numbers[address], tensor.data_ptr() - address))
        run.append((spec, as_bytes(tensor)))
        num_bytes += spec.num_bytes
    close()
    return found


@dataclass(slots=True)
class _Route:
    """From where to where the tensors of one message go, kept as long as the targets stay where they are."""

    addresses: list[int]
    """Of the targets that are written as they are; 0 for those that have staging memory in front of them."""
    pieces: list[Tensor]
    contents: list[Tensor]


class Mirror:
    """The receiver's side: the sender's memory, mapped, and what lies in it."""

    def __init__(self, sources: Sources, segments: Sequence[Tensor], specs: Sequence[TensorSpec], sender: str) -> None:
        self._sender = sender
        self._places: list[tuple[TensorSpec, Tensor]] = []
        self._routes: dict[int, _Route] = {}
        for tensor, segment, offset in sources.places:
            if tensor >= len(specs) or segment >= len(segments):
                raise ProtocolError(f"{sender} placed tensor {tensor} in segment {segment}; it has told of neither")
            spec, memory = specs[tensor], segments[segment]
            if offset % spec.dtype.itemsize or offset + spec.num_bytes > memory.numel():
                raise ProtocolError(f"{sender} placed {spec} at {offset} of a segment of {memory.numel()} bytes")
            self._places.append((spec, memory[offset : offset + spec.num_bytes]))

    def land(self, landing: Landing, message: Mapped) -> list[tuple[str, Tensor]]:
        """Copy what is ready to where it belongs, or for a consumer that iterates to memory of its own; verify it.

        Raises:
            ProtocolError, DigestError, TensorError: see their names.
        """
        places = self._places[message.first : message.first + len(message.digests)]
        if len(places) != len(message.digests) or not places:
            raise ProtocolError(
                f"{self._sender} told of {len(message.digests)} mapped tensors, of {len(places)} it has"
            )
        specs = [spec for spec, _ in places]
        targets = landing.begin_mapped(message.sequence, specs)
        route = self._route(message.first, places, targets)
        rl_csrc.bucket_copy(route.pieces, route.contents)
        for spec, found, sent in zip(specs, digests_of(route.contents), message.digests, strict=True):
            if found != sent:
                raise DigestError(
                    f"{spec.name!r} of version {landing.version} landed with digest {found:#018x}; {self._sender} has "
                    f"{sent:#018x}. It is not handed out"
                )
            landing.digests[spec] = found
        items: list[tuple[str, Tensor]] = []
        for index, spec in enumerate(specs):
            if targets is None:
                items.append((spec.name, from_bytes(route.contents[index], spec)))
            elif not route.addresses[index]:
                targets[index].detach().copy_(from_bytes(route.contents[index], spec))
        return items

    def _route(
        self, first: int, places: Sequence[tuple[TensorSpec, Tensor]], targets: Sequence[Tensor] | None
    ) -> _Route:
        pieces = [piece for _, piece in places]
        if targets is None:
            return _Route([], pieces, [torch.empty_like(piece) for piece in pieces])
        addresses = [
            target.data_ptr() if is_plain_on(target, piece.device) else 0
            for target, piece in zip(targets, pieces, strict=True)
        ]
        known = self._routes.get(first)
        if known is None or known.addresses != addresses:
            contents = [
                as_bytes(target) if address else torch.empty_like(piece)
                for target, piece, address in zip(targets, pieces, addresses, strict=True)
            ]
            known = self._routes[first] = _Route(addresses, pieces, contents)
        return known
