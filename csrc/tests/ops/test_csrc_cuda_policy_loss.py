"""Policy losses, recurrences and statistics against float64, on each device that has kernels."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from csrc_kit import Implementation, cu_seqlens, relative_error
from torch import Tensor

from rl_csrc import reference
from rl_csrc.types import AGGREGATIONS, KLS, LOSSES, MASK_MODES, SCAN_KINDS, LossSpec

LENGTHS = [5, 0, 130, 1, 700, 33]
SLOW = pytest.mark.slow


def make_tokens(kernels: Implementation, lengths: list[int] = LENGTHS, seed: int = 0) -> dict[str, Tensor]:
    """A packed batch whose masked-out positions hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    num = sum(lengths)

    def normal(scale: float = 1.0) -> Tensor:
        return torch.randn(num, generator=generator) * scale

    logprobs = -normal().abs()
    mask = torch.rand(num, generator=generator) < 0.7
    found = {
        "logprobs": logprobs,
        "old": logprobs + normal(0.3),
        "advantages": normal(),
        "ref": logprobs + normal(0.3),
        "weights": normal().exp(),
        "entropy": normal().abs(),
    }
    found = {name: torch.where(mask, x, float("nan")) for name, x in found.items()}
    found |= {"mask": mask, "cu_seqlens": cu_seqlens(lengths)}
    return {name: x.to(kernels.device) for name, x in found.items()}


def run_loss(kernels: Implementation, tokens: dict[str, Tensor], spec: LossSpec, denominator: Any = 321.0) -> Any:
    order = ("logprobs", "old", "advantages", "mask", "cu_seqlens")
    extras = (tokens.get("entropy"), tokens.get("ref"), tokens.get("weights"))
    return kernels.call("policy_loss", *(tokens[name] for name in order), spec, denominator, *extras)


def float64_loss(tokens: dict[str, Tensor], spec: LossSpec, denominator: float | Tensor = 321.0) -> Any:
    exact = {name: x.double() if x.is_floating_point() else x for name, x in tokens.items()}
    logprobs, entropy = (exact[name].requires_grad_() for name in ("logprobs", "entropy"))
    found = reference.differentiable_policy_loss(
        logprobs,
        exact["old"],
        exact["advantages"],
        exact["mask"],
        exact["cu_seqlens"],
        spec,
        denominator,
        entropy=entropy,
        ref_logprobs=exact["ref"],
        weights=exact["weights"],
    )
    return found.loss, found.metrics, *torch.autograd.grad(found.loss, [logprobs, entropy])


@pytest.mark.process
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_losses_match_float64(kernels: Implementation, loss: Any, aggregation: Any) -> None:
    bound = 0.05 if loss.startswith("dppo") else 0.2
    spec = LossSpec(
        loss=loss,
        aggregation=aggregation,
        clip_low=bound,
        clip_high=bound * 1.3,
        clip_dual=3.0 if loss in ("ppo", "gspo") else math.inf,
        kl="k3",
        kl_coef=0.1,
        entropy_coef=0.01,
    )
    tokens = make_tokens(kernels)
    for ours, theirs in zip(run_loss(kernels, tokens, spec), float64_loss(tokens, spec), strict=True):
        assert relative_error(ours, theirs) < 2e-5
        assert ours.isfinite().all()


@pytest.mark.parametrize("kl", KLS)
def test_kl_estimators_match_float64(kernels: Implementation, kl: Any) -> None:
    spec = LossSpec(kl=kl, kl_coef=0.5)
    tokens = make_tokens(kernels, seed=1)
    for ours, theirs in zip(run_loss(kernels, tokens, spec), float64_loss(tokens, spec), strict=True):
        assert relative_error(ours, theirs) < 2e-5


@pytest.mark.parametrize("kl", ["k3", "k3+"])
def test_k3_is_capped(kernels: Implementation, kl: Any) -> None:
    spec = LossSpec(kl=kl, kl_coef=0.5)
    tokens = make_tokens(kernels, seed=2)
    tokens["ref"] = tokens["logprobs"] + 20 * tokens["advantages"]
    found = run_loss(kernels, tokens, spec)
    for ours, theirs in zip(found, float64_loss(tokens, spec), strict=True):
        assert relative_error(ours, theirs) < 2e-5
    assert float(found[1][1]) * 321 <= 10 * int(tokens["mask"].sum())


