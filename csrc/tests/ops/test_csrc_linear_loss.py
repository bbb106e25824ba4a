"""`linear_loss`: any token-local loss under an LM head, its gradients from one pass over the logits."""

import threading

import pytest
import torch

import rl_csrc
from rl_csrc.cpu import kernels as head

NUM, VOCAB, WIDTH = 53, 4140, 64


def case(dtype):
    g = torch.Generator().manual_seed(0)
    hidden = (torch.randn(NUM, WIDTH, generator=g) / 4).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=g).to(dtype)
    return hidden, weight, torch.randint(VOCAB, (NUM,), generator=g)


def curved(logprobs, entropy):
    """A loss that is linear in nothing, and whose value needs all tokens."""
    weight = torch.arange(NUM, dtype=logprobs.dtype) / NUM
    value = (weight * (logprobs + 8).square()).sum() / NUM
    return value if entropy is None else value - 0.3 * (entropy.square() * weight).sum()


def exact(hidden, weight, labels, loss, **options):
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    found = rl_csrc.logprobs(h @ w.T, labels, entropy=True, ignore_index=None, **options)
    value = loss(found.logprobs, found.entropy)
    (value * 3).backward()
    return value.detach(), found.logprobs.detach(), h.grad, w.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"entropy": True}, {"softcap": 3.0, "temperature": 0.7}])
@pytest.mark.parametrize("kept_rows", [1000, 32])
def test_it_equals_log_probs_and_then_the_loss(monkeypatch, dtype, options, kept_rows):
    monkeypatch.setattr(head, "KEPT_BYTES", kept_rows * VOCAB * 2)
    hidden, weight, labels = case(dtype)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = rl_csrc.linear_loss(h, w, labels, curved, **options)
    (found.loss * 3).backward()
    scoring = {name: value for name, value in options.items() if name != "entropy"}
    loss = curved if "entropy" in options else lambda logprobs, _: curved(logprobs, None)
    value, logprobs, d_hidden, d_weight = exact(hidden, weight, labels, loss, **scoring)
    torch.testing.assert_close(found.loss.double(), value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=1e-5, atol=1e-5)
    assert (found.entropy is None) == ("entropy" not in options)
    for leaf, wanted in ((h, d_hidden), (w, d_weight)):
        step = 3 * torch.finfo(dtype).eps
        tolerance = {"rtol": step + 1e-4, "atol": step * float(wanted.abs().max()) + 1e-6}
        torch.testing.assert_close(leaf.grad.double(), wanted, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.1}, {"aggregation": "seq-mean-token-mean"}])
