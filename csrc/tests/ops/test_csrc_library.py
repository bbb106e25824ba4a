"""The ops under torch.library and torch.compile, across a fork, with poisoned outputs, both tensor crossings."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.library import opcheck

import rl_csrc
from rl_csrc import _cpu, cpu
from rl_csrc.types import LossSpec

OPS = torch.ops.rl_csrc
CU = torch.tensor([0, 3, 3, 8])


SPEC = LossSpec(entropy_coef=0.1)


def policy_arguments(kl="k3"):
    old, adv, ref = -torch.rand(8), torch.randn(8), -torch.rand(8)
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
    return old, adv, mask, CU, LossSpec(kl=kl, kl_coef=0.1, entropy_coef=0.01).numbers(), None, 6.0, ref, None


def logits(dtype=torch.float32, grad=True):
    return torch.randn(8, 21).to(dtype).requires_grad_(grad)


def leaf(*shape):
    return torch.randn(shape).requires_grad_()


LABELS = torch.tensor([0, 5, -100, 20, 3, 3, 7, 1])
SAMPLES = {
    "logprobs": lambda: (logits(), LABELS, None, 0.7, 5.0, -100, None, True, True, False),
    "logprobs rows": lambda: (
        logits(), LABELS[:2], torch.ones(2), 1.0, None, None, torch.tensor([6, 1]), False, False, False,
    ),
    "logprob_stats": lambda: (logits(grad=False), LABELS, None, 1.0, None, -100, None, 0),
    "stats_merge": lambda: (torch.rand(2, 4, 5) + 0.5,),
    "parallel_logprobs": lambda: (logits(), LABELS, None, 1.0, 5.0, -100, None, 21, torch.rand(2, 8, 5) + 0.5, False),
    "linear_logprobs": lambda: (
        leaf(8, 6), leaf(21, 6), leaf(21), LABELS, None, 1.0, None, -100, None, False, True, True,
    ),
    "policy_loss": lambda: ((-torch.rand(8)).requires_grad_(), *policy_arguments(), torch.rand(8).requires_grad_()),
    "scan_reverse": lambda: (
        torch.randn(8), torch.randn(8), CU, None, "gae", 0.9, None, 0.8, None, "hold", None, 1.0, 1.0,
    ),
    "group_norm": lambda: (torch.randn(8), torch.tensor([0, 0, 1, 1, 2, 2, 2, 0]), None, "grpo", 1e-6),
    "whiten": lambda: (torch.randn(8), None, True, 1e-8, []),
}  # fmt: skip


@pytest.mark.process
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not:UserWarning"
)  # torch 2.15, of its own check
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    op = getattr(OPS, name.split()[0]).default
    opcheck(op, SAMPLES[name]())


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.promise("`torch.compile(fullgraph=True)` takes the ops whole")
@pytest.mark.process
def test_a_compiled_training_step_equals_the_eager_one():
    old, adv, mask, cu, *_ = policy_arguments()
    operands = torch.randn(8, 6), torch.randn(21, 6), torch.randn(21)

    def step(h, w, bias):
        scored = rl_csrc.logprobs(h @ w.T, LABELS, entropy=True, temperature=0.9)
        linear = rl_csrc.linear_logprobs(h, w, LABELS, bias=bias)
        loss = rl_csrc.policy_loss(scored.logprobs, old, adv, mask, cu, SPEC, entropy=scored.entropy).loss
        return loss + linear.logprobs.sum()

    grads = []
    for run in (step, compiled(step)):
        leaves = [x.clone().requires_grad_() for x in operands]
        loss = run(*leaves)
        loss.backward()
        grads.append((loss.detach(), *(x.grad for x in leaves)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.process
@pytest.mark.parametrize("temperature", [0.9, torch.linspace(0.5, 2.0, 8)])
def test_compiled_shards_equal_the_eager_ones(temperature):
    whole = logits(grad=False)

    def score(left, right):
        def stats(x, start):
            return rl_csrc.logprob_stats(x, LABELS, vocab_start=start, temperature=temperature)

        other = stats(right, 11)
        merged = rl_csrc.stats_merge(torch.stack([stats(left, 0), other]))
        mine = rl_csrc.parallel_logprobs(
            left, LABELS, vocab_start=0, gather=lambda own: torch.stack([own, other]), temperature=temperature
        )
        return *merged, *mine

    found = []
    for run in (score, compiled(score)):
        left, right = (part.contiguous().requires_grad_() for part in whole.split(11, dim=1))
        scores = run(left, right)
        (scores[3].sum() + 2 * scores[4].sum()).backward()
        assert right.grad is None  # its own rank makes it
        found.append([*scores, left.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(found[0][0], found[0][3])


@pytest.mark.process
def test_compiled_advantages_equal_the_eager_ones():
    rewards, values, ids = torch.randn(8), torch.randn(8), torch.tensor([4, 4, 4, 1, 1, 0, 0, 0])

    def work(r, v):
        scan = rl_csrc.scan_reverse(r, v, CU, gamma=0.9, lam=0.5)
        moments = rl_csrc.Moments(torch.tensor(8.0), torch.tensor(0.5), torch.tensor(3.0))
        return rl_csrc.group_norm(r, ids), rl_csrc.whiten(scan.advantages), rl_csrc.whiten(v, moments=moments)

    for a, b in zip(work(rewards, values), compiled(work)(rewards, values), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's inductor, of its own code
def test_inductor_compiles_the_whole_step():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def loss(x):
        return rl_csrc.logprobs(x * 2, LABELS, entropy=True).logprobs.sum()

    x = logits()
    loss(x).backward()
    y = x.detach().clone().requires_grad_()
    rl_csrc.logprobs(y * 2, LABELS).logprobs.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_every_output_is_written(monkeypatch):
    """Outputs come poisoned; what is not written stays NaN."""

    def poisoned(*shape, **options):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        out = torch.zeros(shape, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(7)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: poisoned(tuple(x.shape), dtype=x.dtype))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape: poisoned(*shape, dtype=x.dtype))
    x = torch.randn(9, 21)
    grad = poisoned((9, 21), dtype=torch.float32)
    rows, labels = torch.tensor([0, 3, 8]), torch.tensor([1, -100, 2])
    found = cpu.logprobs_forward(x, labels, 1.0, None, -100, rows, True, True)
    cpu.logprobs_backward(
        x, labels, found[0], found[3], torch.ones(3), found[1], torch.ones(3), 1.0, None, -100, rows, 0, grad
    )
    scan = rl_csrc.scan_reverse(torch.randn(8), None, CU, loss_mask=torch.zeros(8))
    policy = rl_csrc.policy_loss(torch.zeros(8), torch.zeros(8), torch.ones(8), torch.zeros(8), CU)
    stats = rl_csrc.logprob_stats(x, torch.zeros(9), vocab_start=0)
    linear = rl_csrc.linear_logprobs(
        torch.randn(5, 64).bfloat16(), torch.randn(40, 64).bfloat16(), torch.zeros(5), entropy=True, sum_pi_squared=True
    )
    outputs = [*found, grad, *scan, *policy, stats, *rl_csrc.stats_merge(stats[None]), *linear]
    for dtype in (torch.float32, torch.bfloat16):  # a tile's 64 columns, and tokens that fill none
        hidden, weight = torch.randn(8, 64).to(dtype), torch.randn(40, 64).to(dtype)
        leaves = [part.clone().requires_grad_() for part in (hidden, weight, weight[:, 0])]
        whole = rl_csrc.linear_logprobs(*leaves[:2], LABELS.clamp(max=0), bias=leaves[2], entropy=True)
        (whole.logprobs.sum() + whole.entropy.sum()).backward()
        pair = [part.clone().requires_grad_() for part in (hidden, weight)]
        headed = rl_csrc.linear_loss(*pair, LABELS.clamp(min=0), lambda scored, _: scored.square().sum())
        headed.loss.backward()
        outputs += [*whole, *(x.grad for x in leaves + pair), *headed]
    outputs += [rl_csrc.group_norm(torch.randn(4), torch.zeros(4)), rl_csrc.whiten(torch.randn(4), torch.zeros(4))]
    outputs += [
        *rl_csrc.sampling.draw(
            torch.randn(8, 21), temperature=torch.ones(8), streams=torch.arange(8), positions=CU[[0] * 8]
        ),
    ]
    assert not any(o.isnan().any() for o in outputs if o is not None)


@pytest.mark.process
def test_a_forked_child_computes_with_threads_of_its_own():
    x, labels = torch.randn(64, 5000), torch.zeros(64, dtype=torch.int64)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    wanted = rl_csrc.logprobs(x, labels).logprobs  # starts the parent's pool
    pid = os.fork()
    if pid == 0:
        same = torch.equal(rl_csrc.logprobs(x, labels).logprobs, wanted)
        os._exit(0 if same else 1)
    torch.set_num_threads(before)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


_COUNT_THREADS = """
import os, torch, rl_csrc
x, labels, found = torch.zeros(64, 5000), torch.zeros(64, dtype=torch.int64), []
for num in (1, 3, 2):
    torch.set_num_threads(num)
    before = len(os.listdir("/proc/self/task"))
    rl_csrc.logprobs(x, labels)
    found.append(len(os.listdir("/proc/self/task")) - before)
