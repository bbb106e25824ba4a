"""Policy-loss reference in plain torch, on packed tokens. Legend: `T` tokens, `B` sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_csrc.types import LOG_RATIO_MAX, LossSpec, PolicyLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequences:
    """Sequence structure of packed tokens: which count, and the sequence of each."""

    mask: Tensor
    """`[T]` bool."""
    of_token: Tensor
    """`[T]` int64, sequence of each token."""
    counts: Tensor
    """`[B]` masked tokens per sequence, at least 1."""
    num_live: Tensor
    """`[]` sequences with a masked token."""

    def mean(self, x: Tensor) -> Tensor:
        """`[T]` mean of x over the masked tokens of each token's sequence."""
        sums = torch.zeros_like(self.counts, dtype=x.dtype).index_add(0, self.of_token, x)
        return (sums / self.counts)[self.of_token]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    """Per-token loss term with its ratio and the masks of tokens that each bound clipped."""

    loss: Tensor
    ratio: Tensor
    high: Tensor
    low: Tensor
    dual: Tensor


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    entropy: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss, metrics and the gradients of logprobs and entropy, by torch's autograd."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (logprobs, entropy) if x is not None]
        tokens = (old_logprobs, advantages, loss_mask, cu_seqlens, spec, denominator)
        second = inputs[1] if entropy is not None else None
        found = differentiable_policy_loss(inputs[0], *tokens, second, ref_logprobs, weights)
    grads = torch.autograd.grad(found.loss, inputs, allow_unused=True, materialize_grads=True)
    return found.loss.detach(), found.metrics, grads[0], grads[1] if entropy is not None else None


