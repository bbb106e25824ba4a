"""CPU kernels of the ops: log-probs of logits, of vocabulary shards and of an LM head; policy losses; advantages.

Legend: `T` tokens, `V` vocabulary, `H` hidden, `B` sequences or rewards, `M` metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_csrc import reference
from rl_csrc.native import cpu as native
from rl_csrc.native import in_huge_pages, native_spec, new_floats, rows_of, with_adjacent_columns
from rl_csrc.types import GROUP_MODES, MASK_MODES, METRIC_NAMES, NUM_STATS, SCAN_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_csrc.types import LossSpec

CHUNK_BYTES = 64 << 20
"""Memory for the logits, or their gradient, of one vocabulary chunk."""
KEPT_BYTES = 128 << 20
"""Memory for the logits of a chunk of tokens until their loss is known."""
SHARD_ROWS = 512
"""Tokens per chunk where log-probs are merged over vocabulary shards."""
INVARIANT_ROWS = 64
"""Rows of every matrix product in batch-invariant mode."""
INVARIANT_BATCH = 1024
"""Tokens for which vocabulary chunks are sized in a batch-invariant backward pass, whatever their number."""


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
    """Log-probs, entropy, sum of squared probabilities, and the log-sum-exp that backward needs; each `[T]`."""
    num = labels.shape[0]
    scored, lse = new_floats(num), new_floats(num)
    entropies = new_floats(num) if entropy else None
    squares = new_floats(num) if sum_pi_squared else None
    native.logprobs(
        with_adjacent_columns(logits),
        labels,
        temperature,
        softcap or 0.0,
        ignore_index,
        row_index,
        scored,
        entropies,
        squares,
        lse,
        torch.get_num_threads(),
    )
    return scored, entropies, squares, lse


def logprobs_backward(
    logits: Tensor,
    labels: Tensor,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
    out: Tensor,
) -> None:
    """Write the gradient of the logits to `out`, which may be the logits."""
    native.logprobs_backward(
        with_adjacent_columns(logits),
        labels,
        temperature,
        softcap or 0.0,
        ignore_index,
        row_index,
        vocab_start,
        logprobs,
        lse,
        entropy,
        grad_logprobs,
        grad_entropy,
        out,
        torch.get_num_threads(),
    )


def logprob_stats(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
) -> Tensor:
    """Softmax statistics of a vocabulary shard, `[T, 5]`."""
    stats = new_floats(labels.shape[0], NUM_STATS)
    threads = torch.get_num_threads()
    options = (temperature, softcap or 0.0, ignore_index, row_index, vocab_start)
    native.logprob_stats(with_adjacent_columns(logits), labels, *options, stats, threads)
    return stats


def stats_merge(stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, entropy, sum of squared probabilities and log-sum-exp merged over shards; each `[T]`."""
    outs = tuple(new_floats(stats.shape[1]) for _ in range(4))
    native.stats_merge(stats.contiguous(), *outs, torch.get_num_threads())
    return outs  # pyright: ignore[reportReturnType]  # four by construction


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    entropy: Tensor | None,
    ref_logprobs: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss `[]`, metrics `[M]`, and the gradients of logprobs and entropy `[T]`."""
    num = logprobs.shape[0]
    loss, metrics, grad = new_floats(), new_floats(len(METRIC_NAMES)), new_floats(num)
    grad_entropy = None if entropy is None else new_floats(num)
    native.policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        loss_mask,
        cu_seqlens,
        ref_logprobs,
        weights,
        entropy,
        denominator if isinstance(denominator, torch.Tensor) and denominator.dim() == 1 else float(denominator),
        native_spec(native, spec),
        loss,
        metrics,
        grad,
        grad_entropy,
        torch.get_num_threads(),
    )
    return loss, metrics, grad, grad_entropy


def scan_reverse(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    loss_mask: Tensor | None,
    kind: str,
    gamma: float,
    lam: float | Tensor,
    bootstrap_values: Tensor | None,
    mask_mode: str,
    rho: Tensor | None,
    rho_clip: float,
    c_clip: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of a backward recurrence, `[T]`."""
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    native.scan_reverse(
        rewards,
        values,
        cu_seqlens,
        loss_mask,
        rho,
        lam,
        bootstrap_values,
        SCAN_KINDS.index(kind),  # pyright: ignore[reportArgumentType]
        MASK_MODES.index(mask_mode),  # pyright: ignore[reportArgumentType]
        gamma,
        rho_clip,
        c_clip,
        advantages,
        returns,
        torch.get_num_threads(),
    )
    return advantages, returns


def group_norm(rewards: Tensor, group_ids: Tensor | None, cu_groups: Tensor | None, mode: str, eps: float) -> Tensor:
    """Group advantages, `[B]`."""
    out = torch.empty_like(rewards)
    native.group_norm(rewards, group_ids, cu_groups, GROUP_MODES.index(mode), eps, out)  # pyright: ignore[reportArgumentType]
    return out


