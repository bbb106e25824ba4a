"""The LM head fused with the log-prob, against a float64 oracle made from the same rounded operands."""

import subprocess
import sys

import pytest
import torch

import rl_csrc
from rl_csrc import _cpu, reference
from rl_csrc.cpu import kernels as head_of_cpu

LEVELS = list(range(_cpu.set_kernel_level(-1) + 1))


@pytest.fixture(params=LEVELS, ids=lambda level: f"isa{level}")
def isa(request):
    _cpu.set_kernel_level(request.param)
    yield request.param
    _cpu.set_kernel_level(-1)


def case(num, vocab, width, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num, width, generator=g).to(dtype)
    weight = (torch.randn(vocab, width, generator=g) / max(width, 1) ** 0.5 * 3).to(dtype)
    labels = torch.randint(vocab, (num,), generator=g)
    labels[torch.rand(num, generator=g) < 0.2] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num", "vocab", "width", "extras"),
    [
        (1, 33, 32, "all"),
        (5, 200, 64, "plain"),
        (40, 4130, 96, "all"),
        (70, 555, 48, "plain"),
        (70, 555, 48, "all"),
        (3, 7, 5, "all"),
        (0, 9, 32, "all"),
        (3, 9, 0, "plain"),
    ],
)
def test_matches_the_oracle(isa, dtype, num, vocab, width, extras):
    hidden, weight, labels = case(num, vocab, width, dtype)
    bias = torch.randn(vocab).to(dtype) if extras == "all" else None
    options = {"temperature": torch.rand(num) + 0.5, "softcap": 10.0} if extras == "all" else {}
    leaves = [x if x is None else x.clone().requires_grad_() for x in (hidden, weight, bias)]
    options |= {"entropy": True, "sum_pi_squared": True}
    found = rl_csrc.linear_logprobs(leaves[0], leaves[1], labels, bias=leaves[2], **options)
    g, h = torch.randn(num), torch.randn(num)
    (found.logprobs * g + found.entropy * h).sum().backward()
    wide = [x if x is None else x.double().requires_grad_() for x in (hidden, weight, bias)]
    wanted = reference.linear_logprobs(wide[0], wide[1], labels, bias=wide[2], **options)
    (wanted.logprobs * g + wanted.entropy * h).sum().backward()
    torch.testing.assert_close(found.logprobs.double(), wanted.logprobs.detach(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(found.entropy.double(), wanted.entropy.detach(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(found.sum_pi_squared.double(), wanted.sum_pi_squared, rtol=2e-5, atol=2e-6)
    assert not found.sum_pi_squared.requires_grad
    for leaf, exact in zip(leaves, wide, strict=True):
        if leaf is None:
            continue
        step = torch.finfo(dtype).eps
        tolerance = 2 * step * float(exact.grad.abs().amax() if exact.grad.numel() else 0) + 1e-5
        torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2 * step + 1e-4, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["linear_logprobs", "linear_loss"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_others(isa, dtype, op):
    hidden, weight, labels = case(40, 555, 64, dtype)
    labels.clamp_(min=0)

    def gradients(*trained):
        h, w = (x.clone().requires_grad_(on) for x, on in zip((hidden, weight), trained, strict=True))
        if op == "linear_logprobs":
            rl_csrc.linear_logprobs(h, w, labels).logprobs.sum().backward()
        else:
            rl_csrc.linear_loss(h, w, labels, lambda logprobs, _: logprobs.square().sum()).loss.backward()
        return h.grad, w.grad

    both, frozen_head, frozen_body = gradients(True, True), gradients(True, False), gradients(False, True)
    assert torch.equal(frozen_head[0], both[0])
    assert torch.equal(frozen_body[1], both[1])
    assert frozen_head[1] is None
    assert frozen_body[0] is None


def test_chunks_of_any_size_agree(isa, monkeypatch):
    hidden, weight, labels = case(37, 3000, 64, torch.float32)
    whole = rl_csrc.linear_logprobs(hidden, weight, labels, entropy=True, sum_pi_squared=True)
    monkeypatch.setattr(head_of_cpu, "CHUNK_BYTES", 37 * 4 * 100)
    leaf = weight.clone().requires_grad_()
    found = rl_csrc.linear_logprobs(hidden, leaf, labels, entropy=True, sum_pi_squared=True, chunk_rows=10)
    torch.testing.assert_close(found.logprobs, whole.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy, whole.entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.sum_pi_squared, whole.sum_pi_squared, rtol=1e-5, atol=1e-5)
    found.logprobs.sum().backward()
    exact = weight.double().requires_grad_()
    reference.linear_logprobs(hidden.double(), exact, labels).logprobs.sum().backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_bits(isa, dtype):
    hidden, weight, labels = case(130, 5000, 64, dtype)
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        options = {"entropy": True, "sum_pi_squared": True, "batch_invariant": True}
        whole = rl_csrc.linear_logprobs(hidden, weight, labels, **options)
        for i in (0, 63, 64, 129):
            alone = rl_csrc.linear_logprobs(hidden[i : i + 1], weight, labels[i : i + 1], **options)
            for one, all_of_them in zip(alone, whole, strict=True):
                assert torch.equal(one, all_of_them[i : i + 1])
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ignored_tokens_may_hold_anything(isa, dtype):
    hidden, weight, labels = case(40, 300, 64, dtype)
    dirty = hidden.clone()
    dirty[labels == -100] = float("nan")
    grads = []
    for x in (hidden, dirty):
        leaf, head = x.clone().requires_grad_(), weight.clone().requires_grad_()
        rl_csrc.linear_logprobs(leaf, head, labels).logprobs.sum().backward()
        grads.append((leaf.grad, head.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])
    assert not grads[1][0][labels == -100].any()


def test_gradcheck_float64():
    hidden, weight, labels = case(3, 7, 4, torch.float64)
    bias = torch.randn(7, dtype=torch.float64)

    def scored(h, w, b):
        found = rl_csrc.linear_logprobs(h, w, labels, bias=b, entropy=True, temperature=0.8, softcap=4.0)
        return found.logprobs, found.entropy

    assert torch.autograd.gradcheck(scored, (hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()))


def test_refusals_are_sentences():
    hidden, weight, labels = case(3, 7, 4, torch.float32)
    with pytest.raises(rl_csrc.ArgumentError, match="one dtype for all operands"):
        rl_csrc.linear_logprobs(hidden.bfloat16(), weight, labels)
    with pytest.raises(rl_csrc.ArgumentError, match=r"wanted \[tokens, hidden\]"):
        rl_csrc.linear_logprobs(hidden, weight.T, labels)
    with pytest.raises(rl_csrc.LabelError):
        rl_csrc.linear_logprobs(hidden, weight, torch.tensor([0, 7, 1]))


WHOLE = """
import resource, torch, rl_csrc
num, vocab = 4096, 32768
hidden, weight = torch.randn(num, 16, requires_grad=True), torch.randn(vocab, 16, requires_grad=True)
labels = torch.randint(vocab, (num,))
rl_csrc.linear_logprobs(hidden[:8], weight, labels[:8]).logprobs.sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rl_csrc.linear_logprobs(hidden, weight, labels, entropy=True).logprobs.sum().backward()
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (4 * num * vocab))
"""


@pytest.mark.promise("`linear_logprobs`: the logits are never held whole, so that rl-engine keeps none")
@pytest.mark.process
def test_the_logits_are_never_held_whole():
    done = subprocess.run([sys.executable, "-c", WHOLE], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5, "forward and backward took as much memory as half of the logits"
