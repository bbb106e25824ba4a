"""Speed estimate: seconds of a step and of an evaluation on this machine's processors, by a probe of its products.

The probe multiplies matrices of the model's width in the number format of the run on one thread, about 0.2 s in
all: with many rows, as prompts and training have them, and with as many as are decoded together, for which the weights
are read from memory again with each token. It counts the thread's processor time, so that other work on the machine
makes it no slower. A forward pass is 2 operations per parameter and token, an update 6, or 8 if activations are
computed again. What is no product (norms, activations, attention, the optimizer) takes about as long in each number
format: constants that were measured with a model of 135M parameters, in float32 and in bfloat16.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_trainer.data.datasets import LocatedRows, location
from rl_trainer.pipeline.roles import has_old_pass, has_reference, model_facts
from rl_trainer.planning.gpus import count_gpus
from rl_trainer.planning.memory import count_parameters, stored_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rl_trainer.config import Config
    from rl_trainer.data.datasets import Datasets
    from rl_trainer.data.rows import Row

EVALUATION_BOUND_S = 300.0
"""Seconds that the evaluation before the first step may take, by the estimate; a sample is evaluated else."""
_LEAST_EVALUATED = 16
_MANY_ROWS = 512
_MEASURE_S = 0.05
_LEAST_CALLS, _THREADS_OF_MEMORY = 4, 4
_CACHE_BYTES, _MEMORY_BYTES = 32 * 2**20, 256 * 2**20
"""Bytes of weights that a cache may hold, and of memory that the probe reads."""
_CHARACTERS_PER_TOKEN = 4
_ELEMENT_S, _PARAMETER_S = 29e-9, 7e-9
"""Seconds on one thread: a pass around its products per token, layer and width; an optimizer step by parameter."""
_COMPLETION_S, _LAYER_S, _STEP_S = 0.5e-3, 0.6e-3, 0.1
"""Seconds of a rollout around its tokens, of a layer that decodes one token around its products, and of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed estimate of a run."""

    num_parameters: int
    num_layers: int
    width: int
    num_threads: int = 1
    decode_flops: float
    """Operations per second while completions are generated."""
    pass_flops: float
    """Operations per second in passes over many tokens."""
    weights_s: float
    """Seconds to read all weights once, as every decoded token does; 0 if caches hold them."""

    def generation_s(self, *, prompts: int, prompt_tokens: float, completions: int, new_tokens: float) -> float:
        """Seconds to generate completions of a length, of prompts that are processed once each."""
        prefill = prompts * prompt_tokens / self.pass_flops
        decode = (
            max(2 * self.num_parameters * completions / self.decode_flops, self.weights_s) + self.num_layers * _LAYER_S
        )
        return 2 * self.num_parameters * prefill + new_tokens * decode + completions * _COMPLETION_S

    def passes_s(self, tokens: float, passes: float) -> float:
        """Seconds of forward passes; a backward pass counts as two."""
        outside = _ELEMENT_S * self.num_layers * self.width / self.num_threads
        return tokens * passes * (2 * self.num_parameters / self.pass_flops + outside)


def speed_facts(config: Config, datasets: Datasets) -> list[tuple[str, str]]:
    """Lines of the plan: seconds of a step and of the first evaluation, for completions of half the length to all."""
    speed = speed_of(config)
    if isinstance(speed, str):
        return [("seconds a step", f"not estimated: {speed}")]
    low, high = (step_s(config, speed, datasets.train, share) for share in (0.5, 1.0))
    half, whole = config.rollout.max_new_tokens / 2, config.rollout.max_new_tokens
    facts = [("seconds a step", f"about {_range(low, high)}, by a probe ({half:.0f} to {whole} tokens a completion)")]
    size, count = first_evaluation(config, datasets.eval), len(datasets.eval)
    low, high = (evaluation_s(config, speed, datasets.eval[:size], share) for share in (0.5, 1.0))
    sample = "" if size == count else f", a sample: all {count} may take longer than {EVALUATION_BOUND_S / 60:.0f} min"
    return [*facts, ("first evaluation", f"{size} prompts, about {_range(low, high)}{sample}")]


def first_rows(config: Config, rows: Sequence[Row]) -> Sequence[Row]:
    """Held-out rows of the evaluation before the first step: a sample by the run's seed if all take too long."""
    size = first_evaluation(config, rows)
    if size == len(rows):
        return rows
    chosen = random.Random(config.seed).sample(range(len(rows)), size)
    return LocatedRows([rows[i] for i in chosen], [location(rows, i, kind="held-out row") for i in chosen])


def first_evaluation(config: Config, rows: Sequence[Row]) -> int:
    """Number of held-out rows that the evaluation before the first step covers."""
    speed, count = speed_of(config), len(rows)
    if isinstance(speed, str) or not count:
        return count
    seconds = evaluation_s(config, speed, rows, 1.0)
    return (
        count
        if seconds <= EVALUATION_BOUND_S
        else min(max(int(count * EVALUATION_BOUND_S / seconds), _LEAST_EVALUATED), count)
    )


