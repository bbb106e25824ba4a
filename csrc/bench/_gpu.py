"""Groups of GPU figures, by events of the device: `kernels.py --gpu` names them."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from rl_bench import Role
from rl_csrc import _cuda
from rl_csrc import cuda as ours
from rl_csrc.inference import paged
from rl_csrc.types import LossSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_bench import Run

    Work = Callable[[], object]

ROWS, VOCAB = 8192, 151936
DEVICE = "cuda"
KV_HEADS, SIZE, PAGE = 8, 128, 16
CASES = [(128, 80, 16), (128, 192, 16), (128, 256, 16), (128, 320, 16), (256, 192, 16), (32, 2048, 16), (128, 192, 32)]
"""(rows, tokens of context, query heads): of Qwen3-0.6B and 1.7B, and the last of Qwen3-8B."""
BEYOND = "peak beyond operands, returned gradients and, of linear_loss, its float32 total; our room is 0.65 GiB"


class Table:
    """Rows of a run, printed as they come."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def add(
        self, metric: str, system: str, samples: Sequence[float], *, role: str = "ours", unit: str = "ms",
        goal: float | None = None, of_limit: float | None = None, note: str = "",
    ) -> None:  # fmt: skip
        """Add one line; `goal` in the row's unit, `of_limit` as a share of the limit's speed."""
        wanted = f"{'>=' if unit.endswith('/s') else '<='} {goal} {unit}" if goal else None
        wanted = f">= {of_limit:.4f} of limit" if of_limit else wanted
        self._run.record(metric, system, samples, unit=unit, role=Role(role), goal=wanted, note=note)
        print(f"{metric:44s} {system:28s} {sorted(samples)} {unit} {note}", flush=True)

    def peers(self, metric: str, works: dict[str, Work], add: Callable[..., None], **how: Any) -> None:
        """Add rows of others; one that fails is a row that says so."""
        for name, work in works.items():
            try:
                add(metric, name, work, role="peer", **how)
            except Exception as error:  # noqa: BLE001
                self.add(metric, name, [], role="peer", note=repr(error)[:200])

    def timed(self, metric: str, system: str, work: Work, *, prepare: Work | None = None, **how: Any) -> None:
        """Time calls and add their row."""
        self.add(metric, system, measure(work, prepare=prepare), **how)


