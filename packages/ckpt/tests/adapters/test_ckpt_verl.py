"""The engine for verl against verl's own interface file, of the package in the index.

verl 0.9.1 cannot be imported in this workspace: it wants Hydra and a dozen others. So of verl only
`verl/checkpoint_engine/base.py` is run, and what that file imports besides torch (Ray, the workers, the rollouts) is
empty. RL_CKPT_VERL may name a folder that `pip install --no-deps --target FOLDER verl` has filled.
"""

import asyncio
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

import rl_ckpt
from rl_ckpt.testing import assert_same, new_name, sample_weights

pytestmark = pytest.mark.integration

VERL = "verl==0.9.1"
STUBS = [
    "ray",
    "verl.single_controller.base",
    "verl.single_controller.base.decorator",
    "verl.single_controller.ray",
    "verl.utils.distributed",
    "verl.utils.import_utils",
    "verl.utils.ray_utils",
    "verl.workers.config",
    "verl.workers.rollout",
    "verl.workers.rollout.utils",
]


class Stub(types.ModuleType):
    """Has every name: a class, as the file derives from some, that as a decorator returns what it decorates."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__new__": lambda cls, *args, **kwargs: args[0] if args else (lambda x: x)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the wheel of verl is unpacked, without what it depends on."""
    if "RL_CKPT_VERL" in os.environ:
        return Path(os.environ["RL_CKPT_VERL"])
    target = tmp_path_factory.mktemp("verl")
    command = ["uv", "pip", "install", "-q", "--no-deps", "--python", sys.executable, "--target", target, VERL]
    subprocess.run(command, check=True, timeout=300)
    return target


@pytest.fixture
def verl(monkeypatch, folder):
    """verl's real base module, and ours after it was imported as verl imports a `custom_backend_module`."""
    modules = {name: Stub(name) for name in STUBS}
    modules["ray"].remote = lambda cls: cls
    modules["verl.single_controller.base.decorator"].register = lambda **_: lambda f: f
    modules["verl.single_controller.base.decorator"].Dispatch = mock.MagicMock()
    modules["verl.utils.ray_utils"].auto_await = lambda f: f
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("verl", "verl.checkpoint_engine"):
        monkeypatch.setitem(sys.modules, name, Stub(name))
    path = folder / "verl" / "checkpoint_engine" / "base.py"
    spec = importlib.util.spec_from_file_location("verl.checkpoint_engine.base", path)
    base = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, base)
    spec.loader.exec_module(base)
    monkeypatch.delitem(sys.modules, "rl_ckpt.adapters.verl", raising=False)
    importlib.import_module("rl_ckpt.adapters.verl")
    return base


async def update(cls, actors, rollouts, weights, step):
    """One `CheckpointEngineManager.update_weights`, without Ray."""
    metadata = [engine.prepare() for engine in actors + rollouts]
    actor_kwargs, rollout_kwargs = cls.build_topology(len(actors), len(rollouts), metadata)
    for engines, kwargs in ((actors, actor_kwargs), (rollouts, rollout_kwargs)):
        assert {len(values) for values in kwargs.values()} == {len(engines)}
        for i, engine in enumerate(engines):
            engine.init_process_group(**{name: values[i] for name, values in kwargs.items()})

    async def take(engine):
        return {name: tensor async for name, tensor in engine.receive_weights(global_steps=step)}

    drained = []

    def source():
        for item in weights.items():
            drained.append(item[0])
            yield item

    sending = [engine.send_weights(source(), global_steps=step) for engine in actors]
    metrics, *rest = await asyncio.gather(*sending, *map(take, rollouts))
    assert drained.count("empty") == len(actors)  # all ranks take part in the collectives of the export
    for engine in actors + rollouts:
        engine.finalize()
    return metrics, rest[len(actors) - 1 :]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_the_interface_is_filled(verl, kind):
    """Two steps, from two ranks of an actor to three workers of rollouts, and one more replica in the third."""
    options = {"url": f"shm://{new_name()}" if kind == "shm" else "tcp://127.0.0.1:0", "timeout_s": 30.0}

    async def main():
        new = verl.CheckpointEngineRegistry.new
        actors = [new("rl_ckpt", is_master=rank == 0, bucket_size=4 << 20, **options) for rank in (0, 1)]
        rollouts = [new("rl_ckpt", bucket_size=4 << 20, **options) for _ in range(3)]
        assert all(isinstance(engine, verl.CheckpointEngine) for engine in actors + rollouts)
        for step in (0, 1, 2):
            if step == 2:
                rollouts.append(new("rl_ckpt", bucket_size=4 << 20, **options))
            weights = sample_weights(step)
            metrics, got = await update(verl.CheckpointEngineRegistry.get("rl_ckpt"), actors, rollouts, weights, step)
            assert len(got) == len(rollouts)
            for tensors in got:
                assert_same(tensors, weights)
            assert metrics["rl_ckpt/wall_s"] > 0
        for engine in (actors[0], *rollouts):
            await engine._session.close()

    asyncio.run(main())


def test_a_version_of_another_step_is_refused(verl):
    """And the sender hears of it."""
    new = verl.CheckpointEngineRegistry.new
    url = f"shm://{new_name()}"

    async def main():
        actor = new("rl_ckpt", is_master=True, bucket_size=1 << 20, url=url, timeout_s=30.0)
        rollout = new("rl_ckpt", bucket_size=1 << 20, url=url, timeout_s=30.0)
        told = actor.prepare()
        for engine, is_receiver in ((actor, False), (rollout, True)):
            engine.init_process_group(**told, num_receivers=1, is_receiver=is_receiver)

        async def take():
            async for _ in rollout.receive_weights(global_steps=6):
                pass

        sending = asyncio.ensure_future(actor.send_weights(iter([("t", torch.ones(3))]), global_steps=5))
        with pytest.raises(rl_ckpt.VersionError, match="version 5 came in step 6"):
            await take()
        with pytest.raises(rl_ckpt.SyncAbortedError):
            await sending
        for engine in (actor, rollout):
            await engine._session.close()

    asyncio.run(main())
