"""Pretrained models through the seams: servers and engines agree with transformers, and training runs."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rl_ckpt
from rl_engine import EngineConfig, create_engine
from rl_engine.testing import ragged_batch
from rl_rollout import FinishReason, GenerateRequest, SamplingParams, ServerConfig, create_server
from rl_rollout.http.http_server import READY

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


def greedy(model, prompt, num_tokens, *, is_ended=False):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        whole = plain.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            min_new_tokens=0 if is_ended else num_tokens,
            do_sample=False,
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


CHAT = """{% for message in messages %}<start_of_turn>{{ message['role'] }}
{{ message['content'] }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
"""A chat template for Gemma-3-270m, whose folder has none."""


def test_the_openai_client_chats_with_rl_serve(model, tmp_path):
    """Chat, stream and completion of a served process are the greedy tokens of transformers."""
    from openai import OpenAI
    from transformers import AutoTokenizer

    folder = shutil.copytree(model, tmp_path / model.name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        (folder / "chat_template.jinja").write_text(CHAT)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Name three colours."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected = tokenizer.decode(greedy(folder, ids, 24, is_ended=True), skip_special_tokens=True)
    command = [Path(sys.executable).with_name("rl-serve"), folder, "--port=0", "--dtype=float32", "--exit-with-stdin"]
    with subprocess.Popen([*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        url = next(json.loads(line.removeprefix(READY))["url"] for line in process.stdout if line.startswith(READY))
        client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
        asked = {"model": client.models.list().data[0].id, "max_tokens": 24, "temperature": 0}
        answer = client.chat.completions.create(messages=messages, logprobs=True, **asked).choices[0]
        streamed = client.chat.completions.create(messages=messages, stream=True, **asked)
        parts = [part.choices[0].delta.content or "" for part in streamed if part.choices]
        plain = client.completions.create(prompt=TEXT[:200], **asked).choices[0]
        process.stdin.close()
        assert process.wait(60) == 0
    assert answer.message.content == expected
    assert "".join(parts) == expected
    text = greedy(folder, tokenizer(TEXT[:200]).input_ids, 24, is_ended=True)
    assert plain.text == tokenizer.decode(text, skip_special_tokens=True)
    assert all(token.logprob <= 0 for token in answer.logprobs.content)


class CallsFirst:
    """A generator whose first turn is a given text, scored by the server; later turns are the server's own."""

    def __init__(self, server, token_ids):
        self.server, self.token_ids = server, token_ids

    async def generate(self, request):
        if self.token_ids is None:
            return await self.server.generate(request)
        ids, self.token_ids = self.token_ids, None
        scored = replace(
            request,
            prompt_token_ids=(*request.prompt_token_ids, *ids),
            sampling_params=replace(request.sampling_params, max_new_tokens=1),
            returns_prompt_logprobs=True,
        )
        output = await self.server.generate(scored)
        return replace(
            output,
            token_ids=ids,
            logprobs=output.prompt_logprobs[-len(ids) :],
            weight_versions=output.weight_versions * len(ids),
            finish_reason=FinishReason.STOP,
            prompt_logprobs=(),
        )


def test_a_chat_over_several_turns_calls_a_tool(smollm2):
    """The model reads the tool's answer and goes on; an engine gives every token of its turns the same log-prob."""
    from rl_agent.loops.tool import ToolLoop
    from rl_agent.registry import create_tokenizer

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    tokenizer = create_tokenizer(str(smollm2))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 23, "b": 8}}\n</tool_call><|im_end|>'
    ids = tuple(tokenizer.encode(call, add_special_tokens=False))
    row = {"prompt": [{"role": "user", "content": "What is 23 + 8? Use the tool add."}]}

    async def scenario(server):
        loop = ToolLoop(CallsFirst(server, ids), tokenizer, tools=[add])
        return await loop.run({"max_new_tokens": 24, "temperature": 1.0, "seed": 3}, row)

    found = serve(smollm2, scenario)
    assert found.num_turns == 2
    assert (found.metrics["num_tool_calls"], found.metrics.get("num_tool_malformed", 0)) == (1, 0)
    said = [token for token, is_own in zip(found.completion_token_ids, found.loss_mask, strict=True) if is_own]
    between = [token for token, is_own in zip(found.completion_token_ids, found.loss_mask, strict=True) if not is_own]
    assert tuple(said[: len(ids)]) == ids
    assert "31" in tokenizer.decode(between)
    engine = create_engine("fsdp", EngineConfig(model_path=str(smollm2), precision="float32"))
    engine.initialize()
    batch = ragged_batch([list(found.prompt_token_ids)], [list(found.completion_token_ids)])
    scored = engine.forward_backward_batch(batch, None, forward_only=True).columns["logprobs"].values()
    engine.close()
    own = torch.tensor(found.loss_mask, dtype=torch.bool)
    sampled = torch.tensor(found.rollout_logprobs)
    assert (scored[own] - sampled[own]).abs().max() < 1e-4
