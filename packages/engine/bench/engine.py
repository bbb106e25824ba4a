"""Optimizer steps against a plain Hugging Face loop (padded there, packed here) and TRL's SFTTrainer: speed and memory.

TRL is an optional peer in an environment of its own, because it pins other versions than the workspace:

    uv venv trl && uv pip install --python trl/bin/python trl==1.16.0 transformers==5.23.0 datasets==5.2.0
    RL_BENCH_TRL_PYTHON=trl/bin/python uv run rl-bench engine
"""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from rl_bench import Role, Run
from rl_csrc import policy_loss
from rl_engine import EngineConfig, OptimizerConfig, create_engine
from rl_engine.losses import sft_loss, token_local
from rl_engine.testing import ragged_batch, write_tiny_model

SIZES = {"hidden_size": 160, "intermediate_size": 480, "num_hidden_layers": 4, "num_attention_heads": 5, "head_dim": 32}

# a vocabulary whose logits weigh, as they do in real models, and rows of mixed lengths
WIDE = {
    "vocab_size": 16384, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 6, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
BATCH, LONGEST = 16, 512
# the shape of Qwen3-0.6B
HALF_BILLION = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
# a vocabulary under which the head is most of a step
HEAVY_HEAD = {
    "vocab_size": 32768, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}  # fmt: skip
# the vocabulary of Qwen, under a trunk that weighs little
QWEN_HEAD = {
    "vocab_size": 151936, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
GPU_TOKENS, GPU_LONGEST = 8192, 2048
NAMES = {"rl-engine": "rl-engine", "plain": "plain Hugging Face", "trl": "TRL's SFTTrainer"}
VARIABLE = "RL_BENCH_TRL_PYTHON"


def draw_rows(num_rows, low, high):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(low, high, (2, num_rows), generator=generator).tolist()
    draw = lambda size: torch.randint(4, 70, (size,), generator=generator).tolist()  # noqa: E731
    return [draw(size) for size in lengths[0]], [draw(size) for size in lengths[1]]


def padded(prompts, completions):
    width = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, stop = len(prompt), len(prompt) + len(completion)
        ids[row, :stop] = torch.tensor(prompt + completion)
        labels[row, start:stop], mask[row, :stop] = ids[row, start:stop], 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def plain_step(folder, prompts, completions, micro_rows):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = sum(map(len, completions))
    pieces = [
        padded(prompts[start : start + micro_rows], completions[start : start + micro_rows])
        for start in range(0, len(prompts), micro_rows)
    ]

    def step():
        optimizer.zero_grad()
        for piece in pieces:
            model(**piece, num_items_in_batch=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def our_step(folder, batch, loss=sft_loss, **changes):
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), optimizer=OptimizerConfig(), **changes))
    engine.initialize()

    def step():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, loss)
        engine.optimizer_step()

    return step, lambda: engine.forward_backward_batch(batch, None)


def main(run: Run) -> None:
    _short_rows(run)
    _mixed_rows(run)
    _head(run)
    _head_memory(run)
    _two_ranks(run)
    gpu(run)


