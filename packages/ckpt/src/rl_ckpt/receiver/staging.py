"""Host memory for a whole version of the weights: it lands there, and is put in force when all of it is verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_ckpt.errors import TensorError
from rl_ckpt.tensors.digest import LEAF_BYTES
from rl_ckpt.tensors.spec import as_bytes, require_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor


class Staging:
    """Tensors of the sync under way, in memory that is kept from one sync to the next.

    Whoever knows the names and shapes that will come makes room for all (`open`), and later lets them change places
    with the tensors of the consumer (`install`, `undo`). Whoever does not adds them one by one (`put`), and reads what
    came from here (`incoming`, `merged`) and ends the sync by `commit`. `clear` ends any other.
    """

    def __init__(self) -> None:
        self.current: dict[str, Tensor] = {}
        """What was committed here."""
        self.incoming: dict[str, Tensor] = {}
        """The tensors of the sync under way, contiguous, on the CPU."""
        self.targets: Mapping[str, Tensor] = {}
        """Where they are to be installed."""
        self._spare: dict[str, Tensor] = {}
        self._installed: list[str] = []
        self._torn: str | None = None
        """The tensor that is changing places: if that is interrupted, its contents are in neither."""

    def open(self, targets: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Make room for a version for these targets: contiguous CPU tensors of the same names, dtypes and shapes.

        Raises:
            TensorError: a target has no memory to install it in.
        """
        self.clear()
        for name, target in targets.items():
            require_memory(name, target)
            self._make_room(name, target)
        self.targets, self._spare = targets, {}
        return self.incoming

    def put(self, name: str, tensor: Tensor) -> None:
        """Keep a copy of a tensor that has landed."""
        self._make_room(name, tensor).copy_(tensor.detach())

    def merged(self) -> dict[str, Tensor]:
        """What is here, each tensor as it landed last."""
        return {**self.current, **self.incoming}

    def install(self, names: Iterable[str]) -> None:
        """Let what landed and the targets change places. What fails between two of them is undone by `undo`."""
        for name in names:
            self._exchange(name)
            self._installed.append(name)

    def undo(self) -> None:
        """Let them change back, the last first: targets may share memory.

        Raises:
            TensorError: one was interrupted half way, so that it is neither.
        """
        if self._torn is not None:
            raise TensorError(f"{self._torn!r} was interrupted while it was installed, and may be mixed")
        while self._installed:
            self._exchange(self._installed[-1])
            self._installed.pop()

    def commit(self, *, is_whole: bool = False) -> None:
        """Make current what has come, in place of the tensors of the same names or, if it is whole, of all."""
        self._spare |= {name: tensor for name, tensor in self.current.items() if is_whole or name in self.incoming}
        self.current, self.incoming = self.incoming if is_whole else self.merged(), {}

    def clear(self) -> None:
        """Forget the sync, but not its memory: it is off, or installed for good."""
        self._spare |= self.incoming
        self.incoming, self.targets, self._installed, self._torn = {}, {}, [], None

    def _exchange(self, name: str) -> None:
        target, mine = self.targets[name].detach(), self.incoming[name]
        self._torn = name
        _exchange(target, mine)
        self._torn = None

    def _make_room(self, name: str, like: Tensor) -> Tensor:
        room = self._spare.pop(name, None)
        if room is None or (room.dtype, room.shape) != (like.dtype, like.shape):
            room = torch.empty(like.shape, dtype=like.dtype)
        self.incoming[name] = room
        return room


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