def masked_moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and centred second moment, `[]` float64."""
    out = torch.empty(3, dtype=torch.float64)
    native.masked_moments(x, mask, out, torch.get_num_threads())
    num, mean, m2 = out.unbind()
    return num, mean, m2


def whiten(
    x: Tensor, mask: Tensor | None, shift_mean: bool, eps: float, moments: tuple[Tensor, Tensor, Tensor] | None
) -> Tensor:
    """Whitened values, of the shape of x."""
    num, mean, m2 = (float(m) for m in (masked_moments(x, mask) if moments is None else moments))
    out = torch.empty_like(x)
    scale = (m2 / max(num - 1, 1) + eps) ** -0.5
    native.whiten(x, mask, mean, scale, 0.0 if shift_mean else mean, out, torch.get_num_threads())
    return out


def _has_tiles(hidden: Tensor) -> bool:
    width = hidden.shape[1]
    return hidden.dtype == torch.bfloat16 and width > 0 and width % 32 == 0 and bool(native.has_tiles())


def _float_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float().contiguous()


def _vocab_chunks(num_vocab: int, num_rows: int, element_bytes: int) -> Iterator[slice]:
    """Vocabulary chunks whose logits for `num_rows` tokens fit in CHUNK_BYTES."""
    step = max(CHUNK_BYTES // element_bytes // max(num_rows, 1) // 64 * 64, 64)
    return (slice(begin, min(begin + step, num_vocab)) for begin in range(0, num_vocab, step))


def _row_chunks(num_rows: int, chunk_rows: int | None, batch_invariant: bool) -> list[slice]:
    step = INVARIANT_ROWS if batch_invariant else (chunk_rows or max(num_rows, 1))
    return [slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]


def _product(rows: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, pad: bool) -> None:
    """`rows @ matrix + bias` into `out`; with `pad` in products of INVARIANT_ROWS rows each, the last one padded."""
    if not pad:
        torch.mm(rows, matrix, out=out) if bias is None else torch.addmm(bias, rows, matrix, out=out)
        return
    for block in _row_chunks(rows.shape[0], None, True):
        part = rows[block]
        part = torch.nn.functional.pad(part, (0, 0, 0, INVARIANT_ROWS - part.shape[0]))
        made = part @ matrix if bias is None else torch.addmm(bias, part, matrix)
        out[block] = made[: block.stop - block.start]


def _chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice, pad: bool) -> Tensor:
    """Float32 logits of one vocabulary chunk; with `pad` always from products of INVARIANT_ROWS rows."""
    part = weight[columns].float().T
    logits = in_huge_pages(new_floats(hidden.shape[0], part.shape[1]))
    _product(hidden, part, None if bias is None else bias[columns], logits, pad)
    return logits


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
    """Log-probs, entropy, sum of squared probabilities and log-sum-exp of the LM head, `[T]` each.

    bfloat16 runs on tiles (AMX or AVX-512) where the CPU has them, other inputs in vocabulary chunks that are merged.
    """
    hidden, weight, bias = (
        with_adjacent_columns(hidden.detach()),
        with_adjacent_columns(weight.detach()),
        _float_bias(bias),
    )
    num = labels.shape[0]
    scored, lse = new_floats(num), new_floats(num)
    entropies, squares = new_floats(num) if entropy else None, new_floats(num) if sum_pi_squared else None
    if _has_tiles(hidden):
        options = (temperature, softcap or 0.0, ignore_index, scored, entropies, squares, lse)
        native.linear_logprobs(hidden, weight, bias, labels, *options, None, None, torch.get_num_threads())
        return scored, entropies, squares, lse
    reference.check_labels(labels, ignore_index, weight.shape[0])
    for rows in _row_chunks(num, chunk_rows, batch_invariant):
        part, options = hidden[rows].float(), (rows_of(temperature, rows), softcap, ignore_index, None)
        stats = [
            logprob_stats(
                _chunk_logits(part, weight, bias, columns, batch_invariant), labels[rows], *options, columns.start
            )
            for columns in _vocab_chunks(weight.shape[0], INVARIANT_ROWS if batch_invariant else part.shape[0], 4)
        ]
        found = stats_merge(torch.stack(stats))
        scored[rows], lse[rows] = found[0], found[3]
        if entropies is not None:
            entropies[rows] = found[1]
        if squares is not None:
            squares[rows] = found[2]
    return scored, entropies, squares, lse


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
    """Gradients of hidden, weight and bias; logits are recomputed one vocabulary chunk at a time.

    Each chunk covers all tokens, so that its gradient of the weight is one product and needs no float32 accumulator.
    With `batch_invariant` the gradient of hidden comes from products of a fixed number of rows; that of the weight is
    a sum over the batch.
    """
    hidden, weight, wide_bias = with_adjacent_columns(hidden), with_adjacent_columns(weight), _float_bias(bias)
    tiles = _has_tiles(hidden)
    num, num_vocab = hidden.shape[0], weight.shape[0]
    ignored = None if ignore_index is None else labels == ignore_index
    clean = hidden if ignored is None else hidden.masked_fill(ignored[:, None], 0)
    operand = clean if tiles else clean.float()
    d_hidden = torch.zeros(hidden.shape, dtype=torch.float32) if need[0] else None
    d_weight = in_huge_pages(torch.empty(weight.shape, dtype=weight.dtype)) if need[1] else None
    d_bias = torch.empty(num_vocab, dtype=weight.dtype) if need[2] else None
    num_chunked = INVARIANT_BATCH if batch_invariant else num
    for columns in _vocab_chunks(num_vocab, num_chunked, 2 if tiles else 4):
        options = (logprobs, lse, entropy, grad_logprobs, grad_entropy)
        if tiles:
            grad = torch.empty(columns.stop - columns.start, (num + 31) // 32 * 32, dtype=torch.bfloat16)
            grad = in_huge_pages(grad)
            scoring = (labels, temperature, softcap or 0.0, ignore_index)
            threads = torch.get_num_threads()
            native.linear_gradient(hidden, weight, wide_bias, *scoring, *options, columns.start, grad, threads)
            grad = grad[:, :num]
        else:
            logits = _chunk_logits(operand, weight, wide_bias, columns, batch_invariant)
            scoring = (temperature, softcap, ignore_index, None, columns.start)
            given = (logprobs, lse, grad_logprobs, entropy, grad_entropy)
            logprobs_backward(logits, labels, *given, *scoring, logits)
            grad = logits.T
        if d_hidden is not None:
            part = weight[columns] if tiles else weight[columns].float()
            if batch_invariant:
                made = torch.empty(hidden.shape, dtype=part.dtype)
                _product(grad.T, part, None, made, True)
                d_hidden.add_(made)
            else:
                d_hidden.add_(grad.T @ part) if tiles else d_hidden.addmm_(grad.T, part)
        if d_weight is not None:
            if d_weight.dtype == operand.dtype:
                torch.mm(grad, operand, out=d_weight[columns])
            else:
                d_weight[columns] = grad @ operand
        if d_bias is not None:
            d_bias[columns] = grad.sum(1, dtype=torch.float32)
    return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss: reference.TokenLoss,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    entropy: bool,
    chunk_rows: int | None,
    need: tuple[bool, bool],
    vocab_start: int,
    gather: reference.Gather | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss, log-probs, entropy, and the gradients of hidden and weight.

    Three matrix products where the logits of a chunk of tokens are kept until their loss is known. Four in bfloat16 on
    tiles with a soft cap or entropies: the logits are recomputed after the loss. Narrow numbers without tiles are
    multiplied in float32, the weight widened by chunks of the vocabulary.
    """
    hidden, weight = with_adjacent_columns(hidden), with_adjacent_columns(weight)
    tiled = _has_tiles(hidden) and softcap is None and not entropy and gather is None
    if gather is None and not (any(need) and (tiled or not _has_tiles(hidden))):
        scoring, how = (temperature, softcap, ignore_index), (entropy, False, chunk_rows, False)
        scored, entropies, _, lse = linear_logprobs_forward(hidden, weight, labels, None, *scoring, *how)
        value, grad, grad_entropy = loss(scored, entropies)
        d_hidden = d_weight = None
        if any(need):
            given, rest = (scored, lse, grad, entropies, grad_entropy), (chunk_rows, False, (*need, False))
            d_hidden, d_weight, _ = linear_logprobs_backward(hidden, weight, labels, None, *given, *scoring, *rest)
        return value, scored, entropies, d_hidden, d_weight
    num, num_vocab = hidden.shape[0], weight.shape[0]
    scored, entropies = torch.zeros(num), torch.zeros(num) if entropy else None
    d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if need[0] else None
    rows_that_fit = max(KEPT_BYTES // (num_vocab * (2 if tiled else 4)) // 32 * 32, 32)
    if gather is not None:  # the same on every rank, although shards may differ in size
        rows_that_fit = chunk_rows or SHARD_ROWS
    chunks = _row_chunks(num, min(chunk_rows or rows_that_fit, rows_that_fit), False)
    d_weight = None
    is_wide = hidden.dtype != torch.float32 and not tiled and gather is None
    if need[1] and (len(chunks) != 1 or is_wide):
        d_weight = in_huge_pages(torch.empty(weight.shape, dtype=torch.float32)).zero_()
    value = loss(scored, entropies)[0] if not chunks else None
    for rows in chunks:
        scoring = (labels[rows], rows_of(temperature, rows), softcap, ignore_index)
        if tiled:
            finish = _tiled_chunk(hidden[rows], weight, scoring, scored[rows])
        else:
            results = (scored[rows], rows_of(entropies, rows))
            finish = _plain_chunk(hidden[rows], weight, scoring, *results, vocab_start, gather)
        # over all tokens scored so far; only this chunk's gradients are used
        value, grad, grad_entropy = loss(scored, entropies)
        if not any(need):
            continue
        transposed = finish(grad[rows], rows_of(grad_entropy, rows))
        if transposed.dtype != hidden.dtype:
            _add_wide_gradients(transposed, hidden[rows], weight, rows_of(d_hidden, rows), d_weight)
            continue
        if d_hidden is not None:
            torch.mm(transposed.T, weight, out=d_hidden[rows])
        if d_weight is not None and hidden.dtype == torch.float32:
            d_weight.addmm_(transposed, hidden[rows])
        elif d_weight is not None:
            d_weight.add_(transposed @ hidden[rows])
        elif need[1]:
            d_weight = in_huge_pages(torch.empty(weight.shape, dtype=weight.dtype))
            torch.mm(transposed, hidden, out=d_weight)
    assert value is not None
    return value, scored, entropies, d_hidden, None if d_weight is None else d_weight.to(weight.dtype)


def _add_wide_gradients(
    transposed: Tensor, hidden: Tensor, weight: Tensor, d_hidden: Tensor | None, d_weight: Tensor | None
) -> None:
    """Fill the gradient of narrow hidden states, and add to the float32 one of the weight, from a float32 gradient."""
    wide, found = hidden.float(), torch.zeros(hidden.shape)
    for columns in _vocab_chunks(weight.shape[0], weight.shape[1], 4):
        if d_hidden is not None:
            found.addmm_(transposed[columns].T, weight[columns].float())
        if d_weight is not None:
            d_weight[columns].addmm_(transposed[columns], wide)
    if d_hidden is not None:
        d_hidden.copy_(found)


_Scoring = tuple[Tensor, float | Tensor, float | None, int | None]


def _plain_chunk(
    hidden: Tensor,
    weight: Tensor,
    scoring: _Scoring,
    scored: Tensor,
    entropies: Tensor | None,
    vocab_start: int,
    gather: reference.Gather | None,
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Score a chunk of tokens; the returned function turns its logits into their gradient, transposed."""
    labels, temperature, softcap, ignore_index = scoring
    dtype = hidden.dtype if gather is not None else torch.float32
    logits = in_huge_pages(torch.empty(hidden.shape[0], weight.shape[0], dtype=dtype))
    if hidden.dtype == dtype:
        torch.mm(hidden, weight.T, out=logits)
    else:
        wide = hidden.float()
        for columns in _vocab_chunks(weight.shape[0], weight.shape[1], 4):
            torch.mm(wide, weight[columns].float().T, out=logits[:, columns])
    options = (temperature, softcap, ignore_index, None)
    if gather is None:
        found = logprobs_forward(logits, labels, *options, entropies is not None, False)
    else:
        found = stats_merge(gather(logprob_stats(logits, labels, *options, vocab_start)))
    scored.copy_(found[0])
    if entropies is not None and found[1] is not None:
        entropies.copy_(found[1])

    def finish(grad: Tensor, grad_entropy: Tensor | None) -> Tensor:
        given = (scored, found[3], grad, entropies, grad_entropy)
        logprobs_backward(logits, labels, *given, *options, vocab_start, logits)
        return logits.T

    return finish


def _tiled_chunk(
    hidden: Tensor, weight: Tensor, scoring: _Scoring, scored: Tensor
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """As `_plain_chunk` on tiles: keeps exponentials in bfloat16; log-probs come from the float32 products."""
    labels, temperature, _, ignore_index = scoring
    num, padded, num_vocab = hidden.shape[0], (hidden.shape[0] + 31) // 32 * 32, weight.shape[0]
    kept, lse = in_huge_pages(torch.empty(num_vocab, padded, dtype=torch.bfloat16)), new_floats(num)
    kept_top = new_floats((num_vocab + 31) // 32, padded)
    threads, bias = torch.get_num_threads(), None
    results = (scored, None, None, lse, kept, kept_top)
    native.linear_logprobs(hidden, weight, bias, labels, temperature, 0.0, ignore_index, *results, threads)

    def finish(grad: Tensor, _grad_entropy: Tensor | None) -> Tensor:
        native.linear_rescale(kept, kept_top, labels, temperature, ignore_index, scored, lse, grad, threads)
        return kept[:, :num]

    return finish
