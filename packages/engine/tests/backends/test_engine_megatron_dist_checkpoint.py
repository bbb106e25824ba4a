"""Weights in Megatron-LM's format, read and written beside megatron-core's own model; what is refused.

Layouts: `test_engine_megatron.py::test_megatron_lm_weights_are_read_by_another_layout`.
"""

import pickle
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from rl_engine import (
    CheckpointError,
    ConfigError,
    EngineConfig,
    Head,
    LoraConfig,
    ModelFolderError,
    ModelInit,
    Precision,
    create_engine,
)
from rl_engine.backends.megatron.layout import megatron_calls  # first: without megatron-core's warnings

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

pytestmark = pytest.mark.process

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="in float64, which a GPU has no step for")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
_spec = spec_from_file_location("megatron_ranks", Path(__file__).parents[1] / "support" / "megatron_ranks.py")
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
SIZES = ranks.SIZES


def build(folder, **changes):
    options = {"precision": Precision.FLOAT64} | changes
    engine = create_engine("megatron", EngineConfig(model_path=str(folder), **options))
    engine.initialize()
    return engine


@pytest.fixture
def model(tmp_path):
    ranks.write_model(tmp_path, "tied")
    return tmp_path / "tied"


def bare(folder):
    """A folder of the model's config alone."""
    AutoConfig.from_pretrained(folder).save_pretrained(folder.with_name("bare"))
    return folder.with_name("bare")


def megatrons_model():
    """The model as a program of megatron-core's makes it: its norms, its attention; for its weights alone."""
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=SIZES["num_hidden_layers"],
        hidden_size=SIZES["hidden_size"],
        num_attention_heads=SIZES["num_attention_heads"],
        kv_channels=SIZES["head_dim"],
        ffn_hidden_size=SIZES["intermediate_size"],
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    more = {"share_embeddings_and_output_weights": True, "position_embedding_type": "rope"}
    return GPTModel(config, spec, SIZES["vocab_size"], 64, **more)


def in_megatrons_program(work):
    """What comes of `work` on the model, in process groups that are gone then."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with megatron_calls():
            model = megatrons_model()
            return work(model, model.sharded_state_dict(metadata={"dp_cp_group": dist.group.WORLD}))
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.mark.promise("and reads and writes Megatron-LM's checkpoints")
@on_a_cpu
def test_megatron_core_reads_what_is_written_and_is_read_itself(model, tmp_path):
    engine = build(model)
    written = ranks.ranks.weights(engine)
    engine.save_dist_checkpoint(tmp_path / "written")
    engine.save_dist_checkpoint(tmp_path / "written")  # in the place of the first
    engine.close()
    assert [path.name for path in tmp_path.glob(".written*")] == []

    def copy(plain, wanted):
        """Read it by number, as Megatron-LM is told to by what is in it; write it in one tensor for all layers."""
        metadata = dist_checkpointing.load_content_metadata(str(tmp_path / "written"))
        by_number = plain.sharded_state_dict(metadata=metadata | {"dp_cp_group": dist.group.WORLD})
        found = dist_checkpointing.load({"model": by_number}, str(tmp_path / "written"))
        plain.load_state_dict(found["model"])
        folder = tmp_path / "megatron" / "iter_0000020"
        folder.mkdir(parents=True)
        state = {"args": None, "iteration": 20, "model": wanted}
        dist_checkpointing.save(state, str(folder))
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("20\n")
        return {name: tensor.clone() for name, tensor in plain.named_parameters()}

    plain = in_megatrons_program(copy)
    norm = written["model.layers.1.input_layernorm.weight"]
    assert torch.equal(plain["decoder.layers.1.input_layernorm.weight"], norm)
    assert torch.equal(plain["embedding.word_embeddings.weight"], written["model.embed_tokens.weight"])

    config = EngineConfig(model_path=str(bare(model)), dist_checkpoint=str(tmp_path / "megatron"))
    create_engine("megatron", config).check(1)
    engine = build(bare(model), dist_checkpoint=str(tmp_path / "megatron"))
    torch.testing.assert_close(ranks.ranks.weights(engine), written, rtol=0, atol=0)
    ranks.one_step(engine, ranks.ranks.batch_of(ranks.ranks.draw_rows(ranks.SEED)))
    engine.save_model(tmp_path / "after")  # in Hugging Face's layout, from a folder without weights
    engine.close()
    assert not torch.equal(ranks.initial(tmp_path / "after")["model.norm.weight"], written["model.norm.weight"])

    engine = build(bare(model), dist_checkpoint=str(tmp_path / "megatron"), head=Head.VALUE, lora=LoraConfig(rank=2))
    seen = ranks.ranks.weights(engine)
    with pytest.raises(ConfigError, match="neither adapters nor scalar heads"):
        engine.save_dist_checkpoint(tmp_path / "critic")
    engine.close()
    assert not seen.pop("score.weight").any()
    torch.testing.assert_close(seen, written, rtol=0, atol=0)


@on_a_cpu
def test_a_folder_of_another_model_is_refused(model, tmp_path):
    engine = build(model)
    engine.save_dist_checkpoint(tmp_path / "written")
    engine.close()
    for change, words in (
        ({"hidden_size": 16}, r"embedding.word_embeddings.weight of shape \(79, 32\).* \(79, 16\)"),
        ({"vocab_size": 80}, r"of shape \(79, 32\).* \(80, 32\)"),
        ({"num_hidden_layers": 3}, r"has decoder.layers.2.\S+ of shape None"),
        ({"intermediate_size": 64}, r"mlp.linear_fc1.weight of shape \(96, 32\); .* has \(128, 32\)"),
    ):
        AutoConfig.for_model("qwen3", **(SIZES | ranks.MODELS["tied"][1] | change)).save_pretrained(tmp_path / "other")
        with pytest.raises(ModelFolderError, match=words):
            build(tmp_path / "other", dist_checkpoint=str(tmp_path / "written"))


@on_a_cpu
def test_a_damaged_folder_is_refused(model, tmp_path):
    engine = build(model)
    engine.save_dist_checkpoint(tmp_path / "written")
    engine.close()
    files = sorted((tmp_path / "written").glob("*.distcp"))
    files[0].write_bytes(files[0].read_bytes()[: files[0].stat().st_size // 2])
    with pytest.raises(ModelFolderError, match="written cannot be read: "):
        build(model, dist_checkpoint=str(tmp_path / "written"))
    (tmp_path / "written" / ".metadata").write_bytes(b"no pickle")
    config = EngineConfig(model_path=str(model), dist_checkpoint=str(tmp_path / "written"))
    with pytest.raises(ModelFolderError, match="written cannot be read: "):
        create_engine("megatron", config).check(1)


class Code:
    """What runs code where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@on_a_cpu
