"""Slices into third-party servers: each rank tells what it computes with, and is sent that alone."""

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from rollout_servers import (
    fake_sglang_config,
    fake_trtllm_config,
    fake_vllm_config,
    real_model,
    real_vllm,
    real_vllm_config,
    request,
)

import rl_ckpt
from rl_rollout import (
    CkptReceiver,
    RolloutError,
    ServerConfig,
    ServerParallel,
    WeightUpdateError,
    create_server,
    launch_server,
)
from rl_rollout.testing import load_weights, write_tiny_model


async def told_by(server):
    asked = [
        replace(request(str(number), temperature=0.0, max_new_tokens=4), prompt_token_ids=(3, number))
        for number in (4, 5)
    ]
    return [await server.generate(each) for each in asked]


async def updated(server, weights, versions=(1, 2)):
    """The layout that the server has told, and the bytes of the last version; each is attested by every rank."""
    told = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in weights.items()}
    layout = await server.weight_layout(told)
    ranks = Ranks(weights, targets=layout)
    try:
        receiver = CkptReceiver(await ranks.open())
        for version in versions:
            sent = {name: tensor * (1 + (version == versions[0])) for name, tensor in weights.items()}
            reports, _ = await asyncio.gather(ranks.send(sent, version), server.update_weights(receiver, version))
        return layout, sum(report.num_bytes for report in reports)
    finally:
        await ranks.close()


IN_PROCESSES_OF_THEIR_OWN = [(launch_server, name) for name in ("vllm", "sglang", "tensorrt_llm")]
MORE = [(create_server, "sglang"), (create_server, "tensorrt_llm"), *IN_PROCESSES_OF_THEIR_OWN]


@pytest.mark.process
@pytest.mark.parametrize(
    ("make", "name"), [(create_server, "vllm"), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_a_third_party_server_serves_slices_like_whole_weights(name, make, tmp_path):
    old, new = (write_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    weights = load_weights(new)
    fake = {"vllm": fake_vllm_config, "sglang": fake_sglang_config, "tensorrt_llm": fake_trtllm_config}[name]

    async def main():
        server, oracle = make(name, fake(old)), create_server("embedded", ServerConfig(model_path=str(new)))
        try:
            await asyncio.gather(server.start(), oracle.start())
            assert server.capabilities.takes_slices
            layout, num_bytes = await updated(server, weights)
            outputs = await told_by(server)
            assert [part.name for part in layout[0]] == list(weights)
            assert num_bytes == sum(tensor.nbytes for tensor in weights.values())
            assert [each.token_ids for each in outputs] == [each.token_ids for each in await told_by(oracle)]
            assert {version for each in outputs for version in each.weight_versions} == {2}
        finally:
            await asyncio.gather(server.stop(), oracle.stop())

    asyncio.run(main())


def test_an_embedded_server_is_one_rank_that_takes_all(qwen3_folder):
    server = create_server("embedded", ServerConfig(model_path=str(qwen3_folder)))
    assert asyncio.run(server.weight_layout({"w": ("float32", (2,))})) is None


@pytest.mark.promise("A real vLLM of several ranks serves what its slices say, dense and with experts, tp, pp and ep")
@real_vllm
@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen2", {"tp": 2}),
        ("qwen3", {"tp": 1}),
        ("qwen3", {"tp": 2}),
        ("qwen3", {"pp": 2}),
        ("qwen3_moe", {"tp": 1}),
        ("qwen3_moe", {"tp": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2}),
    ],
    ids=lambda told: told if isinstance(told, str) else "-".join(f"{name}{size}" for name, size in told.items()),
)
def test_each_rank_of_a_real_server_gets_and_attests_its_slices(family, sizes, tmp_path):
    """With two ranks, what is cut over them moves once, and what both have, twice.

    vLLM 0.32 for CPUs dies at its first token at pp=2 (a KeyError of its scheduler) and at ep=2 (a fault in its expert
    kernel), with or without an update before: there every rank attests both versions, and no answer is asked for.
    """
    layout = ServerParallel(**sizes)
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "qwen2":
        fields["hidden_size"] = 128  # its heads are a quarter of it in vLLM, whatever `head_dim` says
    if family == "qwen3_moe":
        fields |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    old, new = (real_model(tmp_path / str(seed), seed=seed, family=family, **fields) for seed in (0, 1))
    weights = load_weights(new)

    async def main():
        server = create_server("vllm", real_vllm_config(old, parallel=layout))
        oracle = create_server("embedded", ServerConfig(model_path=str(new), num_threads=1))
        try:
            await asyncio.gather(server.start(), oracle.start())
            layouts, num_bytes = await updated(server, weights)
            whole = sum(tensor.nbytes for tensor in weights.values())
            assert whole <= num_bytes < (1.0 if layout.num_ranks == 1 else 1.5) * whole + 1
            assert len(layouts) == layout.num_ranks
            if layout.pp * layout.ep > 1:
                return
            outputs = await told_by(server)
            assert {version for each in outputs for version in each.weight_versions} == {2}
            for one, other in zip(outputs, await told_by(oracle), strict=True):
                assert one.token_ids == other.token_ids
                torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)
        finally:
            await asyncio.gather(server.stop(), oracle.stop())

    asyncio.run(main())


