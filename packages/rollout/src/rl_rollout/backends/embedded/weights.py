"""New weights: staged beside the served ones, checked, then swapped in whole.

The served weights are not touched until every tensor has arrived, so a failed update leaves the old version as it
was. The price is a second copy of the weights, kept from one update to the next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_rollout.errors import WeightUpdateError


class WeightStore:
    """The parameters and persistent buffers of a module by their Hugging Face names.

    `stage` and `check_complete` run while the module is in use; `swap` and `release` must not.
    """

    def __init__(self, module: Any) -> None:
        self._tensors: dict[str, Tensor] = dict(module.state_dict(keep_vars=True))
        self._shapes = {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in self._tensors.items()}
        # Tied weights are one tensor under several names: the first name stands for it.
        first_of: dict[int, str] = {}
        self._owner = {name: first_of.setdefault(id(tensor), name) for name, tensor in self._tensors.items()}
        self._staged: dict[str, Tensor] = {}
        self._arrived: set[str] = set()

    def begin(self) -> None:
        """Start an update: nothing has arrived yet."""
        self._arrived.clear()

    def stage(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor beside the served one.

        Raises:
            WeightUpdateError: no such name, another shape, or two different tensors for tied names.
        """
        if name not in self._shapes:
            raise WeightUpdateError(
                f"the model has no weight {name!r}; it has {len(self._shapes)}, e.g. {self._nearest(name)!r}"
            )
        shape, dtype, device = self._shapes[name]
        if tensor.shape != shape:
            raise WeightUpdateError(f"weight {name!r} arrived as {tuple(tensor.shape)}; the model holds {tuple(shape)}")
        owner = self._owner[name]
        if owner not in self._staged:
            self._staged[owner] = torch.empty(shape, dtype=dtype, device=device)
        if owner in self._arrived:
            if not torch.equal(self._staged[owner], tensor.to(device=device, dtype=dtype)):
                raise WeightUpdateError(f"weight {name!r} is tied to {owner!r}, and a different value arrived for each")
            return
        self._staged[owner].copy_(tensor)
        self._arrived.add(owner)

    def check_complete(self) -> None:
        """See that every weight has arrived, a tied one under one of its names at least.

        Raises:
            WeightUpdateError: says how many are missing, and one of them.
        """
        missing = sorted(set(self._owner.values()) - self._arrived)
        if missing:
            raise WeightUpdateError(f"{len(missing)} weights did not arrive, e.g. {missing[0]!r}")

    def swap(self) -> None:
        """Serve what was staged. What was served becomes the room for the next update."""
        for owner, new in self._staged.items():
            served = self._tensors[owner]
            old = served.data
            served.data = new
            self._staged[owner] = old
        self._staged = {owner: old for owner, old in self._staged.items() if old.numel()}
        self._arrived.clear()

    def release_staging(self) -> None:
        """Give the second copy back."""
        self._staged.clear()
        self._arrived.clear()

    def release(self) -> None:
        """Give both copies back. The module cannot run until the next `swap`."""
        self.release_staging()
        for tensor in self._tensors.values():
            tensor.data = tensor.data.new_empty(0)

    def _nearest(self, name: str) -> str:
        from difflib import get_close_matches

        return next(iter(get_close_matches(name, self._shapes, n=1, cutoff=0)), "")
