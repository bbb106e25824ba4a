"""Layout of an engine's rank: which part of each tensor of a checkpoint the rank computes with.

It is found by a dry run of the engine's own loader, over tensors that nothing was written to: what the loader would
copy is noted, and nothing is copied. A trainer makes its `ShardPlan` of the layouts of all ranks of a server.

The ranks of a server are processes that a client cannot talk to one by one, so that layouts are exchanged in a folder:
`write_layout_request` there, have the server call each rank with `layout://FOLDER`, and `read_layouts`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_ckpt.adapters.load_recorder import Layout, Origins, pointer_of
from rl_ckpt.errors import UsageError
from rl_ckpt.types import ShardSpec, decoded, encoded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor, nn

SCHEME = "layout://"
_REQUEST = "weights.json"


class DryLoad(TorchDispatchMode):
    """While it is entered, a loader copies nothing into a model, and what it would have copied is noted.

    Args:
        model: Model whose tensors are not to change.
        given: Name to tensor on the CPU, as the loader is given them; each has memory of its own, which nothing reads.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._given = given
        self._origins = Origins(given)
        self._kept = {pointer_of(tensor) for tensor in (*model.parameters(), *model.buffers())} - {None, 0}
        self._copied: dict[str, list[Layout]] = {}
        self._whole: set[str] = set()
        """Names of tensors that the loader computes with before it copies: all of each counts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        sources = [(origin, tensor) for tensor in tensors if (origin := self._origins.find(tensor)) is not None]
        if func is torch.ops.aten.copy_.default:
            for (name, part), _ in sources if args[0].numel() else ():
                if part is None:
                    self._whole.add(name)
                else:
                    self._copied.setdefault(name, []).append(part)
            if sources or pointer_of(args[0]) in self._kept:
                return args[0]
        result = func(*args, **(kwargs or {}))
        if sources and not self._origins.follow(func, args[0], result):
            shared = {pointer_of(tensor) for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)}
            self._whole |= {name for (name, _), tensor in sources if pointer_of(tensor) not in shared}
        return result

    def copied(self, name: str) -> list[tuple[int, ...]] | None:
        """Shapes of what was copied of a tensor; None if something was computed of it."""
        return None if name in self._whole else [layout.size for layout in self._copied.get(name, ())]

    def parts(self) -> dict[str, ShardSpec]:
        """Smallest box of all that was copied of each tensor, by name. A tensor that was left out has none."""
        found: dict[str, ShardSpec] = {}
        for name, tensor in self._given.items():
            boxes = [_box(layout, tensor) for layout in self._copied.get(name, ())]
            if name in self._whole:
                boxes.append([(0, size) for size in tensor.shape])
            if boxes:
                box = [(min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*boxes, strict=True)]
                offsets, sizes = tuple(first for first, _ in box), tuple(end - first for first, end in box)
                found[name] = ShardSpec(name=name, shape=tuple(tensor.shape), offsets=offsets, sizes=sizes)
        return found


def _box(layout: Layout, whole: Tensor) -> list[tuple[int, int]]:
    """Box of a contiguous tensor that a view is; the whole tensor, where the view is no box of it."""
    last = layout.offset + sum((size - 1) * stride for size, stride in zip(layout.size, layout.stride, strict=True))
    box: list[tuple[int, int]] = []
    first, end = layout.offset, last
    for stride in whole.stride():
        (low, first), (high, end) = divmod(first, stride), divmod(end, stride)
        box.append((low, high + 1))
    is_box = all(a < b for a, b in box) and math.prod(b - a for a, b in box) == math.prod(layout.size)
    return box if is_box else [(0, size) for size in whole.shape]


def compact(part: ShardSpec, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """A tensor of the whole's shape in which a part is contiguous. Its other elements, worthless, share memory.

    The columns that one rank takes of a matrix would otherwise lie on all pages of it.
    """
    strides = torch.empty(part.sizes, device="meta").stride()
    return torch.empty_strided(part.shape, strides, dtype=dtype, device=device)


def write_layout_request(folder: Path, weights: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Ask for layouts in an empty folder; returns the URL for the ranks.

    Args:
        folder: Folder that all ranks see.
        weights: Dtype (`bfloat16`) and shape of every tensor that will be sent, by name.
    """
    folder.joinpath(_REQUEST).write_text(json.dumps(weights))
    return f"{SCHEME}{folder}"


def answer_request(url: str, rank: int) -> tuple[dict[str, Tensor], Path]:
    """Tensors for a rank to load dry, in memory that nothing was written to, and the file of `write_answer`."""
    folder = Path(url.removeprefix(SCHEME))
    request: dict[str, tuple[str, list[int]]] = json.loads(folder.joinpath(_REQUEST).read_text())
    given = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in request.items()}
    return given, folder / f"rank-{rank}.json"


def write_answer(path: Path, parts: Iterable[ShardSpec]) -> None:
    """Describe the tensors that a rank takes."""
    path.write_text(json.dumps(encoded(parts)))


def read_layouts(folder: Path, num_ranks: int) -> list[list[ShardSpec]]:
    """Layouts of all ranks, once each was called.

    Raises:
        UsageError: the server has fewer ranks, or more.
    """
    files = {path.name: path for path in folder.glob("rank-*.json")}
    names = [f"rank-{rank}.json" for rank in range(num_ranks)]
    if sorted(files) != sorted(names):
        raise UsageError(f"{num_ranks} ranks were asked for their layouts; the server answered with {sorted(files)}")
    return [decoded(json.loads(files[name].read_text())) for name in names]
