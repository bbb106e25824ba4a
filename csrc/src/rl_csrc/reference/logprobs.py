"""Log-probabilities in plain torch. Legend: `T` labels, `R` logit rows, `V` vocabulary, `H` hidden, `W` shards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_csrc.errors import LabelError
from rl_csrc.types import LogProbs

TokenLoss = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor | None]]
"""Maps `[T]` log-probs and entropies to the loss and its gradients with respect to both."""
Gather = Callable[[Tensor], Tensor]
"""Maps this rank's statistics `[T, 5]` to those of all ranks, `[W, T, 5]` in rank order."""
_NEG_INF = float("-inf")


def compute_dtype(x: Tensor) -> torch.dtype:
    """Compute dtype: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _temperature_column(temperature: float | Tensor, z: Tensor) -> float | Tensor:
    return temperature.to(z.dtype)[:, None] if isinstance(temperature, Tensor) else temperature


def _scaled_logits(
    logits: Tensor, valid: Tensor, temperature: float | Tensor, softcap: float | None, row_index: Tensor | None
) -> Tensor:
    """Scaled logits `[T, V]`, softcap(logits) / temperature; rows of ignored labels are 0, even if they hold NaN."""
    rows = logits if row_index is None else logits.index_select(0, row_index)
    z = torch.where(valid[:, None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device))
    z = z.to(compute_dtype(logits))
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / _temperature_column(temperature, z)


def _valid_labels(labels: Tensor, ignore_index: int | None) -> Tensor:
    return torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index


def check_labels(labels: Tensor, ignore_index: int | None, vocab_size: int) -> None:
    """Raise LabelError for a label outside the vocabulary (CPU only)."""
    if labels.device.type != "cpu":
        return  # reading the values would synchronize with the device
    bad = _valid_labels(labels, ignore_index) & ((labels < 0) | (labels >= vocab_size))
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise LabelError(
            f"labels[{at}] is {int(labels[at])}; allowed are 0 to {vocab_size - 1} and ignore_index. "
            "Check that the labels were made with this model's tokenizer."
        )


def logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    row_index: Tensor | None = None,
) -> LogProbs:
    """Log-probs of labels `[T]` under logits `[R, V]`. See `rl_csrc.logprobs`."""
    valid = _valid_labels(labels, ignore_index)
    check_labels(labels, ignore_index, logits.shape[1])
    z = _scaled_logits(logits, valid, temperature, softcap, row_index)
    dead = (z.detach() == _NEG_INF).all(dim=1)
    z = torch.where(dead[:, None], torch.zeros_like(z), z)
    lse = torch.logsumexp(z, dim=1)
    target = z.gather(1, torch.where(valid, labels, 0)[:, None])[:, 0]
    zero = torch.zeros_like(lse)
    scored = torch.where(dead, torch.full_like(lse, _NEG_INF), torch.where(valid, target - lse, zero))
    live = valid & ~dead
    entropies = torch.where(live, _entropy(z, lse), zero) if entropy else None
    squares = torch.where(live, (2 * (z - lse[:, None])).exp().sum(dim=1), zero).detach() if sum_pi_squared else None
    return LogProbs(scored, entropies, squares)


def _entropy(z: Tensor, lse: Tensor) -> Tensor:
    probability = (z - lse[:, None]).exp()
    finite = torch.where(z == _NEG_INF, torch.zeros_like(z), z)
    return lse - (probability * finite).sum(dim=1)


def logprob_stats(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
) -> Tensor:
    """Softmax statistics of a vocabulary shard, `[T, 5]`. See `rl_csrc.logprob_stats`."""
    valid = _valid_labels(labels, ignore_index)
    z = _scaled_logits(logits, valid, temperature, softcap, row_index)
    top = z.max(dim=1).values
    centre = torch.where(top == _NEG_INF, torch.zeros_like(top), top)
    shifted = z - centre[:, None]
    e = shifted.exp()
    weighted = torch.where(e > 0, e * shifted, torch.zeros_like(e)).sum(dim=1)
    local = labels - vocab_start
    here = valid & (local >= 0) & (local < z.shape[1])
    target = z.gather(1, torch.where(here, local, 0)[:, None])[:, 0]
    target = torch.where(here, target, torch.full_like(target, _NEG_INF))
    stats = torch.stack([top, e.sum(dim=1), weighted, (e * e).sum(dim=1), target], dim=1)
    ignored = stats.new_tensor([_NEG_INF, 0.0, 0.0, 0.0, float("inf")])
    return torch.where(valid[:, None], stats, ignored)


def stats_merge(stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, entropy, sum of squared probabilities and log-sum-exp (-inf: no finite logit), merged by rank."""
    top = stats[..., 0].max(dim=0).values
    dead = top == _NEG_INF
    centre = torch.where(dead, torch.zeros_like(top), top)
    ignored = stats[0, :, 4] == float("inf")
    total, weighted, squared = (torch.zeros_like(top) for _ in range(3))
    target = torch.full_like(top, _NEG_INF)
    for shard in stats:  # a fixed order, so that all ranks get the same bits
        shift = shard[:, 0] - centre
        scale = shift.exp()
        total = total + shard[:, 1] * scale
        moved = shard[:, 2] + shard[:, 1] * torch.where(scale > 0, shift, torch.zeros_like(shift))
        weighted = weighted + scale * moved
        squared = squared + shard[:, 3] * scale * scale
        target = torch.maximum(target, shard[:, 4])
    zero = torch.zeros_like(top)
    log_total = total.log()
    scored = torch.where(ignored, zero, torch.where(dead, top, (target - centre) - log_total))
    blank = ignored | dead
    entropies = torch.where(blank, zero, log_total - weighted / total)
    squares = torch.where(blank, zero, squared / (total * total))
    return scored, entropies, squares, torch.where(ignored, zero, torch.where(dead, top, centre + log_total))