def measure(run: Work, *, repeats: int = 15, warmup: int = 3, prepare: Work | None = None) -> list[float]:
    """Milliseconds of each of `repeats` calls; `prepare` runs before each, untimed."""
    for _ in range(warmup):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, stop in events:
        if prepare is not None:
            prepare()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def measure_graph(runs: Sequence[Work], *, rounds: int = 4) -> list[float]:
    """Milliseconds per short launch: one graph calls each of `runs` (each on its own inputs) `rounds` times."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for run in runs:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for run in runs:
                run()
    return [x / (rounds * len(runs)) for x in measure(graph.replay)]


def losses(table: Table) -> None:
    """Policy loss, recurrences and statistics: short launches, inputs rotated beyond the L2 cache."""
    for num, goal in ((1 << 16, None), (1 << 20, 0.012)):
        sets = []
        for _ in range(8):
            logprobs = -torch.rand(num, device=DEVICE)
            arrays = (logprobs, logprobs + 0.1 * torch.randn(num, device=DEVICE), torch.randn(num, device=DEVICE))
            mask = torch.rand(num, device=DEVICE) < 0.9
            sets.append((*arrays, mask, torch.arange(0, num + 1, 4096, device=DEVICE)))
        for name, spec, limit in (("ppo", LossSpec(), goal), ("gspo", LossSpec(loss="gspo"), None)):
            runs = [
                lambda s=s, spec=spec, num=num: ours.policy_loss(*s, spec, float(num), None, None, None) for s in sets
            ]
            table.add(f"policy_loss {name} {num} tokens", "rl_csrc.policy_loss", measure_graph(runs), goal=limit)
    num = 64 * 4096
    sets = [
        (torch.randn(num, device=DEVICE), torch.randn(num, device=DEVICE), torch.rand(num, device=DEVICE) < 0.9)
        for _ in range(16)
    ]
    boundaries = torch.arange(0, num + 1, 4096, device=DEVICE)
    for kind, goal in (("gae", 0.008), ("vtrace", None)):
        how = (kind, 0.99, 0.95, None, "hold", None, 1.0, 1.0)
        runs = [lambda s=s, how=how: ours.scan_reverse(s[0], s[1], boundaries, s[2], *how) for s in sets]
        table.add(f"scan_reverse {kind} 64x4096", "rl_csrc.scan_reverse", measure_graph(runs), goal=goal)
    rewards = torch.randn(4096, device=DEVICE)
    ids = torch.arange(4096, device=DEVICE) // 8
    groups = torch.arange(0, 4097, 8, device=DEVICE)
    shuffled = ids[torch.randperm(4096, device=DEVICE)]
    for name, given in (("cu_groups", (None, groups)), ("ids", (ids, None)), ("shuffled ids", (shuffled, None))):
        samples = measure_graph([lambda given=given: ours.group_norm(rewards, *given, "grpo", 1e-6)], rounds=32)
        table.add(f"group_norm 4096, {name}", "rl_csrc.group_norm", samples, goal=0.006)
    x, mask = torch.randn(1 << 20, device=DEVICE), torch.rand(1 << 20, device=DEVICE) < 0.9
    samples = measure_graph([lambda: ours.masked_moments(x, mask)], rounds=32)
    table.add("masked_moments 1M", "rl_csrc.masked_moments", samples)
    table.add("whiten 1M", "rl_csrc.whiten", measure_graph([lambda: ours.whiten(x, mask, True, 1e-8, None)], rounds=32))


def copies(table: Table) -> None:
    """Copies and digests, in bytes moved (copies: read and written) over time."""
    total = 2 << 30
    source = torch.empty(total, dtype=torch.uint8, device=DEVICE).random_(0, 255)
    target = torch.empty_like(source)

    def rate(samples: list[float], nbytes: int) -> list[float]:
        return [nbytes / x / 1e6 for x in samples]

    limit = rate(measure(lambda: target.copy_(source)), 2 * total)
    sizes = {"300 tensors": total // 300 // 256 * 256, "3000 tensors of 64 KiB": 65536, "300 odd tensors": 7_000_003}
    for name, size in sizes.items():
        num = 3000 if size == 65536 else 300
        sources = [source[i * size : (i + 1) * size] for i in range(num)]
        shift = 3 if "odd" in name else 0
        targets = [target[shift + i * size : shift + (i + 1) * size] for i in range(num)]
        plan = _cuda.CopyPlan([x.data_ptr() for x in sources], [x.data_ptr() for x in targets], [size] * num)
        moved = measure(lambda plan=plan: plan.run(torch.cuda.current_stream().cuda_stream))
        metric = f"bucket_copy, {name}"
        table.add(metric, "copy", limit, role="limit", unit="GB/s")
        table.add(metric, "rl_csrc.bucket_copy", rate(moved, 2 * size * num), unit="GB/s", of_limit=0.85)
        peer = measure(lambda s=sources, t=targets: torch._foreach_copy_(t, s))
        table.add(metric, "torch._foreach_copy_", rate(peer, 2 * size * num), role="peer", unit="GB/s")
    for metric, read, goal in (("digest of 2 GiB", source, 3000), ("digest of 2 GiB, unaligned", source[1:], None)):
        samples = measure(lambda read=read: ours.digest_sum_async(read))
        table.add(metric, "rl_csrc.digest", rate(samples, total), unit="GB/s", goal=goal)


def deltas(table: Table) -> None:
    """Delta of 1 GiB of bfloat16 weights, 1% changed: bytes of an operand over time, the wait for sizes included."""
    base = torch.randn(1 << 29, device=DEVICE).to(torch.bfloat16).view(torch.int16)
    fresh = torch.where(torch.rand(1 << 29, device=DEVICE) < 0.01, base + 1, base)
    found = ours.delta_encode(fresh, base, 0.5)
    assert found is not None
    for name, run in (
        ("delta encode", lambda: ours.delta_encode(fresh, base, 0.5)),
        ("delta apply", lambda: ours.delta_apply(base, *found)),
    ):
        rates = [base.nbytes / x / 1e6 for x in measure(run)]
        table.add(f"{name} at 1% of 1 GiB", "rl_csrc", rates, unit="GB/s", goal=500)
        base.copy_(torch.where(torch.rand(1 << 29, device=DEVICE) < 0.01, fresh - 1, fresh))


def attention(table: Table) -> None:
    """A new token of each row, bfloat16, beside a copy that moves the bytes of the keys and values that it reads."""
    for rows, context, heads in CASES:
        metric = f"paged attention {rows} x {context}, {heads} / {KV_HEADS} heads"
        source = torch.empty(rows * context * KV_HEADS * SIZE * 2, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        copied = measure(lambda source=source, target=target: target.copy_(source))
        table.add(metric, "copy of half the bytes", copied, role="limit")
        table.add(metric, "rl_csrc.paged.attention", measure_graph([_call(rows, context, heads)], rounds=20))


def _call(rows: int, context: int, heads: int) -> Work:
    pages = -(-context // PAGE)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).bfloat16()

    caches = [normal(rows * pages, PAGE, KV_HEADS, SIZE) for _ in range(2)]
    tables = torch.randperm(rows * pages, device=DEVICE).view(rows, pages)
    new = normal(rows, heads, SIZE), normal(rows, KV_HEADS, SIZE), normal(rows, KV_HEADS, SIZE)
    where = tables, torch.arange(rows, device=DEVICE), torch.full((rows,), context - 1, device=DEVICE)
    return lambda: paged.attention(*new, *caches, *where, scaling=SIZE**-0.5)


def forward(table: Table) -> None:
    """Log-probs and entropies of 8192 x 151936 bfloat16."""
    metric = f"logprobs+entropy forward {ROWS}x{VOCAB} bf16"
    logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16, device=DEVICE).normal_(0, 3)
    labels = torch.randint(0, VOCAB, (ROWS,), device=DEVICE)
    flat = logits.view(-1)
    half = flat.numel() // 2  # read half, write half: the bytes of one read
    table.timed(metric, "copy of the same bytes", lambda: flat[:half].copy_(flat[half:]), role="limit")
    logits.normal_(0, 3)

    def scored(logits: torch.Tensor, labels: torch.Tensor, entropy: bool) -> object:
        return ours.logprobs_forward(logits, labels, 1.0, None, -100, None, entropy, False)

    table.timed(metric, "rl_csrc.logprobs", lambda: scored(logits, labels, True), goal=0.70)
    table.timed(metric, "rl_csrc.logprobs, no entropy", lambda: scored(logits, labels, False))
    compiled = torch.compile(lambda x, y: torch.log_softmax(x.float(), -1).gather(1, y[:, None]))
    peers = {
        "torch.compile": lambda: compiled(logits, labels),
        "F.cross_entropy": lambda: functional.cross_entropy(logits, labels, reduction="none"),
    }
    table.peers(metric, peers, table.timed, note="no entropy")
    odd = torch.empty(ROWS * (VOCAB - 1), dtype=torch.bfloat16, device=DEVICE).normal_(0, 3).view(ROWS, VOCAB - 1)
    fewer = labels.clamp(max=VOCAB - 2)
    metric, note = f"the same, {VOCAB - 1} columns", "unaligned rows"
    table.timed(metric, "rl_csrc.logprobs", lambda: scored(odd, fewer, True), note=note)


def train(table: Table) -> None:
    """Backward in place, and forward and backward in one pass."""
    logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16, device=DEVICE).normal_(0, 3)
    labels = torch.randint(0, VOCAB, (ROWS,), device=DEVICE)
    grads = torch.randn(ROWS, device=DEVICE) * 1e-4
    spare = torch.empty_like(logits)
    limit = measure(lambda: spare.copy_(logits))

    def refill() -> None:
        logits.normal_(0, 3)

    metric = f"logprobs backward in place {ROWS}x{VOCAB} bf16"
    table.add(metric, "copy", limit, role="limit")
    scored, entropies, _, lse = ours.logprobs_forward(logits, labels, 1.0, None, -100, None, True, False)
    for name, upstream, goal in (("rl_csrc.logprobs", None, 1.35), ("rl_csrc.logprobs, with entropy", grads, None)):
        given = (logits, labels, scored, lse, grads, entropies, upstream, 1.0, None, -100, None, 0, logits)
        table.timed(metric, name, lambda given=given: ours.logprobs_backward(*given), prepare=refill, goal=goal)

    metric = f"forward+backward {ROWS}x{VOCAB} bf16"
    table.add(metric, "copy", limit, role="limit")

    def both() -> None:
        found = ours.logprobs_forward(logits, labels, 1.0, None, -100, None, False, False)
        how = (1.0, None, -100, None, 0, logits)
        ours.logprobs_backward(logits, labels, found[0], found[3], grads, None, None, *how)

    table.timed(metric, "rl_csrc.logprobs, gradient in place", both, prepare=refill, goal=2.7)

    def backward_of(loss: Callable[[torch.Tensor], torch.Tensor]) -> Work:
        return lambda: torch.autograd.grad(loss(leaf := logits.detach().requires_grad_()), leaf)

    compiled = torch.compile(lambda x: -torch.log_softmax(x.float(), -1).gather(1, labels[:, None]).mean())
    peers = {
        "F.cross_entropy": backward_of(lambda x: functional.cross_entropy(x, labels)),
        "torch.compile": backward_of(compiled),
    }
    table.peers(metric, peers, table.timed)

    def liger() -> object:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        return LigerCrossEntropyFunction.apply(logits, labels, None)

    table.peers(metric, {"Liger": liger}, table.timed, prepare=refill, note="gradient in place")


def linear(table: Table) -> None:
    """The LM head: forward, backward by recompute, and the three-product form with the loss inside."""
    for width in (2048, 4096):
        hidden = torch.randn(ROWS, width, device=DEVICE, dtype=torch.bfloat16)
        weight = torch.randn(VOCAB, width, device=DEVICE, dtype=torch.bfloat16) * 0.02
        Head(table, hidden, weight).measure()


class Head:
    """The LM head at one width."""

    def __init__(self, table: Table, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        self.table, self.hidden, self.weight = table, hidden, weight
        self.labels = torch.randint(0, VOCAB, (ROWS,), device=DEVICE)
        self.gradients = hidden.nbytes + weight.nbytes

    def products(self) -> tuple[list[float], list[float]]:
        """Times of the head's product, and of the two products of its backward together."""
        logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16, device=DEVICE)
        dhidden, dweight = torch.empty_like(self.hidden), torch.empty_like(self.weight)

        def pair() -> None:
            torch.mm(logits, self.weight, out=dhidden)
            torch.mm(logits.t(), self.hidden, out=dweight)

        one = measure(lambda: torch.mm(self.hidden, self.weight.t(), out=logits), repeats=11)
        return one, measure(pair, repeats=11)

    def with_memory(
        self, metric: str, system: str, work: Work, *, returned: int, role: str = "ours", of_limit: float | None = None
    ) -> None:
        """Time, and memory beyond operands and what is returned."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        samples = measure(work, repeats=7, warmup=1)
        extra = (torch.cuda.max_memory_allocated() - before - returned) / 2**30
        self.table.add(metric, system, samples, of_limit=of_limit, role=role)
        goal = 0.7 if role == "ours" else None
        self.table.add(f"{metric}, memory", system, [extra], unit="GiB", goal=goal, role=role, note=BEYOND)

    def measure(self) -> None:
        product, two = self.products()
        table, hidden, weight, labels = self.table, self.hidden, self.weight, self.labels
        shape = f"H={hidden.shape[1]}"
        metric = f"linear_logprobs forward {shape}"
        table.add(metric, "one torch.mm, bf16 result", product, role="limit")
        for chunk, goal in ((None, 1 / 1.07), (512, None)):
            how = (1.0, None, -100, True, False, chunk, False)
            self.with_memory(
                metric, f"rl_csrc.linear_logprobs, chunk {chunk}",
                lambda how=how: ours.linear_logprobs_forward(hidden, weight, labels, None, *how),
                returned=0, of_limit=goal,
            )  # fmt: skip
        one, pair = statistics.median(product), statistics.median(two)
        how = (1.0, None, -100, True, False, None, False)
        scored, entropies, _, _ = ours.linear_logprobs_forward(hidden, weight, labels, None, *how)
        grads = torch.randn(ROWS, device=DEVICE) * 1e-4

        def recompute() -> None:
            found = ours.linear_logprobs_forward(hidden, weight, labels, None, *how)
            ours.linear_logprobs_backward(
                hidden, weight, labels, None, found[0], found[3], grads, entropies, None, 1.0, None, -100, None, False,
                (True, True, False),
            )  # fmt: skip

        metric = f"linear_logprobs forward+backward, 4 products {shape}"
        table.add(metric, "its 4 torch.mm", [2 * one + pair], role="limit")
        self.with_memory(
            metric, "rl_csrc.linear_logprobs", recompute, returned=self.gradients, of_limit=1 / 1.10
        )  # fmt: skip
        metric = f"linear_loss of a policy loss, 3 products {shape}"
        table.add(metric, "its 3 torch.mm", [one + pair], role="limit")
        self.losses(metric, scored, grads)
        self.peers(metric)

    def losses(self, metric: str, scored: torch.Tensor, grads: torch.Tensor) -> None:
        """A policy loss between two kernels."""
        mask = torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
        tokens = (scored, grads, mask, torch.arange(0, ROWS + 1, 512, device=DEVICE), LossSpec(), float(ROWS))

        def loss(found: torch.Tensor, entropies: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, None]:
            value, _, grad, _ = ours.policy_loss(found, *tokens, entropies, None, None)
            return value, grad, None

        for chunk, goal in ((None, 1 / 1.08), (512, None)):
            how = (loss, 1.0, None, -100, False, chunk, (True, True), 0, None)
            self.with_memory(
                metric, "rl_csrc.linear_loss" + (f", chunk {chunk}" if chunk else ""),
                lambda how=how: ours.linear_loss(self.hidden, self.weight, self.labels, *how),
                returned=4 * self.weight.numel() + self.gradients, of_limit=goal,
            )  # fmt: skip

    def peers(self, metric: str) -> None:
        """The LM head with cross-entropy, forward and backward, by others."""
        leaves = [self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()]

        def plain() -> None:
            torch.autograd.grad(functional.cross_entropy(leaves[0] @ leaves[1].t(), self.labels), leaves)

        def liger() -> None:
            from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

            found = LigerFusedLinearCrossEntropyFunction.apply(*leaves, self.labels)
            torch.autograd.grad(found[0] if isinstance(found, tuple) else found, leaves)

        works = {"torch, mm + F.cross_entropy": plain, "Liger fused linear": liger}
        self.table.peers(metric, works, self.with_memory, returned=self.gradients)


GROUPS = {
    "losses": losses,
    "copies": copies,
    "attention": attention,
    "deltas": deltas,
    "forward": forward,
    "train": train,
    "linear": linear,
}
