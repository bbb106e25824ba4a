"""Completions that are stopped at a step's end and go on in the next, compared with waiting for all, and with dropping.

A random model ends a completion with one and the same chance at every token, so that lengths are geometric and the
longest of a batch is four times the mean. Whole runs take turns: `waiting` generates each batch to its last completion,
`continued` is `batch.over_sampling=0.5`, `dropped` the same with unfinished completions thrown away and begun anew.
Forward passes are counted: where the weights have to be read for each, as on a GPU, a pass of few sequences takes as
long as one of many. On a processor it takes as long as its sequences, and time follows the tokens.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from rich.console import Console

from rl_bench import Role, Run
from rl_rollout.backends.embedded.step_runner import StepRunner
from rl_rollout.router import Router
from rl_rollout.testing import write_tiny_model
from rl_rollout.types import TokenOutput
from rl_trainer.config import load_config
from rl_trainer.run import run as train
from rl_trainer.samples import read_samples

BATCH, GROUP = 8, 4
CASES = {"waiting": 0.0, "continued": 0.5, "dropped": 0.5}
METRICS = {
    "tokens learned from in a pass": "tokens",
    "tokens generated for each": "",
    "tokens learned from": "tokens/s",
}


def main(run: Run) -> None:
    steps, rounds = (6, 1) if run.quick else (16, 3)
    run.parameters(batch=BATCH, group=GROUP, steps=steps, rounds=rounds, max_new_tokens=512)
    found = {(metric, case): [] for metric in METRICS for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"num_hidden_layers": 6, "hidden_size": 384, "max_position_embeddings": 1024}
        model = write_tiny_model(Path(folder) / "model", **sizes)
        for turn in range(rounds):
            for case in CASES:
                values = one(model, Path(folder) / f"{case}{turn}", case, steps)
                for metric, value in zip(METRICS, values, strict=True):
                    found[metric, case].append(value)
    for (metric, case), values in found.items():
        role = Role.PEER if case == "waiting" else Role.OURS
        run.record(f"a long tail: {metric}", case, values, unit=METRICS[metric], role=role)


def one(model: Path, folder: Path, case: str, steps: int) -> tuple[float, float, float]:
    """Tokens learned from for each pass, tokens generated for each of these, and these per second of generating."""
    settings = ["runtime=inline", f"steps={steps}", "eval_every=0", "data.eval_size=4", "tracking.keep_samples=true"]
    settings += [f"batch.{key}={BATCH}" for key in ("batch_size", "mini_batch_size")]
    settings += [f"batch.group_size={GROUP}", f"batch.over_sampling={CASES[case]}", "engine.optimizer.lr=1e-9"]
    settings += ["rollout.max_new_tokens=512", "rollout.max_model_len=544", f"model.path={model}"]
    lost: list[int] = []
    runners: list[StepRunner] = []
    with noting(runners), dropping(lost) if case == "dropped" else contextlib.nullcontext():
        train(load_config("quickstart", [*settings, f"output_dir={folder}"]), Console(quiet=True))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    seconds = sum(json.loads(line).get("phase_s", {}).get("generate", 0.0) for line in lines)
    samples = read_samples(folder, steps=list(range(1, steps + 1))).to_pylist()
    learned = sum(len(row["completion_token_ids"]) for row in samples)
    passes = sum(runner.num_passes for runner in runners)
    return learned / passes, 1 + sum(lost) / learned, learned / seconds


@contextlib.contextmanager
def noting(runners: list[StepRunner]) -> Iterator[None]:
    """Note the runners of servers that start."""
    begin = StepRunner.__init__

    def noted(self, *args, **options):
        begin(self, *args, **options)
        runners.append(self)

    with mock.patch.object(StepRunner, "__init__", noted):
        yield


@contextlib.contextmanager
def dropping(lost: list[int]) -> Iterator[None]:
    """Have a stopped request begin anew, and note how many tokens it loses."""
    generate_part = Router._generate_part

    async def without_its_tokens(self, request, deadline):
        output, is_last = await generate_part(self, request, deadline)
        if not is_last:
            lost.append(len(output.token_ids))
            output = TokenOutput.empty(request)
        return output, is_last

    with mock.patch.object(Router, "_generate_part", without_its_tokens):
        yield
