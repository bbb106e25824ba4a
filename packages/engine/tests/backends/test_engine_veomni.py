"""VeOmni's published wheel in an environment of its own: what it trains on CPUs, beside fsdp (docs/backends.md)."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import EngineConfig, OptimizerConfig, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch

SCRIPT = Path(__file__).parents[1] / "support" / "veomni_ranks.py"
VEOMNI = "veomni==0.1.12"
BESIDE = [  # what it imports; neither timm nor torchvision, whose wheels want torch's CUDA build
    *(f"torch=={torch.__version__.partition('+')[0]}", "transformers==5.9.0", "datasets==2.21.0", "torchdata"),
    *("tiktoken", "psutil", "einops", "blobfile", "wandb", "setuptools", "matplotlib", "packaging<26"),
]
SIZES = {
    "vocab_size": 79, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def veomni(tmp_path_factory):
    """The environment's folder of programs."""
    folder = tmp_path_factory.mktemp("environment") / "veomni"
    install = ["uv", "pip", "install", "-q", "--python", str(folder / "bin" / "python")]
    for command in (["uv", "venv", "-q", "--python", "3.11", str(folder)], [*install, *BESIDE],
                    [*install, "--no-deps", VEOMNI]):  # fmt: skip
        subprocess.run(command, check=True, timeout=600, cwd=folder.parent)  # without the workspace's constraints
    return folder / "bin"


def run(programs, folder, ep):
    command = [str(programs / "torchrun"), "--standalone", "--nproc-per-node", "2", str(SCRIPT), str(folder), str(ep)]
    return subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def write(folder, kind, sizes):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **sizes), dtype=torch.float32)
    model.save_pretrained(folder)
    rows = torch.randint(3, 70, (2, 24)).tolist()
    (folder / "rows.json").write_text(json.dumps(rows))
    return rows


def step_of_fsdp(folder, rows):
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), optimizer=OptimizerConfig()))
    engine.initialize()
    data = ragged_batch([row[:1] for row in rows], [row[1:] for row in rows])
    loss = engine.forward_backward_batch(data, sft_loss).metrics["loss"]
    norm = engine.optimizer_step()
    engine.close()
    return loss, norm


@pytest.mark.promise("VeOmni's wheel trains in an environment of its own with the gradient of `fsdp`")
@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", {}), ("qwen3_moe", EXPERTS)])
def test_it_trains_on_two_gloo_ranks_with_the_gradient_of_fsdp(veomni, tmp_path, kind, sizes):
    rows = write(tmp_path, kind, sizes)
    done = run(veomni, tmp_path, 1)
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads((tmp_path / f"ep-1-{rank}.json").read_text()) for rank in (0, 1)]
    assert all(any(name.startswith("veomni.models.transformers") for name in each["classes"]) for each in told)
    loss, norm = step_of_fsdp(tmp_path, rows)
    assert sum(each["loss"] for each in told) / 2 == pytest.approx(loss, rel=1e-5)
    assert [each["norm"] for each in told] == pytest.approx([norm, norm], rel=1e-4)


@pytest.mark.integration
@pytest.mark.timeout(1500)
def test_its_experts_are_divided_over_ranks_by_gpu_kernels_alone(veomni, tmp_path):
    """Its plain experts look for all of them on every rank; when this fails, `ep` has a place in the test above."""
    write(tmp_path, "qwen3_moe", EXPERTS)
    done = run(veomni, tmp_path, 2)
    assert done.returncode != 0
    assert "IndexError: index 2 is out of bounds for dimension 0 with size 2" in done.stderr
