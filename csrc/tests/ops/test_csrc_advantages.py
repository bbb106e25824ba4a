"""Recurrences, group statistics, whitening and ragged copies."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_csrc
from rl_csrc import reference
from rl_csrc.types import GROUP_MODES, MASK_MODES, SCAN_KINDS


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def test_hand_computed_gae():
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.4, 0.3])
    found = rl_csrc.scan_reverse(rewards, values, torch.tensor([0, 3]), gamma=0.9, lam=0.5)
    a2 = 1 - 0.3
    a1 = 0.9 * 0.3 - 0.4 + 0.45 * a2
    a0 = 0.9 * 0.4 - 0.5 + 0.45 * a1
    assert found.advantages.tolist() == pytest.approx([a0, a1, a2], abs=1e-6)
    assert found.returns.tolist() == pytest.approx([a0 + 0.5, a1 + 0.4, 1.0], abs=1e-6)


def test_hand_computed_returns_pass_over_tool_tokens():
    rewards, mask = torch.tensor([1.0, 7.0, 2.0]), torch.tensor([1, 0, 1])
    cu = torch.tensor([0, 3], dtype=torch.int32)

    def returns(mode):
        return rl_csrc.scan_reverse(
            rewards, None, cu, loss_mask=mask, kind="returns", gamma=0.5, mask_mode=mode
        ).returns.tolist()

    assert returns("hold") == [2.0, 2.0, 2.0]
    assert returns("compress") == [2.0, 0.0, 2.0]
    assert returns("zero") == [1.0, 0.0, 2.0]
    assert returns("none") == [1 + 0.5 * (7 + 1), 8.0, 2.0]


def test_hand_computed_vtrace():
    found = rl_csrc.scan_reverse(
        torch.tensor([0.0, 1.0]),
        torch.tensor([0.5, 0.25]),
        torch.tensor([0, 2]),
        kind="vtrace",
        gamma=1.0,
        rho=torch.tensor([0.5, 3.0]),
    )
    v1 = 0.25 + 1.0 * (1 - 0.25)
    v0 = 0.5 + 0.5 * (0.25 - 0.5) + 0.5 * (v1 - 0.25)
    assert found.returns.tolist() == pytest.approx([v0, v1])
    assert found.advantages.tolist() == pytest.approx([0.5 * (v1 - 0.5), 0.75])


@pytest.mark.process
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=11),
    kind=st.sampled_from(SCAN_KINDS),
    mode=st.sampled_from(MASK_MODES),
    with_values=st.booleans(),
    with_bootstrap=st.booleans(),
    lam=st.sampled_from([0.9, "per sequence"]),
    seed=st.integers(0, 99),
)
def test_scan_matches_the_reference(lengths, kind, mode, with_values, with_bootstrap, lam, seed):
    g = torch.Generator().manual_seed(seed)
    num = sum(lengths)
    r, v, rho = (torch.randn(num, generator=g) for _ in range(3))
    mask = torch.rand(num, generator=g) < 0.6
    hidden = mask | (mode == "none")
    options = {"kind": kind, "mask_mode": mode, "gamma": 0.95}
    options["lam"] = torch.rand(len(lengths), generator=g) if lam == "per sequence" else lam
    options["bootstrap_values"] = torch.randn(len(lengths), generator=g) if with_bootstrap else None
    options["rho"] = rho.exp() if kind == "vtrace" else None
    values = torch.where(hidden, v, float("nan")) if with_values else None  # never looked at
    found = rl_csrc.scan_reverse(
        torch.where(hidden, r, float("nan")), values, offsets(lengths), loss_mask=mask, **options
    )
    wide = {k: x.double() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    wanted = reference.scan_reverse(
        r.double(), v.double() if with_values else None, offsets(lengths), loss_mask=mask, **wide
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_td_lambda_is_gae_plus_values_and_one_is_the_return():
    r, v, cu = torch.randn(30), torch.randn(30), torch.tensor([0, 13, 30])
    gae = rl_csrc.scan_reverse(r, v, cu, gamma=0.9, lam=0.7)
    td = rl_csrc.scan_reverse(r, v, cu, kind="td_lambda", gamma=0.9, lam=0.7)
    torch.testing.assert_close(td.returns, gae.returns)
    plain = rl_csrc.scan_reverse(r, v, cu, kind="returns", gamma=0.9)
    torch.testing.assert_close(rl_csrc.scan_reverse(r, v, cu, kind="td_lambda", gamma=0.9).returns, plain.returns)


def test_a_sequence_has_the_same_bits_whatever_stands_beside_it():
    lengths = [37, 5, 90, 41, 41, 12, 64, 3, 77]
    cu = offsets(lengths)
    r, v = torch.randn(int(cu[-1])), torch.randn(int(cu[-1]))
    together = rl_csrc.scan_reverse(r, v, cu, gamma=0.99, lam=0.95)
    for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        alone = rl_csrc.scan_reverse(r[a:b], v[a:b], torch.tensor([0, b - a]), gamma=0.99, lam=0.95)
        assert torch.equal(alone.advantages, together.advantages[a:b])


def test_hand_computed_groups():
    rewards, ids = torch.tensor([1.0, 5.0, 3.0, 7.0]), torch.tensor([-4, 9, -4, 8])
    assert rl_csrc.group_norm(rewards, ids, mode="rloo").tolist() == [-2.0, 0.0, 2.0, 0.0]
    assert rl_csrc.group_norm(rewards, ids, mode="dr_grpo").tolist() == [-1.0, 0.0, 1.0, 0.0]
    root = 1 / (math.sqrt(2) + 1e-6)
    assert rl_csrc.group_norm(rewards, ids).tolist() == pytest.approx([-root, 5.0, root, 7.0])


@pytest.mark.parametrize("mode", GROUP_MODES)
def test_groups_match_the_reference_and_equal_rewards_give_zero(mode):
    g = torch.Generator().manual_seed(1)
    rewards = torch.randn(500, generator=g)
    ids = torch.randint(-(2**60), 2**60, (40,), generator=g)[torch.randint(40, (500,), generator=g)]
    wanted = reference.group_norm(rewards.double(), ids, mode=mode)
    torch.testing.assert_close(rl_csrc.group_norm(rewards, ids, mode=mode).double(), wanted, rtol=1e-6, atol=1e-6)
    cu = torch.tensor([0, 200, 200, 201, 500])
    wanted = reference.group_norm(rewards.double(), cu_groups=cu, mode=mode)
    torch.testing.assert_close(
        rl_csrc.group_norm(rewards, cu_groups=cu, mode=mode).double(), wanted, rtol=1e-6, atol=1e-6
    )
    for value in (0.1, 1e30, -7.3):
        same = rl_csrc.group_norm(torch.full((7,), value), torch.zeros(7, dtype=torch.int64), mode=mode)
        assert torch.equal(same, torch.zeros(7))


def test_moments_and_whitening_ignore_the_thread_count():
    x, mask = torch.randn(300_001) * 3 + 7, torch.rand(300_001) < 0.7
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append((*rl_csrc.masked_moments(x, mask), rl_csrc.whiten(x, mask)))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True))


def test_moments_and_whitening_match_float64_and_skip_masked():
    x = torch.randn(3, 5001) * 3 + 1000
    mask = torch.rand(3, 5001) < 0.5
    dirty = torch.where(mask, x, float("nan"))
    found, chosen = rl_csrc.masked_moments(dirty, mask), x[mask].double()
    assert found.num.item() == chosen.numel()
    torch.testing.assert_close(found.mean, chosen.mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.variance, chosen.var(), rtol=1e-10, atol=0)
    white = rl_csrc.whiten(dirty, mask)
    assert torch.equal(white[~mask], torch.zeros_like(white[~mask]))
    torch.testing.assert_close(white.double(), reference.whiten(x.double(), mask), rtol=1e-5, atol=1e-6)
    kept = rl_csrc.whiten(x, shift_mean=False, moments=rl_csrc.masked_moments(x))
    torch.testing.assert_close(kept.double(), reference.whiten(x.double(), shift_mean=False), rtol=1e-6, atol=1e-6)
    assert rl_csrc.masked_moments(x, torch.zeros_like(mask)) == (0, 0, 0)


def test_a_rank_without_groups_has_no_advantages():
    assert rl_csrc.group_norm(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_bucket_copy_copies_every_pair_and_tells_autograd():
    sources = [torch.randn(3, 4), torch.randn(8)[::2], torch.randn(5), torch.empty(0), torch.randn(2**19)]
    targets = [
        torch.full((3, 4), 7.0),
        torch.zeros(4),
        torch.zeros(5, dtype=torch.bfloat16),
        torch.empty(0),
        torch.zeros(2**19),
    ]
    versions = [t._version for t in targets]
    rl_csrc.bucket_copy(sources, targets)
    for s, t in zip(sources, targets, strict=True):
        assert torch.equal(s.to(t.dtype), t)
    assert all(t._version > v for t, v in zip(targets, versions, strict=True))
    with pytest.raises(rl_csrc.ArgumentError, match="the shape of its source"):
        rl_csrc.bucket_copy([torch.zeros(2)], [torch.zeros(3)])
    with pytest.raises(rl_csrc.ArgumentError, match="1 sources for 0"):
        rl_csrc.bucket_copy([torch.zeros(2)], [])


def test_copies_of_lazy_conjugates_and_negations_are_exact():
    z = torch.randn(3, 4, dtype=torch.complex64).conj()
    values = z.resolve_conj()
    negated = z.imag[:1, :1]  # a single number is contiguous, whatever its stride
    assert negated.is_neg()
    assert negated.is_contiguous()
    conjugated = torch.zeros(3, 4, dtype=torch.complex64).conj()
    targets = [torch.zeros_like(values), torch.zeros(1, 1), conjugated]
    rl_csrc.bucket_copy([z, negated, values], targets)
    assert torch.equal(targets[0], values)
    assert torch.equal(targets[1], negated.resolve_neg())
    assert torch.equal(targets[2], values)


def test_a_destination_is_its_source_or_apart_from_it():
    x = torch.arange(10.0)
    rl_csrc.bucket_copy([x], [x])
    rl_csrc.bucket_copy([x[:5]], [x[5:]])
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0] * 2
    for source, target in ((x[:8], x[2:]), (x[2:], x[:8])):
        with pytest.raises(rl_csrc.ArgumentError, match="memory that does not overlap its source"):
            rl_csrc.bucket_copy([source], [target])


def test_arguments_that_lie_apart_in_memory_give_the_same():
    """Every second entry of a longer tensor: masks, rewards, offsets and group ids."""
    generator = torch.Generator().manual_seed(5)
    apart = [torch.rand(64, generator=generator)[::2] for _ in range(2)]
    mask = (torch.rand(64, generator=generator) < 0.5)[::2]
    offsets = torch.tensor([0, -1, 20, -1, 32, -1])[::2]
    ids = (torch.arange(64) // 16)[::2]
    assert not any(x.is_contiguous() for x in (*apart, mask, offsets, ids))
    whole = [x.contiguous() for x in (*apart, mask, offsets, ids)]

    def results(rewards, values, mask, offsets, ids):
        spent = rl_csrc.policy_loss(rewards, values, rewards, mask, offsets)
        return [*rl_csrc.scan_reverse(rewards, values, offsets, loss_mask=mask), rl_csrc.whiten(rewards, mask),
                rl_csrc.group_norm(rewards, ids), *spent]  # fmt: skip

    for found, wanted in zip(results(*apart, mask, offsets, ids), results(*whole), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_group_norm_refuses_rewards_that_are_no_row(shape):
    with pytest.raises(rl_csrc.ArgumentError, match=r"rewards has shape \[.*\]; wanted one dimension"):
        rl_csrc.group_norm(torch.zeros(shape), torch.zeros(shape, dtype=torch.int64))
