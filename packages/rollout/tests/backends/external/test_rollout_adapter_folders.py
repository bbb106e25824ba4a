"""Adapters with settings that would be served wrongly are refused when a server is created, before it starts."""

import json

import pytest

from rl_rollout.errors import ModelFolderError
from rl_rollout.registry import create_server
from rl_rollout.types import ServerConfig

PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "init_lora_weights": True}
BACKENDS = ("embedded", "vllm", "sglang")


def created(backend, folder, tmp_path, **settings):
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN | settings))
    return create_server(backend, ServerConfig(model_path=str(folder), options={"adapters": {"mine": str(tmp_path)}}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 4}),
        ("bias", "all"),
        ("lora_bias", True),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("trainable_token_indices", [1]),
        ("init_lora_weights", "pissa"),
        ("peft_type", "LOHA"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_plain_lora_is_refused_at_once(qwen3_folder, tmp_path, backend, name, value):
    with pytest.raises(ModelFolderError, match=f"adapter 'mine' .*{'type' if name == 'peft_type' else name}"):
        created(backend, qwen3_folder, tmp_path, **{name: value})


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaling_by_the_root_of_the_rank_is_served_or_refused(qwen3_folder, tmp_path, backend):
    if backend == "sglang":  # it reads rank and alpha alone
        with pytest.raises(ModelFolderError, match="use_rslora"):
            created(backend, qwen3_folder, tmp_path, use_rslora=True)
    else:
        created(backend, qwen3_folder, tmp_path, use_rslora=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_folder_without_a_description_is_no_adapter(qwen3_folder, tmp_path, backend):
    options = {"adapters": {"mine": str(tmp_path)}}
    with pytest.raises(ModelFolderError, match=r"has no adapter_config\.json that can be read"):
        create_server(backend, ServerConfig(model_path=str(qwen3_folder), options=options))
