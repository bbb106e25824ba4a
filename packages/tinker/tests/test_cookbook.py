"""Recipes of tinker-cookbook 0.6 against a server with a tiny model.

`TINKER_COOKBOOK_PYTHON` names a Python that has tinker-cookbook; it is on no index with all that it depends on.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from packages.tinker.tests.support import running

from rl_engine.registry import create_worker
from rl_engine.types import EngineConfig, LoraConfig, Precision
from rl_rollout.testing import write_tiny_model
from rl_tinker.ranks.group import ElasticGroup
from rl_tinker.ranks.modules import lora_modules
from rl_tinker.ranks.rank import ALPHA
from rl_tinker.service.replicas import Replicas
from rl_tinker.types import ServeConfig

PYTHON = os.environ.get("TINKER_COOKBOOK_PYTHON", "")
NAME = "meta-llama/Llama-3.1-8B"
"""Name that the server has for the tiny model, so that the cookbook's table of models has its renderer."""
RECIPES = Path(__file__).with_name("cookbook_recipes.py")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not PYTHON, reason="TINKER_COOKBOOK_PYTHON names no Python with tinker-cookbook"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    config = ServeConfig(model_path=str(model), output_dir=str(folder), dtype="float32", max_model_len=2048)
    group, replicas = ElasticGroup(config, str(model)), Replicas(config, str(model), folder / "checkpoints")
    with running(
        folder, model, group=group, replicas=replicas, model_name=NAME, max_model_len=2048, dtype="float32"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def data(model, tmp_path_factory):
    """The model and local data sets under the names of the hub's, in the working folder of the recipes."""
    folder = tmp_path_factory.mktemp("data")
    (folder / NAME).parent.mkdir()
    (folder / NAME).symlink_to(model)
    chats = [
        [{"role": "user", "content": f"what is {i} + {i}?"}, {"role": "assistant", "content": f"it is {2 * i}."}]
        for i in range(200)
    ]
    (folder / "conversations.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in chats))
    sums = [{"question": f"what is {i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(16)]
    talks = [
        {"chosen": f"\n\nHuman: say {i}.\n\nAssistant: {i}.", "rejected": f"\n\nHuman: say {i}.\n\nAssistant: no."}
        for i in range(16)
    ]
    write_data_set(folder / "openai/gsm8k", "main", sums)
    write_data_set(folder / "zwhe99/DeepMath-103K", "default", sums)
    write_data_set(folder / "Anthropic/hh-rlhf", "default", talks)
    return folder


def write_data_set(folder, config, rows):
    folder.mkdir(parents=True)
    files = []
    for split, some in (("train", rows), ("test", rows[:4])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        files.append(f"  - split: {split}\n    path: {split}.jsonl\n")
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{''.join(files)}---\n")


def run(recipe, server, data):
    environment = os.environ | {"TINKER_API_KEY": f"tml-{recipe}", "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, str(RECIPES), recipe, server.url, NAME]
    done = subprocess.run(command, cwd=data, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in (data / f"logs/{recipe}/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", ["rl_basic", "rl_loop", "distillation", "preference"])
def test_a_recipe_of_the_cookbook_runs(server, data, recipe):
    assert len(run(recipe, server, data)) >= 2


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_losses_of_sl_basic_are_those_of_transformers_and_peft(server, data, model, tmp_path):
    steps = [each for each in run("sl_basic", server, data) if "train_mean_nll" in each]
    batches = json.loads((data / "logs/sl_basic/batches.json").read_text())
    (run_of,) = [each for each in server.store.models.values() if each.tenant == tenant_of(server, "tml-sl_basic")]
    reference = losses_by_peft(model, run_of.adapter, batches, [each["learning_rate"] for each in steps], tmp_path)
    assert [each["train_mean_nll"] for each in steps] == pytest.approx(reference, abs=1e-4)
    assert steps[-1]["train_mean_nll"] < steps[0]["train_mean_nll"]


def tenant_of(server, key):
    from rl_tinker.service.tenants import Tenants

    return Tenants(None).of(key).name


def losses_by_peft(model, adapter, batches, rates, folder):
    """Mean losses of a plain loop over transformers and peft, from the same initial adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with create_worker(EngineConfig(model_path=str(model), optimizer=None, precision=Precision.FLOAT32)) as worker:
        lora = LoraConfig(rank=adapter.rank, alpha=ALPHA, target_modules=lora_modules(model).of(adapter))
        worker.add_adapter("first", lora, adapter.seed)
        worker.save_state(folder / "first", "first")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    tuned = PeftModel.from_pretrained(base, folder / "first", is_trainable=True)
    trained = [each for each in tuned.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for batch, rate in zip(batches, rates, strict=True):
        total, weight = torch.zeros(()), 0.0
        for row in batch:
            logits = tuned(input_ids=torch.tensor([row["tokens"]])).logits[0].log_softmax(-1)
            scored = logits.gather(-1, torch.tensor(row["targets"])[:, None])[:, 0]
            total = total - (scored * torch.tensor(row["weights"])).sum()
            weight += sum(row["weights"])
        optimizer.zero_grad()
        total.backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        losses.append(total.item() / weight)
    return losses
