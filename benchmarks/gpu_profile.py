"""Time by kernel of a prefill, of decode steps and of a training step, by torch.profiler (on a GPU over CUPTI).

A model of the shape of Qwen3-0.6B in bfloat16, 256 prompts of 64 tokens in groups of 8, then a training step of 8,192
tokens. Each phase has a row for its time on the clock, for the sum of its kernels, and for the kernels that take most.
Without a GPU a tiny model takes its place, and operators that of kernels: it tells that the benchmark works.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rl_bench.shapes import qwen3

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_bench import Run

PROMPT_TOKENS, GROUP, STEPS, TRAINED_ROWS, TRAINED_TOKENS = 64, 8, 32, 32, 256
MOST_KERNELS, MOST_LETTERS = 15, 90


def main(run: Run) -> None:
    """Profile the three phases."""
    from rl_rollout.testing import write_tiny_model

    has_gpu = torch.cuda.is_available()
    num_requests, num_rows = (256, TRAINED_ROWS) if has_gpu and not run.quick else (16, 4)
    run.parameters(num_requests=num_requests, prompt_tokens=PROMPT_TOKENS, steps=STEPS, trained_rows=num_rows)
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(
            Path(folder), **(qwen3("0.6B", max_position_embeddings=1024, initializer_range=0.02) if has_gpu else {})
        )
        _generation(run, folder, num_requests, "cuda" if has_gpu else "cpu")
        if has_gpu:
            torch.cuda.empty_cache()
        _training(run, folder, num_rows)


gpu = main


def _generation(run: Run, folder: str, num_requests: int, device: str) -> None:
    from rl_rollout import GenerateRequest, SamplingParams, ServerConfig
    from rl_rollout.backends.embedded.decode_engine import Engine
    from rl_rollout.backends.embedded.model.model_runner import load_model

    config = ServerConfig(model_path=folder, device=device, max_num_seqs=num_requests, kv_cache_bytes=2**33)
    engine = Engine(load_model(config), config)

    def submit(turn: int) -> None:
        prompts = torch.randint(3, 50, (num_requests // GROUP, PROMPT_TOKENS))
        params = SamplingParams(max_new_tokens=4 * STEPS, ignore_eos=True, seed=turn)
        engine.submit(
            (
                GenerateRequest(
                    request_id=f"{turn}-{i}",
                    prompt_token_ids=tuple(prompts[i // GROUP].tolist()),
                    sampling_params=params,
                ),
                0,
            )
            for i in range(num_requests)
        )

    def prefill() -> None:
        while engine.scheduler.waiting or engine.scheduler._pending():
            engine.step()

    def decode() -> None:
        for _ in range(STEPS):
            engine.step()

    for turn in range(2):  # the first captures graphs and compiles what is compiled once
        submit(turn)
        if turn:
            _measure(run, f"prefill of {num_requests} prompts", prefill)
        else:
            prefill()
        decode()
        if turn:
            _measure(run, f"{STEPS} decode steps of {num_requests} sequences", decode)
        engine.abort()
    engine.close()


def _training(run: Run, folder: str, num_rows: int) -> None:
    from rl_engine import EngineConfig, OptimizerConfig, create_engine
    from rl_engine.losses import sft_loss
    from rl_engine.testing import ragged_batch

    precision = "bfloat16" if torch.cuda.is_available() else "float32"
    config = EngineConfig(model_path=folder, optimizer=OptimizerConfig(lr=1e-6), precision=precision)
    engine = create_engine("fsdp", config)
    engine.initialize()
    rows = torch.randint(3, 50, (num_rows, TRAINED_TOKENS)).tolist()
    batch = ragged_batch([row[:PROMPT_TOKENS] for row in rows], [row[PROMPT_TOKENS:] for row in rows])

    def step() -> None:
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, sft_loss)
        engine.optimizer_step()

    with engine.train_mode():
        step()
        _measure(run, f"training step of {num_rows} x {TRAINED_TOKENS} tokens", step)
    engine.close()


def _measure(run: Run, phase: str, work: Callable[[], None]) -> None:
    """Profile the work once; its time on the clock includes the profiler's own."""
    has_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    with profile(activities=activities) as found:
        start = time.perf_counter()
        work()
        if has_gpu:
            torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - start)
    kernels = sorted(_kernels(found, has_gpu), key=lambda kernel: -kernel[1])
    run.record(f"{phase}: clock, profiled", "all", [wall_ms], unit="ms")
    run.record(f"{phase}: kernels", "all", [sum(ms for _, ms, _ in kernels)], unit="ms")
    for name, ms, count in kernels[:MOST_KERNELS]:
        run.record(f"{phase}: kernels", name[:MOST_LETTERS], [ms], unit="ms", note=f"{count} launches")


def _kernels(found: Any, has_gpu: bool) -> list[tuple[str, float, int]]:
    """(name, ms, launches) of kernels and copies on the device; of operators without one."""
    if not has_gpu:
        return [(event.key, event.self_cpu_time_total / 1e3, event.count) for event in found.key_averages()]
    on_device = [event for event in found.key_averages() if event.device_type == DeviceType.CUDA]
    return [(event.key, event.self_device_time_total / 1e3, event.count) for event in on_device]
