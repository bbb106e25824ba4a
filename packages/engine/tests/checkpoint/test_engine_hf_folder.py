import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from rl_csrc.inference.folder_tokens import read_folder_tokens
from rl_engine import CheckpointError, ConfigError, EngineConfig, ModelFolderError, check, create_engine
from rl_engine.checkpoint.hf_folder import previous_folder, replace_folder
from rl_engine.testing import ragged_batch, write_tiny_model
from rl_engine.types import Head, LoraConfig, OptimizerConfig


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "model")


def load(folder, backend="fsdp", **changes):
    engine = create_engine(backend, EngineConfig(model_path=str(folder), **changes))
    engine.initialize()
    return engine


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ModelFolderError, match=r"has no config\.json"):
        load(tmp_path)


def test_an_unknown_architecture(folder):
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen99", "architectures": ["Qwen99"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match="qwen99"):
        load(folder)


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"no \.safetensors file"):
        load(folder)
    load(folder, init="random").close()


def test_a_shard_that_is_named_and_absent(folder):
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFolderError, match="model-00002-of-00002"):
        load(folder)


@pytest.mark.promise("A model folder loads completely or not at all")
def test_a_missing_tensor_is_named(folder):
    edit(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelFolderError, match=r"lacks 1 tensor\(s\): model\.norm\.weight"):
        load(folder)


def test_an_extra_tensor_is_named(folder):
    edit(folder, lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)}))
    with pytest.raises(ModelFolderError, match=r"model\.extra\.weight"):
        load(folder)


