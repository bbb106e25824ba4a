"""The public ops on a GPU, or an emulated one: autograd and in-place gradients reach the kernels, the CPU agrees.

On a GPU also through torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from csrc_kit import cu_seqlens, relative_error
from torch import Tensor

import rl_csrc
from rl_csrc.ops import operator

pytestmark = pytest.mark.process

Check = Callable[..., None]

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def make(rows: int = 24, vocab: int = 1003) -> dict[str, Tensor]:
    """A small packed batch on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "logits": normal(rows, vocab) * 2,
        "hidden": normal(rows, 32),
        "weight": normal(vocab, 32) * 0.3,
        "labels": torch.randint(0, vocab, (rows,), generator=generator),
        "old": -normal(rows).abs() - 6,
        "advantages": normal(rows),
        "mask": torch.rand(rows, generator=generator) < 0.8,
        "cu_seqlens": cu_seqlens([rows // 3, rows - rows // 3]),
    }


@pytest.fixture(
    params=[pytest.param("emulated", marks=pytest.mark.process), pytest.param("cuda", marks=[pytest.mark.gpu, gpu])]
)
def check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    """Compare what `run(batch)` returns by the CPU's kernels and by those of CUDA, on the GPU or emulated."""

    def compare(run: Callable[[dict[str, Tensor]], list[Tensor]], tolerance: float = 3e-5) -> None:
        theirs = run(make())
        if request.param == "emulated":
            request.getfixturevalue("emulated")
            monkeypatch.setitem(operator._KERNEL_MODULES, "cpu", "rl_csrc.cuda")
            forget_kernels()
        ours = run({name: x.to("cpu" if request.param == "emulated" else "cuda") for name, x in make().items()})
        for found, wanted in zip(ours, theirs, strict=True):
            assert found.is_cuda == (request.param == "cuda")
            assert relative_error(found.cpu(), wanted) < tolerance

    yield compare
    forget_kernels()


def forget_kernels() -> None:
    operator._find.cache_clear()
    operator._kernels.cache_clear()


@pytest.mark.parametrize("inplace", [False, True])
def test_logprobs_with_gradient(check: Check, inplace: bool) -> None:
    def run(b: dict[str, Tensor]) -> list[Tensor]:
        leaf = b["logits"].clone().requires_grad_()
        found = rl_csrc.logprobs(leaf * 1.0, b["labels"], entropy=True, temperature=0.9, inplace=inplace)
        assert found.entropy is not None
        total = (found.logprobs * b["advantages"]).sum() + found.entropy.sum()
        return [found.logprobs.detach(), found.entropy.detach(), *torch.autograd.grad(total, leaf)]

    check(run)


def test_vocab_parallel_with_gradient(check: Check) -> None:
    def run(b: dict[str, Tensor]) -> list[Tensor]:
        halves = [x.contiguous() for x in b["logits"].split([500, 503], dim=1)]
        stats = [rl_csrc.logprob_stats(x, b["labels"], vocab_start=at) for x, at in zip(halves, (0, 500), strict=True)]
        leaf = halves[1].clone().requires_grad_()
        found = rl_csrc.parallel_logprobs(
            leaf, b["labels"], vocab_start=500, gather=lambda mine: torch.stack([stats[0], mine])
        )
        assert found.entropy is not None
        total = (found.logprobs * b["advantages"]).sum() + found.entropy.sum()
        return [found.logprobs.detach(), *torch.autograd.grad(total, leaf)]

    check(run)


def test_linear_logprobs_with_gradient(check: Check) -> None:
    def run(b: dict[str, Tensor]) -> list[Tensor]:
        leaves = [b["hidden"].requires_grad_(), b["weight"].requires_grad_()]
        found = rl_csrc.linear_logprobs(*leaves, b["labels"], entropy=True, chunk_rows=16)
        assert found.entropy is not None
        total = (found.logprobs * b["advantages"]).sum() + found.entropy.sum()
        return [found.logprobs.detach(), *torch.autograd.grad(total, leaves)]

    check(run)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_policy_loss_with_gradient(check: Check, loss: str) -> None:
    def run(b: dict[str, Tensor]) -> list[Tensor]:
        leaf = (b["old"] + 0.1 * b["advantages"]).requires_grad_()
        found = rl_csrc.policy_loss(
            leaf, b["old"], b["advantages"], b["mask"], b["cu_seqlens"], rl_csrc.LossSpec(loss=loss)
        )
        return [found.loss.detach(), found.metrics, *torch.autograd.grad(found.loss, leaf)]

    check(run)


def under_the_head(b: dict[str, Tensor]) -> rl_csrc.LinearLoss:
    """A policy loss of hidden states."""
    tokens = b["old"], b["advantages"], b["mask"], b["cu_seqlens"]
    labels = b["labels"].clamp(min=0)
    return rl_csrc.linear_loss(
        b["hidden"], b["weight"], labels, lambda scored, _: rl_csrc.policy_loss(scored, *tokens).loss, chunk_rows=16
    )


def test_a_policy_loss_under_the_head_with_gradient(check: Check) -> None:
    def run(b: dict[str, Tensor]) -> list[Tensor]:
        leaves = [b["hidden"].requires_grad_(), b["weight"].requires_grad_()]
        found = under_the_head(b)
        return [found.loss.detach(), found.logprobs, *torch.autograd.grad(found.loss, leaves)]

    check(run)


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_the_head_or_what_is_below_it_may_be_frozen(check: Check, trained: str) -> None:
    def run(b: dict[str, Tensor]) -> list[Tensor]:
        leaf = b[trained].requires_grad_()
        scored = rl_csrc.linear_logprobs(b["hidden"], b["weight"], b["labels"], chunk_rows=16).logprobs
        found = under_the_head(b)
        return [*torch.autograd.grad(scored.sum(), leaf), *torch.autograd.grad(found.loss, leaf)]

    check(run)


def test_advantages(check: Check) -> None:
    def run(b: dict[str, Tensor]) -> list[Tensor]:
        scan = rl_csrc.scan_reverse(b["advantages"], b["old"], b["cu_seqlens"], loss_mask=b["mask"], lam=0.9)
        groups = rl_csrc.group_norm(b["advantages"], b["labels"] % 5)
        white = rl_csrc.whiten(b["advantages"], b["mask"])
        return [scan.advantages, scan.returns, groups, white]

    check(run)


@pytest.mark.gpu
@gpu
def test_a_tensor_left_on_the_host_is_refused_not_read() -> None:
    batch = {name: x.cuda() for name, x in make().items()}
    with pytest.raises(rl_csrc.ArgumentError, match="temperature is float32 .*wanted a tensor on the GPU"):
        rl_csrc.logprobs(batch["logits"], batch["labels"], temperature=torch.ones(24))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_may_lie_on_a_device_that_is_not_current() -> None:
    batch = make()
    there = {name: x.to("cuda:1") for name, x in batch.items()}
    wanted = rl_csrc.logprobs(batch["logits"], batch["labels"]).logprobs
    assert relative_error(rl_csrc.logprobs(there["logits"], there["labels"]).logprobs.cpu(), wanted) < 3e-5
    with pytest.raises(rl_csrc.ArgumentError, match="wanted one on cuda:1"):
        rl_csrc.logprobs(there["logits"], there["labels"].to("cuda:0"))


@pytest.mark.gpu
@gpu
def test_digest_of_a_device_tensor() -> None:
    x = make()["logits"]
    assert rl_csrc.digest(x.cuda()) == rl_csrc.digest(x)


@pytest.mark.gpu
@gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch 2.11's inductor, of its own code
def test_compiled_without_graph_breaks() -> None:
    batch = {name: x.cuda() for name, x in make().items()}

    def step(logits: Tensor, labels: Tensor, old: Tensor) -> Tensor:
        scored = rl_csrc.logprobs(logits * 0.5, labels).logprobs
        return rl_csrc.policy_loss(
            scored, old, batch["advantages"], batch["mask"], batch["cu_seqlens"], num_tokens=20.0
        ).loss

    leaf = batch["logits"].clone().requires_grad_()
    wanted = torch.autograd.grad(step(leaf, batch["labels"], batch["old"]), leaf)[0]
    compiled = torch.compile(step, fullgraph=True)
    found = torch.autograd.grad(compiled(leaf, batch["labels"], batch["old"]), leaf)[0]
    assert relative_error(found, wanted) < 1e-5