def coarse_kl(teacher: Tensor, policy: Tensor) -> Tensor:
    """Forward KL(teacher || policy) over K candidate tokens and one outcome for all other tokens: `[T]`.

    A lower bound of the KL over the vocabulary. Differentiable by torch's autograd.

    Args:
        teacher: `[T, K]` log-probs of the candidates.
        policy: `[T, K]` log-probs of the same candidates.
    """
    wide = [x.to(compute_dtype(x)) for x in (teacher, policy)]
    first, second = (torch.cat([x, _log_remainder(x)], -1) for x in wide)
    return (first.exp() * (first - second)).sum(-1)


def _log_remainder(x: Tensor) -> Tensor:
    """Log `[T, 1]` of the probability mass that `[T, K]` log-probs leave, at least 1e-6 (less is rounding)."""
    return (1.0 - x.exp().sum(-1, keepdim=True)).clamp(min=1e-6).log()


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    softcap: float | None = None,
    ignore_index: int | None = -100,
) -> LogProbs:
    """Log-probs of labels under `hidden [T, H] @ weight [V, H].T (+ bias)`, with all logits in the compute dtype."""
    valid = _valid_labels(labels, ignore_index)
    safe = torch.where(valid[:, None], hidden, torch.zeros((), dtype=hidden.dtype, device=hidden.device))
    return logprobs(
        _logits(safe, weight, bias),  # a NaN next to an ignored label must not reach the weight's gradient
        labels,
        temperature=temperature,
        entropy=entropy,
        sum_pi_squared=sum_pi_squared,
        softcap=softcap,
        ignore_index=ignore_index,
    )


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
    """Log-probs, entropy, sum of squared probabilities and log-sum-exp, from the statistics of one shard."""
    check_labels(labels, ignore_index, logits.shape[1])
    stats = logprob_stats(logits, labels, temperature, softcap, ignore_index, row_index, 0)
    scored, entropies, squares, lse = stats_merge(stats[None])
    return scored, entropies if entropy else None, squares if sum_pi_squared else None, lse


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
    """Write the gradient of logits, or of one vocabulary shard, to `out`, from the saved log-probs and log-sum-exp."""
    valid = _valid_labels(labels, ignore_index)
    live = valid & (lse != _NEG_INF)
    z = _scaled_logits(logits, valid, temperature, softcap, row_index)
    lse = torch.where(live, lse, 0.0)
    p = torch.where(live[:, None], (z - lse[:, None]).exp(), 0.0)
    g = torch.where(live, torch.zeros_like(logprobs) if grad_logprobs is None else grad_logprobs, 0.0)
    grad = -g[:, None] * p
    local = labels - vocab_start
    here = live & (local >= 0) & (local < z.shape[1])
    rows = here.nonzero()[:, 0]
    grad[rows, local[rows]] = -(g * torch.expm1(logprobs))[rows]
    if entropy is not None and grad_entropy is not None:
        surprise = torch.where(p > 0, z - lse[:, None] + entropy[:, None], 0.0)
        grad = grad - torch.where(live, grad_entropy, 0.0)[:, None] * p * surprise
    grad = grad / _temperature_column(temperature, z)
    if softcap is not None:
        scored = logits if row_index is None else logits.index_select(0, row_index)
        cap = torch.tanh(torch.where(valid[:, None], scored, 0).to(z.dtype) / softcap)
        grad = grad * (1 - cap * cap)
    grad = grad.to(logits.dtype)
    out.copy_(grad if row_index is None else torch.zeros_like(logits).index_copy(0, row_index, grad))


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
    """Log-probs, entropy, sum of squared probabilities and log-sum-exp of the LM head; all logits are in memory."""
    del chunk_rows, batch_invariant
    options = (temperature, softcap, ignore_index, None, entropy, sum_pi_squared)
    return logprobs_forward(_logits(hidden, weight, bias), labels, *options)


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
    """Gradients of hidden, weight and bias; None for those not in `need`."""
    del chunk_rows, batch_invariant
    logits = _logits(hidden, weight, bias)
    grad = torch.empty_like(logits)
    given = (logprobs, lse, grad_logprobs, entropy, grad_entropy)
    logprobs_backward(logits, labels, *given, temperature, softcap, ignore_index, None, 0, grad)
    safe = torch.where(_valid_labels(labels, ignore_index)[:, None], hidden, torch.zeros_like(hidden)).to(grad.dtype)
    return (
        (grad @ weight.to(grad.dtype)).to(hidden.dtype) if need[0] else None,
        (grad.T @ safe).to(weight.dtype) if need[1] else None,
        grad.sum(0).to(weight.dtype) if need[2] else None,
    )


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
    """Loss, log-probs, entropy and the gradients of hidden and weight; all logits are in memory."""
    del chunk_rows
    logits = _logits(hidden, weight, None)
    options = (temperature, softcap, ignore_index, None)
    if gather is None:
        found = logprobs_forward(logits, labels, *options, entropy, False)
    else:
        found = stats_merge(gather(logprob_stats(logits, labels, *options, vocab_start)))
    entropies = found[1] if entropy else None
    value, grad, grad_entropy = loss(found[0], entropies)
    d_hidden = d_weight = None
    if any(need):
        out = torch.empty_like(logits)
        logprobs_backward(logits, labels, found[0], found[3], grad, entropies, grad_entropy, *options, vocab_start, out)
        d_hidden = (out @ weight.to(out.dtype)).to(hidden.dtype) if need[0] else None
        d_weight = (out.T @ hidden.to(out.dtype)).to(weight.dtype) if need[1] else None
    return value, found[0], entropies, d_hidden, d_weight


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = compute_dtype(hidden)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    return logits if bias is None else logits + bias.to(dtype)
