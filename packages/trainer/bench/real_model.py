"""A GRPO step of a pretrained model (SmolLM2-135M) on processors next to TRL's, and each phase next to its bound.

Both systems answer the recipe `smollm`'s questions, 64 completions of at most 24 tokens in float32, and take turns in
one run. In the first metric every completion has an advantage, in the second the rewards are the recipe's, where most
groups have none at the start. The bound of a phase is its matrix products at the model's shapes, measured in this run:
of an update forward and backward by `torch.mm`, the tokens of a prompt once; of prefill forward, and of a decoded batch
at its number of rows, by `torch.mm` or by oneDNN over weights that it packed, whichever is faster. A decoded batch also
reads every weight once: its bound is the longer of the two. Bounds are measured with as many threads as the phases
have, before any server starts. TRL runs in an environment of its own (it pins other versions than the workspace):

    uv venv trl && uv pip install --python trl/bin/python trl==1.16.0 transformers==5.23.0 datasets==5.2.0
    RL_REAL_MODELS=FOLDER RL_BENCH_TRL_PYTHON=trl/bin/python uv run rl-bench real_model
"""

import asyncio
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from rl_bench import Role, Run
from rl_rollout import GenerateRequest, SamplingParams, ServerConfig, create_server
from rl_trainer.config import load_config
from rl_trainer.data import Row, load_datasets

PROMPTS, GROUP, NEW_TOKENS, LR = 8, 8, 24, 1e-9
"""A learning rate that keeps the policy, so that lengths do not change."""
MICRO_BATCH = 2048
"""Tokens of a micro-batch: one holds the whole batch."""
ROUNDS, STEPS, WARM_UP, TIMEOUT_S = 2, 2, 1, 900
PREFILL = (8, 256)
"""Prompts and their tokens."""
BATCHES = (1, 16, 64)
"""Sequences decoded together."""
TASK = Path(__file__).with_name("_letters.py")
DENSE, SPARSE = "every completion has an advantage", "rewards of the sums"
OURS, TRL, PRODUCTS = "ours, runtime=inline", "TRL's GRPOTrainer", "its matrix products"