@pytest.mark.parametrize("loss", LOSSES)
def test_each_sequence_has_a_denominator_of_its_own(kernels: Implementation, loss: Any) -> None:
    spec = LossSpec(loss=loss, aggregation="seq-mean-token-mean", kl="k2", kl_coef=0.1, entropy_coef=0.01)
    tokens = make_tokens(kernels)
    given = torch.tensor([7.0, 1.0, 400.0, 3.0, 1000.0, 33.0], device=kernels.device)
    for ours, theirs in zip(run_loss(kernels, tokens, spec, given), float64_loss(tokens, spec, given), strict=True):
        assert relative_error(ours, theirs) < 2e-5


def test_ratio_beyond_the_clamp_has_no_gradient(kernels: Implementation) -> None:
    tokens = make_tokens(kernels, [4])
    tokens["mask"][:] = True
    for name in ("logprobs", "old", "advantages", "ref", "weights", "entropy"):
        tokens[name] = torch.ones(4, device=kernels.device)
    tokens["old"] = torch.tensor([-30.0, 40.0, 1.0, 1.0], device=kernels.device)
    tokens["advantages"] = torch.tensor([-1.0, 1.0, 1.0, -1.0], device=kernels.device)
    spec = LossSpec()
    for ours, theirs in zip(run_loss(kernels, tokens, spec), float64_loss(tokens, spec), strict=True):
        assert relative_error(ours, theirs) < 1e-5


def test_loss_is_deterministic_and_takes_a_device_denominator(kernels: Implementation) -> None:
    tokens = make_tokens(kernels, [4001, 70_000, 12_345])
    spec = LossSpec(kl="k2", kl_coef=0.1)
    first = run_loss(kernels, tokens, spec)
    again = run_loss(kernels, tokens, spec, torch.tensor(321, device=kernels.device))
    for ours, theirs in zip(first, again, strict=True):
        assert torch.equal(ours, theirs)
    assert relative_error(first[1], float64_loss(tokens, spec)[1]) < 1e-5


def test_loss_without_optional_arrays(kernels: Implementation) -> None:
    tokens = make_tokens(kernels)
    plain = {name: x for name, x in tokens.items() if name not in ("entropy", "ref", "weights")}
    found = run_loss(kernels, plain, LossSpec())
    blank = dict(tokens)
    blank["weights"] = torch.ones_like(tokens["weights"])
    blank["entropy"] = torch.zeros_like(tokens["entropy"])
    wanted = run_loss(kernels, blank, LossSpec())
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[2], wanted[2])
    assert found[3] is None


@pytest.mark.process
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss not in ("gspo", "gmpo")])
@pytest.mark.parametrize("vocab", [5, 1001, 9000, 40_000])
def test_a_policy_loss_of_rows_matches_float64(kernels: Implementation, loss: Any, vocab: int) -> None:
    check_rows(kernels, vocab, torch.float32, LossSpec(loss=loss, entropy_coef=0.02, kl="k3", kl_coef=0.1))


FULL = [(151_937, torch.bfloat16), (400_000, torch.float32)]
MORE = [
    (vocab, dtype)
    for vocab in (151_936, 151_937, 250_001, 400_000)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if (vocab, dtype) not in FULL
]


@pytest.mark.process
@pytest.mark.parametrize(("vocab", "dtype"), [*FULL, *(pytest.param(*case, marks=SLOW) for case in MORE)], ids=str)
def test_a_policy_loss_of_rows_at_full_vocabularies(kernels: Implementation, vocab: int, dtype: torch.dtype) -> None:
    if kernels.name == "cpu":
        pytest.skip("the smaller vocabularies cover the CPU")
    check_rows(kernels, vocab, dtype, LossSpec(aggregation="seq-mean-token-mean"))


