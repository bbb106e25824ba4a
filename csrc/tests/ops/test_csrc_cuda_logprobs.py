"""The log-prob kernels against float64, on each device that has them: the CPU runs are the twins of the GPU runs."""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from csrc_kit import Implementation, relative_error
from torch import Tensor

from rl_csrc import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = 3e-5


def make_rows(
    kernels: Implementation, rows: int, vocab: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits of a confident model and labels, two of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    if rows > 4:
        labels[1] = labels[-1] = -100
        logits[1] = float("nan")  # never looked at
    return logits.to(kernels.device), labels.to(kernels.device)


def forward(kernels: Implementation, logits: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, ...]:
    chosen = {
        "temperature": 1.0,
        "softcap": None,
        "ignore_index": -100,
        "row_index": None,
        "entropy": True,
        "sum_pi_squared": True,
    } | options
    return kernels.call("logprobs_forward", logits, labels, **chosen)


@pytest.mark.process
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 128, 1001, 4096, 32003])
def test_forward_matches_float64(kernels: Implementation, dtype: torch.dtype, vocab: int) -> None:
    logits, labels = make_rows(kernels, 9, vocab, dtype)
    found = forward(kernels, logits, labels)
    wanted = reference.logprobs(logits.double(), labels, entropy=True, sum_pi_squared=True)
    for ours, theirs in zip(found, wanted, strict=False):
        assert relative_error(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("per_row", [False, True])
def test_temperature_and_softcap(kernels: Implementation, softcap: float | None, per_row: bool) -> None:
    logits, labels = make_rows(kernels, 12, 1031)
    temperature = torch.linspace(0.5, 2.0, 12, device=logits.device) if per_row else 0.7
    found = forward(kernels, logits, labels, temperature=temperature, softcap=softcap)
    wanted = reference.logprobs(logits.double(), labels, temperature=temperature, softcap=softcap, entropy=True)
    assert relative_error(found[0], wanted.logprobs) < TOLERANCE
    assert relative_error(found[1], wanted.entropy) < TOLERANCE


@pytest.mark.parametrize("with_entropy", [False, True])
def test_each_output_alone(kernels: Implementation, with_entropy: bool) -> None:
    logits, labels = make_rows(kernels, 6, 999)
    full = forward(kernels, logits, labels)
    found = forward(kernels, logits, labels, entropy=with_entropy, sum_pi_squared=False)
    assert relative_error(found[0], full[0]) < 2e-6
    assert (found[1] is not None) == with_entropy
    assert found[2] is None


@pytest.mark.parametrize("vocab", [1000, 1001])
def test_bits_do_not_depend_on_batch_or_place(kernels: Implementation, vocab: int) -> None:
    logits, labels = make_rows(kernels, 11, vocab)
    whole = forward(kernels, logits, labels)
    for i in range(11):
        alone = forward(kernels, logits[i : i + 1].clone(), labels[i : i + 1])
        for ours, theirs in zip(alone, whole, strict=True):
            assert torch.equal(ours[0], theirs[i])


def test_bits_do_not_depend_on_alignment(kernels: Implementation) -> None:
    logits, labels = make_rows(kernels, 5, 777)
    wide = torch.randn(5, 800, device=logits.device).to(logits.dtype)
    wanted = forward(kernels, logits, labels)
    for shift in range(9):
        view = wide[:, shift : shift + 777]
        view.copy_(logits)
        for ours, theirs in zip(forward(kernels, view, labels), wanted, strict=True):
            assert torch.equal(ours, theirs)


def test_rows_by_index(kernels: Implementation) -> None:
    logits, _ = make_rows(kernels, 8, 515)
    logits[1] = 0.5
    rows = torch.tensor([7, 0, 3, 3], device=logits.device)
    labels = torch.tensor([1, 2, 3, 514], device=logits.device)
    found = forward(kernels, logits, labels, row_index=rows)
    wanted = forward(kernels, logits[rows].contiguous(), labels)
    assert torch.equal(found[0], wanted[0])


def test_infinities(kernels: Implementation) -> None:
    """All -inf: -inf and 0, not NaN. Some -inf: as if those columns were not there."""
    logits, labels = make_rows(kernels, 4, 300, torch.float32)
    labels[:] = 5
    logits[0] = float("-inf")
    logits[1, 100:] = float("-inf")
    logits[2, 5] = float("-inf")
    logits[3, 7] = float("nan")
    scored, entropies, squares, lse = forward(kernels, logits, labels)
    assert scored[0] == float("-inf")
    assert entropies[0] == 0
    assert squares[0] == 0
    assert lse[0] == float("-inf")
    few = forward(kernels, logits[1:2, :100].contiguous(), labels[1:2])
    assert relative_error(scored[1:2], few[0]) < TOLERANCE
    assert relative_error(entropies[1:2], few[1]) < TOLERANCE
    assert scored[2] == float("-inf")
    assert lse[2].isfinite()
    assert scored[3].isnan()


def backward(
    kernels: Implementation,
    logits: Tensor,
    labels: Tensor,
    grads: tuple[Tensor, Tensor | None],
    out: Tensor,
    **options: Any,
) -> None:
    chosen = {"temperature": 1.0, "softcap": None, "ignore_index": -100, "row_index": None} | options
    scored, entropies, _, lse = forward(kernels, logits, labels, **chosen)
    kernels.call(
        "logprobs_backward",
        logits,
        labels,
        scored,
        lse,
        grads[0],
        entropies if grads[1] is not None else None,
        grads[1],
        vocab_start=0,
        out=out,
        **chosen,
    )


def float64_gradient(logits: Tensor, labels: Tensor, grads: tuple[Tensor, Tensor | None], **options: Any) -> Tensor:
    exact = logits.double().requires_grad_()
    found = reference.logprobs(exact, labels, entropy=True, **options)
    total = (found.logprobs * grads[0]).sum()
    if grads[1] is not None:
        assert found.entropy is not None
        total = total + (found.entropy * grads[1]).sum()
    return torch.autograd.grad(total, exact)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [7, 1000, 1001])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_backward_matches_float64(kernels: Implementation, dtype: torch.dtype, vocab: int, with_entropy: bool) -> None:
    logits, labels = make_rows(kernels, 9, vocab, dtype)
    generator = torch.Generator().manual_seed(1)
    grads = tuple(torch.randn(9, generator=generator).to(kernels.device) for _ in range(2))
    chosen = (grads[0], grads[1] if with_entropy else None)
    options = {"temperature": 0.8, "softcap": 20.0 if with_entropy else None}
    out = torch.full_like(logits, 123.0)
    backward(kernels, logits, labels, chosen, out, **options)
    wanted = float64_gradient(logits, labels, chosen, **options)
    resolution = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    assert relative_error(out, wanted) < resolution
    assert (out[1] == 0).all()  # ignored, and full of NaN
    backward(kernels, logits, labels, chosen, logits, **options)
    assert torch.equal(out, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "offset"), [(1, 0), (999, 0), (4104, 0), (4104, 2), (4104, 5)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradient_in_a_narrower_type(
    kernels: Implementation, dtype: torch.dtype, vocab: int, offset: int, with_entropy: bool
) -> None:
    """The same numbers, rounded once; whole vectors or not, as addresses allow."""
    if kernels.name == "cpu":
        pytest.skip("on a CPU gradients have the type of their logits")
    logits, labels = make_rows(kernels, 9, vocab, torch.float32)
    wide = torch.zeros(9, vocab + 8, device=kernels.device)
    wide[:, offset : offset + vocab] = logits
    logits = wide[:, offset : offset + vocab]
    grads = (torch.ones(9, device=kernels.device), torch.ones(9, device=kernels.device) if with_entropy else None)
    full = torch.empty(9, vocab, device=kernels.device)
    backward(kernels, logits, labels, grads, full)
    room = torch.full((9, vocab + 8), 123.0, dtype=dtype, device=kernels.device)
    narrow = room[:, 4 : 4 + vocab]
    backward(kernels, logits, labels, grads, narrow)
    assert torch.equal(narrow, full.to(dtype))
    assert (room[:, :4] == 123).all()
    assert (room[:, 4 + vocab :] == 123).all()


def test_target_gradient_survives_confidence(kernels: Implementation) -> None:
    """Where p is almost 1, 1 - p taken in bfloat16 would be 0 or 2^-8."""
    logits = torch.zeros(1, 64, dtype=torch.bfloat16, device=kernels.device)
    logits[0, 3] = 12.0
    labels = torch.tensor([3], device=kernels.device)
    out = torch.empty_like(logits)
    backward(kernels, logits, labels, (torch.ones(1, device=kernels.device), None), out)
    exact = float64_gradient(logits, labels, (torch.ones(1, device=kernels.device, dtype=torch.float64), None))
    assert abs(out[0, 3].double() / exact[0, 3] - 1) < 4e-3


def test_backward_of_rows_by_index(kernels: Implementation) -> None:
    logits, _ = make_rows(kernels, 8, 515)
    logits[1] = 0.5
    rows, labels = torch.tensor([7, 0, 3], device=logits.device), torch.tensor([1, 2, 3], device=logits.device)
    grads = (torch.ones(3, device=logits.device), None)
    out = torch.full_like(logits, 123.0)
    backward(kernels, logits, labels, grads, out, row_index=rows)
    wanted = float64_gradient(logits, labels, grads, row_index=rows)
    assert relative_error(out, wanted) < 1.6e-2
    assert (out[[1, 2, 4, 5, 6]] == 0).all()


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_vocab_shards_merge_to_the_whole(kernels: Implementation, world: int) -> None:
    logits, labels = make_rows(kernels, 10, 1003, torch.float32)
    logits[3, : 1003 // world] = float("-inf")
    bounds = [1003 * w // world for w in range(world + 1)]
    stats = torch.stack(
        [kernels.call("logprob_stats", logits[:, a:b], labels, 0.9, None, -100, None, a) for a, b in pairwise(bounds)]
    )
    found = kernels.call("stats_merge", stats)
    wanted = reference.logprobs(logits.double(), labels, temperature=0.9, entropy=True, sum_pi_squared=True)
    for ours, theirs in zip(found, wanted, strict=False):
        assert relative_error(ours, theirs) < TOLERANCE


def test_more_than_two_to_the_31_elements(kernels: Implementation) -> None:
    if kernels.device.type == "cpu":
        pytest.skip("6 GB and minutes; the GPU run has it")
    rows, vocab = 16400, 151936
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device=kernels.device)
    for part in logits.split(1024):
        part.normal_(0, 3)
    labels = torch.randint(0, vocab, (rows,), device=kernels.device)
    whole = forward(kernels, logits, labels)
    last = forward(kernels, logits[-8:].clone(), labels[-8:])
    assert torch.equal(whole[0][-8:], last[0])
    grads = (torch.randn(rows, device=kernels.device), None)
    wanted = torch.empty_like(logits[-8:])
    backward(kernels, logits[-8:].clone(), labels[-8:], (grads[0][-8:], None), wanted)
    backward(kernels, logits, labels, grads, logits)
    assert torch.equal(logits[-8:], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_forward_and_backward(kernels: Implementation, dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(70, 64, generator=generator).to(kernels.device, dtype)
    weight = (torch.randn(1111, 64, generator=generator) * 0.3).to(kernels.device, dtype)
    offset = torch.randn(1111, generator=generator).to(kernels.device, dtype) if bias else None
    labels = torch.randint(0, 1111, (70,), generator=generator).to(kernels.device)
    labels[4] = -100
    hidden[4] = float("nan")
    scored, entropies, squares, lse = kernels.call(
        "linear_logprobs_forward", hidden, weight, labels, offset, 0.7, None, -100, True, True, 32, False
    )
    operands = [x.double().requires_grad_() for x in (hidden, weight)]
    exact_offset = None if offset is None else offset.double()
    wanted = reference.linear_logprobs(
        *operands, labels, bias=exact_offset, temperature=0.7, entropy=True, sum_pi_squared=True
    )
    assert relative_error(scored, wanted.logprobs) < TOLERANCE
    assert relative_error(entropies, wanted.entropy) < TOLERANCE
    assert relative_error(squares, wanted.sum_pi_squared) < TOLERANCE
    grads = [torch.randn(70, generator=generator).to(kernels.device) for _ in range(2)]
    found = kernels.call(
        "linear_logprobs_backward", hidden, weight, labels, offset, scored, lse, grads[0], entropies, grads[1],
        0.7, None, -100, 32, False, (True, True, bias),
    )  # fmt: skip
    assert wanted.entropy is not None
    total = (wanted.logprobs * grads[0]).sum() + (wanted.entropy * grads[1]).sum()
    for ours, theirs in zip(found, torch.autograd.grad(total, operands), strict=False):
        assert ours.dtype == dtype
        assert relative_error(ours, theirs) < (2e-5 if dtype == torch.float32 else 1e-2)


WIDE_DTYPES = [torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:])]


@pytest.mark.process
@pytest.mark.parametrize("dtype", WIDE_DTYPES, ids=str)
@pytest.mark.parametrize(("room", "blocks"), [(1 << 30, 1), (1 << 18, 1), (30000, 3)])
@pytest.mark.parametrize("need", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)])
def test_linear_backward_in_blocks(
    kernels: Implementation,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    room: int,
    blocks: int,
    need: tuple[bool, bool, bool],
) -> None:
    """One block, blocks of columns, and blocks of rows and columns."""
    file = "kernels" if kernels.name == "cpu" else "linear_logprobs"
    head = importlib.import_module(f"{kernels.module.__name__}.{file}")
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(70, 64, generator=generator).to(kernels.device, dtype)
    weight = (torch.randn(1111, 64, generator=generator) * 0.3).to(kernels.device, dtype)
    bias = torch.randn(1111, generator=generator).to(kernels.device, dtype)
    labels = torch.randint(0, 1111, (70,), generator=generator).to(kernels.device)
    labels[:9] = torch.tensor([-100, 0, 127, 128, 255, 256, 1023, 1024, 1110])
    upstream = [torch.randn(70, generator=generator).to(kernels.device) for _ in range(2)]
    scored, entropies, _, lse = kernels.call(
        "linear_logprobs_forward", hidden, weight, labels, bias, 0.7, 9.0, -100, True, False, None, False
    )
    monkeypatch.setattr(head, "CHUNK_BYTES", room)
    if kernels.name != "cpu":
        monkeypatch.setattr(head, "LEAST_COLUMNS", 128)
        height, width = head._block_shape(hidden, 1111, None, False)
        assert -(-70 // height) == blocks
        assert (width == 1111) == (room == 1 << 30)
    found = kernels.call(
        "linear_logprobs_backward", hidden, weight, labels, bias, scored, lse, upstream[0], entropies, upstream[1],
        0.7, 9.0, -100, None, False, need,
    )  # fmt: skip
    operands = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    wanted = reference.linear_logprobs(
        *operands[:2], labels, bias=operands[2], temperature=0.7, softcap=9.0, entropy=True
    )
    assert wanted.entropy is not None
    total = (wanted.logprobs * upstream[0]).sum() + (wanted.entropy * upstream[1]).sum()
    for ours, theirs, is_needed in zip(found, torch.autograd.grad(total, operands), need, strict=True):
        if not is_needed:
            assert ours is None
            continue
        assert ours.dtype == dtype
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(
            ours.double(), theirs, rtol=step + 1e-4, atol=step * float(theirs.abs().max()) + 1e-5
        )


@pytest.mark.parametrize("through_head", [False, True])
def test_a_gradient_of_the_entropy_alone(kernels: Implementation, through_head: bool) -> None:
    """Nothing asks for that of the log-probs: autograd hands over None."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(9, 64, generator=generator).to(kernels.device)
    weight = (torch.randn(333, 64, generator=generator) * 0.3).to(kernels.device)
    labels = torch.randint(0, 333, (9,), generator=generator).to(kernels.device)
    upstream = torch.randn(9, generator=generator).to(kernels.device)
    exact = hidden.double().requires_grad_()
    logits = (exact @ weight.double().T).detach().requires_grad_()
    if through_head:
        how = (None, False)
        scored, entropies, _, lse = kernels.call(
            "linear_logprobs_forward", hidden, weight, labels, None, 1.0, None, -100, True, False, *how
        )
        found = kernels.call(
            "linear_logprobs_backward", hidden, weight, labels, None, scored, lse, None, entropies, upstream,
            1.0, None, -100, *how, (True, False, False),
        )[0]  # fmt: skip
        wanted = reference.linear_logprobs(exact, weight.double(), labels, entropy=True).entropy
        leaf = exact
    else:
        rows = logits.detach().float()
        scored, entropies, _, lse = forward(kernels, rows, labels)
        found = torch.empty_like(rows)
        backward(kernels, rows, labels, (None, upstream), found)
        wanted, leaf = reference.logprobs(logits, labels, entropy=True).entropy, logits
    assert wanted is not None
    assert relative_error(found, torch.autograd.grad((wanted * upstream).sum(), leaf)[0]) < TOLERANCE


@pytest.mark.process
def test_linear_batch_invariance(kernels: Implementation) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(300, 128, generator=generator).to(kernels.device, torch.bfloat16)
    weight = torch.randn(2000, 128, generator=generator).to(kernels.device, torch.bfloat16)
    labels = torch.randint(0, 2000, (300,), generator=generator).to(kernels.device)

    def run(rows: slice) -> Tensor:
        return kernels.call(
            "linear_logprobs_forward",
            hidden[rows],
            weight,
            labels[rows],
            None,
            1.0,
            None,
            None,
            False,
            False,
            None,
            True,
        )[0]

    def gradient(rows: slice) -> Tensor:
        part = hidden[rows], weight, labels[rows], None
        scored, _, _, lse = kernels.call("linear_logprobs_forward", *part, 1.0, None, None, False, False, None, True)
        return kernels.call(
            "linear_logprobs_backward", *part, scored, lse, torch.ones_like(lse), None, None, 1.0, None, None, None,
            True, (True, False, False),
        )[0]  # fmt: skip

    whole, whole_gradient = run(slice(0, 300)), gradient(slice(0, 300))
    for rows in (slice(0, 1), slice(37, 38), slice(250, 300), slice(5, 270)):
        assert torch.equal(run(rows), whole[rows])
        assert torch.equal(gradient(rows), whole_gradient[rows])


def test_no_rows(kernels: Implementation) -> None:
    """Zero rows are no launch and no error."""
    logits, labels = make_rows(kernels, 3, 50)
    found = forward(kernels, logits[:0], labels[:0])
    assert found[0].shape == (0,)
