"""Staging: host memory for a whole version of the weights, installed once all of it is verified."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import torch

from rl_ckpt.errors import TensorError
from rl_ckpt.tensors.digest import LEAF_BYTES
from rl_ckpt.tensors.spec import as_bytes, require_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

SPARSE_BYTES = 1 << 20
"""Tensors from this size on have pages of their own, where a part of them comes."""


class Staging:
    """Staging memory of the current sync, reused by the next.

    If names and shapes are known, `open` allocates all tensors, and `install` and `undo` swap them with the consumer's.
    Otherwise `put` adds tensors one by one, `incoming` and `merged` read them, and `commit` ends the sync. `clear` ends
    a sync of the first kind, or a failed one.
    """

    def __init__(self) -> None:
        self.current: dict[str, Tensor] = {}
        """Committed tensors."""
        self.incoming: dict[str, Tensor] = {}
        """Tensors of the current sync, contiguous, on the CPU."""
        self.targets: Mapping[str, Tensor] = {}
        """Tensors of the consumer that they will be installed in."""
        self._spare: dict[str, Tensor] = {}
        self._installed: list[str] = []
        self._torn: str | None = None
        """Tensor that is being swapped: if interrupted, neither copy is intact."""

    def open(self, targets: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Allocate staging tensors for these targets: contiguous CPU tensors of the same names, dtypes and shapes.

        Raises:
            TensorError: a target has no memory of its own.
        """
        self.clear()
        for name, target in targets.items():
            require_memory(name, target)
            self.room(name, target)
        self.targets, self._spare = targets, {}
        return self.incoming

    def put(self, name: str, tensor: Tensor) -> None:
        """Add a copy of a received tensor."""
        self.room(name, tensor).copy_(tensor.detach())

    def merged(self) -> dict[str, Tensor]:
        """Committed tensors, updated by those of the current sync."""
        return {**self.current, **self.incoming}

    def install(self, names: Iterable[str]) -> None:
        """Swap staged tensors with the targets. After a failure between two tensors, call `undo`."""
        for name in names:
            self._exchange(name)
            self._installed.append(name)

    def undo(self) -> None:
        """Swap them back in reverse order, as targets may share memory.

        Raises:
            TensorError: the swap of a tensor was interrupted, so that it may be mixed.
        """
        if self._torn is not None:
            raise TensorError(f"{self._torn!r} was interrupted while it was installed, and may be mixed")
        while self._installed:
            self._exchange(self._installed[-1])
            self._installed.pop()

    def commit(self, *, is_whole: bool = False) -> None:
        """Commit the current sync: it replaces tensors of the same names, or with `is_whole` all tensors."""
        self._spare |= {name: tensor for name, tensor in self.current.items() if is_whole or name in self.incoming}
        self.current, self.incoming = self.incoming if is_whole else self.merged(), {}

    def clear(self) -> None:
        """End the sync and keep its memory: it was aborted, or is installed for good."""
        self._spare |= self.incoming
        self.incoming, self.targets, self._installed, self._torn = {}, {}, [], None

    def _exchange(self, name: str) -> None:
        target, mine = self.targets[name].detach(), self.incoming[name]
        self._torn = name
        _exchange(target, mine)
        self._torn = None

    def room(self, name: str, like: Tensor) -> Tensor:
        """Memory for a tensor to land in, of this dtype and shape.

        Where the other is of the device `meta`, the strides are its too, and what is never written to takes no memory.
        """
        room = self._spare.pop(name, None)
        is_sparse = like.device.type == "meta"
        strides = like.stride() if is_sparse else torch.empty(like.shape, device="meta").stride()
        if room is None or (room.dtype, room.shape, room.stride()) != (like.dtype, like.shape, strides):
            room = sparse_like(like) if is_sparse else torch.empty(like.shape, dtype=like.dtype)
        self.incoming[name] = room
        return room


def sparse_like(like: Tensor) -> Tensor:
    """Memory on the CPU laid out like a tensor's, which takes pages where it is written to: malloc may reuse some."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    if not like.numel() or count * like.element_size() < SPARSE_BYTES:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    pages = mmap.mmap(-1, count * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype).as_strided(like.shape, like.stride())


def _exchange(target: Tensor, mine: Tensor) -> None:
    """Swap the contents of two tensors of one dtype and shape, the second contiguous on the CPU."""
    if target.device.type != "cpu" or not target.is_contiguous() or target.is_conj() or target.is_neg():
        before = target.to("cpu", copy=True)
        target.copy_(mine)
        mine.copy_(before)
        return
    room = torch.empty(min(LEAF_BYTES, target.nbytes), dtype=torch.uint8)
    pairs = zip(as_bytes(target).split(LEAF_BYTES), as_bytes(mine).split(LEAF_BYTES), strict=True)
    for theirs, ours in pairs:
        kept = room[: theirs.numel()].copy_(theirs)
        theirs.copy_(ours)
        ours.copy_(kept)