def under_the_head(
    kernels: Implementation, tokens: dict[str, Tensor], spec: LossSpec, count: float, hidden: Tensor, weight: Tensor,
    labels: Tensor, chunk_rows: int | None, need: tuple[bool, bool],
) -> list[Any]:  # fmt: skip
    """Loss, metrics, log-probs, entropies and the gradients of hidden and weight: the loss as kernels make it."""
    given = (tokens["old"], tokens["advantages"], tokens["mask"], tokens["cu_seqlens"], spec, count)
    measured: list[Tensor] = []

    def loss(scored: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        found = kernels.call("policy_loss", scored, *given, entropies, tokens.get("ref"), tokens.get("weights"))
        measured[:] = [found[1]]
        return found[0], found[2], found[3]

    options = (0.9, None, -100, True, chunk_rows, need, 0, None)
    value, *rest = kernels.call("linear_loss", hidden, weight, labels, loss, *options)
    return [value, *measured, *rest]


def check_rows(kernels: Implementation, vocab: int, dtype: torch.dtype, spec: LossSpec) -> None:
    """Under a head whose hidden states are unit vectors, the logits are its weight and so is their gradient."""
    tokens = make_tokens(kernels, [4, 0, 7])
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(11, vocab, generator=generator) * 2).to(kernels.device, dtype)
    labels = torch.randint(0, vocab, (11,), generator=generator).to(kernels.device)
    labels = torch.where(tokens["mask"], labels, -100)
    exact = logits.double().requires_grad_()
    scored = reference.logprobs(exact, labels, temperature=0.9, entropy=True)
    tokens["old"] = scored.logprobs.detach().float() + 0.1 * torch.where(tokens["mask"], tokens["advantages"], 0.0)
    tokens["ref"] = tokens["old"] + 0.05
    wanted = reference.differentiable_policy_loss(
        scored.logprobs, tokens["old"].double(), tokens["advantages"].double(), tokens["mask"], tokens["cu_seqlens"],
        spec, 3.0, entropy=scored.entropy, ref_logprobs=tokens["ref"].double(), weights=tokens["weights"].double(),
    )  # fmt: skip
    gradient = torch.autograd.grad(wanted.loss, exact)[0]
    unit = torch.eye(11, device=kernels.device, dtype=dtype)
    loss, metrics, logprobs, entropy, _, transposed = under_the_head(
        kernels, tokens, spec, 3.0, unit, logits.T.contiguous(), labels, None, (False, True)
    )
    assert relative_error(loss, wanted.loss) < 5e-5
    assert relative_error(metrics, wanted.metrics) < 5e-5
    assert relative_error(logprobs, scored.logprobs) < 3e-5
    assert scored.entropy is not None
    assert relative_error(entropy, scored.entropy) < 3e-5
    resolution = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert relative_error(transposed.T, gradient) < resolution


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_from_hidden_matches_float64(kernels: Implementation, dtype: torch.dtype) -> None:
    tokens = make_tokens(kernels, [40, 27])
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(67, 64, generator=generator).to(kernels.device, dtype)
    weight = (torch.randn(1201, 64, generator=generator) * 0.3).to(kernels.device, dtype)
    labels = torch.randint(0, 1201, (67,), generator=generator).to(kernels.device)
    labels = torch.where(tokens["mask"], labels, -100)
    operands = [x.double().requires_grad_() for x in (hidden, weight)]
    scored = reference.linear_logprobs(*operands, labels, temperature=0.9, entropy=True)
    tokens["old"] = scored.logprobs.detach().float() + 0.1 * torch.where(tokens["mask"], tokens["advantages"], 0.0)
    spec = LossSpec(entropy_coef=0.02, aggregation="seq-mean-token-mean")
    wanted = reference.differentiable_policy_loss(
        scored.logprobs, tokens["old"].double(), tokens["advantages"].double(), tokens["mask"], tokens["cu_seqlens"],
        spec, 2.0, entropy=scored.entropy,
    )  # fmt: skip
    gradients = torch.autograd.grad(wanted.loss, operands)
    del tokens["ref"], tokens["weights"]
    loss, metrics, logprobs, _, dhidden, dweight = under_the_head(
        kernels, tokens, spec, 2.0, hidden, weight, labels, 32, (True, True)
    )
    assert relative_error(loss, wanted.loss) < 5e-5
    assert relative_error(metrics, wanted.metrics) < 5e-5
    assert relative_error(logprobs, scored.logprobs) < 3e-5
    assert relative_error(dhidden, gradients[0]) < (2e-5 if dtype == torch.float32 else 1e-2)
    assert relative_error(dweight, gradients[1]) < (2e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_any_loss_under_the_head_matches_float64(kernels: Implementation, dtype: torch.dtype, is_sharded: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(67, 64, generator=generator).to(kernels.device, dtype)
    weight = (torch.randn(1201, 64, generator=generator) * 0.3).to(kernels.device, dtype)
    labels = torch.randint(0, 1201, (67,), generator=generator).to(kernels.device)
    operands = [x.double().requires_grad_() for x in (hidden, weight)]
    scored = reference.linear_logprobs(*operands, labels, temperature=0.9, entropy=True)
    assert scored.entropy is not None
    wanted = scored.logprobs.square().sum() - 0.2 * scored.entropy.square().sum()
    gradients = torch.autograd.grad(wanted, operands)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return logprobs.square().sum() - 0.2 * entropy.square().sum(), 2 * logprobs, -0.4 * entropy

    gather = (lambda stats: stats[None]) if is_sharded else None
    value, logprobs, entropy, dhidden, dweight = kernels.call(
        "linear_loss", hidden, weight, labels, loss, 0.9, None, None, True, 32, (True, True), 0, gather
    )
    is_narrow = kernels.name == "cpu" and is_sharded and dtype == torch.bfloat16  # whose logits are in bfloat16
    assert relative_error(value, wanted) < (2e-3 if is_narrow else 5e-5)
    assert relative_error(logprobs, scored.logprobs) < (2e-3 if is_narrow else 3e-5)
    assert relative_error(entropy, scored.entropy) < (1e-2 if is_narrow else 3e-5)
    assert relative_error(dhidden, gradients[0]) < (2e-5 if dtype == torch.float32 else 1e-2)
    assert relative_error(dweight, gradients[1]) < (2e-5 if dtype == torch.float32 else 1e-2)


SCANS = [(SCAN_KINDS[place % len(SCAN_KINDS)], mode, place % 2 == 0) for place, mode in enumerate(MASK_MODES)]
SCANS += [(kind, MASK_MODES[0], True) for kind in SCAN_KINDS if kind not in {kind for kind, _, _ in SCANS}]
MORE_SCANS = [
    (kind, mode, extras)
    for kind in SCAN_KINDS
    for mode in MASK_MODES
    for extras in (False, True)
    if (kind, mode, extras) not in SCANS
]
SCANNED = [1, 0, 300, 4500, 17, 4096, 4097]


def scanned() -> list[Tensor]:
    """Rewards, values, importance ratios, a mask, and by sequence a lambda and a value to go on from."""
    generator = torch.Generator().manual_seed(7)
    rewards, values, rho = (torch.randn(sum(SCANNED), generator=generator) for _ in range(3))
    mask = torch.rand(sum(SCANNED), generator=generator) < 0.8
    lam = torch.linspace(0.8, 1.0, len(SCANNED))
    return [rewards, values, rho.exp(), mask, lam, torch.randn(len(SCANNED), generator=generator)]


@cache
def scanned_by_reference(kind: Any, mask_mode: Any, extras: bool) -> Any:
    """Row by row in Python, which takes a second: once for all devices."""
    rewards, values, rho, mask, lam, bootstrap = scanned()
    return reference.scan_reverse(
        rewards.double(), values.double(), cu_seqlens(SCANNED), loss_mask=mask, kind=kind, gamma=0.99,
        lam=lam if extras else 0.95, bootstrap_values=bootstrap if extras else None, mask_mode=mask_mode,
        rho=rho if extras else None, rho_clip=1.1, c_clip=0.9,
    )  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "mask_mode", "extras"), [*SCANS, *(pytest.param(*scan, marks=SLOW) for scan in MORE_SCANS)]
)
def test_scans_match_float64(kernels: Implementation, kind: Any, mask_mode: Any, extras: bool) -> None:
    rewards, values, rho, mask, lam, bootstrap = (x.to(kernels.device) for x in scanned())
    boundaries = cu_seqlens(SCANNED, kernels.device)
    found = kernels.call(
        "scan_reverse", rewards, values, boundaries, mask, kind, 0.99, lam if extras else 0.95,
        bootstrap if extras else None, mask_mode, rho if extras else None, 1.1, 0.9,
    )  # fmt: skip
    for ours, theirs in zip(found, scanned_by_reference(kind, mask_mode, extras), strict=True):
        assert relative_error(ours.cpu(), theirs) < 2e-5


