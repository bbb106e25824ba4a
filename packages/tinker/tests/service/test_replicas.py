"""Adapters on their way to sampling servers that end."""

import asyncio
import json

import pytest
import torch
from safetensors.torch import save_file

from rl_rollout.errors import ServerLostError
from rl_tinker.service import replicas
from rl_tinker.types import AdapterSpec, Checkpoint, ServeConfig


class LostRouter:
    servers = (None,)

    async def start(self):
        pass

    async def stop(self):
        pass

    async def update_weights(self, receive, version):
        await PatientSender.has_begun.wait()
        raise ServerLostError("it was killed")


class PatientSender:
    address = "shm://test"
    was_cancelled, has_begun = False, asyncio.Event()

    async def prepare(self):
        pass

    async def close(self):
        pass

    async def send_weights(self, weights, *, version, num_peers):
        PatientSender.has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            PatientSender.was_cancelled = True
            raise


def test_a_sender_does_not_wait_for_servers_that_have_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(replicas, "launch_server", lambda *_: None)
    monkeypatch.setattr(replicas, "create_router", lambda _: LostRouter())
    monkeypatch.setattr(replicas, "connect", lambda *_, **__: PatientSender())
    monkeypatch.setattr(replicas, "create_receiver", lambda *_, **__: PatientSender())
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 32}))
    save_file({"a.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    checkpoint = Checkpoint(
        path="tinker://a/sampler_weights/b", model="a", tenant="t", kind="sampler", folder="adapter", created=0.0,
        adapter=AdapterSpec(), step=0, size_bytes=0,
    )  # fmt: skip

    async def run():
        servers = replicas.Replicas(ServeConfig(model_path="m"), "m", tmp_path)
        await servers.start()
        async with asyncio.timeout(10):
            async with servers.adapter(checkpoint):
                pass

    with pytest.raises(ServerLostError, match="killed"):
        asyncio.run(run())
    assert PatientSender.was_cancelled


def test_a_server_that_has_ended_is_started_again(tmp_path, monkeypatch):
    started = []

    class EndedServer:
        async def check_health(self):
            raise ServerLostError("it was killed")

    class Router(LostRouter):
        servers = (EndedServer(),)

        async def start(self):
            started.append(self)

    monkeypatch.setattr(replicas, "launch_server", lambda *_: None)
    monkeypatch.setattr(replicas, "create_router", lambda _: Router())
    monkeypatch.setattr(replicas, "connect", lambda *_, **__: PatientSender())
    monkeypatch.setattr(replicas, "create_receiver", lambda *_, **__: PatientSender())

    async def run():
        servers = replicas.Replicas(ServeConfig(model_path="m"), "m", tmp_path)
        await servers.start()
        await servers.recover()

    asyncio.run(run())
    assert len(started) == 2
