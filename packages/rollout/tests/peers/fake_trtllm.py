"""A process that speaks the part of trtllm-serve's protocol that we use, over the embedded engine.

Written from TensorRT-LLM's sources (`serve/openai_server.py`, `serve/openai_protocol.py`); the real server was never
run. It refuses what it does not know, so that a misspelt argument, path or field fails a test.
"""

import argparse
import asyncio
import json
import sys
from contextlib import aclosing

from aiohttp import web
from serving import serve

from rl_rollout import GenerateRequest, SamplingParams, ServerConfig, create_server

FIXED = {
    "include_stop_str_in_output": True,
    "add_special_tokens": False,
    "detokenize": False,
    "logprobs": 1,
    "stream": True,
}


def parse():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    for name in ("backend", "host"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "max_seq_len", "max_batch_size"):
        parser.add_argument(f"--{name}", required=True, type=int)
    return parser.parse_args()


class FakeTrtllm:
    def __init__(self, arguments):
        self.num_ids = 0
        self.server = create_server(
            "embedded",
            ServerConfig(
                model_path=arguments.model,
                max_model_len=arguments.max_seq_len,
                max_num_seqs=arguments.max_batch_size,
                num_threads=1,
            ),
        )

    def routes(self):
        return [
            web.get("/health", self.health),
            web.post("/v1/completions", self.completions),
            web.post("/release_memory", self.release),
            web.post("/resume_memory", self.resume),
        ]

    async def health(self, request):
        return web.Response()

    async def completions(self, request):
        body = await request.json()
        assert {name: body.pop(name) for name in FIXED} == FIXED
        assert body.pop("model") == self.server.status()["model"]
        self.num_ids += 1
        ours = GenerateRequest(
            request_id=str(self.num_ids),
            prompt_token_ids=tuple(body.pop("prompt")),
            sampling_params=SamplingParams(
                max_new_tokens=body.pop("max_tokens"), stop_token_ids=tuple(body.pop("stop_token_ids")), **body
            ),
        )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with aclosing(self.server.generate_stream(ours)) as chunks:
            async for chunk in chunks:
                choice = {
                    "index": 0,
                    "text": "",
                    "token_ids": chunk.token_ids,
                    "logprobs": {"token_logprobs": chunk.logprobs},
                    "finish_reason": chunk.finish_reason,
                }
                await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def release(self, request):
        assert await request.json() == {"tags": ["kv_cache"]}
        assert self.server.status()["num_running"] == 0  # its engine would be asked for memory that is gone
        await self.server.sleep(1)
        return web.json_response({"status": "success"})

    async def resume(self, request):
        assert await request.json() == {"tags": ["kv_cache"]}
        await self.server.wake(["kv_cache"])
        return web.json_response({"status": "success"})


async def main():
    arguments = parse()
    fake = FakeTrtllm(arguments)
    await serve(fake, fake.server.start, web.TCPSite, arguments.host, arguments.port)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
