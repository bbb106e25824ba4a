"""What every third-party server must do when an adapter alone is sent to it."""

import asyncio
import json
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from ranks import Ranks
from rollout_servers import alone
from safetensors.torch import load_file, save_file

import rl_ckpt
from rl_rollout import CkptReceiver, RequestError, WeightUpdateError, create_server
from rl_rollout.testing import Served, load_weights


def copy_of(folder, other, weights):
    """The folder of the same model with other weights."""
    shutil.copytree(folder, other)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return other


async def send(server, tensors, version):
    """Send over a session of its own; returns the bytes. A server of several ranks takes them on each."""
    url = f"shm://adapter-{uuid.uuid4().hex}"

    def sent():
        with rl_ckpt.connect(url, role="send", timeout_s=60) as sender:
            return sender.send(tensors.items(), version=version, num_peers=server.capabilities.num_receivers)

    work = asyncio.to_thread(sent), server.update_weights(CkptReceiver(url), version)
    answers = await asyncio.gather(*work, return_exceptions=True)
    for answer in reversed(answers):
        if isinstance(answer, BaseException):
            raise answer
    return answers[0].num_bytes


def halves_of(config, adapters):
    """Halves of both factors of `one` as they are sent, the base's weights, and what those halves add to them."""
    sent = load_file(f"{adapters['one'][0]}/adapter_model.safetensors")
    base, merged = load_weights(config.model_path), load_weights(adapters["one"][1])
    quarters = {name: (merged[name] - base[name]) / 4 for name in base}
    return {f"adapters.one.{name}": tensor * 0.5 for name, tensor in sent.items()}, base, quarters


def check_adapter_alone(backend, config, adapters, folder):
    """By halves of both factors of `one`: a quarter of the difference to the base, in every token from then on.

    Args:
        backend: Name of the server's.
        config: Of a server with the adapters one and two.
        adapters: By name, folders of the adapter and of the model that it is merged into.
        folder: Free.
    """
    halves, base, quarters = halves_of(config, adapters)
    quarter = copy_of(config.model_path, folder / "quarter", {name: base[name] + quarters[name] for name in base})

    async def main():
        server = create_server(backend, replace(config, options={**config.options, "default_adapter": "one"}))
        await server.start()
        try:
            assert server.capabilities.updates_adapters
            served = Served(server=server, run=None, model_path=config.model_path, update=None, max_model_len=256)
            asked = served.request(max_new_tokens=16)
            oracle = {name: await asyncio.to_thread(alone, path, asked) for name, (_, path) in adapters.items()}
            before = await server.generate(asked)
            assert before.token_ids == oracle["one"].token_ids, "the default adapter answers"
            for bad, told in (
                (dict(list(halves.items())[1:]), "1 tensors of adapter 'one'"),
                ({name.replace(".one.", ".six."): tensor for name, tensor in halves.items()}, "no adapter 'six'"),
            ):
                with pytest.raises(WeightUpdateError, match=told):
                    await send(server, bad, 1)
                assert await server.generate(asked) == replace(before, request_id=ANY)
            num_bytes = await send(server, halves, 2)
            assert num_bytes == sum(tensor.nbytes for tensor in halves.values()), "A and B, and nothing else"
            want = await asyncio.to_thread(alone, quarter, asked)
            for _ in range(2):  # vLLM forgets adapters when weights were updated, and reads folders again
                got = await server.generate(asked)
                assert got.token_ids == want.token_ids
                assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
                assert got.weight_versions == (2,) * 16
            two = await server.generate(replace(asked, request_id="two", adapter="two"))
            assert two.token_ids == oracle["two"].token_ids, "the other one is as it was"
            # vLLM labels all tokens with the newest version; the engine of its stand-in, with that of the adapter.
            assert {*two.weight_versions} in ({2}, {0})
        finally:
            await server.stop()

    asyncio.run(main())


def check_adapters_come_and_go(backend, config, adapters):
    """Adapters that updates name, bring and remove, on a server with room for two of them.

    Args:
        backend: Name of the server's.
        config: Of a server with room for two adapters.
        adapters: By name, folders of the adapters one and two, and of the models that they are merged into.
    """

    def named(name, source):
        folder = Path(adapters[source][0])
        told = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        rank = told["r"] ** (0.5 if told.get("use_rslora") else 1)
        tensors["scaling"] = torch.tensor(told["lora_alpha"] / rank)
        return {f"adapters.{name}.{key}": tensor for key, tensor in tensors.items()}

    async def main():
        server = create_server(backend, config)
        await server.start()
        try:
            assert server.capabilities.has_adapters
            served = Served(server=server, run=None, model_path=config.model_path, update=None, max_model_len=256)
            asked = served.request(max_new_tokens=16)
            folders = {None: config.model_path} | {name: merged for name, (_, merged) in adapters.items()}
            want = {name: (await asyncio.to_thread(alone, path, asked)).token_ids for name, path in folders.items()}

            async def check(**sources):
                for name, source in {"": None, **sources}.items():
                    got = await server.generate(replace(asked, request_id=f"r-{name}", adapter=name or None))
                    assert got.token_ids == want[source], name

            await send(server, named("a", "one"), 1)
            await check(a="one")
            await send(server, named("b", "two"), 2)
            await check(a="one", b="two")
            with pytest.raises(WeightUpdateError, match="adapter 'c'"):
                await send(server, named("c", "two"), 3)
            await check(a="one", b="two")
            await send(server, named("c", "two") | {"adapters.a.removed": torch.zeros(1)}, 4)
            await check(b="two", c="two")
            with pytest.raises(RequestError, match="there is no adapter 'a'; loaded are: b, c"):
                await server.generate(replace(asked, adapter="a"))
        finally:
            await server.stop()

    asyncio.run(main())


def check_slices_under_an_adapter(backend, config, adapters, folder):
    """New weights go under an adapter that was sent alone before, which stays, and is not read from its folder again.

    Args:
        backend: Name of the server's.
        config: Of a server with the adapters one and two.
        adapters: By name, folders of the adapter and of the model that it is merged into.
        folder: Free.
    """
    halves, base, quarters = halves_of(config, adapters)
    new = {name: weight + 0.1 * torch.sin(weight * 100) for name, weight in base.items()}
    both = {name: new[name] + quarters[name] for name in new}
    folders = {
        None: copy_of(config.model_path, folder / "new", new),
        "one": copy_of(config.model_path, folder / "both", both),
    }
    told = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in new.items()}

    async def main():
        server = create_server(backend, config)
        await server.start()
        try:
            await send(server, halves, 1)
            ranks = Ranks(new, targets=await server.weight_layout(told))
            receiver = CkptReceiver(await ranks.open())
            for version in (2, 3):
                weights = {name: tensor * (1 + (version == 2)) for name, tensor in new.items()}
                await asyncio.gather(ranks.send(weights, version), server.update_weights(receiver, version))
            await ranks.close()
            served = Served(server=server, run=None, model_path=config.model_path, update=None, max_model_len=256)
            asked = served.request(max_new_tokens=16)
            for name, path in folders.items():
                want = await asyncio.to_thread(alone, path, asked)
                got = await server.generate(replace(asked, adapter=name, request_id=f"with {name}"))
                assert got.token_ids == want.token_ids, name
                assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
                assert got.weight_versions == (3,) * 16
        finally:
            await server.stop()

    asyncio.run(main())