def test_code_in_a_folder_is_refused_and_not_run(model, tmp_path):
    engine = build(model)
    engine.save_dist_checkpoint(tmp_path / "written")
    engine.close()
    (tmp_path / "written" / ".metadata").write_bytes(pickle.dumps(Code(tmp_path / "it ran")))
    config = EngineConfig(model_path=str(model), dist_checkpoint=str(tmp_path / "written"))
    with pytest.raises(ModelFolderError, match=r"its .metadata names \S+, which no checkpoint is made of"):
        create_engine("megatron", config).check(1)
    assert not (tmp_path / "it ran").exists()


@on_a_cpu
@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_folder_with_a_file_that_is_cut_off_is_refused(model, tmp_path, name):
    engine = build(model)
    engine.save_dist_checkpoint(tmp_path / "written")
    engine.close()
    file = tmp_path / "written" / name
    if name == "common.pt" and not file.exists():
        pytest.skip("megatron-core 0.19 writes what was in it among the tensors")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ModelFolderError, match="written cannot be read: "):
        build(model, dist_checkpoint=str(tmp_path / "written"))


@on_a_cpu
def test_a_folder_that_cannot_be_written_is_told(model, tmp_path):
    engine = build(model)
    (tmp_path / "a file").touch()
    with pytest.raises(CheckpointError, match="a file/written cannot be written: .*Not a directory"):
        engine.save_dist_checkpoint(tmp_path / "a file" / "written")
    engine.close()


def test_an_invalid_folder_is_refused_before_the_start(model, tmp_path):
    def check(backend="megatron", **changes):
        create_engine(backend, EngineConfig(model_path=str(model), **changes)).check(1)

    with pytest.raises(ModelFolderError, match="no metadata.json of megatron-core's dist_checkpointing"):
        check(dist_checkpoint=str(model))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ModelFolderError, match="iter_0000007 has no metadata.json"):
        check(dist_checkpoint=str(tmp_path))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(ModelFolderError, match="release has no metadata.json"):
        check(dist_checkpoint=str(tmp_path))
    (model / "metadata.json").write_text('{"format": "another"}')
    with pytest.raises(ModelFolderError, match="no metadata.json of megatron-core's dist_checkpointing"):
        check(dist_checkpoint=str(model))
    (model / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(ModelFolderError, match="is of the format zarr; torch_dist is read"):
        check(dist_checkpoint=str(model))
    with pytest.raises(ConfigError, match="dist_checkpoint is set; .* megatron alone"):
        check("fsdp", dist_checkpoint=str(model))
    with pytest.raises(ConfigError, match="dist_checkpoint is set and init is random"):
        check(dist_checkpoint=str(model), init=ModelInit.RANDOM)


@pytest.mark.gpu
@on_a_gpu
def test_an_engine_on_a_gpu_reads_what_it_wrote(model, tmp_path):
    engine = build(model, precision=Precision.BFLOAT16)
    written = {name: tensor.cpu() for name, tensor in ranks.ranks.weights(engine).items()}
    engine.save_dist_checkpoint(tmp_path / "written")
    engine.close()
    engine = build(bare(model), dist_checkpoint=str(tmp_path / "written"), precision=Precision.BFLOAT16)
    read = {name: tensor.cpu() for name, tensor in ranks.ranks.weights(engine).items()}
    engine.close()
    torch.testing.assert_close(read, written, rtol=0, atol=0)