print(found)
"""


@pytest.mark.process
def test_a_call_uses_as_many_threads_as_torch_has():
    """The caller is one of them; others are started when they are first wanted, and kept."""
    done = subprocess.run([sys.executable, "-c", _COUNT_THREADS], check=True, capture_output=True, text=True)
    assert done.stdout.split("\n")[-2] == "[0, 2, 0]"


def test_other_threads_of_python_go_on_during_a_call():
    """The interpreter itself does not take turns here: another thread runs only where the call lets go of the GIL."""
    x, labels, out = torch.randn(64, 60_000), torch.zeros(64, dtype=torch.int64), torch.empty(64)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for _ in range(20):  # on a busy machine it may wake up too late
            seen, begun = [], threading.Event()

            def call(seen=seen, begun=begun):
                begun.set()
                seen.append("begin")
                _cpu.logprobs(x, labels, 1.0, 0.0, None, None, out, None, None, None, 1)
                seen.append("end")

            thread = threading.Thread(target=call)
            thread.start()
            begun.wait()
            seen.append("meanwhile")
            thread.join()
            if seen == ["begin", "meanwhile", "end"]:
                return
    finally:
        sys.setswitchinterval(before)
    pytest.fail("No other thread ever ran during a call.")


def test_calls_from_python_threads_do_not_disturb_each_other():
    from concurrent.futures import ThreadPoolExecutor

    x, labels = torch.randn(64, 3000), torch.zeros(64, dtype=torch.int64)
    wanted = rl_csrc.logprobs(x, labels).logprobs
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: rl_csrc.logprobs(x, labels).logprobs, range(40)):
            assert torch.equal(found, wanted)


def test_a_tensor_without_an_exchange_table_uses_its_attributes():
    class Wrapped:  # what the binding asks of a tensor when it has no table
        def __init__(self, x):
            self.x = x

        def __getattr__(self, name):
            return getattr(self.x, name)

    x, labels = torch.randn(4, 50)[:, :33], torch.tensor([1, 2, 3, 4])
    outs = [torch.empty(4) for _ in range(2)]
    for wrap, out in zip((Wrapped, lambda t: t), outs, strict=True):
        _cpu.logprobs(wrap(x), wrap(labels), 1.0, 0.0, None, None, wrap(out), None, None, None, 1)
    assert torch.equal(*outs)


def test_the_binding_refuses_what_it_cannot_take():
    x, labels, out = torch.randn(4, 33), torch.arange(4), torch.empty(4)
    with pytest.raises(rl_csrc.ArgumentError, match=r"logits is int64 \[4\]; wanted float32, bfloat16 or float16"):
        _cpu.logprobs(labels, labels, 1.0, 0.0, None, None, out, None, None, None, 1)
    with pytest.raises(rl_csrc.ArgumentError, match="adjacent columns"):
        _cpu.logprobs(x.T[:4], labels, 1.0, 0.0, None, None, out, None, None, None, 1)
    with pytest.raises(rl_csrc.ArgumentError, match=r"logprobs is float32 \[3\]; wanted 4 elements"):
        _cpu.logprobs(x, labels, 1.0, 0.0, None, None, out[:3], None, None, None, 1)
    lp, shared = torch.zeros(4), torch.zeros(1, 33).expand(4, 33)
    with pytest.raises(rl_csrc.ArgumentError, match="rows that do not overlap"):
        _cpu.logprobs_backward(x, labels, 1.0, 0.0, None, None, 0, lp, lp, None, lp, None, shared, 1)
