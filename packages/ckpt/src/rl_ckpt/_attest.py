"""The public digest of a model's weights. Imports torch when it is called, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor


def tree_digest(named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> int:
    """64-bit digest of named tensors: what a `Receipt`, a `SyncReport` and `CheckpointEngine.digest` hold of them.

    It depends on names, dtypes, shapes and bits, and not on the order of the tensors, their strides, their device, or
    how they were sent. WIRE.md defines it. It detects damage and mistakes, not malice: there is no secret in it.

    Raises:
        TensorError: an item cannot be sent, and so has no digest; or a name comes twice.
    """
    from rl_ckpt.tensors import digest as _digest

    return _digest.tree_digest(named_tensors)
