"""Samples of tenants from a real vLLM. RL_ROLLOUT_VLLM is the folder of an environment with vLLM and rl-ckpt."""

import os
from contextlib import contextmanager

import numpy as np
import pytest
import tinker
import torch
from packages.tinker.tests.support import running
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rl_rollout.testing import write_tiny_model
from rl_tinker.ranks.group import ElasticGroup
from rl_tinker.service.replicas import Replicas
from rl_tinker.types import ServeConfig

ENVIRONMENT = os.environ.get("RL_ROLLOUT_VLLM")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.usefixtures("collects_clients"),
    pytest.mark.skipif(not ENVIRONMENT, reason="RL_ROLLOUT_VLLM names no environment with vLLM and rl-ckpt"),
]
PROMPT = [5, 9, 13, 7, 11]
VLLM = {
    "command": f"{ENVIRONMENT}/bin/python -m vllm.entrypoints.openai.api_server",
    "args": "--enforce-eager --max-num-seqs 8",
    "env": {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with an output layer of its own, which an adapter goes on too; vLLM has heads of 32 at least."""
    sizes = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", **sizes)


@contextmanager
def served(folder, model, **settings):
    given = {"dtype": "float32", "max_model_len": 128, "server_backend": "vllm", "server_options": VLLM} | settings
    folder.mkdir()
    config = ServeConfig(model_path=str(model), output_dir=str(folder), **given)
    group, replicas = ElasticGroup(config, str(model)), Replicas(config, str(model), folder / "checkpoints")
    with running(folder, model, group=group, replicas=replicas, model_name="tiny", **given) as server:
        yield server


def trained(server, key, rank, seed, *tokens):
    """Training client of a tenant after a large step towards tokens."""
    service = tinker.ServiceClient(base_url=server.url, api_key=key)
    client = service.create_lora_training_client(base_model="tiny", rank=rank, seed=seed).result()
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)
    client.forward_backward([datum], "cross_entropy")
    client.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    return service, client


def saved(service, client):
    """Path of a checkpoint to sample from, and sampling client on it."""
    path = client.save_weights_for_sampler("now").result().path
    return path, service.create_sampling_client(model_path=path).result()


def greedy(client):
    params = tinker.SamplingParams(max_tokens=16, temperature=0.0, stop=[])
    return client.sample(tinker.ModelInput.from_ints(PROMPT), 1, params)


def generated(model, weights):
    """Greedy tokens by transformers, of a model folder, with an adapter's if that folder is one."""
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    if weights is not None:
        found = PeftModel.from_pretrained(found, weights)
    tokens = list(PROMPT)
    with torch.no_grad():
        while len(tokens) < len(PROMPT) + 16:
            tokens.append(int(found(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def test_tenants_sample_their_own_adapters_from_vllm(model, tmp_path):
    with served(tmp_path / "s", model, max_adapters=2, max_rank=8) as server:
        folders = server.store.checkpoints_folder
        tenants = [
            ("tml-alice", 4, 1, (3, 8, 2, 6)),
            ("tml-bob", 8, 2, (12, 1, 9, 4)),
            ("tml-eve", 2, 3, (7, 7, 5, 10)),
        ]
        kept = [trained(server, key, rank, seed, *tokens) for key, rank, seed, tokens in tenants]
        found = [saved(*each) for each in kept]
        want = [generated(model, folders / server.store.checkpoints[path].folder) for path, _ in found]
        base = kept[0][0].create_sampling_client(base_model="tiny").result()
        want_base = generated(model, None)
        assert len({tuple(each) for each in [*want, want_base]}) == 4
        for order in ([0, 1], [1, 0, 1], [2], [0, 2, 0], [1]):  # the third takes the room of the one used least lately
            pending = [(index, greedy(found[index][1])) for index in order]
            assert greedy(base).result().sequences[0].tokens == want_base
            for index, future in pending:
                assert future.result().sequences[0].tokens == want[index], index


def test_all_weights_of_a_model_reach_vllm(model, tmp_path):
    with served(tmp_path / "s", model, training="full") as server:
        service, client = trained(server, "tml-alice", 0, 1, 3, 8, 2, 6)
        path, sampler = saved(service, client)
        folder = server.store.checkpoints_folder / server.store.checkpoints[path].folder
        want, want_base = generated(folder, None), generated(model, None)
        assert want != want_base
        base = service.create_sampling_client(base_model="tiny").result()
        for asked, tokens in ((base, want_base), (sampler, want), (base, want_base), (sampler, want)):
            assert greedy(asked).result().sequences[0].tokens == tokens
