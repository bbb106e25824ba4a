"""All backends stop where the model folder says that a turn ends, in whichever of its files."""

import json
from functools import partial

import pytest

from rl_rollout.backends.embedded.model.model_runner import load_model
from rl_rollout.errors import ModelFolderError
from rl_rollout.registry import create_server
from rl_rollout.types import GenerateRequest, SamplingParams, ServerConfig


@pytest.fixture
def folder(qwen3_folder, tmp_path):
    for file in qwen3_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    return tmp_path


@pytest.mark.promise("All servers stop at the ids that end a turn in the model folder")
@pytest.mark.parametrize("backend", ["vllm", "sglang", "tensorrt_llm"])
def test_third_party_servers_get_the_ids(folder, backend):
    server = create_server(backend, ServerConfig(model_path=str(folder)))
    asked = {"request_id": "1", "prompt_token_ids": (3,)}
    params = SamplingParams(stop_token_ids=(9, 5))
    assert server.limits.stop_ids(GenerateRequest(**asked, sampling_params=params)) == (9, 5, 6, 1)
    params = SamplingParams(stop_token_ids=(9,), ignore_eos=True)
    assert server.limits.stop_ids(GenerateRequest(**asked, sampling_params=params)) == (9,)


def test_the_embedded_server_stops_at_the_same_ids(folder):
    assert load_model(ServerConfig(model_path=str(folder))).eos_token_ids == (5, 6, 1)


def test_a_damaged_generation_config_is_named(folder):
    (folder / "generation_config.json").write_text("{")
    for use in (load_model, partial(create_server, "vllm")):
        with pytest.raises(ModelFolderError, match=r"generation_config\.json"):
            use(ServerConfig(model_path=str(folder)))
