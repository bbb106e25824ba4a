"""Settings that no backend could honour are refused where a configuration is made."""

import pytest

from rl_engine import ConfigError, EngineConfig, LoraConfig, OptimizerConfig, ParallelConfig


def config_of(changes, rate):
    optimizer = OptimizerConfig(**rate) if rate else OptimizerConfig()
    return EngineConfig(model_path="nowhere", **({"optimizer": optimizer} | changes))


@pytest.mark.parametrize(
    ("changes", "rate", "sentence"),
    [
        ({"precision": "fp8"}, {}, r"precision is 'fp8'; allowed are float32, bfloat16, float64, auto\."),
        ({"matmul_precision": "low"}, {}, r"matmul_precision is 'low'; allowed are highest, high, medium\."),
        ({"head": "critic"}, {}, r"head is 'critic'; allowed are lm, value, reward\."),
        ({"init": "zeros"}, {}, "init is 'zeros'"),
        ({"temperature": 0.0}, {}, r"temperature is 0\.0; it must be above 0\."),
        ({"max_tokens_per_gpu": 0}, {}, "max_tokens_per_gpu is 0"),
        ({"timeout_s": 0.0}, {}, "timeout_s is 0"),
        ({"num_candidates": -1}, {}, "num_candidates is -1"),
        ({"router_aux_loss_coef": -0.1}, {}, r"router_aux_loss_coef is -0\.1; it must be 0 \(off\) or more"),
        ({"head": "value", "sum_pi_squared": True}, {}, "sum_pi_squared is True; it needs head=lm"),
        ({}, {"lr": -1.0}, r"optimizer\.lr is -1\.0"),
        ({}, {"lr": float("nan")}, r"optimizer\.lr is nan"),
        ({}, {"betas": (0.9, 1.0)}, r"optimizer\.betas is \(0\.9, 1\.0\)"),
        ({}, {"eps": 0.0}, r"optimizer\.eps is 0"),
        ({}, {"weight_decay": -0.1}, r"optimizer\.weight_decay is -0\.1"),
        ({}, {"max_grad_norm": 0.0}, r"optimizer\.max_grad_norm is 0\.0; it must be above 0"),
        ({}, {"warmup_steps": -1}, r"optimizer\.warmup_steps is -1"),
        ({}, {"min_lr_ratio": 2.0, "total_steps": 3}, r"optimizer\.min_lr_ratio is 2\.0"),
        ({}, {"min_lr_ratio": 0.5}, r"optimizer\.min_lr_ratio is 0\.5; it must be 0 without total_steps"),
        ({}, {"total_steps": 0}, r"optimizer\.total_steps is 0; it must be 1 or more, or None"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(changes, rate, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config_of(changes, rate)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"export": "whole"}, r"lora\.export is 'whole'; allowed are merged, adapter\."),
        ({"rank": 0}, r"lora\.rank is 0; it must be 1 or more"),
        ({"alpha": 0.0}, r"lora\.alpha is 0\.0; it must be above 0"),
        ({"dropout": 1.0}, r"lora\.dropout is 1\.0; it must be from 0 to below 1"),
    ],
)
def test_an_adapter_that_cannot_be_meant_is_one_sentence(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        LoraConfig(**changes)


@pytest.mark.parametrize("name", ["tp", "pp", "ep", "vpp", "cp", "sp", "dp_replicate"])
def test_a_parallel_size_below_one_names_its_key(name):
    with pytest.raises(ConfigError, match=rf"parallel\.{name} is 0; it must be 1 or more"):
        ParallelConfig(**{name: 0})
