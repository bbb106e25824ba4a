"""Rows of the ranks that work on one copy of the model, put together and taken apart again.

Every rank passes its own rows, whatever the layout; the ranks of one copy all run the rows of all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from rl_engine._rows import PAIR
from rl_engine.errors import BatchError

if TYPE_CHECKING:
    from rl_engine.backends.megatron._layout import Axis


def merge_rows(data: TensorDict, ranks: Axis) -> tuple[TensorDict, int]:
    """The rows of all `ranks`, in rank order, on the CPU, and the index of this rank's first. Collective.

    Raises:
        BatchError: two ranks have different columns.
    """
    plain = {str(name): _to_plain(data.get(name)) for name in data.keys()}  # noqa: SIM118 - a TensorDict iterates rows
    count = int(data.batch_size[0]) if data.batch_size else 0
    answers: list[Any] = [None] * ranks.size
    dist.all_gather_object(answers, (count, plain), group=ranks.group)
    names = [sorted(columns) for _, columns in answers]
    if any(other != names[0] for other in names):
        raise BatchError(
            f"Ranks that share one copy of the model have different columns: {', '.join(map(str, names))}."
        )
    for rank, (_, columns) in enumerate(answers):
        if PAIR in columns:  # each rank numbers its own
            columns[PAIR] = columns[PAIR] * ranks.size + rank
    merged = {name: _merge([columns[name] for _, columns in answers]) for name in names[0]}
    counts = [count for count, _ in answers]
    rows = TensorDict(merged, batch_size=[sum(counts)])  # pyright: ignore[reportArgumentType]
    return rows, sum(counts[: ranks.rank])


def take_own(column: Any, first: int, count: int) -> Tensor:
    """Rows `first` to `first + count` of a jagged column."""
    offsets = column.offsets()[first : first + count + 1]
    values = column.values()[int(offsets[0]) : int(offsets[-1])]
    return torch.nested.nested_tensor_from_jagged(values, offsets - offsets[0])


def _to_plain(column: Any) -> Any:
    """Something that travels: values and lengths of a jagged column, a tensor, or a list."""
    if isinstance(column, NonTensorStack):
        return column.tolist()
    if column.is_nested:
        return column.values().cpu(), column.offsets().diff().cpu()
    return column.cpu()


def _merge(parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return NonTensorStack(*[item for part in parts for item in part])
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    lengths = torch.cat([lengths for _, lengths in parts])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(torch.cat([values for values, _ in parts]), offsets)
