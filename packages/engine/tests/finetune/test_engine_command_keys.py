"""Every key of rl-sft, rl-dpo, rl-rm and rl-distill does something, or is refused where it would do nothing.

A key that is not in the tables below fails. Runs of two steps with and without another value of it must differ in the
named part of what a run leaves behind.
"""

import json
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file

from rl_engine import TrainingWorker
from rl_engine.errors import ConfigError, EngineError
from rl_engine.finetune import loop
from rl_engine.finetune.cli import parse_config
from rl_engine.finetune.distill import DistillConfig
from rl_engine.finetune.distill import train as distill
from rl_engine.finetune.preferences import DpoConfig, RmConfig
from rl_engine.finetune.preferences import train as judge
from rl_engine.finetune.preferences import train as prefer
from rl_engine.finetune.record import run_folder
from rl_engine.finetune.sft import SftConfig
from rl_engine.finetune.sft import train as fine_tune
from rl_engine.testing import write_tiny_model

RUNS = {
    SftConfig: (fine_tune, "rows.jsonl"),
    DpoConfig: (prefer, "pairs.jsonl"),
    RmConfig: (judge, "pairs.jsonl"),
    DistillConfig: (distill, "rows.jsonl"),
}
# key: (another value, the part of `look` that it changes); names in capitals are files of the test's folder
SHARED = {
    "model_path": ("WIDER", "shapes"),
    "data_path": ("OTHER.jsonl", "weights"),
    "output_dir": ("ELSEWHERE", "files"),
    "eval_path": ("OTHER.jsonl", "evaluated"),
    "eval_every": (1, "lines"),
    "steps": (3, "steps"),
    "epochs": (2, "steps"),
    "batch_size": (3, "weights"),
    "lr": (1e-3, "weights"),
    "warmup_steps": (1, "weights"),
    "weight_decay": (0.5, "weights"),
    "max_grad_norm": (1e-3, "weights"),
    "max_tokens_per_gpu": (9, "engine"),
    "precision": ("bfloat16", "engine"),
    "matmul_precision": ("highest", "engine"),
    "activation_checkpointing": (True, "engine"),
    "lora_rank": (2, "engine"),
    "lora_alpha": (8.0, "engine"),
    "lora_dropout": (0.5, "engine"),
    "lora_target_modules": ("q_proj,v_proj", "engine"),
    "lora_export": ("adapter", "engine"),
    "seed": (1, "weights"),
    "save_every": (1, "files"),
    "log_every": (1, "lines"),
    "trackers": ("tensorboard", "record"),
    "backend": ("torchtitan", "backend"),
}
OWN = {
    SftConfig: {
        "init": ("random", "engine"),
        "dropout": (True, "engine"),
        "target_loss": (100.0, "steps"),
        "target_sequence_accuracy": (0.0, "steps"),
    },
    DpoConfig: {
        "loss": ("ipo", "weights"),
        "beta": (0.5, "weights"),
        "label_smoothing": (0.3, "weights"),
        "reference_free": (True, "weights"),
        "desirable_weight": (2.0, "weights"),
        "undesirable_weight": (2.0, "weights"),
    },
    RmConfig: {"loss": ("process", "refusal")},  # which reads another kind of rows
    DistillConfig: {
        "teacher_path": ("WIDER", "weights"),
        "loss": ("mixed", "weights"),
        "forward_weight": (0.9, "weights"),
        "num_candidates": (2, "weights"),
    },
}
BESIDE = {
    "eval_every": {"eval_path": "OTHER.jsonl"},
    "target_loss": {"log_every": 1},
    "target_sequence_accuracy": {"log_every": 1},
    "desirable_weight": {"loss": "kto"},
    "undesirable_weight": {"loss": "kto"},
    **{f"lora_{key}": {"lora_rank": 2} for key in ("alpha", "dropout", "target_modules", "export")},
    "forward_weight": {"loss": "mixed"},
}
# test_a_resumed_run_is_the_run_that_was_not_interrupted, test_what_is_there_is_not_overwritten, test_engine_images.py
ELSEWHERE_TESTED = {"resume", "overwrite", "freeze_vision"}
CASES = [(SftConfig, key, *what) for key, what in SHARED.items()]
CASES += [(kind, key, *what) for kind, keys in OWN.items() for key, what in keys.items()]
BY_DEFAULT = {"loss", "num_candidates", "beta"}  # of those that one command line alone has
CASES = [
    pytest.param(
        *case,
        id=f"{case[0].__name__}-{case[1]}",
        marks=[] if case[0] is SftConfig or case[1] in BY_DEFAULT else [pytest.mark.slow],
    )
    for case in CASES
]


