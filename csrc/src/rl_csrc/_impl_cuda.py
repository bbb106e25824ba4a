"""The ops on CUDA: checked tensors in, new tensors out, launched on torch's current stream.

Every function has the signature of its namesake in `_impl_cpu`. torch allocates all memory, nothing waits for the
device, and every call may be captured in a CUDA graph, but for those that say otherwise. Legend: `T` tokens, `R` logit
rows, `V` vocabulary, `H` hidden, `B` sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_csrc import _cuda  # pyright: ignore[reportAttributeAccessIssue]  # built with RL_CSRC_CUDA=ON only
from rl_csrc._types import (
    AGGREGATIONS,
    GROUP_MODES,
    KLS,
    LOSSES,
    MASK_MODES,
    METRIC_NAMES,
    NUM_STATS,
    SCAN_KINDS,
    LossSpec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types the kernels take, and their codes in the C interface."""
CHUNK_BYTES = 670 << 20
"""Room for the logits and gradients that the LM-head ops hold at once."""
GRADIENT_ROWS = 256
"""Rows of float32 logits at a time where gradients are made; the rest of the room collects gradients in the operands'
type, because every product for the gradient of the weight reads and writes its whole float32 total."""
INVARIANT_ROWS = 256
"""Rows of every matrix product where the bits may not depend on the batch."""

_COUNTERS = 1 << 14
_counters: dict[int, Tensor] = {}
"""Per device, zeros that kernels count in and leave zero; entry 0 stays unused."""
_taken: dict[tuple[int, int], int] = {}
"""Entry of each (device, stream), and how many entries each (device, -1) has given away."""


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _counter(device: torch.device) -> Tensor:
    """`[1]` a zero that a kernel counts in and leaves zero; launches that may run at once never share one.

    Each stream has its own, and so has each launch captured in a graph.
    """
    stream = torch.cuda.current_stream(device)
    index, key = stream.device_index, (stream.device_index, stream.cuda_stream)
    capturing = torch.cuda.is_current_stream_capturing()
    pool = _counters.get(index)
    if pool is None and not capturing:
        pool = _counters[index] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    entry = _taken.get(key) if not capturing else None
    if entry is None:
        entry = _taken.get((index, -1), 0) + 1
        if pool is None or entry >= _COUNTERS:
            return torch.zeros(1, dtype=torch.int32, device=device)
        _taken[index, -1] = entry
        if not capturing:
            _taken[key] = entry
    assert pool is not None
    return pool[entry : entry + 1]


def _f32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _logits(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int = 0,
) -> Any:
    per_row = isinstance(temperature, torch.Tensor)
    return _cuda.Logits(
        data=logits.data_ptr(),
        row_stride=logits.stride(0) if logits.shape[0] > 1 else logits.shape[1],
        vocab=logits.shape[1],
        rows=labels.shape[0],
        dtype=DTYPES[logits.dtype],
        labels=labels.data_ptr(),
        row_index=_at(row_index),
        temperature=temperature.data_ptr() if per_row else 0,
        scalar_temperature=1.0 if per_row else float(temperature),
        softcap=softcap or 0.0,
        ignore_index=ignore_index,
        vocab_start=vocab_start,
    )