def main(run: Run) -> None:
    torch.set_num_threads(threads := int(os.environ["OMP_NUM_THREADS"]))
    rounds, steps = (1, 2) if run.quick else (ROUNDS, STEPS)
    model = pretrained()
    shapes = Shapes(model)
    run.parameters(model=model.name, prompts=PROMPTS, group_size=GROUP, new_tokens=NEW_TOKENS, steps=steps)
    run.parameters(threads=threads, rounds=rounds, precision="float32", weights="dequantised from 4 bits")
    run.parameters(micro_batch_tokens=MICRO_BATCH)
    samples: dict[str, list[dict[str, float]]] = {DENSE: [], SPARSE: [], TRL: []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for reward in (DENSE, SPARSE):
                samples[reward] += ours(model, Path(folder) / f"{turn}{reward[:3]}", steps, reward)
            if python := os.environ.get("RL_BENCH_TRL_PYTHON"):
                samples[TRL] += trl(python, model, Path(folder) / f"{turn}trl", steps, threads)
    record(run, samples, shapes)
    prefill, reading = shapes.forward_seconds(math.prod(PREFILL), PREFILL[0]), reading_seconds(shapes.num_bytes)
    decoding = {batch: shapes.forward_seconds(batch, batch) for batch in BATCHES}
    asyncio.run(serve(run, model, prefill, decoding, reading))


def gpu(run: Run) -> None:
    """Steps on one GPU next to TRL's: 256 completions of at most 320 tokens to GSM8K's questions (RL_GSM8K)."""
    model, data, prompts = pretrained(), os.environ.get("RL_GSM8K", "shared/data/gsm8k"), 4 if run.quick else 32
    sizes = [f"data.path={data}", "data.max_prompt_tokens=384", "rollout.max_model_len=704", "algorithm.kl_coef=0"]
    sizes += ["rollout.max_new_tokens=320", "batch.group_size=8", "engine.max_tokens_per_gpu=65536"]
    sizes += [f"batch.batch_size={prompts}", f"batch.mini_batch_size={prompts}"]
    run.parameters(model=model.name, prompts=prompts, group_size=GROUP, new_tokens=320, steps=STEPS)
    with tempfile.TemporaryDirectory() as folder:
        found = steps_of("gsm8k", sizes, model, Path(folder) / "ours", STEPS)
        for phase in ("step", "generate", "update", "weight_sync"):
            run.record(f"{phase}: GSM8K", OURS, [each[phase] for each in found], unit="s")
        python = os.environ.get("RL_BENCH_TRL_PYTHON") or sys.executable
        rows = load_datasets(load_config("gsm8k", sizes).data, seed=0).train[:256]
        given = {"completions": prompts * GROUP, "group_size": GROUP, "max_new_tokens": 320, "threads": 8, "is_gpu": 1}
        found = steps_of_trl(python, given, rows, model, Path(folder) / "trl", STEPS)
        for phase in ("step", "generate", "update"):
            run.record(f"{phase}: GSM8K", TRL, [each[phase] for each in found], unit="s", role=Role.PEER)


def pretrained() -> Path:
    """SmolLM2's folder, below RL_REAL_MODELS; made if it is not there."""
    tools = Path(__file__).parents[3] / "tools"
    sys.path.append(str(tools))
    root = Path(os.environ.get("RL_REAL_MODELS", Path.home() / ".cache" / "rl-stack" / "real-models"))
    return importlib.import_module("real_models").model_folder("smollm2", root)


class Shapes:
    """The model's products: one layer's weights as (inputs, outputs), the head, and random numbers to multiply."""

    def __init__(self, model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        width, inner, count = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        keys = config["num_key_value_heads"] * width // count
        self.layers = config["num_hidden_layers"]
        shapes = [(width, width), (width, keys), (width, keys), (width, width), (width, inner), (width, inner)]
        self.layer = [torch.randn(shape) for shape in [*shapes, (inner, width)] * self.layers]
        self.head = torch.randn(width, config["vocab_size"])

    def seconds(self, tokens: int, head_tokens: int, *, backward: bool = False) -> float:
        """Seconds of the products of so many tokens, the median of three."""
        works = [(weight, tokens) for weight in self.layer] + [(self.head, head_tokens)]
        given = {(w.shape[0], n): torch.randn(n, w.shape[0]) for w, n in works if n}
        wanted = {(w.shape[1], n): torch.randn(n, w.shape[1]) for w, n in works if n} if backward else {}
        found = []
        for _ in range(4):
            start = time.perf_counter()
            for weight, n in works:
                if n:
                    torch.mm(given[weight.shape[0], n], weight)
                if n and backward:
                    out = wanted[weight.shape[1], n]
                    torch.mm(out, weight.T), torch.mm(given[weight.shape[0], n].T, out)
            found.append(time.perf_counter() - start)
        return statistics.median(found[1:])

    def forward_seconds(self, tokens: int, head_tokens: int) -> float:
        """Seconds of the forward products by the faster of the two libraries."""
        return min(self.seconds(tokens, head_tokens), self.packed_seconds(tokens, head_tokens))

    def packed_seconds(self, tokens: int, head_tokens: int) -> float:
        """Seconds of the forward products over weights that oneDNN packed, the median of three; inf without oneDNN."""
        if not torch.backends.mkldnn.is_available():
            return math.inf
        pack, multiply = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
        works = [(pack(weight.T.contiguous(), tokens), tokens, weight.shape[0]) for weight in self.layer]
        works.append((pack(self.head.T.contiguous(), head_tokens), head_tokens, self.head.shape[0]))
        given = {(width, n): torch.randn(n, width) for _, n, width in works}
        found = []
        for _ in range(4):
            start = time.perf_counter()
            for weight, n, width in works:
                multiply(given[width, n], weight, None, "none", [], "")
            found.append(time.perf_counter() - start)
        return statistics.median(found[1:])

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, which a decoded token reads."""
        return sum(weight.nbytes for weight in [*self.layer, self.head])


def ours(model: Path, out: Path, steps: int, reward: str) -> list[dict[str, float]]:
    """Phases of the steps after the warm-up, with the first step's time since the start and the peak memory."""
    dense = [f"reward.path={TASK}:share_of_even", "reward.parts={}"] if reward == DENSE else []
    sizes = [f"batch.batch_size={PROMPTS}", f"batch.mini_batch_size={PROMPTS}", f"batch.group_size={GROUP}"]
    sizes += [f"rollout.max_new_tokens={NEW_TOKENS}", "engine.precision=float32"]
    sizes += [f"engine.max_tokens_per_gpu={MICRO_BATCH}", *dense]
    return steps_of("smollm", sizes, model, out, steps)


def steps_of(recipe: str, sizes: list[str], model: Path, out: Path, steps: int) -> list[dict[str, float]]:
    """Run a recipe for some steps whose learning rate keeps the policy."""
    overrides = [
        f"model.path={model}", f"output_dir={out}", f"steps={WARM_UP + steps}", "eval_every=0", "save_every=0",
        "runtime=inline", "data.eval_size=2", f"engine.optimizer.lr={LR}", *sizes,
    ]  # fmt: skip
    start, first = time.time(), 0.0
    process = subprocess.Popen([sys.executable, "-m", "rl_trainer.cli", recipe, *overrides], stdout=sys.stderr)
    metrics = out / "metrics.jsonl"
    while not first:
        if metrics.exists() and metrics.read_text().count("\n") > 1:
            first = time.time() - start
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) or time.time() - start > TIMEOUT_S:
            break  # `ended` takes its exit code
        time.sleep(0.05)
    peak = ended(process)
    found = [json.loads(line) for line in metrics.read_text().splitlines()][1 + WARM_UP :]
    return [
        {**step["phase_s"], "step": step["wall_s"] - step["phase_s"].get("eval", 0.0), "tokens": step["num_tokens"],
         "peak": peak, "first": first}
        for step in found
    ]  # fmt: skip


def trl(python: str, model: Path, out: Path, steps: int, threads: int) -> list[dict[str, float]]:
    """As `ours`; what is not generation is TRL's update."""
    rows = load_datasets(load_config("smollm").data, seed=0).train[:256]
    sizes = {"completions": PROMPTS * GROUP, "group_size": GROUP, "max_new_tokens": NEW_TOKENS, "threads": threads}
    return steps_of_trl(python, sizes, rows, model, out, steps)


def steps_of_trl(
    python: str, sizes: dict[str, int], rows: list[Row], model: Path, out: Path, steps: int
) -> list[dict[str, float]]:
    """Run TRL's trainer for some steps."""
    out.mkdir()
    settings = {
        **sizes, "model": str(model), "output_dir": str(out), "results": str(out / "results.json"),
        "steps": WARM_UP + steps, "lr": LR,
        "rows": [{"prompt": row["prompt"], "truth": row["reward_model"]["ground_truth"]} for row in rows],
    }  # fmt: skip
    (out / "settings.json").write_text(json.dumps(settings))
    script = Path(__file__).with_name("_trl_grpo.py")
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    peak = ended(subprocess.Popen([python, script, out / "settings.json"], stdout=sys.stderr, env=environment))
    done = json.loads((out / "results.json").read_text())
    return [
        {"generate": generated, "update": seconds - generated, "step": seconds, "peak": peak}
        for seconds, generated in list(zip(done["seconds"], done["generated"], strict=True))[WARM_UP:]
    ]


def ended(process: subprocess.Popen) -> float:
    """Wait for a process to end well; its peak memory, GiB."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{process.args[0]} ended with {process.returncode}")
    return usage.ru_maxrss / 2**20


def record(run: Run, samples: dict[str, list[dict[str, float]]], shapes: Shapes) -> None:
    """Rows of steps, phases and memory."""
    why = "" if samples[TRL] else "RL_BENCH_TRL_PYTHON is not set"
    for reward, goal in ((DENSE, ">= 4.2 of best peer"), (SPARSE, ">= 5 of best peer")):
        tokens = statistics.mean(each["tokens"] for each in samples[reward])
        for phase in ("step", "generate", "update", "weight_sync"):
            metric = f"{phase}: {reward}"
            if (phase, reward) == ("update", DENSE):
                bound = shapes.seconds(PROMPTS * prompt_tokens() + int(tokens), int(tokens), backward=True)
                run.record(metric, PRODUCTS, [bound], unit="s", role=Role.LIMIT)
            goals = {"step": goal, "update": ">= 0.9 of limit" if reward == DENSE else None}
            run.record(metric, OURS, [each[phase] for each in samples[reward]], unit="s", goal=goals.get(phase))
            if phase != "weight_sync":
                run.record(metric, TRL, [each[phase] for each in samples[TRL]], unit="s", role=Role.PEER, note=why)
    firsts = [each["first"] for each in samples[SPARSE]]
    run.record("start to first step", OURS, firsts, unit="s", goal="<= 20 s")
    run.record("peak memory", OURS, [each["peak"] for each in samples[DENSE]], unit="GiB")
    run.record("peak memory", TRL, [each["peak"] for each in samples[TRL]], unit="GiB", role=Role.PEER, note=why)


def prompt_tokens() -> int:
    """Tokens of a prompt of the recipe's: 46 in the first one, which two or three digits change little."""
    return 46


async def serve(run: Run, model: Path, prefill: float, decoding: dict[int, float], reading: float) -> None:
    """Rows of prefill, and of decoding at batches of 1, 16 and 64, with the seconds of their bounds.

    Args:
        prefill: Seconds of the products of a prefill.
        decoding: Seconds of the products of a decoded token, by batch.
        reading: Seconds of reading every weight once.
    """
    config = ServerConfig(model_path=str(model), dtype="float32", max_model_len=1024, max_num_seqs=64)
    server, count = create_server("embedded", config), 0
    await server.start()

    async def seconds(batch: int, prompt: int, new_tokens: int) -> float:
        nonlocal count
        params = SamplingParams(max_new_tokens=new_tokens, temperature=1.0, ignore_eos=True)
        ids = [tuple(torch.randint(5, 40_000, (prompt,)).tolist()) for _ in range(batch)]
        count += batch
        requests = [
            GenerateRequest(request_id=f"{count}-{i}", prompt_token_ids=each, sampling_params=params)
            for i, each in enumerate(ids)
        ]
        start = time.perf_counter()
        await asyncio.gather(*map(server.generate, requests))
        return time.perf_counter() - start

    repetitions, length = (1, 8) if run.quick else (5, 64)
    try:
        await seconds(2, 64, 4)
        run.record("prefill of 8 x 256 tokens", PRODUCTS, [prefill], unit="s", role=Role.LIMIT)
        found = [await seconds(*PREFILL, 1) for _ in range(repetitions)]
        run.record("prefill of 8 x 256 tokens", "ours, embedded", found, unit="s", goal=">= 0.9 of limit")
        for batch, products in decoding.items():
            metric = f"token decoded in a batch of {batch}"
            limit = "its products" if products > reading else "reading the weights"
            run.record(metric, limit, [1e3 * max(products, reading)], unit="ms", role=Role.LIMIT)
            found = []
            for _ in range(repetitions):
                short = await seconds(batch, 16, 1)
                found.append(1e3 * (await seconds(batch, 16, 1 + length) - short) / length)
            run.record(metric, "ours, embedded", found, unit="ms", goal=">= 0.9 of limit")
    finally:
        await server.stop()


def reading_seconds(num_bytes: int) -> float:
    """Seconds to read so many bytes once, the fastest of five."""
    numbers, found = torch.randn(num_bytes // 4), []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        found.append(time.perf_counter() - start)
    return min(found)
