"""Generation on one machine: the embedded server beside transformers, on a small random Qwen3.

All systems hold the same weights in float32, draw at temperature 1, and run every request to its length.
"""

import asyncio
import tempfile
import time
from pathlib import Path

import torch

from rl_bench import Run
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


def make_requests(count: int, new_tokens: int, turn: int) -> list[GenerateRequest]:
    """Other prompts in every turn, in groups of 8."""
    prompts = torch.randint(3, 50, (-(-count // 8), PROMPT_TOKENS), generator=torch.Generator().manual_seed(turn))
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    return [
        GenerateRequest(
            request_id=f"{turn}-{i}", prompt_token_ids=tuple(prompts[i // 8].tolist()), sampling_params=params
        )
        for i in range(count)
    ]


class Turns:
    """Numbers the calls, so that no two see the same prompts."""

    def __init__(self) -> None:
        self.turn = 0

    def requests(self, count: int, new_tokens: int) -> list[GenerateRequest]:
        self.turn += 1
        return make_requests(count, new_tokens, self.turn)


def main(run: Run) -> None:
    from transformers import AutoModelForCausalLM

    count, new_tokens = (16, 16) if run.quick else (64, 64)
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        write_tiny_model(Path(folder), **MODEL)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
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
        config = ServerConfig(model_path=folder, max_num_seqs=1024, num_threads=torch.get_num_threads())
        servers = {
            "embedded, in process": create_server("embedded", config),
            "embedded, rl-serve over HTTP": launch_server("embedded", config),
        }
        for server in servers.values():
            runner.run(server.start())

        async def generate(server, requests):
            return await asyncio.gather(*map(server.generate, requests))

        def ours(server, count=count, new_tokens=new_tokens):
            return lambda: runner.run(generate(server, turns.requests(count, new_tokens)))

        def transformers_generate():
            prompts = torch.tensor([r.prompt_token_ids for r in turns.requests(count, new_tokens)])
            with torch.inference_mode():
                model.generate(prompts, do_sample=True, top_k=0, min_new_tokens=new_tokens, max_new_tokens=new_tokens)

        run.compare(
            f"{count} requests x {new_tokens} tokens",
            {name: ours(server) for name, server in servers.items()},
            peers={"transformers generate": transformers_generate},
            unit="tokens/s",
            amount=count * new_tokens,
            goal=">= 5 of best peer",
        )
        for batch in (64,) if run.quick else (64, 256, 1024):
            run.compare(
                f"{batch} requests x 16 tokens",
                {name: ours(server, batch, 16) for name, server in servers.items()},
                unit="tokens/s",
                amount=batch * 16,
            )
        _first_token(run, runner, servers["embedded, in process"], turns, count)
        for server in servers.values():
            runner.run(server.stop())


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
