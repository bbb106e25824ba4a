"""Check of targets that share memory (tied weights, views into a fused tensor) and so cannot differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_ckpt.errors import TensorError
from rl_ckpt.tensors.digest import combine, leaves_of
from rl_ckpt.tensors.spec import as_bytes, end_of, memory_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from rl_ckpt.tensors.spec import TensorSpec


class AliasCheck:
    """Alias check of an end's targets; overlaps are cached until a target's address, shape or strides change."""

    def __init__(self) -> None:
        self._layouts: dict[str, tuple[object, ...]] = {}
        self._groups: list[list[str]] = []

    def require_equal(self, targets: Mapping[str, Tensor], landed: Iterable[tuple[TensorSpec, int]]) -> None:
        """Check that targets which share memory hold what was sent for each; `landed` has `(spec, digest)` pairs.

        Raises:
            TensorError: a target was overwritten by another one with different contents.
        """
        sent: dict[str, int] = {}
        layouts: dict[str, tuple[object, ...]] = {}
        for spec, digest in landed:
            target = targets[spec.name]
            sent[spec.name] = digest
            layout = target.is_contiguous() or (target.shape, target.stride())
            layouts[spec.name] = target.data_ptr(), spec.num_bytes, layout
        if layouts != self._layouts:
            self._layouts, self._groups = layouts, _groups_of({name: targets[name] for name in sent})
        for names in self._groups:
            if len(names) > 1 and len({memory_key(targets[name]) for name in names}) == 1:
                changed = [name for name in names if sent[name] != sent[names[0]]]
            else:
                changed = [name for name in names if combine(leaves_of(as_bytes(targets[name]))) != sent[name]]
            if changed:
                whose = "the targets" if len(names) > 1 else "elements of"
                raise TensorError(
                    f"{whose} {', '.join(map(repr, names))} share memory, and came with different contents: "
                    f"{changed[0]!r} is not what was sent. Give each separate memory, or tie them at the source too"
                )


def _groups_of(targets: Mapping[str, Tensor]) -> list[list[str]]:
    """Groups of names whose memory overlaps, transitively; a tensor that may overlap itself is a group."""
    layouts = sorted((str(target.device), *_extent_of(target), name) for name, target in targets.items())
    groups: list[list[str]] = []
    where, end = "", 0
    for device, first, last, name in layouts:
        if first == last:
            continue
        if device == where and first < end:
            groups[-1].append(name)
        else:
            groups.append([name])
            end = last
        where, end = device, max(end, last)
    return [group for group in groups if len(group) > 1 or _may_overlap_itself(targets[group[0]])]


def _may_overlap_itself(tensor: Tensor) -> bool:
    """Whether two elements may share memory, by the strides."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _extent_of(tensor: Tensor) -> tuple[int, int]:
    """(start, end) address of its elements, bytes."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    num_elements = end_of(tensor) - int(tensor.storage_offset())
    return tensor.data_ptr(), tensor.data_ptr() + num_elements * tensor.itemsize
