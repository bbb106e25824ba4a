"""The veomni backend in an environment with VeOmni's published wheel: steps on gloo ranks, compared with fsdp."""

import json
import os
import subprocess
import sysconfig
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import BackendError, EngineConfig, create_engine

SUPPORT = Path(__file__).parents[1] / "support"
_spec = spec_from_file_location("veomni_engine", SUPPORT / "veomni_engine.py")
script = module_from_spec(_spec)
_spec.loader.exec_module(script)
VEOMNI = "veomni==0.1.12"
BESIDE = ["transformers==5.9.0", "datasets==2.21.0", "torchdata", "tiktoken", "psutil", "einops", "blobfile", "wandb"]
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
    (site,) = folder.glob("lib/python*/site-packages")  # all else is found where this process finds it
    (site / "run.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder / "bin"


def run(programs, ranks, name, *arguments):
    command = [str(programs / "python"), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, str(SUPPORT / name), *map(str, arguments)],
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


@pytest.mark.promise("VeOmni's models train as a backend with the steps and weights of `fsdp`")
@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", {}), ("qwen3_moe", EXPERTS)])
def test_it_trains_with_the_steps_and_weights_of_fsdp(veomni, tmp_path, kind, sizes, ranks):
    rows = write(tmp_path, kind, sizes)
    done = run(veomni, ranks, "veomni_engine.py", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"veomni.models.transformers.{kind}.generated" in done.stdout + done.stderr
    found = torch.load(tmp_path / "veomni.pt", weights_only=True)
    steps, weights = script.steps("fsdp", tmp_path, rows)
    assert torch.tensor(found["steps"]) == pytest.approx(torch.tensor(steps), rel=1e-4)
    assert steps[2][0] < steps[0][0] - 0.01
    assert found["weights"].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(find_spec("veomni") is not None, reason="VeOmni is installed here")
def test_without_veomni_the_environment_is_named():
    with pytest.raises(BackendError, match=r"needs veomni 0.1.12 and transformers 5.9 .* engine.environment"):
        create_engine("veomni", EngineConfig(model_path="nowhere"))


@pytest.mark.integration
@pytest.mark.timeout(1500)
def test_its_experts_are_divided_over_ranks_by_gpu_kernels_alone(veomni, tmp_path):
    """Its plain experts look for all of them on every rank; when this fails, the backend can take `ep`."""
    write(tmp_path, "qwen3_moe", EXPERTS)
    done = run(veomni, 2, "veomni_ranks.py", tmp_path, 2)
    assert done.returncode != 0
    assert "IndexError: index 2 is out of bounds for dimension 0 with size 2" in done.stderr
