"""Megatron-Bridge under Python 3.12: its maps next to ours, and families that come from it.

RL_ENGINE_MEGATRON is the folder of an environment with megatron-core 0.19, Megatron-Bridge 0.6.2 and rl-engine
(docs/packages/engine/backends.md).
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from rl_engine import ConfigError, EngineConfig, create_engine
from rl_engine.testing import write_tiny_model

pytestmark = pytest.mark.process

ENVIRONMENT = os.environ.get("RL_ENGINE_MEGATRON")
SCRIPT = Path(__file__).parents[1] / "support" / "bridge_ranks.py"
real = pytest.mark.skipif(not ENVIRONMENT, reason="RL_ENGINE_MEGATRON names no environment with Megatron-Bridge")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bridge")
    command = [f"{ENVIRONMENT}/bin/python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return torch.load(folder / "seen.pt", weights_only=True)


@pytest.mark.integration
@pytest.mark.timeout(1100)
@real
def test_its_maps_are_ours(found):
    """Names of tensors for the nine families, and numbers of parameters that are made of several tensors."""
    for kind, (names, other) in found["names"].items():
        assert names, kind
        for parameter, (ours, theirs) in names.items():
            assert ours == theirs, (kind, parameter)
        own = (".sinks", ".linear_fc1.weight", ".linear_fc1.bias", ".linear_fc2.weight", ".linear_fc2.bias")
        assert kind == "oss" or not other, (kind, other)
        assert all(parameter.endswith(own) for parameter in other), other  # GPT-OSS's, by classes of its own
    assert found["joined"], "no parameter of several tensors was compared"
    assert set(found["joined"].values()) == {0.0}


@pytest.mark.promise("families beyond the nine come from Megatron-Bridge, with the steps of `fsdp`")
@pytest.mark.integration
@pytest.mark.timeout(1100)
@real
@pytest.mark.parametrize("layout", ["pp2", "ep2", "sp2"])
@pytest.mark.parametrize("kind", ["hy_v3", "glm4_moe_lite"])
def test_a_family_of_its_list_steps_as_on_fsdp(found, kind, layout):
    (steps, weights), (got, changed) = found[kind]["fsdp"], found[kind][layout]
    assert torch.tensor(got) == pytest.approx(torch.tensor(steps), rel=1e-6)
    assert steps[1][0] < steps[0][0] - 0.1
    assert changed.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(torch.as_tensor(changed[name]), torch.as_tensor(weight), rtol=1e-5, atol=1e-6)


@pytest.mark.integration
@pytest.mark.timeout(1100)
@real
def test_layers_of_its_own_are_rejected(found):
    assert "ernie4_5_moe model has layers of its own (GPTModelProvider, _ernie45" in found["refused"]["ernie4_5_moe"]
    assert "gemma model has hidden_act=gelu_pytorch_tanh" in found["refused"]["gemma"]


@pytest.mark.process  # the import of Megatron-core takes seconds
def test_the_key_decides_about_a_family_of_its_list(monkeypatch):
    """Bridge itself is not imported before a model is described."""
    from rl_engine.backends.megatron import bridge

    monkeypatch.setattr(bridge, "find_spec", lambda name: name == "megatron.bridge")
    for kind, key, wanted in (("hy_v3", "auto", True), ("hy_v3", "own", False), ("qwen3", "auto", False)):
        assert bridge.takes_bridge(EngineConfig(model_path="", bridge=key), kind) is wanted
    monkeypatch.setattr(bridge, "find_spec", lambda name: None)
    assert not bridge.takes_bridge(EngineConfig(model_path=""), "hy_v3")


def test_the_key_is_megatrons(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="bridge is own; of the backends here megatron alone has it. Leave it auto"):
        create_engine("fsdp", EngineConfig(model_path=str(folder), bridge="own")).check(1)
    with pytest.raises(ConfigError, match="bridge is 'on'; allowed are auto, own"):
        EngineConfig(model_path=str(folder), bridge="on")