def test_a_tensor_of_another_shape_is_named(folder):
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(ModelFolderError, match=r"another shape 1 tensor\(s\): model\.norm\.weight"):
        load(folder)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_damaged_file_is_named(folder, backend):
    (folder / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(ModelFolderError, match=r"(cannot be read|cannot build).*[Hh]eader"):
        load(folder, backend)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_damaged_index_is_named(folder, backend):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [')
    with pytest.raises(ModelFolderError, match=r"index\.json is damaged .*Download the folder again"):
        load(folder, backend)


def test_a_damaged_config_is_named(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match=r"config\.json is not valid JSON"):
        load(folder)


@pytest.mark.parametrize("backend", ["fsdp", "megatron", "torchtitan"])
def test_quantised_weights_are_refused(folder, backend):
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=r"are quantised \(fp8\); .* Give the folder in bfloat16\."):
        load(folder, backend)


def test_rows_longer_than_the_context_are_refused(folder):
    engine = load(folder)
    with pytest.raises(ValueError, match="A row has 513 tokens; the model's context is 512"):
        engine.forward_backward_batch(ragged_batch([[1] * 500], [[2] * 13]), None)


def test_rows_that_would_change_others__frequencies_are_refused(tmp_path):
    """Up to that length, a row's log-probs are its own."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
    engine = load(write_tiny_model(tmp_path, rope_parameters=rope, max_position_embeddings=256))
    short, prompts, answers = [3, 1, 4, 1, 5], [[7] * 9, [5] * 40], [[3, 1, 4, 1, 5], [2] * 24]
    beside = engine.forward_backward_batch(ragged_batch(prompts, answers), None, forward_only=True)
    alone = engine.forward_backward_batch(ragged_batch([prompts[0]], [short]), None, forward_only=True)
    torch.testing.assert_close(beside.columns["logprobs"].unbind()[0], alone.columns["logprobs"].unbind()[0])
    with pytest.raises(ValueError, match=r"A row has 65 tokens; beyond 64 this model \(longrope\) turns all rows"):
        engine.forward_backward_batch(ragged_batch([*prompts, [5] * 40], [*answers, [2] * 25]), None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weights: weights.pop("model.layers.0.self_attn.q_proj.weight"), r"lacks 1 tensor\(s\): .*q_proj"),
        (
            lambda weights: weights.update(left=torch.ones(2)),
            r"beyond what the architecture takes, 1 tensor\(s\): left",
        ),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(3)}), "with another shape 1 .*norm.weight"),
    ],
)
def test_check_finds_tensors_that_do_not_fit_by_their_headers(tmp_path, damage, message):
    folder = write_tiny_model(tmp_path)
    check("fsdp", EngineConfig(model_path=str(folder)), 1)
    weights = load_file(folder / "model.safetensors")
    damage(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match=message):
        check("fsdp", EngineConfig(model_path=str(folder)), 1)


def test_code_of_a_model_folder_is_never_run(tmp_path):
    """A model type that transformers does not know and the folder brings: refused, not asked for, not imported."""
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mine", "auto_map": own}))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    with pytest.raises(ModelFolderError, match="transformers cannot read"):
        load(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.process
def test_a_checkpoint_of_another_model_is_refused_unchanged(tmp_path, folder):
    other = load(write_tiny_model(tmp_path / "other", num_hidden_layers=1))
    other.save_checkpoint(tmp_path / "checkpoint", 1)
    engine = load(folder)
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    with pytest.raises(ValueError, match="has no tensor model.model.layers.1"):
        engine.load_checkpoint(tmp_path / "checkpoint")
    torch.testing.assert_close(dict(engine.get_per_tensor_param()[0]), before, rtol=0, atol=0)


@pytest.mark.process
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 3}, r"it has model\.model\.layers\.2.*, which this model has not"),
        ({"intermediate_size": 96}, r"gate_proj\.weight has shape \[96, 32\], this model's is \[64, 32\]"),
    ],
)
def test_a_checkpoint_of_a_larger_model_is_refused(tmp_path, folder, changes, problem):
    larger = load(write_tiny_model(tmp_path / "larger", **changes))
    larger.save_checkpoint(tmp_path / "checkpoint", 1)
    with pytest.raises(CheckpointError, match=problem):
        load(folder).load_checkpoint(tmp_path / "checkpoint")


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "rl-engine-checkpoint/1"}', '{"format": "older"}'])
def test_a_damaged_manifest_is_named(tmp_path, folder, text):
    engine = load(folder)
    engine.save_checkpoint(tmp_path / "checkpoint", 1)
    (tmp_path / "checkpoint" / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is (damaged|not of format)"):
        engine.load_checkpoint(tmp_path / "checkpoint")


def test_a_damaged_checkpoint_changes_nothing(tmp_path, folder):
    engine = load(folder)
    engine.save_checkpoint(tmp_path / "checkpoint", 1)
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    file = next((tmp_path / "checkpoint").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:20000])
    with pytest.raises(ValueError, match=r"shard-00000.safetensors is damaged: it has 20000 bytes"):
        engine.load_checkpoint(tmp_path / "checkpoint")
    torch.testing.assert_close(dict(engine.get_per_tensor_param()[0]), before, rtol=0, atol=0)


def test_a_killed_checkpoint_replacement_is_recovered(tmp_path, folder):
    engine, path = load(folder), tmp_path / "checkpoint"
    engine.save_checkpoint(path, 1)
    engine.save_checkpoint(path, 2)
    assert engine.load_checkpoint(path) == 2
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
    path.rename(previous_folder(path))  # as if killed between the two renames
    assert engine.load_checkpoint(path) == 2


@pytest.mark.process
@pytest.mark.promise("A failure of `async_checkpoints` is raised by the next call")
def test_a_failure_in_the_background_is_raised_by_the_next_call(tmp_path, folder):
    (tmp_path / "file").write_text("")
    for then in ("save_checkpoint", "load_checkpoint", "close"):
        engine = load(folder, async_checkpoints=True)
        engine.save_checkpoint(tmp_path / "file" / "checkpoint", 1)
        arguments = {"save_checkpoint": (tmp_path / "other", 2), "load_checkpoint": (tmp_path / "other",)}
        with pytest.raises(CheckpointError, match="file/checkpoint was not written .*Not a directory"):
            getattr(engine, then)(*arguments.get(then, ()))
        engine.close()


def test_replace_folder_leaves_no_trace_of_the_old(tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]
    assert [entry.name for entry in (tmp_path / "old").iterdir()] == ["new"]


def test_modes_put_things_back(folder):
    engine = load(folder)
    with engine.eval_mode():
        assert not engine.parts.built.scorer.training
        assert not torch.is_grad_enabled()
    assert engine.parts.built.scorer.training
    with engine.train_mode():
        engine.to("cpu")
    assert torch.is_grad_enabled()


def test_a_second_initialize_is_refused(folder):
    engine = load(folder)
    with pytest.raises(ConfigError, match="initialised already"):
        engine.initialize()


def test_part_of_torchruns_environment_is_an_error(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT is not set"):
        load(folder)


OTHERS = {
    "generation_config.json": '{"eos_token_id": [0, 1], "temperature": 0.6}',
    "chat_template.json": '{"chat_template": ""}',
    "preprocessor_config.json": '{"patch_size": 14}',
    "video_preprocessor_config.json": '{"fps": 2}',
    "processor_config.json": "{}",
    "special_tokens_map.json": '{"eos_token": "<eos>"}',
    "added_tokens.json": '{"<user>": 2}',
    "modeling_own.py": "raise SystemExit",
    "README.md": "# Model",
    "additional_chat_templates/tool_use.jinja": "{{ messages }}",
}
"""Files that are not weights; each is written as it was read."""
WEIGHTS = ("pytorch_model.bin", "model-00001-of-00009.safetensors.index.json", "model.gguf")


@pytest.mark.promise("A saved model has all files of its source but weights")
@pytest.mark.parametrize(
    "changes",
    [{}, {"head": Head.REWARD}, {"lora": LoraConfig(rank=2), "optimizer": OptimizerConfig()}],
    ids=["whole", "reward", "merged"],
)
def test_all_files_but_weights_are_carried_over(tmp_path, folder, changes):
    (folder / "additional_chat_templates").mkdir()
    for name, text in OTHERS.items():
        (folder / name).write_text(text)
    config = json.loads((folder / "config.json").read_text()) | {"of_another_program": [1], "torch_dtype": "float32"}
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    engine = load(folder, **changes)
    for name in WEIGHTS:  # of other programs, not of the model that is read
        (folder / name).write_text("{}")
    engine.save_model(tmp_path / "out")
    for name, text in OTHERS.items():
        assert (tmp_path / "out" / name).read_text() == text
    assert not any((tmp_path / "out" / name).exists() for name in WEIGHTS)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    if "head" in changes:  # its padding: see test_engine_preferences.py
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        config |= labels | {"architectures": ["Qwen3ForSequenceClassification"]}
    assert written == config


def test_config_says_the_number_format_that_is_written(tmp_path, folder):
    load(folder, precision="bfloat16").save_model(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.process
def test_what_ends_a_turn_is_the_same_after_training_again(tmp_path, folder):
    """The file lists more ids than config.json and stays as it is, a first and a second time."""
    text = json.dumps({"eos_token_id": [0, 1]})
    (folder / "generation_config.json").write_text(text)
    load(folder).save_model(tmp_path / "once")
    load(tmp_path / "once").save_model(tmp_path / "twice")
    assert (tmp_path / "twice" / "generation_config.json").read_text() == text
    assert read_folder_tokens(tmp_path / "twice") == read_folder_tokens(folder)


def test_a_template_token_that_is_no_eos_is_listed(tmp_path, folder):
    """A model that has learned to end its turns there would not stop at other servers."""
    template = (folder / "chat_template.jinja").read_text().replace("<eos>", "<user>")
    (folder / "chat_template.jinja").write_text(template)
    load(folder).save_model(tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [1, 2]
