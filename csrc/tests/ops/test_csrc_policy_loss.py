"""Policy losses against hand-computed numbers and the float64 reference."""

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_csrc
from rl_csrc import LossSpec, _cpu
from rl_csrc.types import AGGREGATIONS, KLS, LOSSES

LEVELS = list(range(_cpu.set_kernel_level(-1) + 1))
NUM_TOKENS, CU = 53, [0, 1, 1, 18, 37, 53]


def policy_loss(*tokens, **options):
    """The op with the fields of its spec among the options."""
    spec = LossSpec(**{name: options.pop(name) for name in LossSpec.__slots__ if name in options})
    return rl_csrc.policy_loss(*tokens, spec, **options)


def batch(seed=0, dtype=torch.float32, cu_seqlens=CU):
    g = torch.Generator().manual_seed(seed)
    num = cu_seqlens[-1]
    lp = -3 * torch.rand(num, generator=g)
    old = (lp + 0.5 * torch.randn(num, generator=g)).clamp(max=-1e-3)
    ref = lp + 0.5 * torch.randn(num, generator=g)
    adv = torch.randn(num, generator=g)
    adv[5:6] = 0
    ref[1::7] += 4  # k3 is capped there
    entropy, weights = torch.rand(num, generator=g), 2 * torch.rand(num, generator=g)
    mask = torch.rand(num, generator=g) < 0.7
    mask[37:] = False  # a sequence that counts nowhere
    lp, old, ref, adv, entropy, weights = (x.to(dtype) for x in (lp, old, ref, adv, entropy, weights))
    return lp, old, adv, mask, torch.tensor(cu_seqlens), ref, entropy, weights


def run(case, *, counts_more=False, **options):
    lp, old, adv, mask, cu, ref, entropy, weights = case
    if counts_more:
        options["sequence_counts"] = cu.diff()
    lp, entropy = lp.detach().clone().requires_grad_(), entropy.detach().clone().requires_grad_()
    found = policy_loss(
        lp, old, adv, mask, cu, ref_logprobs=ref, entropy=entropy, weights=weights, norm_constant=11.0, **options
    )
    (found.loss * 1.5).backward()
    return found, lp.grad, entropy.grad


def doubled(case):
    return tuple(x.double() if x.is_floating_point() else x for x in case)


