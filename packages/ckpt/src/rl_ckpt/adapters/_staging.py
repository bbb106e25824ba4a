"""Host memory of a receiver that must be able to go back: what its engine holds, and what is landing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Staging:
    """Two copies of the weights on the CPU, whose memory changes places with every version.

    `put` what lands; then `commit` it, or `abort`. Neither copies anything.
    """

    def __init__(self) -> None:
        self.current: dict[str, Tensor] = {}
        """What was committed."""
        self.landing: dict[str, Tensor] = {}
        """What has come of the sync under way."""
        self._spare: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Keep a copy of a tensor that has landed."""
        spare = self._spare.pop(name, None)
        if spare is None or (spare.dtype, spare.shape) != (tensor.dtype, tensor.shape):
            spare = tensor.new_empty(tensor.shape, device="cpu")
        self.landing[name] = spare.copy_(tensor.detach())

    def merged(self) -> dict[str, Tensor]:
        """All weights as they are with what has landed."""
        return {**self.current, **self.landing}

    def commit(self, *, is_whole: bool = False) -> None:
        """What has landed is in force, in place of the tensors of the same names or, if it is whole, of all."""
        self._spare |= {name: tensor for name, tensor in self.current.items() if is_whole or name in self.landing}
        self.current = self.landing if is_whole else self.merged()
        self.landing = {}

    def abort(self) -> None:
        """What has landed is worthless; its memory is kept."""
        self._spare |= self.landing
        self.landing = {}