def evaluation_s(config: Config, speed: Speed, rows: Sequence[Row], share: float) -> float:
    """Seconds of an evaluation whose completions have a share of the longest length."""
    completions = len(rows) * config.rollout.eval_samples
    return speed.generation_s(
        prompts=completions, prompt_tokens=_prompt_tokens(config, rows), completions=completions,
        new_tokens=share * config.rollout.max_new_tokens,
    )  # fmt: skip


def step_s(config: Config, speed: Speed, rows: Sequence[Row], share: float) -> float:
    """Seconds of a step whose completions have a share of the longest length, one phase after the other."""
    prompts, completions = config.batch.batch_size, config.batch.batch_size * config.batch.group_size
    prompt, new = _prompt_tokens(config, rows), share * config.rollout.max_new_tokens
    generation = speed.generation_s(prompts=prompts, prompt_tokens=prompt, completions=completions, new_tokens=new)
    update = 4 if config.engine.activation_checkpointing else 3
    passes = update + has_old_pass(config) + has_reference(config)
    num_updates = config.batch.batch_size / config.batch.mini_batch_size
    optimizer = num_updates * speed.num_parameters * _PARAMETER_S / speed.num_threads
    return generation + speed.passes_s(completions * (prompt + new), passes) + optimizer + _STEP_S


def speed_of(config: Config) -> Speed | str:
    """Speed of this machine for the policy, or why there is no estimate."""
    if count_gpus(config):
        return "the probe is of processors, and this run has GPUs"
    if config.runtime == "ray" and "RAY_ADDRESS" in os.environ:
        return "the nodes at RAY_ADDRESS are not this machine"
    try:
        count, width, num_layers = _size(config)
    except KeyError as missing:
        return f"config.json has no {missing}"
    num_bytes = count * (2 if "16" in str(config.engine.precision) else 4)
    together = min(config.rollout.max_num_seqs, config.batch.batch_size * config.batch.group_size)
    dtype, precision = str(config.engine.precision), str(config.engine.matmul_precision)
    return Speed(
        num_parameters=count,
        num_layers=num_layers,
        width=width,
        num_threads=_num_threads(),
        decode_flops=_flops(width, min(together, _MANY_ROWS), dtype, precision),
        pass_flops=_flops(width, _MANY_ROWS, dtype, precision),
        weights_s=num_bytes / _bandwidth(min(num_bytes, _MEMORY_BYTES)) if num_bytes > _CACHE_BYTES else 0.0,
    )


def _size(config: Config) -> tuple[int, int, int]:
    """Parameters, width and layers of the policy."""
    if config.model.path is None:
        warmup = config.model.warmup
        assert warmup is not None, "preflight has checked it"
        return 12 * warmup.num_layers * warmup.hidden_size**2, warmup.hidden_size, warmup.num_layers
    folder = Path(config.model.path)
    model = model_facts(folder).config
    return stored_parameters(folder) or count_parameters(model), model["hidden_size"], model["num_hidden_layers"]


@cache
def _flops(width: int, num_rows: int, dtype: str, matmul_precision: str) -> float:
    """Operations per second of products of `num_rows` rows with weights of the model's width, on all threads."""
    import torch

    kind = getattr(torch, dtype, torch.float32)
    weights, rows = torch.ones(3 * width, width, dtype=kind), torch.ones(num_rows, width, dtype=kind)
    with _one_thread(matmul_precision):
        seconds = _fastest(lambda: torch.nn.functional.linear(rows, weights))
    return 2 * num_rows * weights.numel() / seconds * _num_threads()


@cache
def _bandwidth(num_bytes: int) -> float:
    """Bytes per second at which memory of that size is read, on the threads that a memory channel serves at most."""
    import torch

    numbers = torch.zeros(num_bytes // 4)
    with _one_thread("highest"):
        seconds = _fastest(numbers.sum)
    return num_bytes / seconds * min(_num_threads(), _THREADS_OF_MEMORY)


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


@contextmanager
def _one_thread(matmul_precision: str) -> Generator[None]:
    """Compute on one thread, as several wait for each other where others use the machine."""
    import torch

    num_threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(matmul_precision)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(num_threads)


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of processor time of the fastest call; the first ones warm up, and others disturb some of them."""
    times, ends = list[float](), time.perf_counter() + _MEASURE_S
    while len(times) < _LEAST_CALLS or time.perf_counter() < ends:
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return max(min(times), 1e-9)


def _prompt_tokens(config: Config, rows: Sequence[Row]) -> float:
    """Tokens of a prompt on average, by its characters; the longest where the rows are streamed."""
    shown = [_characters(row.get("prompt")) for row in rows[:256]]
    longest = config.data.max_prompt_tokens
    return min(sum(shown) / len(shown) / _CHARACTERS_PER_TOKEN, longest) if shown else longest


def _characters(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(message.get("content") or "")) for message in prompt or ())


def _range(low: float, high: float) -> str:
    if high < 2:
        return f"{low:.1f} to {high:.1f} s"
    if high < 120:
        return f"{low:.0f} to {high:.0f} s"
    return f"{low / 60:.0f} to {high / 60:.0f} min"
