"""Generation on one machine: the embedded server beside transformers and vLLM, on a small random Qwen3.

All systems hold the same weights in float32 on the CPU, draw at temperature 1, and run every request to its length.
vLLM is a peer where RL_ROLLOUT_VLLM is the folder of an environment with vLLM and rl-ckpt. Where there is a CUDA
device, a model of the shape of Qwen3-0.6B follows, in bfloat16 on it.
"""

import asyncio
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from rl_bench import Run, has_card
from rl_bench.shapes import qwen3
from rl_rollout import GenerateRequest, SamplingParams, ServerConfig, create_server, launch_server
from rl_rollout.testing import write_tiny_model

PROMPT_TOKENS = 16
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
}

GPU_GOALS = {"0.6B": 40000, "1.7B": 25000}
"""Tokens per second on an H200, by shape."""
GPU_PROMPT_TOKENS = 64


def make_requests(count: int, new_tokens: int, turn: int, prompt_tokens: int) -> list[GenerateRequest]:
    """Other prompts in every turn, in groups of 8."""
    prompts = torch.randint(3, 50, (-(-count // 8), prompt_tokens), generator=torch.Generator().manual_seed(turn))
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    return [
        GenerateRequest(
            request_id=f"{turn}-{i}", prompt_token_ids=tuple(prompts[i // 8].tolist()), sampling_params=params
        )
        for i in range(count)
    ]


def with_length(request: GenerateRequest, new_tokens: int) -> GenerateRequest:
    """The same with another length."""
    return replace(request, sampling_params=replace(request.sampling_params, max_new_tokens=new_tokens))


class Turns:
    """Numbers the calls, so that no two see the same prompts."""

    def __init__(self, prompt_tokens: int = PROMPT_TOKENS) -> None:
        self.turn = 0
        self._prompt_tokens = prompt_tokens

    def requests(self, count: int, new_tokens: int) -> list[GenerateRequest]:
        self.turn += 1
        return make_requests(count, new_tokens, self.turn, self._prompt_tokens)


def main(run: Run) -> None:
    from transformers import AutoModelForCausalLM

    count, new_tokens = (16, 16) if run.quick else (64, 64)
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        write_tiny_model(Path(folder), **MODEL)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        products = Products(model, count)
        num_parameters = sum(p.numel() for p in model.parameters())
        run.parameters(
            num_requests=count,
            new_tokens=new_tokens,
            prompt_tokens=PROMPT_TOKENS,
            num_parameters=num_parameters,
            dtype="float32",
            num_threads=torch.get_num_threads(),
            **MODEL,
        )
        config = ServerConfig(
            model_path=folder, max_num_seqs=1024, num_threads=torch.get_num_threads(), device="cpu", dtype="float32"
        )
        servers = {
            "embedded, in process": create_server("embedded", config),
            "embedded, rl-serve over HTTP": launch_server("embedded", config),
        }
        peers = {}
        if environment := os.environ.get("RL_ROLLOUT_VLLM"):
            peers["vLLM 0.32 on CPU, over HTTP"] = create_server("vllm", vllm_config(environment, config))
        for server in (*servers.values(), *peers.values()):
            runner.run(server.start())

        async def generate(server, requests):
            return await asyncio.gather(*map(server.generate, requests))

        def ours(server, count=count, new_tokens=new_tokens):
            return lambda: runner.run(generate(server, turns.requests(count, new_tokens)))

        vllm = {name: ours(server) for name, server in peers.items()} or {"vLLM": "RL_ROLLOUT_VLLM is not set"}

        def transformers_generate():
            prompts = torch.tensor([r.prompt_token_ids for r in turns.requests(count, new_tokens)])
            with torch.inference_mode():
                model.generate(prompts, do_sample=True, top_k=0, min_new_tokens=new_tokens, max_new_tokens=new_tokens)

        run.compare(
            f"{count} requests x {new_tokens} tokens",
            {name: ours(server) for name, server in servers.items()},
            peers={"transformers generate": transformers_generate, **vllm},
            limit={"the model's matrix products alone": lambda: products.run(new_tokens)},
            unit="tokens/s",
            amount=count * new_tokens,
            goal=">= 5 of best peer",
        )
        run.compare(
            f"{count} requests x 1 token at once, until the last has it",
            {name: ours(server, new_tokens=1) for name, server in servers.items()},
            peers={name: ours(server, new_tokens=1) for name, server in peers.items()},
            unit="ms",
        )
        lengths = torch.empty(count).log_normal_(3.5, 0.8, generator=torch.Generator().manual_seed(0))
        lengths = [max(1, min(400, int(length))) for length in lengths]

        def ours_ragged(server):
            def work():
                requests = turns.requests(count, new_tokens)
                runner.run(generate(server, [with_length(r, n) for r, n in zip(requests, lengths, strict=True)]))

            return work

        def transformers_ragged():
            prompts = torch.tensor([r.prompt_token_ids for r in turns.requests(count, new_tokens)])
            longest = max(lengths)  # a batch runs until its last row ends
            with torch.inference_mode():
                model.generate(prompts, do_sample=True, top_k=0, min_new_tokens=longest, max_new_tokens=longest)

        run.compare(
            f"{count} requests, lognormal lengths up to {max(lengths)}",
            {name: ours_ragged(server) for name, server in servers.items()},
            peers={"transformers generate": transformers_ragged},
            unit="tokens/s",
            amount=sum(lengths),
        )
        _first_token(run, runner, servers["embedded, in process"], turns, count)
        for dtype in ("float32", "bfloat16"):
            _agreement(run, runner, config, dtype, turns)
        for server in (*servers.values(), *peers.values()):
            runner.run(server.stop())
    if torch.cuda.is_available():
        gpu(run)


def gpu(run: Run) -> None:
    """256 requests x 256 tokens from prompts of 64, on models of the shapes of Qwen3, in bfloat16."""
    for name in GPU_GOALS:
        _gpu_model(run, name)


def _gpu_model(run: Run, name: str) -> None:
    from transformers import AutoModelForCausalLM

    count, new_tokens = (32, 32) if run.quick else (256, 256)
    turns = Turns(GPU_PROMPT_TOKENS)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        write_tiny_model(Path(folder), **qwen3(name, max_position_embeddings=1024, initializer_range=0.02))
        config = ServerConfig(
            model_path=folder, max_num_seqs=count, device="cuda", dtype="bfloat16", timeout_s=600, kv_cache_bytes=2**34
        )
        servers = {
            "embedded, in process": create_server("embedded", config),
            "embedded, rl-serve over HTTP": launch_server("embedded", config),
        }
        for server in servers.values():
            runner.run(server.start())
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()

        async def generate(server):
            await asyncio.gather(*map(server.generate, turns.requests(count, new_tokens)))

        def transformers_generate():
            prompts = torch.tensor([r.prompt_token_ids for r in turns.requests(count, new_tokens)], device="cuda")
            with torch.inference_mode():
                model.generate(prompts, do_sample=True, top_k=0, min_new_tokens=new_tokens, max_new_tokens=new_tokens)
            torch.cuda.synchronize()

        run.compare(
            f"GPU, Qwen3-{name} shape, bfloat16: {count} requests x {new_tokens} tokens",
            {name: lambda server=server: runner.run(generate(server)) for name, server in servers.items()},
            peers={"transformers generate": transformers_generate},
            unit="tokens/s",
            amount=count * new_tokens,
            goal=f">= {GPU_GOALS[name]} tokens/s",
            can_tell=not run.quick and has_card("H200"),
            peer_repetitions=2,
        )
        model.to("cpu")
        for server in servers.values():
            runner.run(server.stop())
        torch.cuda.empty_cache()
        _agreement(run, runner, config, "bfloat16", turns, precision="bfloat16")


def vllm_config(environment: str, config: ServerConfig) -> ServerConfig:
    """The same, served by the vLLM of an environment."""
    options = {
        "command": f"{environment}/bin/python -m vllm.entrypoints.openai.api_server",
        "args": "--enforce-eager",
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
    }
    return replace(
        config,
        device="auto",
        dtype="float32",
        max_num_seqs=64,
        timeout_s=600,
        kv_cache_bytes=config.kv_cache_bytes or 2**30,
        options=options,
    )


class Products:
    """The least that a step of this model can take: its float32 products alone, over weights that oneDNN packed."""

    def __init__(self, model, batch: int) -> None:
        weights = [layer.weight.detach() for layer in model.modules() if type(layer) is torch.nn.Linear]
        pack = torch.ops.mkldnn._reorder_linear_weight
        self._work = [(torch.randn(batch, weight.shape[1]), pack(weight, batch)) for weight in weights]

    @torch.inference_mode()
    def run(self, steps: int) -> None:
        for _ in range(steps):
            for x, packed in self._work:
                torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _agreement(
    run: Run,
    runner: asyncio.Runner,
    config: ServerConfig,
    dtype: str,
    turns: Turns,
    *,
    precision: str = "float32",
) -> None:
    """Log-probs of the sampler beside those of rl-engine in another precision, on the same weights and tokens."""
    from rl_engine import EngineConfig, create_engine
    from rl_engine.testing import ragged_batch

    server = create_server("embedded", replace(config, dtype=dtype))
    runner.run(server.start())

    async def generate():
        return await asyncio.gather(*map(server.generate, requests))

    requests = turns.requests(32, 64)
    outputs = runner.run(generate())
    runner.run(server.stop())
    engine = create_engine("fsdp", EngineConfig(model_path=config.model_path, optimizer=None, precision=precision))
    engine.initialize()
    batch = ragged_batch(
        [list(request.prompt_token_ids) for request in requests], [list(output.token_ids) for output in outputs]
    )
    with engine.eval_mode():
        trained = engine.forward_backward_batch(batch, None).columns["logprobs"].values().double()
    engine.close()
    sampled = torch.tensor([x for output in outputs for x in output.logprobs], dtype=torch.float64)
    trained = trained.cpu()
    ratio = trained - sampled
    metric = f"sampler in {dtype} beside rl-engine in {precision}, {len(sampled)} tokens"
    found = {
        "max |difference|": ratio.abs().max(),
        "mean |difference|": ratio.abs().mean(),
        "k1": -ratio.mean(),
        "k3": (ratio.exp() - 1 - ratio).mean(),
        "ppl ratio": (-trained.mean()).exp() / (-sampled.mean()).exp(),
    }
    for name, value in found.items():
        goals = {"float32": {"max |difference|": 1e-4}, "bfloat16": {"mean |difference|": 2e-3}}
        bound = goals[dtype].get(name) if dtype == precision else None
        unit = "ratio" if name == "ppl ratio" else "nats"
        goal = None if bound is None else f"<= {bound:.4f} nats"
        run.record(f"{metric}: {name}", "embedded", [float(value)], unit=unit, goal=goal)


def _first_token(run: Run, runner: asyncio.Runner, server, turns: Turns, count: int) -> None:
    """Seconds until each of `count` requests that come together has its first token."""

    async def first(request):
        start = time.perf_counter()
        stream = server.generate_stream(request)
        async for _ in stream:
            break
        waited = time.perf_counter() - start
        await stream.aclose()
        return waited

    async def all_first():
        return max(await asyncio.gather(*map(first, turns.requests(count, 16))))

    samples = run.collect({"embedded": lambda: runner.run(all_first()) * 1e3})["embedded"]
    run.record(f"time to first token, slowest of {count} at once", "embedded, in process", samples, unit="ms")
