"""Weights arrive under the names that they have on disk, which are not always those of the module."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_rollout import WeightUpdateError
from rl_rollout.backends.embedded.model.weights import WeightStore
from rl_rollout.testing import load_weights, write_tiny_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of one shape, whose experts the module joins into one tensor per layer."""
    root = tmp_path_factory.mktemp("moe")
    return [write_tiny_model(root / str(seed), family="qwen3_moe", seed=seed, **EXPERTS) for seed in (0, 1)]


def install(store, weights):
    store.begin()
    for name, tensor in weights.items():
        store.stage(name, tensor)
    store.check_complete()
    store.swap()


def test_experts_one_by_one_make_the_joined_tensors(folders):
    served, wanted = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    weights = load_weights(folders[1])
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in weights
    install(WeightStore(served), weights)
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(served.state_dict()[name], tensor), name


def test_weights_may_keep_addresses_for_captured_graphs(folders):
    served, wanted = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    store, first, second = WeightStore(served, keeps_places=True), *map(load_weights, folders)
    places = {name: tensor.data_ptr() for name, tensor in served.state_dict().items()}
    for weights in (second, first, second):
        install(store, weights)
        assert {name: tensor.data_ptr() for name, tensor in served.state_dict().items()} == places
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(served.state_dict()[name], tensor), name
    store.release()
    install(store, first)  # elsewhere, as what they had was given back
    assert torch.equal(served.state_dict()["model.norm.weight"], first["model.norm.weight"])


def test_weights_go_to_the_host_and_come_back(folders):
    """Bit for bit; an update in between is what serves, and an update that failed changes nothing."""
    served = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
    store, other = WeightStore(served), load_weights(folders[1])
    store.offload()
    assert all(tensor.numel() == 0 for tensor in served.state_dict().values())
    store.begin()
    store.stage("model.norm.weight", other["model.norm.weight"] + 1)
    assert store.reload()
    assert all(torch.equal(served.state_dict()[name], tensor) for name, tensor in before.items())
    store.offload()
    install(store, other)
    assert not store.reload()
    wanted = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32).state_dict()
    assert all(torch.equal(served.state_dict()[name], tensor) for name, tensor in wanted.items())


def test_a_missing_or_misshapen_part_is_refused(folders):
    store = WeightStore(AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32))
    weights = load_weights(folders[1])
    part = "model.layers.1.mlp.experts.2.gate_proj.weight"
    with pytest.raises(WeightUpdateError, match=f"1 weights did not arrive, e.g. '{part}'"):
        install(store, {name: tensor for name, tensor in weights.items() if name != part})
    with pytest.raises(WeightUpdateError, match=r"arrived as \(32, 16\); the model holds \(16, 32\)"):
        install(store, weights | {part: weights[part].T})
    with pytest.raises(WeightUpdateError, match="the model has no weight 'model.layers.1.mlp.experts.4"):
        install(store, weights | {part.replace("2", "4"): weights[part]})
