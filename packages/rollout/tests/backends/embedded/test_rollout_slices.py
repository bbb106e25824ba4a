"""Weights that come as slices from the ranks of a trainer: nothing whole is sent, and one decision holds for all."""

import asyncio
from contextlib import AsyncExitStack

import pytest
import torch
from ranks import Ranks

import rl_ckpt
from rl_rollout import (
    CkptReceiver,
    GenerateRequest,
    SamplingParams,
    ServerConfig,
    WeightUpdateError,
    create_server,
    launch_server,
)
from rl_rollout.testing import load_weights, write_tiny_model

pytestmark = pytest.mark.process


def request(number):
    return GenerateRequest(
        request_id=str(number),
        prompt_token_ids=(1, 2, 3 + number),
        sampling_params=SamplingParams(max_new_tokens=6, temperature=0),
    )


async def told_by(server):
    outputs = await asyncio.gather(*(server.generate(request(number)) for number in range(3)))
    return [(output.token_ids, output.logprobs) for output in outputs], {v for o in outputs for v in o.weight_versions}


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_slices_of_two_ranks_are_served_like_whole_weights(family, tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if family != "qwen3" else {}
    old, new = (write_tiny_model(tmp_path / str(seed), family=family, seed=seed, **experts) for seed in (0, 1))
    weights = load_weights(new)

    async def main():
        async with AsyncExitStack() as stack:
            servers = [launch_server("embedded", ServerConfig(model_path=str(old))) for _ in range(2)]
            servers.append(create_server("embedded", ServerConfig(model_path=str(new))))
            for server in servers:
                stack.push_async_callback(server.stop)
            await asyncio.gather(*(server.start() for server in servers))
            assert all(server.capabilities.takes_slices for server in servers[:2])
            wanted, _ = await told_by(servers[2])
            ranks = Ranks(weights)
            stack.push_async_callback(ranks.close)
            receiver = CkptReceiver(await ranks.open())
            for version in (1, 2, 3):  # the copies that serve and that is staged change places
                sent = {name: tensor + (version == 2) for name, tensor in weights.items()}
                reports, *_ = await asyncio.gather(
                    ranks.send(sent, version, 2), *(server.update_weights(receiver, version) for server in servers[:2])
                )
                assert sum(report.num_bytes for report in reports) == sum(t.nbytes for t in weights.values())
            for server in servers[:2]:
                assert await told_by(server) == (wanted, {3})

    asyncio.run(main())


@pytest.mark.slow
def test_differences_or_whole_slices_go_by_version_held(qwen3_folder):
    weights = load_weights(qwen3_folder)

    async def main():
        servers = [launch_server("embedded", ServerConfig(model_path=str(qwen3_folder))) for _ in range(2)]
        await asyncio.gather(*(server.start() for server in servers))
        ranks = Ranks(weights, delta=True)
        try:
            receiver = CkptReceiver(await ranks.open())
            sent, wire, told = weights, [], []
            for version in (1, 2, 3, 4):
                sent = {name: tensor.clone() for name, tensor in sent.items()}
                sent["model.embed_tokens.weight"].view(-1)[version::101] += 0.5
                joined = servers[: 2 if version == 3 else 1]  # the second one misses all versions but the third
                reports, *_ = await asyncio.gather(
                    ranks.send(sent, version, len(joined)), *(each.update_weights(receiver, version) for each in joined)
                )
                wire.append(sum(report.num_wire_bytes for report in reports))
                told.append([await told_by(server) for server in joined])
                if version == 3:
                    await servers[1].stop()
            assert wire[0] == wire[2] > 5 * max(wire[1], wire[3]), "differences, but for who has no base"
            assert told[2][0] == told[2][1]
            assert told[3][0][1] == {4}
        finally:
            await ranks.close()
            for server in servers:
                await server.stop()

    asyncio.run(main())


@pytest.mark.slow
def test_a_misfit_is_not_installed_and_the_old_version_serves(qwen3_folder):
    weights = load_weights(qwen3_folder)
    name = "model.norm.weight"
    others = {
        "1 weights did not arrive, e.g. 'model.norm.weight'": {k: v for k, v in weights.items() if k != name},
        "no tensor of that name": {**weights, "model.norm.wight": weights[name]},
        "came as torch.bfloat16": {**weights, name: weights[name].to(torch.bfloat16)},
        "another layout than it declared": {**weights, name: torch.zeros(len(weights[name]) + 2)},
    }

    async def main():
        server = launch_server("embedded", ServerConfig(model_path=str(qwen3_folder)))
        await server.start()
        try:
            before = await told_by(server)
            for version, (told, sent) in enumerate(others.items(), start=1):
                ranks = Ranks(sent)
                receiver = CkptReceiver(await ranks.open())
                answers = await asyncio.gather(
                    ranks.send(sent, version), server.update_weights(receiver, version), return_exceptions=True
                )
                assert isinstance(answers[0], rl_ckpt.SyncAbortedError)
                assert isinstance(answers[1], WeightUpdateError)
                assert told in str(answers[1])
                assert "version 0 still serves" in str(answers[1])
                await ranks.close()
            assert await told_by(server) == before
        finally:
            await server.stop()

    asyncio.run(main())
