"""Schema of fields: dtype and shapes per field, its selections and concatenations."""

from __future__ import annotations

import copy
import itertools
import logging
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tensordict import TensorDict

logger = logging.getLogger(__name__)

Schema = dict[str, dict[str, Any]]
"""Field name to `dtype`, `shape` of one sample, `is_nested`, `is_non_tensor` and, where samples differ,
`per_sample_shapes`."""


def names_of(data: TensorDict | Mapping[str, Any]) -> list[str]:
    """Field names of a batch; a `TensorDict` itself iterates over its rows."""
    return [*cast("Mapping[str, Any]", data).keys()]


def extract_field_schema(data: TensorDict) -> Schema:
    """Schema of a batch. A field of scalars has shape (1,).

    Raises:
        ValueError: a field has another number of samples than the batch.
    """
    size = data.batch_size[0]
    schema: Schema = {}
    if not size:
        return schema
    for name in names_of(data):
        value: Any = data.get(name)
        is_tensor = isinstance(value, torch.Tensor)
        is_nested = is_tensor and value.is_nested
        if is_tensor and value.size(0) != size:
            raise ValueError(f"field {name!r} has {value.size(0)} samples, and the batch {size}")
        shapes = [tuple(row.shape) for row in value.unbind()] if is_nested else None
        shape = None if not is_tensor else shapes[0] if shapes else tuple(value.shape[1:]) or (1,)
        schema[name] = {
            "dtype": value.dtype if is_tensor else None,
            "shape": None if shape is None else torch.Size(shape),
            "is_nested": is_nested,
            "is_non_tensor": not is_tensor,
        }
        if shapes is not None:
            schema[name]["per_sample_shapes"] = shapes
    return schema


def even_parts(size: int, count: int) -> list[range]:
    """`count` contiguous ranges over 0..size-1 whose lengths differ by one at most."""
    if size < count:
        logger.warning("%d samples are cut into %d chunks: some of them are empty", size, count)
    least, more = divmod(size, count)
    ends = [i * least + min(i, more) for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def schema_at(schema: Schema, positions: Sequence[int]) -> Schema:
    """Schema of the samples at `positions`."""
    taken = copy.deepcopy(schema)
    for each in taken.values():
        if each.get("per_sample_shapes") is not None:
            each["per_sample_shapes"] = [each["per_sample_shapes"][i] for i in positions]
    return taken


def joined_schema(schemas: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    """Schema of one field over concatenated batches of `sizes` samples."""
    is_nested = any(schema.get("is_nested") for schema in schemas)
    joined = {
        "dtype": schemas[0].get("dtype"),
        "shape": None if is_nested else schemas[0].get("shape"),
        "is_nested": is_nested,
        "is_non_tensor": bool(schemas[0].get("is_non_tensor")),
    }
    if is_nested or any(schema.get("per_sample_shapes") for schema in schemas):
        joined["per_sample_shapes"] = [
            shape
            for schema, size in zip(schemas, sizes, strict=True)
            for shape in schema.get("per_sample_shapes") or [schema.get("shape")] * size
        ]
    return joined


def joined_info(infos: Sequence[dict[str, Any]], what: str) -> dict[str, Any]:
    """Merged `extra_info` of concatenated batches.

    Raises:
        ValueError: two of them differ in a value.
    """
    joined: dict[str, Any] = {}
    if any(info.keys() != infos[0].keys() for info in infos):
        logger.warning("%s.concat: extra_info has other keys in some parts: all of them are kept", what)
    for info in infos:
        for key, value in info.items():
            if key in joined and not _is_equal(joined[key], value):
                raise ValueError(
                    f"{what}.concat: extra_info key '{key}' has conflicting values: {joined[key]!r} and {value!r}"
                )
            joined.setdefault(key, value)
    return joined


def _is_equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return bool(a == b)
