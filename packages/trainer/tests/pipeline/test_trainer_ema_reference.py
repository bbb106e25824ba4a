"""A reference that follows the policy: the average by hand, and a run."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from rl_trainer.config import load_config
from rl_trainer.config.schema import EmaSection
from rl_trainer.errors import InputError, PlanError
from rl_trainer.pipeline.ema_reference import EmaReference, start_of
from rl_trainer.planning.plan import make_plan
from rl_trainer.run import run
from rl_trainer.workers.reference import average_folders

EMA = ["algorithm.kl_coef=0.1", "algorithm.ref_ema.decay=0.75"]


def folder(path, **tensors):
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.promise("`algorithm.ref_ema` averages in float32, and is part of a checkpoint")
def test_the_average_by_hand_and_in_float32(tmp_path):
    """A step of a bfloat16 weight that bfloat16 would round away."""
    one = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    reference = folder(tmp_path / "reference", w=one, n=torch.tensor([1]), tied=one.clone())
    policy = folder(tmp_path / "policy", w=one + torch.tensor([0.0078125, 0.0]).bfloat16(), n=torch.tensor([2]))
    average_folders(reference, policy, tmp_path / "into", 0.75)
    found = load_file(tmp_path / "into" / "model.safetensors")
    assert found["w"].tolist() == [1.0 + 0.25 * 0.0078125, 2.0]
    assert (found["w"].dtype, found["n"].tolist()) == (torch.float32, [2])
    assert sorted(path.name for path in (tmp_path / "into").iterdir()) == ["config.json", "model.safetensors"]
    average_folders(reference, policy, tmp_path / "into", 0.0)
    assert load_file(tmp_path / "into" / "model.safetensors")["w"].tolist() == [1.0078125, 2.0]
    other = folder(tmp_path / "other", v=one)
    with pytest.raises(InputError, match="has no tensor 'v', which the policy has"):
        average_folders(reference, other, tmp_path / "into", 0.5)


@pytest.mark.process
def test_it_moves_at_intervals_in_one_folder_and_is_checkpointed(tmp_path):
    calls, values = [], {"policy": 0.0, "reference": torch.tensor([0.0])}
    start = folder(tmp_path / "start", w=values["reference"])

    def save_model(path):
        folder(tmp_path / "out" / "policy", w=torch.tensor([values["policy"]]))
        calls.append(path)

    def average(policy, into, decay):
        average_folders(current[0], tmp_path / "out" / "policy", tmp_path / "out" / into.rsplit("/", 1)[1], decay)

    current = [start]
    engine = SimpleNamespace(
        average=average,
        load_model=lambda path: current.__setitem__(0, tmp_path / "out" / path.rsplit("/", 1)[1]),
        offload=lambda: calls.append("offload"),
    )
    (tmp_path / "out").mkdir()
    moving = EmaReference(
        SimpleNamespace(save_model=save_model), engine, EmaSection(decay=0.5, every=2), folder=tmp_path / "out",
        start=start, is_offloaded=True,
    )  # fmt: skip
    for step in range(1, 6):
        values["policy"] = float(step)
        moving.follow(step)
    assert len(calls) == 2 * 2  # after steps 2 and 4
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["step-4"]
    assert start.is_dir()
    moving.save(tmp_path / "checkpoint-4")
    kept = load_file(tmp_path / "checkpoint-4" / "reference" / "model.safetensors")
    assert kept["w"].tolist() == [0.5 * (0.5 * 2) + 0.5 * 4]
    resumed = load_config("quickstart", [*EMA, f"resume_from={tmp_path}/checkpoint-4"])
    assert start_of(resumed, start) == tmp_path / "checkpoint-4" / "reference"
    assert start_of(load_config("quickstart", EMA), start) == start
    assert start_of(load_config("quickstart", [EMA[0], f"resume_from={tmp_path}/checkpoint-4"]), start) == start
    shutil.rmtree(tmp_path / "checkpoint-4" / "reference")
    with pytest.raises(InputError, match="so its run had no algorithm.ref_ema"):
        start_of(resumed, start)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (EMA[1:], "does nothing unless algorithm.kl_coef is positive"),
        ([*EMA, "engine.lora.rank=4"], "leave one of them out"),
    ],
)
def test_what_would_do_nothing_is_refused(overrides, words):
    with pytest.raises(PlanError, match=words):
        make_plan(load_config("quickstart", overrides))
    make_plan(load_config("quickstart", EMA))


@pytest.mark.slow
def test_the_kl_is_to_where_the_reference_has_moved(model, tmp_path):
    """One update per step: with decay 0 the reference is the policy before it, whose KL is nothing."""
    sizes = ["data.options.num_rows=200", "data.eval_size=4", "batch.batch_size=4", "batch.mini_batch_size=4"]
    sizes += ["batch.group_size=4", "steps=4", "eval_every=0", "timeout_s=120", "runtime=inline", "save_every=2"]
    sizes += [
        "engine.optimizer.lr=1e-2",
        "engine.optimizer.warmup_steps=0",
        "algorithm.entropy_coef=0.1",
        "algorithm.kl_coef=0.1",
    ]
    sizes += ["engine.matmul_precision=highest", "algorithm.old_logprobs=recompute", f"model.path={model}"]

    def kl(name, *overrides):
        out = tmp_path / name
        run(load_config("quickstart", [*sizes, f"output_dir={out}", *overrides]), Console(quiet=True))
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return {record["step"]: record["metrics"]["kl"] for record in records[1:]}

    still, reset = kl("still"), kl("reset", "algorithm.ref_ema.decay=0")
    assert still[4] > 1e-4
    assert all(value < 1e-7 for value in reset.values())
    average = kl("average", "algorithm.ref_ema.decay=0.5")
    assert 1e-6 < average[4] < still[4]
    resume = ["algorithm.ref_ema.decay=0.5", f"resume_from={tmp_path}/average/checkpoint-2"]
    assert kl("resumed", *resume) == {step: average[step] for step in (3, 4)}
