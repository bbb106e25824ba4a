"""CUDA kernels of the LM head, in blocks of logits: log-probs and losses of hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_csrc.cuda.kernels import logits_arguments, logprob_stats, logprobs_backward, logprobs_forward, stats_merge
from rl_csrc.cuda.launch import native, new_floats, on_its_device, stream_of
from rl_csrc.native import rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from rl_csrc.reference import Gather, TokenLoss

CHUNK_BYTES = 670 << 20
"""Memory for the logits and gradients that the LM-head ops hold at once."""


GRADIENT_ROWS = 512
"""Rows of float32 logits per chunk of `linear_loss`: each product for logits reads the whole weight. The rest of the
memory collects gradients in the operands' dtype: each product for the weight's gradient reads and writes the whole
float32 accumulator. On an H200, 256 rows took as long at a width of 2048 and 6% longer at 4096."""


INVARIANT_ROWS = 256
"""Rows of every matrix product in batch-invariant mode."""


LEAST_COLUMNS = 1024
"""Least vocabulary columns in a block of recomputed logits."""


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


def _blocks(num: int, each: int) -> list[slice]:
    return [slice(first, min(first + each, num)) for first in range(0, num, each)]


def _padded(hidden: Tensor, height: int) -> Tensor:
    """Hidden states zero-padded to `height` rows: the same kernel and order of sums for any number of rows."""
    return torch.cat([hidden, hidden.new_zeros(height - hidden.shape[0], hidden.shape[1])])


def _matrix(buffer: Tensor, height: int, columns: slice) -> Tensor:
    width = columns.stop - columns.start
    return buffer[: height * width].view(height, width)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=like.device)


class _Head:
    """LM head over chunks of rows, with one buffer of float32 logits that is reused for every chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, pad: bool) -> None:
        self._hidden, self._weight_t, self._bias = hidden, weight.t(), bias
        self._chunk, self._pad = chunk, pad
        self._buffer = new_floats(hidden, chunk, weight.shape[0])

    def chunks(self) -> list[slice]:
        """The rows of each chunk."""
        return _blocks(self._hidden.shape[0], self._chunk)

    def logits(self, rows: slice) -> Tensor:
        """`[rows, V]` float32 logits, valid until the next call."""
        hidden = self._hidden[rows]
        num = hidden.shape[0]
        if self._pad:
            hidden = _padded(hidden, self._chunk)
        logits = self._buffer[: hidden.shape[0]]
        _mm_f32(hidden, self._weight_t, logits)
        if self._bias is not None:
            logits.add_(self._bias)
        return logits[:num]


@on_its_device
def linear_logprobs_forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    entropy: bool,
    sum_pi_squared: bool,
    chunk_rows: int | None,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Log-probs, entropies, sums of squares and log-sum-exps `[T]` of the LM head, chunk by chunk of float32 logits."""
    num = labels.shape[0]
    scored, lse = new_floats(hidden, num), new_floats(hidden, num)
    entropies = new_floats(hidden, num) if entropy else None
    squares = new_floats(hidden, num) if sum_pi_squared else None
    chunk = _chunk_rows(weight.shape[0], num, chunk_rows, batch_invariant)
    head = _Head(hidden, weight, bias, chunk, batch_invariant)
    for rows in head.chunks():
        logits = head.logits(rows)
        arguments = logits_arguments(logits, labels[rows], rows_of(temperature, rows), softcap, ignore_index, None)
        native.logprobs(
            arguments, scored[rows], rows_of(entropies, rows), rows_of(squares, rows), lse[rows], stream_of(hidden)
        )
    return scored, entropies, squares, lse


def _block_shape(hidden: Tensor, vocab: int, chunk_rows: int | None, batch_invariant: bool) -> tuple[int, int]:
    """Shape (rows, columns) of the blocks of logits in backward: all rows if they are not too many."""
    num, width = hidden.shape
    room = CHUNK_BYTES * 3 // 4  # the rest is for the block's float32 gradient of hidden
    each = 4 if hidden.dtype == torch.float32 else 4 + hidden.element_size()
    if batch_invariant:
        rows = INVARIANT_ROWS
    else:
        most = chunk_rows or min((CHUNK_BYTES - room) // (4 * max(width, 1)), room // (each * LEAST_COLUMNS))
        rows = -(-num // max(1, -(-num // most)))  # blocks of one size
    columns = room // (each * max(rows, 1))
    return max(rows, 1), min(vocab, max(columns - columns % 128, LEAST_COLUMNS))


@on_its_device
def linear_logprobs_backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    chunk_rows: int | None,
    batch_invariant: bool,
    need: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias; logits are recomputed block by block.

    The log-sum-exp of every row is known, so a block need not hold whole rows: it holds some columns of all rows, if
    those are not too many. The gradient of the weight is then one product, and only that of hidden sums over blocks.
    """
    num, vocab = labels.shape[0], weight.shape[0]
    if ignore_index is not None:  # a NaN next to an ignored label must not reach the gradient of the weight
        hidden = hidden.masked_fill((labels == ignore_index)[:, None], 0)
    height, width = _block_shape(hidden, vocab, chunk_rows, batch_invariant)
    row_blocks, column_blocks = _blocks(num, height), _blocks(vocab, width)
    buffer = new_floats(hidden, height * width)
    narrow = None if hidden.dtype == torch.float32 else hidden.new_empty(height * width)
    grad_hidden = torch.empty_like(hidden) if need[0] else None
    grad_weight = None
    if need[1]:
        grad_weight = torch.empty_like(weight) if len(row_blocks) == 1 else _zeros(weight.shape, weight)
    grad_bias = _zeros((vocab,), weight) if need[2] else None
    for rows in row_blocks:
        part = _padded(hidden[rows], height) if batch_invariant else hidden[rows]
        total = None if grad_hidden is None else _zeros(part.shape, part)
        scored = slice(0, rows.stop - rows.start)
        for columns in column_blocks:
            logits = _matrix(buffer, part.shape[0], columns)
            _mm_f32(part, weight[columns].t(), logits)
            if bias is not None:
                logits.add_(bias[columns])
            gradient = logits if narrow is None else _matrix(narrow, part.shape[0], columns)
            logprobs_backward(
                logits[scored], labels[rows], logprobs[rows], lse[rows], rows_of(grad_logprobs, rows),
                rows_of(entropy, rows), rows_of(grad_entropy, rows), rows_of(temperature, rows), softcap, ignore_index,
                None, columns.start, gradient[scored],
            )  # fmt: skip
            gradient[scored.stop :].zero_()
            if total is not None:
                _addmm_f32(total, gradient, weight[columns])
            if grad_weight is not None and len(row_blocks) == 1:
                torch.mm(gradient.t(), part, out=grad_weight[columns])
            elif grad_weight is not None:
                _addmm_f32(grad_weight[columns], gradient.t(), part)
            if grad_bias is not None:
                grad_bias[columns] += gradient.sum(0, dtype=torch.float32)
        if grad_hidden is not None and total is not None:
            grad_hidden[rows] = total[scored]
    buffer = narrow = logits = gradient = total = None  # frees memory for the converted gradients
    grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
    return grad_hidden, grad_weight, None if grad_bias is None else grad_bias.to(weight.dtype)