def test_every_key_is_in_a_table():
    shared = {field.name for field in fields(loop.RunConfig)}
    assert shared == SHARED.keys() | ELSEWHERE_TESTED
    for kind, keys in OWN.items():
        assert {field.name for field in fields(kind)} == shared | keys.keys()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_tiny_model(folder / "model")
    write_tiny_model(folder / "WIDER", seed=7, hidden_size=16)

    def write(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    questions = [[{"role": "user", "content": f"{a}+{b}="}] for a in range(2) for b in range(3)]
    write("rows.jsonl", [{"prompt": asked, "completion": str(n)} for n, asked in enumerate(questions)])
    write("OTHER.jsonl", [{"prompt": asked, "completion": "no"} for asked in questions])
    write("pairs.jsonl", [{"prompt": asked, "chosen": "yes", "rejected": "not"} for asked in questions])
    return folder


def config_of(kind, place, changes):
    base = {
        "model_path": "model", "data_path": RUNS[kind][1], "output_dir": "out", "steps": 2, "batch_size": 4,
        "lr": 1e-2, "warmup_steps": 0,
    }  # fmt: skip
    if "epochs" in changes:  # which stands in the place of steps
        del base["steps"]
    if kind is DistillConfig:
        base["teacher_path"] = "model"
    values = {
        name: str(place / value) if name.endswith(("_path", "_dir")) else value
        for name, value in (base | changes).items()
    }
    return parse_config(kind, [f"{name}={value}" for name, value in values.items()])


def look(kind, config, place, monkeypatch):
    """What a run leaves behind, in a folder of its own."""
    seen, lines = {}, []
    start = TrainingWorker.__init__

    def watched(self, engine, backend="fsdp"):
        seen["engine"], seen["backend"] = replace(engine, optimizer=None), backend
        start(self, engine, backend)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingWorker, "__init__", watched)
        try:
            outcome = RUNS[kind][0](config, lines.append)
        except (EngineError, ValueError) as error:
            return seen | {"refusal": str(error)}
    output = place / config.output_dir
    file = output / "model.safetensors"
    weights = load_file(file if file.is_file() else output / "adapter_model.safetensors")
    return seen | {
        "refusal": None,
        "lines": len(lines),
        "steps": outcome.steps,
        "evaluated": bool(outcome.eval_metrics),
        "weights": weights,
        "shapes": {name: tuple(tensor.shape) for name, tensor in weights.items()},
        "files": sorted(path.name for path in output.parent.iterdir()),
        "record": sorted(path.name for path in run_folder(config.output_dir).iterdir()),
    }


def is_same(one, other):
    if isinstance(one, dict) and one.keys() == other.keys():
        return all(is_same(value, other[name]) for name, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.fixture(scope="module")
def looked_at():
    """What `look` saw of the runs that others are compared with."""
    return {}


@pytest.mark.promise("No key of the command lines is ignored")
@pytest.mark.process
@pytest.mark.parametrize(("kind", "key", "value", "part"), CASES)
def test_a_key_does_something(place, looked_at, tmp_path, monkeypatch, kind, key, value, part):
    beside = BESIDE.get(key, {})

    def run(name, changes):
        return look(kind, config_of(kind, place, {"output_dir": tmp_path / name / "out"} | changes), place, monkeypatch)

    base = (kind, *sorted(beside.items()))
    if base not in looked_at:
        looked_at[base] = run("before", beside)
    before, after = looked_at[base], run("after", beside | {key: value})
    assert not is_same(before[part], after[part]), f"{key}={value} changes nothing of {part}"


@pytest.mark.parametrize(
    ("kind", "loss", "key", "value"),
    [
        (DpoConfig, "ipo", "label_smoothing", 0.1),
        (DpoConfig, "hinge", "desirable_weight", 2.0),
        (DpoConfig, "sigmoid", "undesirable_weight", 2.0),
        (DistillConfig, "forward", "forward_weight", 0.3),
        (DistillConfig, "reverse", "forward_weight", 0.3),
        (DistillConfig, "reverse", "num_candidates", 4),
    ],
)
def test_a_key_of_another_loss_is_refused(place, tmp_path, kind, loss, key, value):
    config = config_of(kind, place, {"output_dir": tmp_path / "out", "loss": loss, key: value})
    with pytest.raises(ConfigError, match=rf"{key}.* nothing with loss={loss}; leave"):
        RUNS[kind][0](config)