def test_a_policy_loss_under_the_head_equals_the_two_ops(monkeypatch, dtype, options):
    """Its metrics are of the last call, which sees all tokens."""
    monkeypatch.setattr(head, "KEPT_BYTES", 32 * VOCAB * 2)
    hidden, weight, labels = case(dtype)
    old, advantages, mask = -torch.rand(NUM) - 8, torch.randn(NUM), torch.rand(NUM) < 0.8
    tokens = (old, advantages, mask, torch.tensor([0, 20, NUM]))
    measured = []

    def loss(logprobs, entropy):
        found = rl_csrc.policy_loss(
            logprobs, *tokens, rl_csrc.LossSpec(loss="cispo", **options), entropy=entropy, num_tokens=40.0
        )
        measured[:] = [found.metrics]
        return found.loss

    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = rl_csrc.linear_loss(h, w, labels, loss, entropy="entropy_coef" in options)
    (found.loss * 3).backward()
    metrics = measured[0]
    value, _, d_hidden, d_weight = exact(hidden, weight, labels, loss)
    torch.testing.assert_close(found.loss.double(), value.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(metrics[3:].double(), measured[0][3:].double(), rtol=1e-4, atol=1e-4)
    for leaf, wanted in ((h, d_hidden), (w, d_weight)):
        step = 3 * torch.finfo(dtype).eps
        tolerance = {"rtol": step + 1e-4, "atol": step * float(wanted.abs().max()) + 1e-6}
        torch.testing.assert_close(leaf.grad.double(), wanted, **tolerance)


def test_the_gradient_of_the_weight_is_summed_in_float32(monkeypatch):
    """Over 32 chunks of tokens; the sum in bfloat16 would be off by 0.0067, the result rounded once is by 0.0017."""
    g = torch.Generator().manual_seed(0)
    num, vocab = 1024, 96
    hidden, weight = (torch.randn(rows, 64, generator=g).bfloat16() / 4 for rows in (num, vocab))
    labels, advantages = torch.randint(vocab, (num,), generator=g), torch.rand(num, generator=g) + 0.5
    monkeypatch.setattr(head, "KEPT_BYTES", 32 * vocab * 2)

    def gradient(dtype):
        leaf = (weight * 4).to(dtype).requires_grad_()
        rl_csrc.linear_loss(
            hidden.to(dtype), leaf, labels, lambda logprobs, _: -(advantages * logprobs).sum() / num
        ).loss.backward()
        return leaf.grad.double()

    wanted = gradient(torch.float64)
    assert (gradient(torch.bfloat16) - wanted).norm() < 0.004 * wanted.norm()


def test_three_products_for_four(monkeypatch):
    """Of the size of the head: what is counted are the calls of mm and addmm that a step makes."""
    hidden, weight, labels = case(torch.float32)
    counts = {}
    for name in ("log-probs, then the loss", "at once"):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.profiler.profile() as profile:
            if name == "at once":
                value = rl_csrc.linear_loss(h, w, labels, curved).loss
            else:
                value = curved(rl_csrc.linear_logprobs(h, w, labels, ignore_index=None).logprobs, None)
            value.backward()
        products = [event for event in profile.events() if event.name in ("aten::mm", "aten::addmm", "aten::addmm_")]
        counts[name] = len(
            [event for event in products if event.cpu_parent is None or "mm" not in event.cpu_parent.name]
        )
    assert counts == {"log-probs, then the loss": 4, "at once": 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk_rows", [None, 20])
def test_shards_of_the_vocabulary_add_up(dtype, chunk_rows):
    """Two ranks as two threads; the head is cut unevenly."""
    hidden, weight, labels = case(dtype)
    barrier, given, found = threading.Barrier(2, timeout=60), [None, None], [None, None]
    cut = 2100

    def rank(index):
        def gather(stats):
            given[index] = stats
            barrier.wait()
            together = torch.stack(given)
            barrier.wait()
            return together

        h = hidden.clone().requires_grad_()
        w = (weight[:cut] if index == 0 else weight[cut:]).clone().requires_grad_()
        options = {"chunk_rows": chunk_rows, "vocab_start": index * cut, "gather": gather, "entropy": True}
        scored = rl_csrc.linear_loss(h, w, labels, curved, **options)
        (scored.loss * 3).backward()
        found[index] = (scored, h.grad, w.grad)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    value, logprobs, d_hidden, d_weight = exact(hidden, weight, labels, curved)
    assert torch.equal(found[0][0].logprobs, found[1][0].logprobs)
    loose = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found[0][0].logprobs.double(), logprobs, **loose)
    torch.testing.assert_close(found[0][0].loss.double(), value, **loose)
    scale = 20 if dtype == torch.bfloat16 else 1
    for got, wanted in ((found[0][1] + found[1][1], d_hidden), (torch.cat([found[0][2], found[1][2]]), d_weight)):
        tolerance = {"rtol": 1e-3 * scale, "atol": 1e-3 * scale * float(wanted.abs().max())}
        torch.testing.assert_close(got.double(), wanted, **tolerance)


def test_what_is_frozen_gets_no_gradient():
    hidden, weight, labels = case(torch.float32)
    for trained in ((True, False), (False, True)):
        h, w = (x.clone().requires_grad_(on) for x, on in zip((hidden, weight), trained, strict=True))
        rl_csrc.linear_loss(h, w, labels, curved).loss.backward()
        assert (h.grad is not None, w.grad is not None) == trained
    with torch.no_grad():
        assert not rl_csrc.linear_loss(hidden.requires_grad_(), weight, labels, curved).loss.requires_grad


def test_a_loss_without_gradient_and_no_tokens_at_all():
    hidden, weight, labels = case(torch.float32)
    h = hidden.clone().requires_grad_()
    rl_csrc.linear_loss(h, weight, labels, lambda logprobs, _: logprobs.new_zeros(())).loss.backward()
    assert not h.grad.any()
    h, w = hidden[:0].clone().requires_grad_(), weight.clone().requires_grad_()
    rl_csrc.linear_loss(h, w, labels[:0], lambda logprobs, _: logprobs.sum()).loss.backward()
    assert h.grad.shape == (0, WIDTH)
    assert not w.grad.any()


def test_a_second_backward_pass_or_a_vector_loss_is_refused():
    hidden, weight, labels = case(torch.float32)
    value = rl_csrc.linear_loss(hidden.requires_grad_(), weight, labels, curved).loss
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="for one backward pass"):
        value.backward()
    with pytest.raises(rl_csrc.ArgumentError, match=r"the loss has shape \[53\]; wanted a scalar"):
        rl_csrc.linear_loss(hidden, weight, labels, lambda logprobs, _: logprobs)