@real_vllm
def test_a_misfit_version_leaves_a_real_server_on_the_previous(tmp_path):
    folder = real_model(tmp_path)
    weights = load_weights(folder)

    async def main():
        server = create_server("vllm", real_vllm_config(folder, parallel=ServerParallel(tp=2)))
        await server.start()
        try:
            told = {name: ("float32", tuple(tensor.shape)) for name, tensor in weights.items()}
            ranks = Ranks(weights, targets=await server.weight_layout(told))
            receiver = CkptReceiver(await ranks.open())
            await asyncio.gather(ranks.send(weights, 1), server.update_weights(receiver, 1))
            before = await told_by(server)
            rounded = {name: tensor.double() + 1e-9 for name, tensor in weights.items()}
            answers = await asyncio.gather(
                ranks.send(rounded, 2), server.update_weights(receiver, 2), return_exceptions=True
            )
            assert isinstance(answers[0], rl_ckpt.SyncAbortedError)
            assert isinstance(answers[1], WeightUpdateError)
            assert [(o.token_ids, o.logprobs) for o in await told_by(server)] == [
                (o.token_ids, o.logprobs) for o in before
            ]
            await ranks.close()
        finally:
            await server.stop()

    asyncio.run(main())


def descendants(pid):
    """Command lines of the processes that a process has started, and theirs, by id."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_text()
            found |= descendants(int(child))
    return found


@real_vllm
def test_a_worker_killed_in_a_sync_ends_it_and_the_next_is_whole(tmp_path):
    """Beside it, a sender that comes late is waited for, and decoding goes on until all has landed."""
    old, new = (real_model(tmp_path / str(seed), seed=seed, num_key_value_heads=2) for seed in (0, 1))
    weights = load_weights(new)
    told = {name: ("float32", tuple(tensor.shape)) for name, tensor in weights.items()}

    async def main():
        first, second = (create_server("vllm", real_vllm_config(old, parallel=ServerParallel(tp=2))) for _ in range(2))
        oracle = create_server("embedded", ServerConfig(model_path=str(new), num_threads=1))
        await asyncio.gather(first.start(), oracle.start())
        ranks = Ranks(weights, targets=await first.weight_layout(told))
        try:
            receiver = CkptReceiver(await ranks.open())
            updating = asyncio.create_task(first.update_weights(receiver, 1))
            await asyncio.sleep(3)
            assert {version for each in await told_by(first) for version in each.weight_versions} == {0}
            assert not updating.done(), "it decodes while nothing has landed"
            await asyncio.gather(ranks.send(weights, 1), updating)
            before = await told_by(first)
            assert [each.token_ids for each in before] == [each.token_ids for each in await told_by(oracle)]

            (victim,) = [pid for pid, line in descendants(first.process.pid).items() if "Worker_TP1" in line]
            since = None

            class Deadly(dict):
                """Weights in the midst of which a worker dies."""

                def items(self):
                    nonlocal since
                    for index, each in enumerate(super().items()):
                        if index == len(self) // 2 and since is None:
                            since = time.perf_counter()
                            os.kill(victim, signal.SIGKILL)
                        yield each

            answers = await asyncio.gather(
                ranks.send(Deadly(weights), 2), first.update_weights(receiver, 2), return_exceptions=True
            )
            assert isinstance(answers[0], rl_ckpt.SyncAbortedError), answers
            assert isinstance(answers[1], RolloutError), answers
            assert time.perf_counter() - since < 40, "far from the deadline of 60 s"
            await second.start()
            assert await second.weight_layout(told) is not None
            receiver = CkptReceiver(receiver.address)
            await asyncio.gather(ranks.send(weights, 3), second.update_weights(receiver, 3))
            after = await told_by(second)
            assert [each.token_ids for each in after] == [each.token_ids for each in before]
            assert {version for each in after for version in each.weight_versions} == {3}
        finally:
            await ranks.close()
            await asyncio.gather(first.stop(), second.stop(), oracle.stop())

    asyncio.run(main())
