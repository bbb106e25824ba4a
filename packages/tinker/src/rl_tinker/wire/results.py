"""Encoder of results in protobuf: outputs of `forward_backward`, and samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rl_tinker.wire.protobuf import FLOAT32, LENGTH, STOP, message

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_rollout.types import TokenOutput

_EMPTY = -99999.0
"""Log-prob of a cell of a top-k table that has no token."""


def encode_forward_backward(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Encode the output of one request.

    Args:
        logprobs: (N,) or (N, K) float32 of each row.
        metrics: Values by name; a name ends with how several are reduced: `loss:sum`.
    """
    output = message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    groups: list[list[np.ndarray]] = []
    for row in logprobs:  # a record is rectangular in its trailing axes: K may differ between rows
        if not groups or groups[-1][0].shape[1:] != row.shape[1:]:
            groups.append([])
        groups[-1].append(row)
    for rows in groups:
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
        field = record.fields["logprobs"]
        field.dtype = FLOAT32
        field.data = b"".join(np.ascontiguousarray(row, "<f4").tobytes() for row in rows)
        field.offsets = np.cumsum([0, *(row.size * 4 for row in rows)], dtype="<i8").tobytes()
        field.trailing_shape.extend(rows[0].shape[1:])
    return output.SerializeToString()


def encode_sample(
    outputs: Sequence[TokenOutput],
    *,
    prompt_logprobs: Sequence[float] | None,
    topk_prompt: Sequence[Sequence[tuple[int, float]]] | None,
    k_prompt: int,
    k_sampled: int,
) -> bytes:
    """Encode samples of one prompt.

    Args:
        outputs: Outputs, one for each sample.
        prompt_logprobs: Log-prob of each prompt token; NaN where there is none, as at the first.
        topk_prompt: Most likely tokens at each prompt position; empty where there are none.
        k_prompt: Width of that table.
        k_sampled: Most likely tokens at each sampled position; 0: none are returned.
    """
    response = message("SampleResponse")()
    for output in outputs:
        sequence = response.sequences.add(
            stop_reason=STOP if output.finish_reason == "stop" else LENGTH,
            tokens=np.asarray(output.token_ids, "<i4").tobytes(),
            logprobs=np.asarray(output.logprobs, "<f4").tobytes(),
        )
        if k_sampled:
            _fill_topk(sequence.topk_sampled_logprobs, output.top_logprobs, k_sampled)
    if prompt_logprobs is not None:
        response.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    if topk_prompt is not None:
        _fill_topk(response.topk_prompt_logprobs, topk_prompt, k_prompt)
    return response.SerializeToString()


def _fill_topk(table: Any, rows: Sequence[Sequence[tuple[int, float]]], k: int) -> None:
    ids = np.zeros((len(rows), k), "<i4")
    logprobs = np.full((len(rows), k), _EMPTY, "<f4")
    for index, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row[:k]):
            ids[index, column], logprobs[index, column] = token, logprob
    table.token_ids, table.logprobs = ids.tobytes(), logprobs.tobytes()
    table.k, table.length = k, len(rows)