def differentiable_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    entropy: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Loss and metrics, differentiable by torch's autograd; `loss_mask` is bool.

    `denominator` is what the aggregation divides by: one number, or `[B]`, one divisor for each sequence's tokens.
    """
    mask = loss_mask.bool()
    dtype = torch.float64 if logprobs.dtype == torch.float64 else torch.float32
    zero = torch.zeros((), dtype=dtype, device=logprobs.device)

    def select(x: Tensor) -> Tensor:
        return torch.where(mask, x.to(dtype), zero)

    sequences = _sequences(mask, cu_seqlens, dtype)
    lp, old, adv = select(logprobs), select(old_logprobs).detach(), select(advantages).detach()
    term = _loss_term(spec, lp, old, adv, sequences)
    weighted = term.loss if weights is None else term.loss * select(weights).detach()
    kl = zero.expand_as(lp)
    if spec.kl != "none" and ref_logprobs is not None:
        kl = _kl(spec, lp - select(ref_logprobs).detach())
    entropies = zero.expand_as(lp) if entropy is None else select(entropy)
    if isinstance(denominator, Tensor) and denominator.dim() == 1:
        scale = (1 / denominator)[sequences.of_token]
    else:
        scale = _token_scale(spec, sequences, dtype) / denominator

    def aggregate(x: Tensor) -> Tensor:
        return (select(x) * scale).sum()

    terms = (aggregate(weighted), aggregate(kl), aggregate(entropies))
    loss = terms[0] + spec.kl_coef * terms[1] - spec.entropy_coef * terms[2]
    d = lp - old
    k3 = d.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp() - 1 - d
    sums = [mask, d, k3, term.high, term.low, term.dual, term.ratio, term.ratio**2]
    count, *rest = [select(x).sum() for x in sums]
    metrics = torch.stack([*terms, count, sequences.num_live.to(dtype), *rest]).detach()
    return PolicyLoss(loss, metrics)


def _sequences(mask: Tensor, cu_seqlens: Tensor, dtype: torch.dtype) -> _Sequences:
    lengths = cu_seqlens.diff().long()
    ids = torch.arange(lengths.shape[0], device=mask.device)
    of_token = torch.repeat_interleave(ids, lengths, output_size=mask.shape[0])
    counts = torch.zeros(lengths.shape[0], dtype=dtype, device=mask.device).index_add(0, of_token, mask.to(dtype))
    return _Sequences(mask=mask, of_token=of_token, counts=counts.clamp(min=1), num_live=(counts > 0).sum())


def _token_scale(spec: LossSpec, sequences: _Sequences, dtype: torch.dtype) -> Tensor:
    if spec.aggregation == "seq-mean-token-mean":
        return (1 / sequences.counts)[sequences.of_token]
    return torch.ones((), dtype=dtype, device=sequences.mask.device)


def _ratio(d: Tensor) -> Tensor:
    return d.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def _loss_term(spec: LossSpec, lp: Tensor, old: Tensor, adv: Tensor, sequences: _Sequences) -> _Term:
    d = lp - old
    none = torch.zeros_like(lp, dtype=torch.bool)
    match spec.loss:
        case "ppo":
            return _clipped(spec, _ratio(d), adv)
        case "gspo":
            # the value is the ratio of the sequence, the gradient that of each token
            mean = sequences.mean(d).detach()
            return _clipped(spec, _ratio(mean) * torch.exp(lp - lp.detach()), adv)
        case "gmpo":
            return _gmpo(spec, d, adv, sequences)
        case "cispo":
            rho = _ratio(d).detach()
            bounded = rho.clamp(1 - spec.clip_low, 1 + spec.clip_high)
            high, low = rho > 1 + spec.clip_high, rho < 1 - spec.clip_low
            return _Term(loss=-bounded * adv * lp, ratio=rho, high=high, low=low, dual=none)
        case "sapo":
            rho = _ratio(d)
            tau = torch.where(adv > 0, spec.tau_pos, spec.tau_neg).to(lp.dtype)
            loss = -adv * (4 / tau) * torch.sigmoid(tau * (rho - 1))
            return _Term(loss=loss, ratio=rho, high=none, low=none, dual=none)
        case "dppo_tv" | "dppo_kl":
            return _dppo(spec, lp, old, adv)
        case "dro":
            loss = -(adv * lp - spec.dro_beta / 2 * d * d)
            return _Term(loss=loss, ratio=_ratio(d), high=none, low=none, dual=none)
        case "reinforce":
            return _Term(loss=-adv * lp, ratio=_ratio(d), high=none, low=none, dual=none)


def _clipped(spec: LossSpec, rho: Tensor, adv: Tensor) -> _Term:
    high = (adv > 0) & (rho > 1 + spec.clip_high)
    low = (adv < 0) & (rho < 1 - spec.clip_low)
    bounded = torch.where(high, 1 + spec.clip_high, torch.where(low, 1 - spec.clip_low, rho))
    dual = torch.zeros_like(high)
    if spec.clip_dual < math.inf:
        dual = (adv < 0) & (rho > spec.clip_dual)
        bounded = torch.where(dual, spec.clip_dual, bounded)
    return _Term(loss=-adv * bounded, ratio=rho, high=high, low=low, dual=dual)


def _gmpo(spec: LossSpec, d: Tensor, adv: Tensor, sequences: _Sequences) -> _Term:
    high = (adv > 0) & (d > spec.clip_high)
    low = (adv < 0) & (d < -spec.clip_low)
    bounded = torch.where(high, spec.clip_high, torch.where(low, -spec.clip_low, d))
    bounded = torch.where(sequences.mask, bounded, torch.zeros_like(bounded))
    rho = _ratio(sequences.mean(bounded))
    return _Term(loss=-adv * rho, ratio=rho, high=high, low=low, dual=torch.zeros_like(high))


def _dppo(spec: LossSpec, lp: Tensor, old: Tensor, adv: Tensor) -> _Term:
    rho = _ratio(lp - old).detach()
    p, q = lp.detach().exp(), old.exp()
    if spec.loss == "dppo_tv":
        high, low = p - q > spec.clip_high, q - p > spec.clip_low
    else:
        kl = q * (old - lp.detach()) + (1 - q) * (_log1mexp(old) - _log1mexp(lp.detach()))
        high, low = (p > q) & (kl > spec.clip_high), (p < q) & (kl > spec.clip_low)
    high, low = high & (adv > 0), low & (adv <= 0)
    kept = torch.where(high | low, torch.zeros_like(rho), rho.clamp(max=spec.ratio_max))
    return _Term(loss=-adv * kept * lp, ratio=rho, high=high, low=low, dual=torch.zeros_like(high))


def _log1mexp(lp: Tensor) -> Tensor:
    return (-torch.expm1(lp)).clamp(min=1e-7).log()


def _kl(spec: LossSpec, d: Tensor) -> Tensor:
    """Estimator of KL(policy || reference) from d = logprob - ref_logprob; with `+`, the gradient is that of k2."""
    k2 = d * d / 2
    k3 = _k3(d).clamp(max=spec.k3_max)
    match spec.kl:
        case "k1":
            return d
        case "abs":
            return d.abs()
        case "k2":
            return k2
        case "k3":
            return k3
        case "k1+":
            return d.detach() + k2 - k2.detach()
        case _:
            return k3.detach() + k2 - k2.detach()


def _k3(d: Tensor) -> Tensor:
    return (-d).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp() - 1 + d
