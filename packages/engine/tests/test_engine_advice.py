"""What a refusal advises, applied to what it refuses, is accepted."""

import re
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from rl_engine import (
    BackendError,
    ConfigError,
    EngineConfig,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    check,
    registry,
)
from rl_engine.finetune.cli import distill_main, dpo_main, sft_main
from rl_engine.testing import write_tiny_model

LORA, ADAM = LoraConfig(rank=4), OptimizerConfig()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("advice") / "model"))


ADVICE = [
    ({"parallel": ParallelConfig(ep=2)}, 2, r"parallel.ep is 2 .* Set it to 1", [{"parallel": ParallelConfig()}]),
    ({"parallel": ParallelConfig(sp=3)}, 3, r"parallel.sp = 3 does not divide .* Use a divisor of 2", [
        {"parallel": ParallelConfig(sp=1)}
    ]),
    ({"dist_checkpoint": "x", "init": "random"}, 1, r"Use init=pretrained, or leave", [{"dist_checkpoint": None}]),
    ({"optimizer_offload": True, "optimizer": None}, 1, r"optimizer_offload is true .* Set it to false", [
        {"optimizer_offload": False}
    ]),
    ({"optimizer_offload": True, "optimizer": ADAM, "cpu_offload": True}, 1, r"Set it to false", [
        {"optimizer_offload": False, "cpu_offload": False}
    ]),
    ({"activation_offload": True, "optimizer": None}, 1, r"Set it to false", [{"activation_offload": False}]),
    ({"fp8": "tensorwise", "precision": "float32"}, 1, r"needs precision=bfloat16. Or fp8=off", [{"fp8": "off"}]),
    ({"fp8": "tensorwise", "precision": "bfloat16"}, 1, r"try: pip install torchao|Set it to off", [{"fp8": "off"}]),
    ({"mtp": "train", "optimizer": ADAM}, 1, r"has no layer for .* Leave mtp out", [{"mtp": "refuse"}]),
    ({"mtp": "train", "optimizer": ADAM, "lora": LORA}, 1, r"lora=None. Or mtp=freeze", [{"mtp": "freeze"}]),
    ({"transformer_engine": False}, 1, r"megatron alone has it. Leave it true", [{"transformer_engine": True}]),
    ({"bridge": "own"}, 1, r"megatron alone has it. Leave it auto", [{"bridge": "auto"}]),
    ({"lora": LORA, "optimizer": None}, 1, r"leave lora out", [{"lora": None}]),
    ({"router_aux_loss_coef": 0.1}, 1, r"no router .* Set it to 0", [{"router_aux_loss_coef": 0.0}]),
    ({"entropy": True, "head": "value"}, 1, r"it needs head=lm", [{"head": "lm"}, {"entropy": False}]),
    ({"lora": LoraConfig(rank=4, target_modules=("embed_tokens",)), "optimizer": ADAM}, 1, r"Leave it out", [
        {"lora": LORA}
    ]),
    ({"parallel": ParallelConfig(tp=2)}, 2, r"the fsdp backend takes sp, dp_replicate and ep only", [
        {"parallel": ParallelConfig()}
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "ranks", "words", "changes"), ADVICE, ids=lambda value: str(value)[:40])
def test_advice_on_an_engine_is_accepted(model, fields, ranks, words, changes):
    with pytest.raises((ConfigError, BackendError), match=words):
        check("fsdp", EngineConfig(model_path=model, **fields), ranks)
    for change in changes:
        check("fsdp", replace(EngineConfig(model_path=model), **{**fields, **change}), ranks)


COMMANDS = [
    (sft_main, ["epochs=1", "steps=2"], r"both say how long: leave one out", ["steps=2"]),
    (sft_main, ["lora.alpha=4"], r"lora.alpha does nothing without lora.rank; set it", ["lora.alpha=4", "lora.rank=2"]),
    (sft_main, ["resume=true", "save_every=0"], r"resume=true needs save_every", ["resume=true", "save_every=1"]),
    (dpo_main, ["loss=hinge", "label_smoothing=0.1"], r"label_smoothing does nothing .* leave it out", ["loss=hinge"]),
    (dpo_main, ["loss=kto", "reference_free=true"], r"leave reference_free out", ["loss=kto"]),
    (dpo_main, ["desirable_weight=2"], r"do nothing with loss=sigmoid; leave them out", []),
    (
        distill_main,
        ["loss=reverse", "num_candidates=3"],
        r"does nothing with loss=reverse; leave it out",
        ["loss=reverse"],
    ),
]


def _name(value):
    return getattr(value, "__name__", str(value))[:40]


@pytest.mark.parametrize(("main", "given", "words", "changed"), COMMANDS, ids=_name)
def test_advice_on_a_command_is_accepted(model, tmp_path, capsys, main, given, words, changed):
    """Followed, a command gets as far as its data, which does not exist."""
    needed = [f"model.path={model}", f"data.path={tmp_path / 'no.jsonl'}", f"output_dir={tmp_path / 'out'}"]
    needed += [f"teacher.path={model}"] if main is distill_main else []
    assert main([*needed, *given]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert main([*needed, *changed]) == 2
    assert "no.jsonl does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extras", "wanted"),
    [
        (["mine"], "pip install 'their-engines[mine]'"),
        ([], "pip install 'their-engines'"),
        (None, "pip install the dist"),
    ],
)
def test_the_pip_line_is_of_the_backends_distribution(monkeypatch, extras, wanted):
    """An extra of rl-engine has no backend that another distribution brings."""
    point = EntryPoint("mine", "no.such.module", "rl_engine.backends")
    metadata = SimpleNamespace(get_all=lambda name: extras)
    dist = None if extras is None else SimpleNamespace(name="their-engines", metadata=metadata)
    object.__setattr__(point, "dist", dist)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    with pytest.raises(BackendError) as error:
        registry.create_engine("mine", EngineConfig(model_path="x"))
    assert wanted in str(error.value)
