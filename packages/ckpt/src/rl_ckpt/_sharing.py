"""Tensors of a consumer that share memory: tied weights, or views into a fused tensor. They cannot differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_ckpt._digest import combine, leaves_of
from rl_ckpt._tensors import as_bytes, place_of
from rl_ckpt.errors import TensorError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from rl_ckpt._tensors import TensorSpec


class Sharing:
    """Of the targets of an end: found out again when one of them is elsewhere than before."""

    def __init__(self) -> None:
        self._addresses: dict[str, int] = {}
        self._groups: list[list[str]] = []

    def require_equal(self, targets: Mapping[str, Tensor], landed: Iterable[tuple[TensorSpec, int]]) -> None:
        """Look whether targets that share memory hold what was sent for each, `landed`: `(what, digest)`.

        Raises:
            TensorError: one was written over by another, that was sent with other contents.
        """
        sent = {spec.name: digest for spec, digest in landed}
        addresses = {name: targets[name].data_ptr() for name in sent}
        if addresses != self._addresses:
            self._addresses, self._groups = addresses, _groups_of({name: targets[name] for name in sent})
        for names in self._groups:
            if len({place_of(targets[name]) for name in names}) == 1:
                changed = [name for name in names if sent[name] != sent[names[0]]]
            else:
                changed = [name for name in names if combine(leaves_of(as_bytes(targets[name]))) != sent[name]]
            if changed:
                raise TensorError(
                    f"the targets {', '.join(map(repr, names))} share memory, and came with different contents: "
                    f"{changed[0]!r} is not what was sent. Give each memory of its own, or tie them at the source too"
                )


def _groups_of(targets: Mapping[str, Tensor]) -> list[list[str]]:
    """The names whose memory overlaps, directly or by others between them."""
    places = sorted((str(target.device), *_extent_of(target), name) for name, target in targets.items())
    groups: list[list[str]] = []
    where, end = "", 0
    for device, first, last, name in places:
        if first == last:
            continue
        if device == where and first < end:
            groups[-1].append(name)
        else:
            groups.append([name])
            end = last
        where, end = device, max(end, last)
    return [group for group in groups if len(group) > 1]


def _extent_of(tensor: Tensor) -> tuple[int, int]:
    """From where to where its elements lie, bytes."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
