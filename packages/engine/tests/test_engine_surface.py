import json
import subprocess
import sys

import pytest

import rl_engine
from rl_engine import (
    BackendError,
    EngineConfig,
    ModelFolderError,
    create_engine,
    describe_model,
    describe_tokens,
)

PUBLIC = """
BackendError BatchCounts BatchError CheckpointError ConfigError DataError Engine
EngineConfig EngineError EngineOutput Fp8 Head LoraConfig LoraExport LossFunction MatmulPrecision ModelFolderError
ModelInit ModelOutput Mtp NonFiniteError OptimizerConfig OptimizerKind ParallelConfig PeftConfig Precision ShardSpec
StepOutcome TrainingWorker AdamParams RowsOutput TrainingRow create_loss create_worker
auto_precision check create_engine digest_files
find_damage for_this_machine model_folder read_manifest write_manifest describe_model describe_tokens ModelFacts
"""


def test_public_names():
    assert sorted(rl_engine.__all__) == rl_engine.__all__
    assert set(rl_engine.__all__) == set(PUBLIC.split())
    assert all(hasattr(rl_engine, name) for name in rl_engine.__all__)


@pytest.mark.process
def test_importing_brings_nothing_heavy():
    heavy = "{'transformers', 'ray', 'vllm', 'megatron', 'wandb', 'peft', 'tensordict'}"
    code = f"import rl_engine, rl_engine.base, rl_engine.types, sys; print(sorted({heavy} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_an_unknown_backend_lists_what_is_installed():
    with pytest.raises(BackendError, match=r"No engine backend is named 'fsdpp'\. Installed: .*fsdp"):
        create_engine("fsdpp", EngineConfig(model_path="nowhere"))


def test_a_backend_that_cannot_be_imported_prints_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in (
        "backends.fsdp",
        "model.hf",
    ):  # imported by other tests, with transformers
        monkeypatch.delitem(sys.modules, f"rl_engine.{name}", raising=False)
    with pytest.raises(BackendError, match=r"pip install 'rl-engine\[fsdp\]'") as raised:
        create_engine("fsdp", EngineConfig(model_path="nowhere"))
    assert isinstance(raised.value.__cause__, ImportError)


def test_a_model_folder_is_described(tmp_path):
    vision = {"spatial_merge_size": 2, "patch_size": 14}
    config = {"model_type": "m", "vision_config": vision, "text_config": {"vocab_size": 7}, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = describe_model(tmp_path)
    assert (facts.config["vocab_size"], facts.takes_images, facts.longrope_limit) == (7, False, None)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert describe_model(tmp_path).takes_images
    rope = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps(rope))
    assert describe_model(tmp_path).longrope_limit == 100
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelFolderError, match="config.json holds a list, not a JSON object"):
        describe_model(tmp_path)


def test_a_pipeline_has_an_index_and_no_config(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    facts = describe_model(tmp_path)
    assert (facts.is_pipeline, facts.config) == (True, {})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 8}))
    facts = describe_model(tmp_path)
    assert (facts.is_pipeline, facts.config["hidden_size"]) == (False, 8)


def test_the_tokens_of_a_folder_are_described(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    tokens = describe_tokens(tmp_path)
    assert (tokens.num_tokens, tokens.ended([1, 6, 2]), tokens.ended([1])) == (None, [1, 6], [1, 5])
    assert tokens.lines == ["5, 6"]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": "end"}))
    with pytest.raises(ModelFolderError, match="eos_token_id='end'"):
        describe_tokens(tmp_path)