def test_scan_bits_do_not_depend_on_neighbours(kernels: Implementation) -> None:
    generator = torch.Generator().manual_seed(8)
    rewards, values = (torch.randn(6000, generator=generator).to(kernels.device) for _ in range(2))

    def run(lengths: list[int], first: int) -> Tensor:
        num = sum(lengths)
        return kernels.call(
            "scan_reverse", rewards[first : first + num].clone(), values[first : first + num].clone(),
            cu_seqlens(lengths, kernels.device), None, "gae", 0.99, 0.95, None, "hold", None, 1.0, 1.0,
        )[0]  # fmt: skip

    whole = run([13, 5000, 987], 0)
    assert torch.equal(run([5000], 13), whole[13:5013])
    assert torch.equal(run([987], 5013), whole[5013:])


@pytest.mark.parametrize("mode", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("size", [1, 7, 64, 1000, pytest.param(40_000, marks=SLOW)])
def test_group_norm_matches_float64(kernels: Implementation, mode: Any, size: int) -> None:
    generator = torch.Generator().manual_seed(9)
    rewards = torch.randn(size, generator=generator).to(kernels.device)
    ids = torch.randint(0, max(1, size // 8), (size,), generator=generator).to(kernels.device) * 7 - 3
    found = kernels.call("group_norm", rewards, ids, None, mode, 1e-6)
    assert relative_error(found, reference.group_norm(rewards.double(), ids, mode=mode)) < 1e-6
    boundaries = cu_seqlens([min(8, size - first) for first in range(0, size, 8)], kernels.device)
    found = kernels.call("group_norm", rewards, None, boundaries, mode, 1e-6)
    assert relative_error(found, reference.group_norm(rewards.double(), cu_groups=boundaries, mode=mode)) < 1e-6


@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("count", [1, 5, 600])
def test_equal_rewards_give_exactly_zero(kernels: Implementation, by_ids: bool, count: int) -> None:
    rewards = torch.full((count * 2,), 0.1, device=kernels.device)
    ids = torch.arange(count * 2, device=kernels.device) % 2 if by_ids else None
    boundaries = None if by_ids else cu_seqlens([count, count], kernels.device)
    for mode in ("dr_grpo", "rloo", *(["grpo"] if count > 1 else [])):
        assert (kernels.call("group_norm", rewards, ids, boundaries, mode, 1e-6) == 0).all()


@pytest.mark.process
@pytest.mark.parametrize("size", [0, 1, 1000, 300_001])
def test_moments_and_whitening_match_float64(kernels: Implementation, size: int) -> None:
    generator = torch.Generator().manual_seed(10)
    x = (torch.randn(size, generator=generator) * 2 + 100).to(kernels.device)
    mask = (torch.rand(size, generator=generator) < 0.6).to(kernels.device)
    x[~mask] = float("nan")
    found, wanted = kernels.call("masked_moments", x, mask), reference.masked_moments(x.double(), mask)
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative_error(ours, theirs) < 1e-12
    white = kernels.call("whiten", x, mask, True, 1e-8, None)
    assert relative_error(white, reference.whiten(x.double(), mask)) < 1e-6
    kept = kernels.call("whiten", x, mask, False, 1e-8, tuple(wanted))
    assert relative_error(kept, reference.whiten(x.double(), mask, shift_mean=False, moments=wanted)) < 1e-6