@pytest.mark.promise("Every op agrees with the plain torch reference")
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=12, deadline=None)
@given(
    aggregation=st.sampled_from(AGGREGATIONS),
    kl=st.sampled_from(KLS),
    clip_dual=st.sampled_from([math.inf, 1.5]),
    counts_more=st.booleans(),
    lengths=st.lists(st.integers(0, 40), max_size=6),
    level=st.sampled_from(LEVELS),
    threads=st.integers(1, 3),
    seed=st.integers(0, 50),
)
def test_matches_the_reference(loss, aggregation, kl, clip_dual, counts_more, lengths, level, threads, seed):
    options = {"loss": loss, "aggregation": aggregation, "kl": kl, "kl_coef": 0.1, "entropy_coef": 0.01}
    options |= {"counts_more": counts_more}
    options |= {"clip_dual": clip_dual, "clip_low": 0.2, "clip_high": 0.28}
    case = batch(seed, cu_seqlens=[0, *accumulate(lengths)] if lengths else CU)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    _cpu.set_kernel_level(level)
    try:
        found, grad, entropy_grad = run(case, **options)
    finally:
        _cpu.set_kernel_level(-1)
        torch.set_num_threads(before)
    wanted, exact, exact_entropy = run(doubled(case), **options)
    torch.testing.assert_close(found.loss.double(), wanted.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.metrics.double(), wanted.metrics, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(grad.double(), exact, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(entropy_grad.double(), exact_entropy, rtol=1e-5, atol=1e-8)


@pytest.mark.process
@pytest.mark.parametrize("loss", ["ppo", "gmpo", "sapo", "dro", "reinforce"])
@pytest.mark.parametrize("kl", ["none", "k3"])
def test_gradcheck_of_losses_without_a_stopped_gradient(loss, kl):
    case = batch(3, torch.float64)

    def value(lp, entropy):
        _, old, adv, mask, cu, ref, _, weights = case
        options = {"loss": loss, "kl": kl, "kl_coef": 0.2, "entropy_coef": 0.1, "clip_dual": 3.0}
        return policy_loss(lp, old, adv, mask, cu, ref_logprobs=ref, entropy=entropy, weights=weights, **options).loss

    assert torch.autograd.gradcheck(value, (case[0].requires_grad_(), case[6].requires_grad_()))


def one_token(lp, old, adv, **options):
    x = torch.tensor([lp], requires_grad=True)
    found = policy_loss(
        x, torch.tensor([old]), torch.tensor([adv]), torch.tensor([True]), torch.tensor([0, 1]), **options
    )
    found.loss.backward()
    return found.loss.item(), x.grad.item()


@pytest.mark.parametrize(
    ("options", "log_ratio", "adv", "loss", "gradient"),
    [
        ({"loss": "ppo"}, math.log(1.1), 2.0, -2.2, -2.2),
        ({"loss": "ppo"}, math.log(1.5), 2.0, -2.4, 0.0),
        ({"loss": "ppo", "clip_high": 0.6}, math.log(1.5), 2.0, -3.0, -3.0),
        ({"loss": "ppo"}, math.log(0.5), -1.0, 0.8, 0.0),
        ({"loss": "ppo"}, math.log(5.0), -1.0, 5.0, 5.0),
        ({"loss": "ppo", "clip_dual": 3.0}, math.log(5.0), -1.0, 3.0, 0.0),
        ({"loss": "gspo"}, math.log(1.1), 2.0, -2.2, -2.2),
        ({"loss": "cispo"}, math.log(1.5), 2.0, 1.2 * 2.0, -2.4),  # logprob is -1
        ({"loss": "sapo"}, 0.0, 2.0, -4.0, -2.0),
        ({"loss": "gmpo"}, math.log(1.1), 2.0, -2.2, -2.2),
        ({"loss": "gmpo"}, 0.5, 2.0, -2.0 * math.exp(0.2), 0.0),
        ({"loss": "dro", "dro_beta": 0.5}, 0.4, 2.0, 2.0 + 0.25 * 0.16, -2.0 + 0.2),
        ({"loss": "reinforce"}, 0.3, 2.0, 2.0, -2.0),
        ({"loss": "dppo_tv", "clip_high": 0.1}, math.log(1.1), 2.0, 2.2, -2.2),
        ({"loss": "dppo_tv", "clip_high": 0.1}, math.log(2.0), 2.0, 0.0, 0.0),
        ({"loss": "dppo_kl", "clip_high": 0.05}, math.log(1.1), 2.0, 2.2, -2.2),
    ],
)
def test_hand_computed_token(options, log_ratio, adv, loss, gradient):
    found = one_token(-1.0, -1.0 - log_ratio, adv, **options)
    assert found[0] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert found[1] == pytest.approx(gradient, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "wanted"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("token-sum", 16.0),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 8),
    ],
)
def test_hand_computed_aggregation(aggregation, wanted):
    losses = torch.tensor([1.0, 2.0, 3.0, 99.0, 10.0, 99.0])
    mask = torch.tensor([1, 1, 1, 0, 1, 0])
    cu = torch.tensor([0, 4, 5, 6], dtype=torch.int32)  # the last sequence is wholly masked: it counts nowhere
    one = torch.ones(6)
    found = policy_loss(-losses, -losses, one, mask, cu, loss="reinforce", aggregation=aggregation, norm_constant=8)
    assert found.loss.item() == pytest.approx(wanted)