def _short_rows(run: Run) -> None:
    num_rows, low, high = (128, 3, 12) if run.quick else (512, 3, 14)
    prompts, completions = draw_rows(num_rows, low, high)
    batch = ragged_batch(prompts, completions)
    tokens = sum(map(len, prompts)) + sum(map(len, completions))
    budget = 8192
    run.parameters(**SIZES, num_rows=num_rows, tokens=tokens, max_tokens_per_gpu=budget)
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(folder, num_key_value_heads=5, **SIZES)
        exact, scores = our_step(folder, batch, max_tokens_per_gpu=budget)
        medium, medium_scores = our_step(folder, batch, max_tokens_per_gpu=budget, matmul_precision="medium")
        plain = plain_step(folder, prompts, completions, micro_rows=budget // (2 * high - 2))
        amount = {"unit": "tokens/s", "amount": tokens}
        run.compare(
            "step", {"rl-engine": exact}, peers={"plain Hugging Face": plain}, goal=">= 1.0 of best peer", **amount
        )
        run.compare(
            "step, bfloat16 products", {"rl-engine": medium}, peers={"plain Hugging Face, float32": plain}, **amount
        )
        run.compare("old log-probs", {"float32": scores, "bfloat16 products": medium_scores}, **amount)


def _mixed_rows(run: Run) -> None:
    """Steps on rows of mixed lengths, each system in a process of its own."""
    draw = random.Random(0)
    batches = [
        [mixed_row(draw, LONGEST, WIDE["vocab_size"]) for _ in range(BATCH)] for _ in range(3 if run.quick else 4)
    ]
    run.parameters(mixed=WIDE, batch_size=BATCH, longest=LONGEST)
    with tempfile.TemporaryDirectory() as place:
        model = write_wide_model(Path(place) / "model")
        given = {"model": str(model), "batches": batches, "batch_size": BATCH, "longest": LONGEST}
        found = race(run, Path(place), given | {"device": "cpu", "is_random": False})
    tell(run, "rows of mixed lengths", batches, found, warm_up=1, goal=">= 1.5 of best peer")
    is_above = {"peak resident memory": False, "its growth over imports": True}
    for metric, over_imports in is_above.items():
        tell_memory(run, metric, found, over_imports=over_imports)


def _policy_loss(output, rows):
    """PPO on log-probs that are the old ones."""
    mask, found = rows["loss_mask"].values().bool(), output.logprobs
    old, advantages = found.detach(), torch.linspace(-1, 1, len(mask))
    counted = {"num_tokens": output.counts.tokens}
    return policy_loss(found, old, advantages, mask, output.cu_seqlens, **counted).loss, {}


def _head(run: Run) -> None:
    """A policy update whose loss is made by the head, and the same where log-probs come first; groups of eight rows."""
    prompts, completions = draw_rows(16 if run.quick else 32, 24, 72)
    prompts = [prompts[row // 8 * 8] for row in range(len(prompts))]
    batch = ragged_batch(prompts, completions)
    tokens = sum(map(len, completions))
    run.parameters(head=HEAVY_HEAD, scored_tokens=tokens, head_prompt_tokens=sum(map(len, prompts[::8])))
    local = token_local(lambda output, rows: _policy_loss(output, rows))
    with tempfile.TemporaryDirectory() as place:
        folder = write_tiny_model(Path(place) / "model", **HEAVY_HEAD)
        for precision in ("float32", "bfloat16"):
            at_once, _ = our_step(folder, batch, local, precision=precision)
            one_after_the_other, _ = our_step(folder, batch, _policy_loss, precision=precision)
            metric = f"products of a policy update over one with the head, {precision}"
            one = tokens * HEAVY_HEAD["vocab_size"] * HEAVY_HEAD["hidden_size"]
            run.record(metric, "loss in the head", [multiplied(at_once) / one], unit="x")
            others = [multiplied(one_after_the_other) / one]
            run.record(metric, "log-probs, then the loss", others, unit="x", role=Role.PEER)
            run.compare(
                f"policy update under 32k tokens of vocabulary, {precision}", {"loss in the head": at_once},
                peers={"log-probs, then the loss": one_after_the_other},
                goal=">= 1.18 of best peer",  # 1 / 0.85
            )  # fmt: skip


class _Products(TorchDispatchMode):
    """Counts the multiplications of matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "bmm"):
            left, right = [given for given in args if isinstance(given, torch.Tensor)][-2:]
            self.count += left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


def multiplied(step) -> int:
    """Multiplications of the matrix products of one step, attention's kernel excepted."""
    with _Products() as products:
        step()
    return products.count


def _head_memory(run: Run) -> None:
    """What steps under 152k tokens of vocabulary take at most, beyond weights, gradients and moments."""
    draw = random.Random(0)
    rows = [mixed_row(draw, 128, QWEN_HEAD["vocab_size"]) for _ in range(16)]
    scored = sum(sum(row["completion_mask"]) for row in rows)
    systems = {"rl-engine": "loss in the head", "separate": "log-probs, then the loss", "plain": NAMES["plain"]}
    run.parameters(qwen_head=QWEN_HEAD, qwen_scored_tokens=scored, qwen_tokens=sum(len(r["input_ids"]) for r in rows))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write_tiny_model(folder, **QWEN_HEAD)
        held = 4 * (folder / "model.safetensors").stat().st_size
        given = {"model": str(folder), "batches": [rows] * 2, "batch_size": len(rows), "longest": 128}
        found = race(run, Path(place), given | {"device": "cpu", "is_random": False}, systems=tuple(systems))
    run.parameters(qwen_held_mebibytes=held / 2**20)
    for system, name in systems.items():
        taken, role = found[system], Role.PEER if system == "plain" else Role.OURS
        above = (taken["peak_bytes"] - taken["base_bytes"] - held) / 2**20
        run.record("memory of a step under 152k tokens of vocabulary", name, [above], unit="MiB", role=role)
        run.record("step under 152k tokens of vocabulary", name, taken["seconds"][1:], unit="s", role=role)


def _two_ranks(run: Run) -> None:
    """Updates of a dense model on two gloo ranks: megatron's tensor parallelism beside fsdp, processes in turns."""
    names = {"megatron": "megatron, tp=2", "fsdp": "fsdp, 2 ranks"}
    note = "gloo on CPUs; megatron-core on the stand-in for CUDA of the tests, without its kernels"
    prompts, completions = draw_rows(32, 24, 96)
    tokens = sum(map(len, prompts)) + sum(map(len, completions))
    run.parameters(two_ranks=WIDE, two_ranks_tokens=tokens, two_ranks_threads=1)
    given = {"prompts": prompts, "completions": completions, "lr": 1e-3, "max_tokens": 1024, "updates": 4}
    found: dict[str, list[list[dict]]] = {backend: [] for backend in names}
    with tempfile.TemporaryDirectory() as place:
        settings = Path(place) / "settings.json"
        settings.write_text(json.dumps(given | {"model": str(write_wide_model(Path(place) / "model"))}))
        for _ in range(1 if run.quick else 2):
            for backend, rounds in found.items():
                rounds.append(ranks_of(settings, backend))
    for backend, rounds in found.items():
        role = Role.OURS if backend == "megatron" else Role.PEER
        seconds = [each for ranks in rounds for each in ranks[0]["seconds"][1:]]
        grown = [(rank["peak_bytes"] - rank["base_bytes"]) / 2**20 for ranks in rounds for rank in ranks]
        run.record("update on two ranks", names[backend], seconds, unit="s", role=role, note=note)
        run.record("memory that a rank of two grows by", names[backend], grown, unit="MiB", role=role, note=note)
    losses = [found[backend][0][0]["losses"] for backend in names]
    apart = [abs(ours - theirs) for ours, theirs in zip(*losses, strict=True)]
    run.parameters(two_ranks_losses=dict(zip(names, losses, strict=True)))
    metric = "loss of updates on two ranks, megatron less fsdp"
    run.record(metric, names["megatron"], [max(apart)], unit="nats", goal="<= 0.0001 nats")


def ranks_of(settings: Path, backend: str, *, timeout_s: float = 200) -> list[dict]:
    """What the two processes of a backend wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    script = str(Path(__file__).with_name("_ranks_child.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, str(settings), backend, str(rank)],
            env=os.environ | group | {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=timeout_s)
            if rank.returncode:
                raise RuntimeError(f"{backend} failed: {said[-3000:]}")
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(settings.with_name(f"{backend}-{rank}.json").read_text()) for rank in range(2)]


def gpu(run: Run) -> None:
    """The same on a GPU: a model of half a billion parameters, packed batches of eight thousand tokens."""
    metric, memory = "0.6 B parameters on a GPU", "0.6 B parameters on a GPU, peak memory"
    goal = ">= 1.5 of best peer"
    if not torch.cuda.is_available():
        run.record(metric, NAMES["rl-engine"], [], unit="tokens/s", goal=goal, note="no CUDA device")
        run.record(memory, NAMES["rl-engine"], [], unit="MiB", goal=">= 1.43 of best peer", note="no CUDA device")
        return
    draw = random.Random(0)
    batches = [full_batch(draw) for _ in range(6 if run.quick else 12)]
    most_rows = max(map(len, batches))
    run.parameters(gpu_model=HALF_BILLION, gpu_tokens=GPU_TOKENS, gpu_longest=GPU_LONGEST)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write_tiny_model(folder)  # its tokenizer
        AutoConfig.for_model("qwen3", **HALF_BILLION).save_pretrained(folder)
        (folder / "model.safetensors").unlink()
        given = {"model": str(folder), "batches": batches, "batch_size": most_rows, "longest": GPU_LONGEST}
        found = race(run, Path(place), given | {"device": "cuda", "is_random": True}, timeout_s=280)
    tell(run, metric, batches, found, warm_up=3, goal=goal)
    tell_memory(run, memory, found, over_imports=False)


def race(
    run: Run,
    folder: Path,
    given: dict,
    *,
    timeout_s: float = 100,
    systems: tuple[str, ...] = ("rl-engine", "plain", "trl"),
) -> dict[str, dict]:
    """What each system's process wrote; TRL's only where there is its interpreter, and batches are of equally many.

    A peer that the GPU's memory is too small for is missing.
    """
    settings, threads = folder / "settings.json", torch.get_num_threads()
    run.parameters(threads=threads)
    settings.write_text(json.dumps(given | {"threads": threads, "lr": 1e-5}))
    trl_python = os.environ.get(VARIABLE)
    interpreters = dict.fromkeys(("rl-engine", "separate", "plain"), sys.executable)
    if trl_python and len({len(rows) for rows in given["batches"]}) == 1:
        interpreters["trl"] = trl_python
    found: dict[str, dict] = {}
    for system, python in interpreters.items():
        if system not in systems:
            continue
        script = str(Path(__file__).with_name("_sft_child.py"))
        done = subprocess.run(
            [python, "-W", "ignore", script, str(settings), system],
            check=False, timeout=timeout_s, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if done.returncode and system != "rl-engine" and "OutOfMemoryError" in done.stderr:
            continue
        if done.returncode:
            raise RuntimeError(f"{system} failed: {done.stderr[-3000:]}")
        found[system] = json.loads((folder / f"{system}.json").read_text())
    return found


def tell(run: Run, metric: str, batches: list, found: dict[str, dict], *, warm_up: int, goal: str) -> None:
    """Tokens a second of every step after the first ones."""
    tokens = [sum(len(row["input_ids"]) for row in rows) for rows in batches][warm_up:]
    run.parameters(**{f"tokens of steps, {metric}": tokens})

    def speeds(one: dict) -> list[float]:
        return [count / seconds for count, seconds in zip(tokens, one["seconds"][warm_up:], strict=True)]

    _tell(run, metric, "tokens/s", found, speeds, goal)


def tell_memory(run: Run, metric: str, found: dict[str, dict], *, over_imports: bool) -> None:
    """Bytes at most, or what they are more than before the model."""

    def mebibytes(one: dict) -> list[float]:
        return [(one["peak_bytes"] - (one["base_bytes"] if over_imports else 0)) / 2**20]

    _tell(run, metric, "MiB", found, mebibytes, ">= 1.43 of best peer")  # 1 / 0.7


def _tell(run: Run, metric: str, unit: str, found: dict[str, dict], samples_of, goal: str) -> None:
    for system, name in NAMES.items():
        taken, role = found.get(system), Role.OURS if system == "rl-engine" else Role.PEER
        why = (
            f"{VARIABLE} is not set, or batches differ in rows" if system == "trl" else "the GPU's memory is too small"
        )
        note = "" if taken else why
        run.record(
            metric, name, samples_of(taken) if taken else [], unit=unit, role=role,
            goal=goal if role is Role.OURS else None, note=note,
        )  # fmt: skip


def mixed_row(draw, longest, vocab_size, *, centre=4.8):
    """A row of lognormal length, half of it prompt, as TRL takes it."""
    size = min(longest, max(16, int(draw.lognormvariate(centre, 0.8))))
    ids = [draw.randrange(vocab_size) for _ in range(size)]
    return {"input_ids": ids, "completion_mask": [int(index >= size // 2) for index in range(size)]}


def full_batch(draw):
    """Rows of mixed lengths with `GPU_TOKENS` tokens in all."""
    rows, left = [], GPU_TOKENS
    while left >= 32:
        row = mixed_row(draw, min(GPU_LONGEST, left), HALF_BILLION["vocab_size"], centre=6.0)
        rows.append(row)
        left -= len(row["input_ids"])
    return rows


def write_wide_model(folder):
    write_tiny_model(folder)  # its tokenizer
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **WIDE), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder
