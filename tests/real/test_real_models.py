"""Pretrained models through the seams: servers and engines agree with transformers, and training runs."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import rl_ckpt
from rl_engine import EngineConfig, create_engine
from rl_engine.testing import ragged_batch
from rl_rollout import GenerateRequest, SamplingParams, ServerConfig, create_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
TEXT = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
"""Real text, of which prompts are cut."""


@pytest.fixture(scope="module", autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


def prompts_of(model, count, length):
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(TEXT).input_ids
    return [tuple(ids[i * length : (i + 1) * length]) for i in range(count)]


def greedy(model, prompt, num_tokens):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        whole = plain.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
        )
    return whole[0, len(prompt) :].tolist()


def serve(model, scenario, **config):
    async def life():
        options = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16} | config
        server = create_server("embedded", ServerConfig(model_path=str(model), **options))
        await server.start()
        try:
            return await scenario(server)
        finally:
            await server.stop()

    return asyncio.run(life())


def request(index, prompt, num_tokens, **more):
    params = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling_params=params, **more)


def test_greedy_tokens_are_those_of_transformers(model):
    """256 tokens after 64 of real text, alone and in a batch of 16."""
    prompts = prompts_of(model, 16, 64)
    expected = greedy(model, prompts[0], 256)

    async def scenario(server):
        alone = await server.generate(request(0, prompts[0], 256))
        batch = [request(i + 1, prompt, 256 if i == 0 else 16) for i, prompt in enumerate(prompts)]
        return alone, await asyncio.gather(*map(server.generate, batch))

    alone, batch = serve(model, scenario)
    assert list(alone.token_ids) == expected
    assert list(batch[0].token_ids) == expected


def test_engine_and_server_agree_on_log_probs(model):
    prompts = prompts_of(model, 4, 48)

    async def scenario(server):
        return await asyncio.gather(*(server.generate(request(i, each, 24)) for i, each in enumerate(prompts)))

    outputs = serve(model, scenario)
    engine = create_engine("fsdp", EngineConfig(model_path=str(model), precision="float32"))
    engine.initialize()
    batch = ragged_batch([list(each) for each in prompts], [list(output.token_ids) for output in outputs])
    scored = engine.forward_backward_batch(batch, None, forward_only=True).columns["logprobs"].values()
    engine.close()
    sampled = torch.tensor([logprob for output in outputs for logprob in output.logprobs])
    assert (scored - sampled).abs().max() < 1e-4


@pytest.mark.parametrize(
    "url", ["shm://real", "uds://real", "tcp://127.0.0.1:{port}", "file://{folder}/published", "inproc://real"]
)
def test_weights_are_synced_and_attested(smollm2, tmp_path, url, monkeypatch):
    """A server takes other weights by each transport, and answers as a model that has them."""
    engine = create_engine("fsdp", EngineConfig(model_path=str(smollm2), precision="float32"))
    engine.initialize()
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    weights["model.norm.weight"] = weights["model.norm.weight"] * 0.5
    engine.close()
    monkeypatch.setenv("RL_CKPT_TOKEN", "of this test")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = url.format(folder=tmp_path, port=probe.getsockname()[1])
    with rl_ckpt.connect(address, role="send", timeout_s=120) as sender:
        reports, peers = [], None if url.startswith("file") else 1
        thread = threading.Thread(
            target=lambda: reports.append(sender.send(weights.items(), version=3, num_peers=peers))
        )
        thread.start()

        async def scenario(server):
            async with rl_ckpt.connect(address, role="receive", timeout_s=120) as receiver:
                await server.update_weights(receiver, 3)
            return await server.generate(request(0, prompts_of(smollm2, 1, 16)[0], 4))

        output = serve(smollm2, scenario)
        thread.join(120)
    assert output.weight_versions == (3,) * 4
    assert reports[0].version == 3


ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {n} + 1? Reply with the number."}], "completion": str(n + 1)}
    for n in range(12)
]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "I do not know"} for row in ROWS]


@pytest.mark.parametrize(
    ("program", "rows", "more"),
    [
        ("rl-sft", ROWS, []),
        ("rl-sft", ROWS, ["lora.rank=4", "lora.export=adapter", "lora.target_modules=q_proj,v_proj"]),
        ("rl-dpo", PAIRS, []),
        ("rl-rm", PAIRS, []),
    ],
    ids=["sft", "lora", "dpo", "rm"],
)
def test_a_few_steps_of_fine_tuning(smollm2, tmp_path, program, rows, more):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [Path(sys.executable).with_name(program), f"model.path={smollm2}", f"data.path={data}", "steps=2"]
    command += ["batch_size=4", "lr=1e-5", "log_every=1", f"output_dir={tmp_path / 'out'}", *more]
    subprocess.run([*map(str, command)], check=True, timeout=1200)
    metrics = [json.loads(line) for line in (tmp_path / "out.run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    if program == "rl-dpo":
        assert metrics[0]["metrics"]["loss"] == pytest.approx(0.693147, abs=1e-4)


def test_two_steps_of_grpo(smollm2, tmp_path):
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": row["prompt"], "answer": row["completion"]} for row in ROWS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        Path(sys.executable).with_name("rl-train"),
        "grpo",
        f"data.path={data}",
        f"model.path={smollm2}",
        "steps=2",
    ]
    command += ["data.eval_size=2", "batch.batch_size=2", "batch.group_size=4", "batch.mini_batch_size=2"]
    command += [
        "rollout.backend=embedded",
        "rollout.max_new_tokens=12",
        "rollout.max_model_len=256",
        "data.max_prompt_tokens=200",
        "engine.precision=float32",
        "runtime=inline",
    ]
    command += [f"output_dir={tmp_path / 'out'}", "reward.parts={right: {kind: rule, rule: exact_match}}"]
    subprocess.run([*map(str, command)], check=True, timeout=1500)
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert all(abs(step["metrics"]["mismatch_k3"]) < 1e-4 for step in steps[1:])
