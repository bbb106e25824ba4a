"""Log-prob ops against a float64 oracle made from the same rounded inputs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_csrc
from rl_csrc import _cpu, reference

LEVELS = list(range(_cpu.set_kernel_level(-1) + 1))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@pytest.fixture(params=LEVELS, ids=lambda level: f"isa{level}")
def isa(request):
    assert _cpu.set_kernel_level(request.param) == request.param
    yield request.param
    _cpu.set_kernel_level(-1)


def oracle(logits, labels, **options):
    return reference.logprobs(logits.detach().double(), labels, entropy=True, sum_pi_squared=True, **options)


def assert_close(found, wanted, tolerance=2e-6):
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=4 * tolerance)


def random_case(rows, vocab, dtype, seed=0, scale=4.0, pad=0, ignored=0.25):
    generator = torch.Generator().manual_seed(seed)
    wide = (torch.randn(rows, vocab + pad, generator=generator) * scale).to(dtype)
    labels = torch.randint(vocab, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < ignored] = -100
    return wide[:, :vocab], labels


def test_hand_computed_row():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    found = rl_csrc.logprobs(logits, torch.tensor([1]), entropy=True, sum_pi_squared=True)
    assert found.logprobs.item() == pytest.approx(math.log(0.75), abs=1e-6)
    assert found.entropy.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75), abs=1e-6)
    assert found.sum_pi_squared.item() == pytest.approx(0.0625 + 0.5625, abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 6),
    vocab=st.sampled_from([1, 2, 3, 7, 15, 16, 17, 31, 33, 100, 1023, 2047, 2048, 2049, 5001]),
    pad=st.integers(0, 3),
    level=st.sampled_from(LEVELS),
    threads=st.integers(1, 3),
    softcap=st.sampled_from([None, 5.0, 30.0]),
    temperature=st.sampled_from([1.0, 0.7, "per row"]),
    seed=st.integers(0, 1000),
)
def test_forward_and_backward_match_the_oracle(dtype, rows, vocab, pad, level, threads, softcap, temperature, seed):
    logits, labels = random_case(rows, vocab, dtype, seed, pad=pad)
    generator = torch.Generator().manual_seed(seed)
    g, h = torch.randn(2, rows, generator=generator)
    if temperature == "per row":
        temperature = torch.rand(rows, generator=generator) + 0.5
    options = {"temperature": temperature, "softcap": softcap}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    _cpu.set_kernel_level(level)
    try:
        x = logits.detach().clone().as_strided(logits.shape, logits.stride()) if pad == 0 else logits.detach()
        x.requires_grad_()
        found = rl_csrc.logprobs(x, labels, entropy=True, sum_pi_squared=True, **options)
        (found.logprobs * g + found.entropy * h).sum().backward()
    finally:
        _cpu.set_kernel_level(-1)
        torch.set_num_threads(before)
    exact = logits.detach().double().requires_grad_()
    wanted = reference.logprobs(exact, labels, entropy=True, sum_pi_squared=True, **options)
    (wanted.logprobs * g + wanted.entropy * h).sum().backward()
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b.detach())
    # What comes in, not what comes out: the two parts of the gradient may cancel, their rounding does not.
    atol = STEP[dtype] * 1e-3 + 2e-6 * float((g.abs() + h.abs()).max())
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=STEP[dtype] + 1e-5, atol=atol)


def test_every_level_and_dtype_on_a_wide_row(isa):
    for dtype in DTYPES:
        logits, labels = random_case(3, 50257, dtype, ignored=0)
        for a, b in zip(
            rl_csrc.logprobs(logits, labels, entropy=True, sum_pi_squared=True), oracle(logits, labels), strict=True
        ):
            assert_close(a, b)


def test_unaligned_rows_give_the_same_bits(isa):
    base = torch.randn(1, 3001)
    alone = rl_csrc.logprobs(base, torch.tensor([5]), entropy=True)
    for shift in range(1, 17):
        moved = torch.empty(shift + 3001)[shift:].view(1, -1)
        moved.copy_(base)
        found = rl_csrc.logprobs(moved, torch.tensor([5]), entropy=True)
        assert torch.equal(found.logprobs, alone.logprobs)
        assert torch.equal(found.entropy, alone.entropy)


@pytest.mark.promise("The bits of a token depend neither on the batch nor on the number of threads")
def test_bits_do_not_depend_on_batch_neighbours_or_threads(isa):
    logits, labels = random_case(64, 2500, torch.bfloat16, ignored=0)
    alone = [rl_csrc.logprobs(logits[i : i + 1], labels[i : i + 1], entropy=True) for i in range(64)]
    for threads in (1, 2, 5):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        together = rl_csrc.logprobs(logits, labels, entropy=True)
        torch.set_num_threads(before)
        assert torch.equal(together.logprobs, torch.cat([a.logprobs for a in alone]))
        assert torch.equal(together.entropy, torch.cat([a.entropy for a in alone]))


def test_ignored_rows_are_not_looked_at(isa):
    logits = torch.full((2, 40), float("nan"), requires_grad=True)
    found = rl_csrc.logprobs(logits, torch.tensor([-100, -100]), entropy=True, sum_pi_squared=True)
    (found.logprobs.sum() + found.entropy.sum()).backward()
    for x in (*found, logits.grad):
        assert torch.equal(x, torch.zeros_like(x))


def test_rows_of_minus_infinity_give_that_and_no_gradient(isa):
    logits = torch.full((1, 40), float("-inf"), requires_grad=True)
    found = rl_csrc.logprobs(logits, torch.tensor([3]), entropy=True, sum_pi_squared=True)
    assert found.logprobs.item() == float("-inf")
    assert found.entropy.item() == 0
    assert found.sum_pi_squared.item() == 0
    (found.logprobs.sum() + found.entropy.sum()).backward()
    assert torch.equal(logits.grad, torch.zeros(1, 40))


def test_some_minus_infinity_is_an_impossible_token(isa):
    logits = torch.randn(2, 40)
    logits[:, 7] = float("-inf")
    logits.requires_grad_()
    found = rl_csrc.logprobs(logits, torch.tensor([7, 8]), entropy=True)
    assert found.logprobs[0].item() == float("-inf")
    (found.logprobs[1] + found.entropy.sum()).backward()
    exact = logits.detach().double().requires_grad_()
    wanted = reference.logprobs(exact, torch.tensor([7, 8]), entropy=True)
    (wanted.logprobs[1] + wanted.entropy.sum()).backward()
    assert_close(logits.grad, exact.grad)
    assert torch.equal(logits.grad[:, 7], torch.zeros(2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_is_nan_and_stays_alone(isa, bad):
    logits, labels = random_case(3, 300, torch.float32, ignored=0)
    logits[1, 17] = bad
    found = rl_csrc.logprobs(logits, labels, entropy=True)
    assert found.logprobs.isnan().tolist() == [False, True, False]
    assert found.entropy.isnan().tolist() == [False, True, False]


def test_a_nearly_certain_target_has_an_exact_gradient(isa):
    logits = torch.tensor([[12.0, 0.0, 0.0]], requires_grad=True)
    rl_csrc.logprobs(logits, torch.tensor([0])).logprobs.sum().backward()
    exact = logits.detach().double().requires_grad_()
    reference.logprobs(exact, torch.tensor([0])).logprobs.sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=0)


def test_row_index_scores_some_rows_and_gives_others_no_gradient(isa):
    for inplace in (False, True):
        base, _ = random_case(6, 77, torch.float32)
        leaf = base.clone().requires_grad_()
        rows, labels = torch.tensor([4, 0, 2]), torch.tensor([5, -100, 76])
        logits = leaf * 1
        found = rl_csrc.logprobs(logits, labels, row_index=rows, inplace=inplace)
        found.logprobs.sum().backward()
        exact = base.double().requires_grad_()
        reference.logprobs(exact, labels, row_index=rows).logprobs.sum().backward()
        assert_close(leaf.grad, exact.grad)


def test_row_named_twice_is_refused_where_a_gradient_is_wanted():
    logits = torch.randn(3, 9, requires_grad=True)
    found = rl_csrc.logprobs(logits, torch.tensor([1, 2]), row_index=torch.tensor([1, 1]))
    with pytest.raises(rl_csrc.ArgumentError, match="row 1 twice"):
        found.logprobs.sum().backward()


def test_inplace_backward_reuses_the_logits_and_tells_autograd():
    leaf = torch.randn(4, 50, requires_grad=True)
    logits = leaf * 2
    version, address = logits._version, logits.data_ptr()
    found = rl_csrc.logprobs(logits, torch.arange(4), inplace=True)
    (grad,) = torch.autograd.grad(found.logprobs.sum(), logits, retain_graph=True)
    assert grad.data_ptr() == address
    assert logits._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(found.logprobs.sum(), logits)


def test_refusals_are_sentences():
    logits = torch.randn(3, 9)
    with pytest.raises(rl_csrc.LabelError, match=r"labels\[1\] is 9; allowed are 0 to 8"):
        rl_csrc.logprobs(logits, torch.tensor([0, 9, 1]))
    with pytest.raises(rl_csrc.LabelError):
        rl_csrc.logprobs(logits.double(), torch.tensor([0, 9, 1]))
    with pytest.raises(rl_csrc.ArgumentError, match="2 labels for 3 rows"):
        rl_csrc.logprobs(logits, torch.tensor([0, 1]))
    with pytest.raises(rl_csrc.ArgumentError, match="Flatten the batch"):
        rl_csrc.logprobs(logits[None], torch.tensor([0, 1, 2]))
    with pytest.raises(rl_csrc.ArgumentError, match="2 labels for 3 rows"):
        rl_csrc.logprob_stats(logits, torch.tensor([0, 1]), vocab_start=0)
    with pytest.raises(rl_csrc.ArgumentError, match="2 labels for 3 rows"):
        rl_csrc.parallel_logprobs(logits, torch.tensor([0, 1]), vocab_start=0, gather=lambda stats: stats[None])
    with pytest.raises(rl_csrc.ArgumentError, match=r"row_index\[0\] is 3; allowed are 0 to 2"):
        rl_csrc.logprobs(logits, torch.tensor([0]), row_index=torch.tensor([3]))
    with pytest.raises(rl_csrc.ArgumentError, match="temperature has shape"):
        rl_csrc.logprobs(logits, torch.tensor([0, 1, 2]), temperature=torch.ones(2))


def test_strided_columns_and_no_rows():
    logits = torch.randn(9, 4).T
    labels = torch.arange(4)
    assert_close(rl_csrc.logprobs(logits, labels).logprobs, oracle(logits, labels).logprobs)
    empty = rl_csrc.logprobs(torch.randn(0, 9), torch.zeros(0, dtype=torch.int64), entropy=True)
    assert empty.logprobs.shape == empty.entropy.shape == (0,)


def test_gradcheck_float64():
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, -100, 5])

    def scored(x):
        found = rl_csrc.logprobs(x, labels, temperature=0.7, softcap=3.0, entropy=True)
        return found.logprobs, found.entropy

    assert torch.autograd.gradcheck(scored, (logits,))


@pytest.mark.parametrize("world", range(1, 9))
def test_vocab_parallel_merge_equals_the_whole(isa, world):
    logits, labels = random_case(5, 333, torch.bfloat16, seed=world)
    whole = logits.clone().requires_grad_()
    options = {"temperature": 0.9, "softcap": 20.0}
    wanted = rl_csrc.logprobs(whole, labels, entropy=True, sum_pi_squared=True, **options)
    g, h = torch.randn(5), torch.randn(5)
    (wanted.logprobs * g + wanted.entropy * h).sum().backward()
    shards = [s.clone().requires_grad_() for s in logits.tensor_split(world, dim=1)]
    starts = [0, *torch.tensor([s.shape[1] for s in shards]).cumsum(0).tolist()]
    stats = torch.stack(
        [rl_csrc.logprob_stats(s, labels, vocab_start=b, **options) for s, b in zip(shards, starts, strict=False)]
    )
    merged = rl_csrc.stats_merge(stats)
    for a, b in zip(merged, wanted, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=3e-6, atol=1e-5)
    for shard, start in zip(shards, starts, strict=False):
        found = rl_csrc.parallel_logprobs(shard, labels, vocab_start=start, gather=lambda _: stats, **options)
        assert torch.equal(found.logprobs, merged.logprobs)
        (found.logprobs * g + found.entropy * h).sum().backward()
    torch.testing.assert_close(torch.cat([s.grad for s in shards], 1), whole.grad, rtol=2**-7, atol=1e-5)


def test_merge_matches_the_reference_and_marks_dead_rows():
    logits, labels = random_case(6, 64, torch.float32)
    logits[2] = float("-inf")
    labels[2] = 3
    shards = logits.chunk(4, dim=1)
    stats = torch.stack(
        [rl_csrc.logprob_stats(s.contiguous(), labels, vocab_start=16 * i) for i, s in enumerate(shards)]
    )
    *wanted, lse = reference.stats_merge(stats.double())
    for a, b in zip(rl_csrc.stats_merge(stats), wanted, strict=True):
        assert_close(a, b)
    assert rl_csrc.stats_merge(stats).logprobs[2] == float("-inf")
    assert lse[2] == float("-inf")


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    vocab = 1 << 16
    logits = torch.zeros((1 << 15) + 2, vocab, dtype=torch.bfloat16)
    logits[-1, 5] = 3.0
    logits.requires_grad_()
    found = rl_csrc.logprobs(logits, torch.full((logits.shape[0],), 5), inplace=True)
    last = 3 - math.log(vocab - 1 + math.exp(3))
    assert found.logprobs[0].item() == pytest.approx(-math.log(vocab), rel=1e-6)
    assert found.logprobs[-1].item() == pytest.approx(last, rel=1e-6)
    (grad,) = torch.autograd.grad(found.logprobs.sum(), logits)
    for row, scored, other in ((0, -math.log(vocab), -math.log(vocab)), (-1, last, last - 3)):
        assert grad[row, 5].item() == pytest.approx(-math.expm1(scored), rel=2**-8)
        assert grad[row, [0, -1]].tolist() == pytest.approx([-math.exp(other)] * 2, rel=2**-8)


def test_coarse_kl_is_that_of_the_candidates_and_the_rest():
    teacher = torch.tensor([[0.5, 0.3], [0.25, 0.25]], dtype=torch.float64)
    policy = torch.tensor([[0.25, 0.25], [0.25, 0.25]], dtype=torch.float64)
    found = reference.coarse_kl(teacher.log(), policy.log())
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.3 * math.log(0.3 / 0.25) + 0.2 * math.log(0.2 / 0.5)
    torch.testing.assert_close(found, torch.tensor([by_hand, 0.0], dtype=torch.float64))
    assert reference.coarse_kl(teacher.float().log(), policy.float().log()).dtype == torch.float32