def _row_stride(x: Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


# ---- log-probs ------------------------------------------------------------------------------------------------------


def logprobs_forward(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    entropy: bool,
    sum_pi_squared: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Log-probs, entropy, sum of squared probabilities and log-sum-exp, `[T]` each, in one read of the logits."""
    num = labels.shape[0]
    scored, lse = _f32(logits, num), _f32(logits, num)
    entropies = _f32(logits, num) if entropy else None
    squares = _f32(logits, num) if sum_pi_squared else None
    arguments = _logits(logits, labels, temperature, softcap, ignore_index, row_index)
    _cuda.logprobs(arguments, scored.data_ptr(), _at(entropies), _at(squares), lse.data_ptr(), _stream(logits))
    return scored, entropies, squares, lse


def logprobs_backward(
    logits: Tensor,
    labels: Tensor,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
    out: Tensor,
) -> None:
    """Write the gradient of the logits to `out` (the logits themselves, or a tensor like them)."""
    arguments = _logits(logits, labels, temperature, softcap, ignore_index, row_index, vocab_start)
    if row_index is not None:
        _zero_unscored(out, row_index)
    _cuda.logprobs_backward(
        arguments,
        logprobs.data_ptr(),
        lse.data_ptr(),
        _at(entropy),
        grad_logprobs.data_ptr(),
        _at(grad_entropy),
        out.data_ptr(),
        _row_stride(out),
        _stream(logits),
    )


def _zero_unscored(out: Tensor, row_index: Tensor) -> None:
    is_scored = torch.zeros(out.shape[0], dtype=torch.bool, device=out.device)
    is_scored[row_index] = True
    _cuda.zero_rows(out.data_ptr(), DTYPES[out.dtype], _row_stride(out), *out.shape, is_scored.data_ptr(), _stream(out))


def logprob_stats(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
) -> Tensor:
    """Statistics of a vocabulary shard, `[T, 5]`."""
    stats = _f32(logits, labels.shape[0], NUM_STATS)
    arguments = _logits(logits, labels, temperature, softcap, ignore_index, row_index, vocab_start)
    _cuda.logprob_stats(arguments, stats.data_ptr(), _stream(logits))
    return stats


def stats_merge(stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, entropy, sum of squared probabilities and log-sum-exp of `[W, T, 5]`, merged in rank order."""
    stats = stats.contiguous()
    scored, entropies, squares, lse = (_f32(stats, stats.shape[1]) for _ in range(4))
    _cuda.stats_merge(
        stats.data_ptr(),
        *stats.shape[:2],
        scored.data_ptr(),
        entropies.data_ptr(),
        squares.data_ptr(),
        lse.data_ptr(),
        _stream(stats),
    )
    return scored, entropies, squares, lse


# ---- policy losses --------------------------------------------------------------------------------------------------


def _spec(spec: LossSpec) -> Any:
    return _cuda.LossSpec(
        loss=LOSSES.index(spec.loss),
        kl=KLS.index(spec.kl),
        aggregation=AGGREGATIONS.index(spec.aggregation),
        clip_low=spec.clip_low,
        clip_high=spec.clip_high,
        clip_dual=spec.clip_dual,
        ratio_max=spec.ratio_max,
        tau_pos=spec.tau_pos,
        tau_neg=spec.tau_neg,
        dro_beta=spec.dro_beta,
        kl_coef=spec.kl_coef,
        entropy_coef=spec.entropy_coef,
    )


def _tokens(
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref: Tensor | None,
    weights: Tensor | None,
    denominator: float | Tensor,
) -> tuple[Any, Tensor | None]:
    """The per-token inputs, and the device scalar they point to, which must outlive the launch call."""
    scalar = denominator.float().reshape(1) if isinstance(denominator, torch.Tensor) else None
    tokens = _cuda.LossTokens(
        old_logprobs=old.data_ptr(),
        advantages=advantages.data_ptr(),
        loss_mask=mask.data_ptr(),
        ref_logprobs=_at(ref),
        weights=_at(weights),
        denominator=_at(scalar),
        scalar_denominator=1.0 if isinstance(denominator, torch.Tensor) else float(denominator),
    )
    return tokens, scalar


def policy_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    entropy: Tensor | None,
    ref: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss `[]`, metrics `[M]`, and the gradients of the log-probs and the entropies, `[T]`; one launch."""
    num, num_sequences = logprobs.shape[0], cu_seqlens.shape[0] - 1
    ref = ref if spec.kl != "none" else None
    native = _spec(spec)
    tokens, _scalar = _tokens(old, advantages, mask, ref, weights, denominator)
    loss, metrics, grad = _f32(logprobs), _f32(logprobs, len(METRIC_NAMES)), _f32(logprobs, num)
    grad_entropy = None if entropy is None else _f32(logprobs, num)
    partials = _f32(logprobs, _cuda.policy_loss_partials(native, num, num_sequences))
    _cuda.policy_loss(
        native,
        tokens,
        logprobs.data_ptr(),
        _at(entropy),
        cu_seqlens.data_ptr(),
        num,
        num_sequences,
        loss.data_ptr(),
        metrics.data_ptr(),
        grad.data_ptr(),
        _at(grad_entropy),
        partials.data_ptr(),
        _counter(logprobs.device).data_ptr(),
        _stream(logprobs),
    )
    return loss, metrics, grad, grad_entropy


def _token_scale(spec: LossSpec, mask: Tensor, cu_seqlens: Tensor) -> Tensor | None:
    """`[T]` weight of a token within its sequence, for the aggregation that has one."""
    if spec.aggregation != "seq-mean-token-mean":
        return None
    running = torch.zeros(mask.shape[0] + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(mask, 0, out=running[1:])
    counts = running[cu_seqlens].diff().clamp(min=1)
    sequence = torch.repeat_interleave(cu_seqlens.diff(), output_size=mask.shape[0])
    return 1.0 / counts[sequence].float()


def _fused_rows(
    logits: Tensor,
    labels: Tensor,
    spec: LossSpec,
    tokens: Any,
    temperature: float | Tensor,
    softcap: float | None,
    row_index: Tensor | None,
    token_scale: Tensor | None,
    scored: Tensor,
    entropies: Tensor | None,
    out: Tensor,
) -> bool:
    """Fill `scored`, `entropies` and `out`; False, and nothing done, where a row does not fit on the chip."""
    return _cuda.policy_loss_from_logits(
        _logits(logits, labels, temperature, softcap, -100, row_index),
        _spec(spec),
        tokens,
        scored.data_ptr(),
        _at(entropies),
        out.data_ptr(),
        _row_stride(out),
        DTYPES[out.dtype],
        _at(token_scale),
        0,
        0,
        _stream(logits),
    )


def _given_rows(
    logits: Tensor,
    labels: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    out: Tensor,
) -> bool:
    """Gradient of the logits from that of the log-probs, in one read; False where a row does not fit on the chip."""
    no_loss = _cuda.LossTokens(
        old_logprobs=0,
        advantages=0,
        loss_mask=0,
        ref_logprobs=0,
        weights=0,
        denominator=0,
        scalar_denominator=1.0,
    )
    return _cuda.policy_loss_from_logits(
        _logits(logits, labels, temperature, softcap, ignore_index, None),
        _spec(LossSpec()),
        no_loss,
        0,
        0,
        out.data_ptr(),
        _row_stride(out),
        DTYPES[out.dtype],
        0,
        grad_logprobs.data_ptr(),
        _at(grad_entropy),
        _stream(logits),
    )


def policy_loss_from_logits(
    logits: Tensor,
    labels: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    ref: Tensor | None,
    weights: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    row_index: Tensor | None,
    entropy: bool,
    out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss, metrics, log-probs and entropies; `out` receives the gradient of the logits. Two launches, one pass."""
    ref = ref if spec.kl != "none" else None
    with_entropy = entropy or spec.entropy_coef != 0.0
    if out is not None and row_index is not None:
        _zero_unscored(out, row_index)
    if out is not None:
        scored = _f32(logits, labels.shape[0])
        entropies = torch.empty_like(scored) if with_entropy else None
        tokens, _scalar = _tokens(old, advantages, mask, ref, weights, denominator)
        scale = _token_scale(spec, mask, cu_seqlens)
        if _fused_rows(logits, labels, spec, tokens, temperature, softcap, row_index, scale, scored, entropies, out):
            loss, metrics, _, _ = policy_loss(
                scored, old, advantages, mask, cu_seqlens, spec, denominator, entropies, ref, weights
            )
            return loss, metrics, scored, entropies
    scored, entropies, _, lse = logprobs_forward(
        logits, labels, temperature, softcap, -100, row_index, with_entropy, False
    )
    loss, metrics, grad, grad_entropy = policy_loss(
        scored, old, advantages, mask, cu_seqlens, spec, denominator, entropies, ref, weights
    )
    if out is not None:
        logprobs_backward(
            logits, labels, scored, lse, grad, entropies, grad_entropy, temperature, softcap, -100, row_index, 0, out
        )
    return loss, metrics, scored, entropies


# ---- LM head --------------------------------------------------------------------------------------------------------


def _chunk_rows(vocab: int, rows: int, chunk_rows: int | None, batch_invariant: bool) -> int:
    if batch_invariant:
        return INVARIANT_ROWS
    if chunk_rows is None:
        fitting = max(16, CHUNK_BYTES // (4 * vocab))
        chunk_rows = -(-rows // max(1, -(-rows // fitting)))  # chunks of one size
        chunk_rows = min(fitting, chunk_rows + -chunk_rows % 128)
    return max(1, min(chunk_rows, rows))


def _mm_f32(a: Tensor, b: Tensor, out: Tensor) -> None:
    """`out = a @ b` with the accumulators stored as they are, in float32."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def _addmm_f32(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, accumulated in float32."""
    if a.dtype == torch.float32:
        torch.addmm(total, a, b, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


class _Head:
    """The LM head in chunks of rows: one buffer of float32 logits, used again for every chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, pad: bool) -> None:
        self._hidden, self._weight_t, self._bias = hidden, weight.t(), bias
        self._chunk, self._pad = chunk, pad
        self._buffer = _f32(hidden, chunk, weight.shape[0])

    def chunks(self) -> list[slice]:
        """The rows of each chunk."""
        num = self._hidden.shape[0]
        return [slice(first, min(first + self._chunk, num)) for first in range(0, num, self._chunk)]

    def logits(self, rows: slice) -> Tensor:
        """`[rows, V]` float32 logits, valid until the next call."""
        hidden = self._hidden[rows]
        num = hidden.shape[0]
        if (
            self._pad and num < self._chunk
        ):  # the same product, so the same kernel and order of sums, for any number of rows
            hidden = torch.cat([hidden, hidden.new_zeros(self._chunk - num, hidden.shape[1])])
        logits = self._buffer[: hidden.shape[0]]
        _mm_f32(hidden, self._weight_t, logits)
        if self._bias is not None:
            logits.add_(self._bias)
        return logits[:num]


def _rows_of(x: float | Tensor, rows: slice) -> float | Tensor:
    return x[rows] if isinstance(x, torch.Tensor) else x


def linear_logprobs_forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    entropy: bool,
    chunk_rows: int | None,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probs, entropies and log-sum-exps `[T]` of the LM head, chunk by chunk of float32 logits."""
    num = labels.shape[0]
    scored, lse = _f32(hidden, num), _f32(hidden, num)
    entropies = _f32(hidden, num) if entropy else None
    chunk = _chunk_rows(weight.shape[0], num, chunk_rows, batch_invariant)
    head = _Head(hidden, weight, bias, chunk, batch_invariant)
    for rows in head.chunks():
        logits = head.logits(rows)
        arguments = _logits(logits, labels[rows], _rows_of(temperature, rows), softcap, ignore_index, None)
        _cuda.logprobs(
            arguments,
            scored[rows].data_ptr(),
            0 if entropies is None else entropies[rows].data_ptr(),
            0,
            lse[rows].data_ptr(),
            _stream(hidden),
        )
    return scored, entropies, lse


def _without_ignored(hidden: Tensor, valid: Tensor) -> Tensor:
    """`hidden` with the rows of ignored labels zeroed: a NaN there must not reach the gradient of the weight."""
    return hidden.masked_fill(~valid[:, None], 0)


def linear_logprobs_backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    chunk_rows: int | None,
    batch_invariant: bool,
    need: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias; the logits are computed again, their gradient overwrites them."""
    num = labels.shape[0]
    if ignore_index is not None:
        hidden = _without_ignored(hidden, labels != ignore_index)
    chunk = _chunk_rows(weight.shape[0], num, chunk_rows or GRADIENT_ROWS, batch_invariant)
    gradients = _HeadGradients(hidden, weight, need, chunk)
    head = _Head(hidden, weight, bias, chunk, batch_invariant)
    for rows in head.chunks():
        logits = head.logits(rows)
        out = gradients.room(rows, logits)
        upstream = grad_logprobs[rows], None if grad_entropy is None else grad_entropy[rows]
        row_temperature = _rows_of(temperature, rows)
        if not _given_rows(logits, labels[rows], *upstream, row_temperature, softcap, ignore_index, out):
            row_entropy = None if entropy is None else entropy[rows]
            logprobs_backward(
                logits, labels[rows], logprobs[rows], lse[rows], upstream[0], row_entropy, upstream[1],
                row_temperature, softcap, ignore_index, None, 0, logits,
            )  # fmt: skip
            if out is not logits:
                out.copy_(logits)
        gradients.add(rows)
    head = logits = out = None  # room for the converted gradients
    return gradients.finish()


class _HeadGradients:
    """Gradients of the LM head's operands, summed over chunks; the weight's in float32."""

    def __init__(self, hidden: Tensor, weight: Tensor, need: tuple[bool, bool, bool], chunk: int) -> None:
        self._operand, self._weight = hidden, weight
        self._hidden = torch.empty_like(hidden) if need[0] else None
        self._total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need[1] else None
        self._bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if need[2] else None
        vocab = weight.shape[0]
        fitting = (CHUNK_BYTES - 4 * chunk * vocab) // (hidden.element_size() * vocab)
        held = max(chunk, min(fitting // chunk * chunk, -(-hidden.shape[0] // chunk) * chunk))
        self._held = None if hidden.dtype == torch.float32 else hidden.new_empty(held, vocab)
        self._held_now: Tensor | None = None
        self._first = 0  # the row whose gradient stands first in `_held`

    def room(self, rows: slice, logits: Tensor) -> Tensor:
        """`[rows, V]` where the chunk's gradient goes: over float32 logits, or beside others collected."""
        if self._held is None:
            self._held_now = logits
            return logits
        self._held_now = self._held[: rows.stop - self._first]
        return self._held[rows.start - self._first : rows.stop - self._first]

    def add(self, rows: slice) -> None:
        """The chunk's gradient is there; multiply what was collected when there is no room for another chunk."""
        if self._held is not None and rows.stop < self._operand.shape[0]:
            chunk = rows.stop - rows.start
            if rows.stop - self._first + chunk <= self._held.shape[0]:
                return
        done, gradient = slice(self._first, rows.stop), self._held_now
        assert gradient is not None
        self._first = rows.stop
        if self._hidden is not None:
            torch.mm(gradient, self._weight, out=self._hidden[done])
        if self._total is not None:
            _addmm_f32(self._total, gradient.t(), self._operand[done])
        if self._bias is not None:
            self._bias += gradient.sum(0, dtype=torch.float32)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients in the operands' types."""
        self._held = self._held_now = None
        dtype = self._weight.dtype
        weight = None if self._total is None else self._total.to(dtype)
        return self._hidden, weight, None if self._bias is None else self._bias.to(dtype)


def policy_loss_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    ref: Tensor | None,
    weights: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    entropy: bool,
    chunk_rows: int | None,
    need: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss, metrics, log-probs, entropies and the gradients of hidden and weight: three products per chunk."""
    ref = ref if spec.kl != "none" else None
    num = labels.shape[0]
    with_entropy = entropy or spec.entropy_coef != 0.0
    scored = _f32(hidden, num)
    entropies = torch.empty_like(scored) if with_entropy else None
    scale = _token_scale(spec, mask, cu_seqlens)
    hidden = _without_ignored(hidden, mask)
    chunk = _chunk_rows(weight.shape[0], num, chunk_rows or GRADIENT_ROWS, batch_invariant=False)
    gradients = _HeadGradients(hidden, weight, (*need, False), chunk)
    head = _Head(hidden, weight, None, chunk, pad=False)
    for rows in head.chunks():
        logits = head.logits(rows)
        out = gradients.room(rows, logits)

        def part(x: Tensor | None, rows: slice = rows) -> Tensor | None:
            return None if x is None else x[rows]

        tokens, _scalar = _tokens(old[rows], advantages[rows], mask[rows], part(ref), part(weights), denominator)
        row_temperature = _rows_of(temperature, rows)
        fused = _fused_rows(
            logits, labels[rows], spec, tokens, row_temperature, softcap, None, part(scale), scored[rows],
            part(entropies), out,
        )  # fmt: skip
        if not fused:
            _unfused_rows(
                logits, labels[rows], old[rows], advantages[rows], mask[rows], spec, denominator, part(ref),
                part(weights), row_temperature, softcap, part(scale), scored[rows], part(entropies), out,
            )  # fmt: skip
        gradients.add(rows)
    head = logits = out = None  # room for the converted gradients
    loss, metrics, _, _ = policy_loss(
        scored, old, advantages, mask, cu_seqlens, spec, denominator, entropies, ref, weights
    )
    return (loss, metrics, scored, entropies, *gradients.finish()[:2])


def _unfused_rows(
    logits: Tensor,
    labels: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    ref: Tensor | None,
    weights: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    token_scale: Tensor | None,
    scored: Tensor,
    entropies: Tensor | None,
    out: Tensor,
) -> None:
    """What `_fused_rows` does, in three passes, for rows that do not fit on the chip."""
    found, found_entropy, _, lse = logprobs_forward(
        logits, labels, temperature, softcap, -100, None, entropies is not None, False
    )
    scored.copy_(found)
    if entropies is not None and found_entropy is not None:
        entropies.copy_(found_entropy)
    rows_each = torch.arange(labels.shape[0] + 1, device=labels.device)  # every token a sequence: no token weight
    _, _, grad, grad_entropy = policy_loss(
        scored, old, advantages, mask, rows_each, spec, denominator, entropies, ref, weights
    )
    if token_scale is not None:
        grad *= token_scale
        grad_entropy = None if grad_entropy is None else grad_entropy * token_scale
    logprobs_backward(
        logits, labels, scored, lse, grad, entropies, grad_entropy, temperature, softcap, -100, None, 0, logits
    )
    if out is not logits:
        out.copy_(logits)


# ---- estimators -----------------------------------------------------------------------------------------------------


def scan_reverse(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    loss_mask: Tensor | None,
    kind: str,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None,
    mask_mode: str,
    rho: Tensor | None,
    rho_clip: float,
    c_clip: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns `[T]`; one block per sequence."""
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    per_sequence = isinstance(lam, torch.Tensor)
    _cuda.scan_reverse(
        rewards.data_ptr(),
        _at(values),
        _at(loss_mask),
        _at(rho),
        lam.data_ptr() if per_sequence else 0,
        _at(bootstrap),
        cu_seqlens.data_ptr(),
        cu_seqlens.shape[0] - 1,
        1.0 if per_sequence else float(lam),
        gamma,
        rho_clip,
        c_clip,
        [*SCAN_KINDS].index(kind),
        [*MASK_MODES].index(mask_mode),
        advantages.data_ptr(),
        returns.data_ptr(),
        _stream(rewards),
    )
    return advantages, returns


MAX_SCATTERED = 1 << 15
"""Rewards beyond which arbitrary group ids are sorted first: finding the members costs rewards times groups."""


def group_norm(rewards: Tensor, group_ids: Tensor | None, cu_groups: Tensor | None, mode: str, eps: float) -> Tensor:
    """Group advantages `[B]`; a warp per group."""
    num = rewards.shape[0]
    order = None
    if group_ids is not None and num > MAX_SCATTERED:  # waits for the device: the number of groups is a shape
        order = torch.argsort(group_ids, stable=True)
        counts = torch.unique_consecutive(group_ids[order], return_counts=True)[1]
        cu_groups = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rewards, group_ids = rewards[order], None
    advantages = torch.empty_like(rewards)
    _cuda.group_norm(
        rewards.data_ptr(),
        _at(group_ids),
        _at(cu_groups),
        num,
        0 if cu_groups is None else cu_groups.shape[0] - 1,
        [*GROUP_MODES].index(mode),
        eps,
        advantages.data_ptr(),
        _stream(rewards),
    )
    return advantages if order is None else torch.empty_like(advantages).index_copy_(0, order, advantages)


def masked_moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared distances, float64 scalars."""
    return tuple(_moments(x, mask))  # pyright: ignore[reportReturnType]  # three rows


def _moments(x: Tensor, mask: Tensor | None) -> Tensor:
    found = torch.empty(3, dtype=torch.float64, device=x.device)
    partials = torch.empty(3 * _cuda.moments_blocks(x.numel()), dtype=torch.float64, device=x.device)
    _cuda.masked_moments(
        x.data_ptr(),
        _at(mask),
        x.numel(),
        found.data_ptr(),
        partials.data_ptr(),
        _counter(x.device).data_ptr(),
        _stream(x),
    )
    return found


def whiten(
    x: Tensor, mask: Tensor | None, shift_mean: bool, eps: float, moments: tuple[Tensor, Tensor, Tensor] | None
) -> Tensor:
    """Whitened values, float32 of x's shape; 0 outside the mask."""
    found = _moments(x, mask) if moments is None else torch.stack([*moments]).to(x.device, torch.float64)
    out = torch.empty_like(x, dtype=torch.float32)
    _cuda.whiten(x.data_ptr(), _at(mask), x.numel(), found.data_ptr(), shift_mean, eps, out.data_ptr(), _stream(x))
    return out


# ---- copies ---------------------------------------------------------------------------------------------------------


def _token_bytes(x: Tensor, leading: int) -> int:
    """Bytes of one token of a contiguous tensor whose first `leading` axes are not part of it."""
    return x.element_size() * x.shape[leading:].numel()


def pack(padded: Tensor, lengths: Tensor, starts: Tensor | None, total: int | None) -> tuple[Tensor, Tensor]:
    """Packed values and cu_seqlens. Waits for the device unless `total` says how many tokens there are."""
    padded = padded.contiguous()
    cu_seqlens = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device=padded.device)
    torch.cumsum(lengths, 0, out=cu_seqlens[1:])
    num = int(cu_seqlens[-1]) if total is None else total
    values = padded.new_empty((num, *padded.shape[2:]))
    starts = None if starts is None else starts.long().contiguous()
    _cuda.pack(
        padded.data_ptr(),
        cu_seqlens.data_ptr(),
        _at(starts),
        *padded.shape[:2],
        num,
        _token_bytes(padded, 2),
        values.data_ptr(),
        _stream(padded),
    )
    return values, cu_seqlens


def unpack(values: Tensor, cu_seqlens: Tensor, length: int, padding_value: float, left: bool) -> Tensor:
    """Padded rows `[B, length, ...]`."""
    values = values.contiguous()
    num_sequences = cu_seqlens.shape[0] - 1
    padded = values.new_full((num_sequences, length, *values.shape[1:]), padding_value)
    _cuda.unpack(
        values.data_ptr(),
        cu_seqlens.data_ptr(),
        num_sequences,
        length,
        values.shape[0],
        _token_bytes(values, 1),
        left,
        padded.data_ptr(),
        _stream(values),
    )
    return padded


def bucket_copy(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Copy each source into its destination; a launch per thousand tensors."""
    plain: list[tuple[int, int, int]] = []
    for source, destination in zip(sources, destinations, strict=True):
        dense = source.is_contiguous() and destination.is_contiguous()
        if dense and source.dtype == destination.dtype and source.device == destination.device:
            plain.append((source.data_ptr(), destination.data_ptr(), source.nbytes))
        else:
            destination.copy_(source)
    if plain:
        _cuda.CopyPlan(*map(list, zip(*plain, strict=True))).run(_stream(destinations[0]))


def roll_labels(token_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor | None, ignore_index: int) -> Tensor:
    """Next-token labels `[T]`."""
    labels = torch.empty_like(token_ids)
    _cuda.roll_labels(
        token_ids.data_ptr(),
        cu_seqlens.data_ptr(),
        cu_seqlens.shape[0] - 1,
        token_ids.shape[0],
        _at(loss_mask),
        ignore_index,
        labels.data_ptr(),
        _stream(token_ids),
    )
    return labels


def cp_slice(x: Tensor, cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
    """This context-parallel rank's tokens and their cu_seqlens."""
    x = x.contiguous()
    num = x.shape[0] // cp_size
    out = x.new_empty((num, *x.shape[1:]))
    _cuda.cp_slice(
        x.data_ptr(),
        cu_seqlens.data_ptr(),
        cu_seqlens.shape[0] - 1,
        num,
        _token_bytes(x, 1),
        cp_rank,
        cp_size,
        out.data_ptr(),
        _stream(x),
    )
    return out, torch.div(cu_seqlens, cp_size, rounding_mode="floor")


# ---- digest ---------------------------------------------------------------------------------------------------------


def digest_sum(raw: Tensor, offset: int = 0) -> int:
    """Unfinished digest of the uint8 `[N]` piece at `offset` bytes of its stream. Waits for the device."""
    return int(digest_sum_async(raw, offset)) & ((1 << 64) - 1)


def digest_sum_async(raw: Tensor, offset: int = 0) -> Tensor:
    """The same as a device int64 scalar (the sum's bits), without waiting."""
    total = torch.empty(1, dtype=torch.int64, device=raw.device)
    partials = torch.empty(_cuda.digest_blocks(raw.numel()), dtype=torch.int64, device=raw.device)
    _cuda.digest(
        raw.data_ptr(),
        raw.numel(),
        offset // 8,
        total.data_ptr(),
        partials.data_ptr(),
        _counter(raw.device).data_ptr(),
        _stream(raw),
    )
    return total[0]


def digest_many(pieces: Sequence[Tensor]) -> list[int]:
    """Unfinished digests of uint8 `[N]` pieces, each from byte 0 of a stream. Waits for the device once."""
    totals = torch.zeros(len(pieces), dtype=torch.int64, device=pieces[0].device)
    addresses, sizes = [piece.data_ptr() for piece in pieces], [piece.numel() for piece in pieces]
    _cuda.digest_many(addresses, sizes, totals.data_ptr(), _stream(totals))
    return [total & ((1 << 64) - 1) for total in totals.tolist()]


# ---- delta ----------------------------------------------------------------------------------------------------------

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _delta_starts(table: Tensor) -> Tensor:
    """`[chunks + 1, 2]` where each chunk's values and gap bytes begin; the last line holds the totals."""
    starts = torch.zeros(table.shape[0] + 1, 2, dtype=torch.int64, device=table.device)
    torch.cumsum(table, 0, dtype=torch.int64, out=starts[1:])
    return starts


def delta_encode(fresh: Tensor, base: Tensor, max_fraction: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """Table, gaps and values of `rl_csrc.delta`, or None where they would be too large. Waits for the device once."""
    item, num = fresh.element_size(), fresh.numel()
    table = torch.empty(-(-num // 65536), 2, dtype=torch.int32, device=fresh.device)
    masks = torch.empty(table.shape[0], 2048, dtype=torch.int32, device=fresh.device)
    operands = fresh.data_ptr(), base.data_ptr(), num, item, masks.data_ptr(), table.data_ptr()
    _cuda.delta_encode(*operands, 0, 0, 0, _stream(fresh))
    starts = _delta_starts(table)
    num_changed, num_gaps = starts[-1].tolist()
    if num_gaps + num_changed * item > int(fresh.nbytes * max_fraction) // item * item:
        return None
    gaps = torch.empty(num_gaps, dtype=torch.uint8, device=fresh.device)
    values = torch.empty(num_changed, dtype=_WORDS[item], device=fresh.device)
    _cuda.delta_encode(*operands, starts.data_ptr(), gaps.data_ptr(), values.data_ptr(), _stream(fresh))
    return table, gaps, values


def delta_apply(target: Tensor, table: Tensor, gaps: Tensor, values: Tensor) -> bool:
    """Overwrite the changed elements; False, and nothing written, where the delta does not fit. Waits for the check."""
    item, num = target.element_size(), target.numel()
    if table.shape != (-(-num // 65536), 2):
        return False
    starts = _delta_starts(table)
    bad = (table < 0).any().int().reshape(1)
    if bool(bad) or starts[-1].tolist() != [values.numel(), gaps.numel()]:
        return False
    parts = table.data_ptr(), starts.data_ptr(), gaps.data_ptr(), values.data_ptr()
    _cuda.delta_apply(target.data_ptr(), num, item, *parts, bad.data_ptr(), _stream(target))
    if bool(bad):
        return False
    _cuda.delta_apply(target.data_ptr(), num, item, *parts, 0, _stream(target))
    return True