def test_a_sequence_is_divided_by_the_count_that_is_given():
    """2 of the first sequence's 4 tokens are masked out, and the mean still goes over 4; one of none counts as 1."""
    losses, mask = torch.tensor([1.0, 2.0, 3.0, 99.0, 10.0, 99.0]), torch.tensor([1, 0, 1, 0, 1, 0])
    found = policy_loss(
        -losses,
        -losses,
        torch.ones(6),
        mask,
        torch.tensor([0, 4, 5, 6]),
        loss="reinforce",
        aggregation="seq-mean-token-mean",
        num_sequences=3,
        sequence_counts=torch.tensor([4, 1, 0]),
        entropy=torch.ones(6),
        entropy_coef=1.0,
    )
    assert found.metrics[:3].tolist() == pytest.approx([((1 + 3) / 4 + 10) / 3, 0.0, (2 / 4 + 1) / 3])
    assert found.loss.item() == pytest.approx((11 - 1.5) / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sequence_whose_tokens_are_all_masked_out_adds_nothing(dtype):
    """Its count is 0, and it is not divided by it: loss, metrics and gradients are finite."""
    lp = torch.tensor([-1.0, -2.0, -99.0, -99.0], dtype=dtype, requires_grad=True)
    found = policy_loss(
        lp,
        lp.detach(),
        torch.ones(4, dtype=dtype),
        torch.tensor([1, 1, 0, 0]),
        torch.tensor([0, 2, 4]),
        loss="reinforce",
        aggregation="seq-mean-token-mean",
        num_sequences=2,
        sequence_counts=torch.tensor([2, 0]),
    )
    found.loss.backward()
    assert found.loss.item() == pytest.approx((1 + 2) / 2 / 2)
    assert found.metrics.isfinite().all()
    assert lp.grad.tolist() == pytest.approx([-0.25, -0.25, 0.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kl", "d", "value", "gradient"),
    [
        ("k3", -2.0, math.exp(2) - 3, 1 - math.exp(2)),
        ("k3", -3.0, 10.0, 0.0),  # e^3 - 4 is 16.1
        ("k3", 9.0, 8 + math.exp(-9), 1 - math.exp(-9)),
        ("k3", 12.0, 10.0, 0.0),
        ("k3", -100.0, 10.0, 0.0),
        ("k3+", -3.0, 10.0, -3.0),
        ("k1", -30.0, -30.0, 1.0),
        ("k2", -30.0, 450.0, -30.0),
    ],
)
def test_k3_is_capped_at_10(dtype, kl, d, value, gradient):
    x = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    zero, one = torch.zeros(1, dtype=dtype), torch.ones(1)
    found = policy_loss(x, x.detach(), zero, one, torch.tensor([0, 1]), kl=kl, kl_coef=1.0, ref_logprobs=-1 - d + zero)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(value, rel=1e-5)
    assert x.grad.item() == pytest.approx(gradient, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("k3_max", "d", "value", "gradient"),
    [
        (2.0, -2.0, 2.0, 0.0),
        (20.0, -3.0, math.exp(3) - 4, 1 - math.exp(3)),
        (math.inf, -19.0, math.exp(19) - 20, 1 - math.exp(19)),
        (math.inf, -30.0, math.exp(20) - 31, 1.0),  # beyond the clamp of the log ratio it is no exponential
    ],
)
def test_the_cap_of_k3_can_be_chosen(dtype, k3_max, d, value, gradient):
    x = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    zero, one = torch.zeros(1, dtype=dtype), torch.ones(1)
    found = policy_loss(
        x, x.detach(), zero, one, torch.tensor([0, 1]), kl="k3", kl_coef=1.0, k3_max=k3_max, ref_logprobs=-1 - d + zero
    )
    found.loss.backward()
    assert found.loss.item() == pytest.approx(value, rel=1e-5)
    assert x.grad.item() == pytest.approx(gradient, rel=1e-5, abs=1e-7)


@pytest.mark.promise("Micro-batches and ranks add up to the loss of the global batch")
def test_micro_batches_add_up_to_the_global_batch():
    lp, old, adv, mask, cu, *_ = batch(1)
    for aggregation, counts in (
        ("token-mean", {"num_tokens": int(mask.sum())}),
        ("seq-mean-token-mean", {"num_sequences": 3}),
    ):
        whole = policy_loss(lp, old, adv, mask, cu, aggregation=aggregation)
        parts = [
            policy_loss(lp[a:b], old[a:b], adv[a:b], mask[a:b], cu[i:j] - cu[i], aggregation=aggregation, **counts)
            for i, j, a, b in ((0, 4, 0, 18), (3, 6, 18, 53))
        ]
        torch.testing.assert_close(sum(p.loss for p in parts), whole.loss)
        torch.testing.assert_close(sum(p.metrics for p in parts), whole.metrics)


@pytest.mark.promise("What stands at a masked position is never looked at")
def test_masked_tokens_are_never_looked_at():
    for loss in LOSSES:
        case = batch(2)
        mask = case[3]
        clean, grad, _ = run(case, loss=loss, kl="k3", kl_coef=0.1)
        for poison in (float("nan"), float("inf"), float("-inf")):
            dirty = [torch.where(mask, x, poison) if x.is_floating_point() else x for x in case]
            found, dirty_grad, _ = run(dirty, loss=loss, kl="k3", kl_coef=0.1)
            assert torch.equal(found.loss, clean.loss)
            assert torch.equal(found.metrics, clean.metrics)
            assert torch.equal(dirty_grad, grad)


@pytest.mark.promise("The same of losses and advantages")
def test_the_same_bits_with_any_number_of_threads():
    g = torch.Generator().manual_seed(0)
    num = 40_000
    lp, old, adv = (torch.randn(num, generator=g) - 2 for _ in range(3))
    cu = torch.arange(0, num + 1, 100)
    results = []
    for threads in (1, 2, 4):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        results.append(policy_loss(lp, old, adv, torch.ones(num), cu))
        torch.set_num_threads(before)
    assert all(torch.equal(r.loss, results[0].loss) and torch.equal(r.metrics, results[0].metrics) for r in results)


@pytest.mark.promise("An error names the argument, the value seen and the values allowed")
def test_refusals_are_sentences():
    lp, old, adv, mask, cu, *_ = batch()
    with pytest.raises(rl_csrc.ArgumentError, match="loss is 'pppo'; allowed are ppo, gspo"):
        policy_loss(lp, old, adv, mask, cu, loss="pppo")
    with pytest.raises(rl_csrc.ArgumentError, match="there are no ref_logprobs"):
        policy_loss(lp, old, adv, mask, cu, kl="k3")
    with pytest.raises(rl_csrc.ArgumentError, match="give norm_constant"):
        policy_loss(lp, old, adv, mask, cu, aggregation="seq-mean-token-sum-norm")
    options = {"aggregation": "seq-mean-token-mean", "sequence_counts": torch.ones(2)}
    with pytest.raises(rl_csrc.ArgumentError, match=r"sequence_counts has shape \[2\]"):
        policy_loss(lp, old, adv, mask, cu, **options)
    with pytest.raises(rl_csrc.ArgumentError, match=r"advantages has shape \[3\]"):
        policy_loss(lp, old, adv[:3], mask, cu)
    for dtype in (torch.float32, torch.float64):  # the kernels', and plain torch, which would broadcast it
        with pytest.raises(rl_csrc.ArgumentError, match=r"entropy has shape \[1\]"):
            policy_loss(lp.to(dtype), old, adv, mask, cu, entropy=torch.ones(1, dtype=dtype))
    with pytest.raises(rl_csrc.ArgumentError, match="end at the number of tokens, 53"):
        policy_loss(lp, old, adv, mask, cu[:-1])
    with pytest.raises(rl_csrc.ArgumentError, match="k3_max is 0"):
        policy_loss(lp, old, adv, mask, cu, k3_max=0)
    for clip_dual in (0.5, 1.0):
        with pytest.raises(rl_csrc.ArgumentError, match=f"clip_dual is {clip_dual}"):
            policy_loss(lp, old, adv, mask, cu, clip_dual=clip_dual)


def test_options_given_one_by_one_are_deprecated():
    lp, old, adv, mask, cu, *_ = batch()
    wanted = rl_csrc.policy_loss(lp, old, adv, mask, cu, LossSpec(loss="gspo", clip_high=0.3))
    with pytest.warns(DeprecationWarning, match=r"given as LossSpec\(\.\.\.\)"):
        found = rl_csrc.policy_loss(lp, old, adv, mask, cu, loss="gspo", clip_high=0.3, clip_dual=None)
    assert torch.equal(found.loss, wanted.loss)
