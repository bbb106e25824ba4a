"""Zero-copy receive of a registered source: the receiver maps the sender's memory and copies from it directly.

The sender side is in `rl_ckpt.transports.mapped_source`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import rl_csrc
from rl_ckpt.errors import DigestError, ProtocolError
from rl_ckpt.tensors.digest import digests_of
from rl_ckpt.tensors.spec import TensorSpec, as_bytes, from_bytes, is_plain_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rl_ckpt.protocol.messages import Mapped, Sources
    from rl_ckpt.receiver.unpacker import Unpacker


@dataclass(slots=True)
class _Route:
    """Copy route of the tensors of one message, cached while the addresses of the targets stay the same."""

    addresses: list[int]
    """Addresses of targets that are written directly; 0 for those copied through staging memory."""
    pieces: list[Tensor]
    contents: list[Tensor]


class MappedSource:
    """Registered source of the sender as the receiver maps it: segments, and the tensors in them."""

    def __init__(self, sources: Sources, segments: Sequence[Tensor], specs: Sequence[TensorSpec], sender: str) -> None:
        self._sender = sender
        self._locations: list[tuple[TensorSpec, Tensor]] = []
        self._routes: dict[int, _Route] = {}
        for tensor, segment, offset in sources.locations:
            if tensor >= len(specs) or segment >= len(segments):
                raise ProtocolError(f"{sender} placed tensor {tensor} in segment {segment}; it has announced neither")
            spec, memory = specs[tensor], segments[segment]
            if offset % spec.dtype.itemsize or offset + spec.num_bytes > memory.numel():
                raise ProtocolError(f"{sender} placed {spec} at {offset} of a segment of {memory.numel()} bytes")
            self._locations.append((spec, memory[offset : offset + spec.num_bytes]))

    def unpack(self, unpacker: Unpacker, message: Mapped) -> list[tuple[str, Tensor]]:
        """Copy announced tensors to their targets, or to new memory for a consumer that iterates, and verify them.

        Raises:
            ProtocolError, DigestError, TensorError: see their names.
        """
        locations = self._locations[message.first : message.first + len(message.digests)]
        if len(locations) != len(message.digests) or not locations:
            raise ProtocolError(
                f"{self._sender} reported {len(message.digests)} mapped tensors of its {len(locations)}"
            )
        specs = [spec for spec, _ in locations]
        targets = unpacker.begin_mapped(message.sequence, specs)
        route = self._route(message.first, locations, targets)
        rl_csrc.bucket_copy(route.pieces, route.contents)
        for spec, found, sent in zip(specs, digests_of(route.contents), message.digests, strict=True):
            if found != sent:
                raise DigestError(
                    f"{spec.name!r} of version {unpacker.version} landed with digest {found:#018x}; {self._sender} has "
                    f"{sent:#018x}. It is not handed out"
                )
            unpacker.digests[spec] = found
        items: list[tuple[str, Tensor]] = []
        for index, spec in enumerate(specs):
            if targets is None:
                items.append((spec.name, from_bytes(route.contents[index], spec)))
            elif not route.addresses[index]:
                targets[index].detach().copy_(from_bytes(route.contents[index], spec))
        return items

    def _route(
        self, first: int, locations: Sequence[tuple[TensorSpec, Tensor]], targets: Sequence[Tensor] | None
    ) -> _Route:
        pieces = [piece for _, piece in locations]
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