class _HeadGradients:
    """Gradients of the LM head's operands, summed over chunks; the weight's in float32."""

    def __init__(self, hidden: Tensor, weight: Tensor, need: tuple[bool, bool], chunk: int) -> None:
        self._operand, self._weight = hidden, weight
        self._hidden = torch.empty_like(hidden) if need[0] else None
        self._total = _zeros(weight.shape, weight) if need[1] else None
        vocab = weight.shape[0]
        fitting = (CHUNK_BYTES - 4 * chunk * vocab) // (hidden.element_size() * vocab)
        held = max(chunk, min(fitting // chunk * chunk, -(-hidden.shape[0] // chunk) * chunk))
        self._held = None if hidden.dtype == torch.float32 else hidden.new_empty(held, vocab)
        self._held_now: Tensor | None = None
        self._first = 0  # row of the first gradient in `_held`

    def room(self, rows: slice, logits: Tensor) -> Tensor:
        """Memory `[rows, V]` for the chunk's gradient: the float32 logits, or the next rows of the collection."""
        if self._held is None:
            self._held_now = logits
            return logits
        self._held_now = self._held[: rows.stop - self._first]
        return self._held[rows.start - self._first : rows.stop - self._first]

    def add(self, rows: slice) -> None:
        """Add the chunk's gradient; run the products of the collected rows once another chunk would not fit."""
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

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of hidden and weight in the operands' dtypes."""
        self._held = self._held_now = None
        return self._hidden, None if self._total is None else self._total.to(self._weight.dtype)


@on_its_device
def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss: TokenLoss,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    entropy: bool,
    chunk_rows: int | None,
    need: tuple[bool, bool],
    vocab_start: int,
    gather: Gather | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss, log-probs, entropies and the gradients of hidden and weight, with three matrix products per chunk."""
    num = labels.shape[0]
    scored = _zeros((num,), hidden)
    entropies = torch.zeros_like(scored) if entropy else None
    chunk = _chunk_rows(weight.shape[0], num, chunk_rows or GRADIENT_ROWS, batch_invariant=False)
    gradients = _HeadGradients(hidden, weight, need, chunk)
    head = _Head(hidden, weight, None, chunk, pad=False)
    value = loss(scored, entropies)[0] if not num else None
    for rows in head.chunks():
        logits = head.logits(rows)
        options = (rows_of(temperature, rows), softcap, ignore_index, None)
        if gather is None:
            found = logprobs_forward(logits, labels[rows], *options, entropies is not None, False)
        else:
            found = stats_merge(gather(logprob_stats(logits, labels[rows], *options, vocab_start)))
        scored[rows] = found[0]
        if entropies is not None and found[1] is not None:
            entropies[rows] = found[1]
        value, grad, grad_entropy = loss(scored, entropies)  # only this chunk's gradients are used
        if any(need):
            given = (scored[rows], found[3], grad[rows], rows_of(entropies, rows), rows_of(grad_entropy, rows))
            out = gradients.room(rows, logits)
            logprobs_backward(logits, labels[rows], *given, *options, vocab_start, out)
            gradients.add(rows)
    head = logits = out = None  # frees memory for the converted gradients
    assert value is not None
    return (value, scored, entropies, *gradients.finish())
