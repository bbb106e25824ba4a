"""Host memory for a whole version: it lands there and, when all of it is verified, changes places with what was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_ckpt.tensors.digest import LEAF_BYTES
from rl_ckpt.tensors.spec import as_bytes, require_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor


class Staging:
    """As large as the targets; kept from one sync to the next."""

    def __init__(self) -> None:
        self.targets: Mapping[str, Tensor] = {}
        """Where what lands is to be installed."""
        self._tensors: dict[str, Tensor] = {}
        self._installed: list[str] = []

    def open(self, targets: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Where the next version for these targets is to land: contiguous CPU tensors of the same names.

        Raises:
            TensorError: a target has no memory to install it in.
        """
        before, self._tensors = self._tensors, {}
        for name, target in targets.items():
            require_memory(name, target)
            mine = before.get(name)
            if mine is None or (mine.dtype, mine.shape) != (target.dtype, target.shape):
                mine = torch.empty(target.shape, dtype=target.dtype)
            self._tensors[name] = mine
        self.targets, self._installed = targets, []
        return self._tensors

    def install(self, names: Iterable[str]) -> None:
        """Let what landed and the targets change places. What fails half way is undone by `undo`."""
        for name in names:
            self._installed.append(name)
            _exchange(self.targets[name].detach(), self._tensors[name])

    def undo(self) -> None:
        """Let them change back, the last first: targets may share memory."""
        while self._installed:
            name = self._installed[-1]
            _exchange(self.targets[name].detach(), self._tensors[name])
            self._installed.pop()

    def close(self) -> None:
        """The version is committed: forget the targets."""
        self.targets, self._installed = {}, []


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
