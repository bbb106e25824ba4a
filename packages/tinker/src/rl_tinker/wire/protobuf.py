"""Protobuf messages of the API, built from a table of their fields (package `tinker_public` of the tinker SDK 0.38).

The messages live in a descriptor pool of their own, so that a process may import the SDK as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "tinker_public"

FIELDS = {
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "ArrayRecord": "1 type_tag string, 2 fields BatchedTensor%, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics double%",
    "LossConfigValue": "1 number double, 2 text string",
    "EncodedTextChunk": "1 tokens bytes",
    "ImageChunk": "1 data bytes, 2 format string",
    "DmelChunk": "1 dmel bytes",
    "Chunk": "1 encoded_text EncodedTextChunk, 2 image ImageChunk, 3 dmel DmelChunk",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs Tensor%",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, "
    "5 loss_fn_config double%, 6 forward_only bool, 7 loss_fn_config_v2 LossConfigValue%",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, 4 topk_sampled_logprobs TopkLogprobs",
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes, 3 topk_prompt_logprobs TopkLogprobs, "
    "4 prompt_cache_hit_tokens int32",
}
"""Fields of each message: number, name and type; `*` repeats, `%` is a map from strings. Enums are their numbers, and
fields of a oneof are fields like any other, which is the same on the wire."""

FLOAT32, INT64, INT32 = 1, 2, 3
"""Numbers of `DType`."""
STOP, LENGTH = 0, 1
"""Numbers of `StopReason`."""

_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3


@cache
def message(name: str) -> Any:
    """Class of a message."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="rl_tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in FIELDS.items():
        kind = file.message_type.add(name=name)
        for field in fields.split(", "):
            number, label, of = field.split(" ")
            _add_field(kind, int(number), label, of)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # pyright: ignore[reportAttributeAccessIssue] - protobuf's stubs omit it
    return pool


def _add_field(kind: Any, number: int, name: str, of: str) -> None:
    bare = of.rstrip("*%")
    field = kind.field.add(name=name, number=number, label=_OPTIONAL if of == bare else _REPEATED)
    if of.endswith("%"):
        entry = kind.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string")
        _add_field(entry, 2, "value", bare)
        field.type, field.type_name = _MESSAGE, f".{_PACKAGE}.{kind.name}.{entry.name}"
    elif bare in _SCALARS:
        field.type = _SCALARS[bare]
    else:
        field.type, field.type_name = _MESSAGE, f".{_PACKAGE}.{bare}"
