"""What several test files need: model folders, and the sending side of weight updates."""

import asyncio
import json
import math
import shutil
import sys
import uuid
from pathlib import Path

import pytest
import torch

import rl_ckpt
from rl_rollout import CkptReceiver
from rl_rollout.testing import load_weights, write_tiny_model

sys.path.append(str(Path(__file__).parent / "peers"))  # `rollout_servers`, for the files about servers of others

TARGETS = ("q_proj", "v_proj", "down_proj")
"""Layers of the adapters."""


class Trainer:
    """Sends from this process; the server's process receives."""

    def __init__(self, timeout_s):
        self.sender = rl_ckpt.connect(f"shm://rollout-test-{uuid.uuid4().hex}", role="send", timeout_s=timeout_s)

    async def update(self, served, weights, version):
        """For `Served.update`."""
        await self.update_server(served.server, weights, version)

    async def update_server(self, server, weights, version):
        failures = await asyncio.gather(
            server.update_weights(CkptReceiver(self.sender.address), version),
            self._send(weights, version),
            return_exceptions=True,
        )
        for failure in failures:
            if failure is not None and not isinstance(failure, rl_ckpt.types.SyncReport):
                raise failure

    async def _send(self, weights, version):
        await self.sender.prepare()
        await self.sender.connect()
        return await self.sender.send_weights(weights.items(), version=version)

    async def close(self):
        await self.sender.close()


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory):
    """A model with room for requests that take seconds."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-long", max_position_embeddings=4096)


@pytest.fixture(scope="session")
def new_trainer():
    """The class, for those who need senders."""
    return Trainer


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny models gain nothing from a second thread, and on a busy machine they wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3")


def write_adapter(folder, base, seed, *, use_rslora=False, targets=TARGETS):
    """A random adapter in peft's format, and the folder of the model that it is merged into."""
    from safetensors.torch import save_file

    rank, alpha = 4, 8
    scaling = alpha / math.sqrt(rank) if use_rslora else alpha / rank
    weights, tensors = load_weights(base), {}
    generator = torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        if any(target in name for target in targets):
            a = torch.randn(rank, weight.shape[1], generator=generator) * 0.3
            b = torch.randn(weight.shape[0], rank, generator=generator) * 0.3
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
            weights[name] = weight + scaling * (b @ a)
    adapter, merged = folder / "adapter", folder / "merged"
    adapter.mkdir(parents=True)
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "use_rslora": use_rslora}
    config["target_modules"] = list(targets)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(base, merged)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return str(adapter), str(merged)


@pytest.fixture(scope="session")
def write_adapters(tmp_path_factory):
    """Of a model folder: two adapters by name, each with its folder and that of the model that it is merged into."""

    def write(base, *, has_rslora=True, targets=TARGETS):
        folder = tmp_path_factory.mktemp("adapters")
        one = write_adapter(folder / "one", base, 1, targets=targets)
        two = write_adapter(folder / "two", base, 2, use_rslora=has_rslora, targets=targets)
        return {"one": one, "two": two}

    return write
