"""Jobs on Ray whose engine ranks send what they hold: the same run as with gathered weights, bit for bit."""

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packages.trainer.bench import weights as bench
from safetensors.torch import load_file

from rl_engine import EngineConfig, LoraConfig, OptimizerConfig, create_engine
from rl_engine.types import LoraExport
from rl_rollout.testing import write_tiny_model
from rl_trainer.config import load_config
from rl_trainer.config.schema import WarmupConfig
from rl_trainer.data import load_datasets
from rl_trainer.data.warmup import make_small_model
from rl_trainer.errors import ConfigError
from rl_trainer.pipeline.weight_transfer import write_start_adapter

SIZES = [
    *("data.options.num_rows=2000", "data.eval_size=16", "batch.batch_size=4", "batch.mini_batch_size=2"),
    *("batch.group_size=4", "steps=2", "eval_every=0", "engine.world_size=2", "agent.num_workers=1"),
    *("algorithm.old_logprobs=recompute", "algorithm.entropy_coef=0.1", "engine.optimizer.lr=1e-2"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The recipe's, hardly trained."""
    small = load_config("quickstart", ["data.options.num_rows=2000", "data.eval_size=16"])
    warmup = WarmupConfig(hidden_size=64, num_layers=1, steps=2, batch_size=16)
    rows = load_datasets(small.data, seed=0).train
    return make_small_model(
        tmp_path_factory.mktemp("m"), warmup, rows, seed=0, timeout_s=300, on_line=lambda line: None
    )


def run(model, folder, *overrides):
    """What it says, and the metrics of every step."""
    own = (f"model.path={model}", f"output_dir={folder}")
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", "runtime=ray", *SIZES, *overrides, *own]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = re.sub(r"[\s│]+", " ", ended.stdout)  # as it was before the table was set
    return told, [record["metrics"] for record in records if record["metrics"]]


@pytest.mark.promise("A run whose weights go from shard to shard has the losses of one that gathers them")
@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("megatron_on_cpu")
@pytest.mark.parametrize(
    "layout",
    [
        ["rollout.num_replicas=2"],
        ["engine.backend=megatron_on_cpu", "engine.parallel.tp=2", "engine.parallel.pp=1"],
        ["weights.delta=true", "weights_transport=tcp"],
    ],
    ids=["fsdp to two replicas", "megatron tp=2", "differences over tcp"],
)
def test_a_run_by_shards_equals_one_with_gathered_weights(layout, model, tmp_path):
    told, sharded = run(model, tmp_path / "sharded", *layout)
    assert "from shard to shard" in told, "the plan says which way weights go"
    plain = [key for key in layout if "delta" not in key]
    told, gathered = run(model, tmp_path / "gathered", *plain, "weights.mode=gathered")
    assert "weights.mode=gathered asks for it" in told
    assert len(sharded) == 2
    for one, other in zip(sharded, gathered, strict=True):
        assert one["mismatch_abs"] < 1e-4, "the servers sample from the weights of the step before"
        for name in ("loss", "grad_norm", "mismatch_abs", "entropy"):
            assert one[name] == other[name], name


@pytest.mark.integration
@pytest.mark.timeout(1500)
def test_a_run_over_difference_folders_equals_one_by_sessions(model, tmp_path):
    over = [f"weights_transport=file://{tmp_path / 'weights'}", "rollout.num_replicas=2"]
    told, chained = run(model, tmp_path / "chained", *over, "weights.delta=true", "steps=3")
    assert "as differences" in told
    manifests = [json.loads(path.read_text()) for path in sorted((tmp_path / "weights").glob("*.json"))]
    assert [each["base"] is not None for each in manifests if "base" in each], "some are differences"
    _, plain = run(model, tmp_path / "plain", "rollout.num_replicas=2", "steps=3")
    for one, other in zip(chained, plain, strict=True):
        for name in ("loss", "grad_norm", "mismatch_abs", "entropy"):
            assert one[name] == other[name], name


@pytest.mark.integration
@pytest.mark.timeout(1000)
def test_every_token_is_sampled_from_the_adapter_sent_alone(model, tmp_path):
    """The engine's log-probs of a policy that has learned are those that the servers told."""
    lora = ["engine.lora.rank=4", "engine.lora.export=adapter", "engine.optimizer.lr=5e-2", "steps=3"]
    told, metrics = run(model, tmp_path, *lora, "rollout.num_replicas=2")
    assert "the adapter alone is sent" in told
    assert all(each["mismatch_abs"] < 1e-4 for each in metrics), metrics
    assert all(each["grad_norm"] > 0 for each in metrics)


def test_a_start_adapter_is_neutral_and_has_every_engine_tensor(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    lora = LoraConfig(rank=4, alpha=8.0, export=LoraExport.ADAPTER)
    folder = write_start_adapter(tmp_path / "adapter", Path(model), lora)
    engine = create_engine("fsdp", EngineConfig(model_path=str(model), lora=lora, optimizer=OptimizerConfig()))
    engine.initialize()
    own, _ = engine.get_per_tensor_param()
    shapes = {name: tensor.shape for name, tensor in own}
    engine.close()
    start = load_file(folder / "adapter_model.safetensors")
    assert {name: tensor.shape for name, tensor in start.items()} == shapes
    assert not any(tensor.any() for tensor in start.values())
    with pytest.raises(ConfigError, match="names no layer"):
        write_start_adapter(tmp_path / "none", Path(model), replace(lora, target_modules=("w_proj",)))


@pytest.mark.promise("No engine rank grows by a whole tensor then")
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_no_rank_grows_by_a_whole_tensor_when_sending(tmp_path):
    """Beside the gathered way, in the same processes: two FSDP ranks over gloo, and a server of their own."""
    sizes = {"hidden_size": 512, "vocab_size": 100_000, "num_attention_heads": 8, "num_key_value_heads": 8}
    model = str(write_tiny_model(tmp_path / "model", **sizes, head_dim=64, tie_word_embeddings=True))
    largest = 100_000 * 512 * 2
    taken = asyncio.run(bench.measure(model, 2, option="?bucket_bytes=1048576", ways=("gathered", "sharded")))
    for rank in (0, 1):
        grown = {way: max(sample["ranks"][rank] for sample in samples) for way, samples in taken.items()}
        assert grown["gathered"] > largest, "so that the measure can see one"
        assert grown["sharded"] < 0.5 * largest
    assert all(sample.get("digest", True) for samples in taken.values() for sample in samples)
