"""A process that speaks the part of TensorRT-LLM's protocol that we use, over the embedded engine.

Written from TensorRT-LLM's sources (`serve/openai_server.py`, `serve/openai_protocol.py`, `serve/rl_control_auth.py`,
`llmapi/rlhf_utils.py`); the real server was never run. It refuses what it does not know, so that a misspelt argument,
path or field fails a test. As of our extension, failures of updates are told by files and the answer is a success.
"""

import argparse
import asyncio
import hashlib
import hmac
import json
import math
import os
import sys
from contextlib import aclosing
from pathlib import Path

from aiohttp import web
from layouts import tell_layout
from serving import serve

from rl_ckpt import Addresses
from rl_rollout import (
    CkptReceiver,
    FinishReason,
    GenerateRequest,
    GenerationError,
    RolloutError,
    SamplingParams,
    ServerConfig,
    create_server,
)

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
    parser.add_argument("--sleeps", action="store_true")
    parser.add_argument("--without-extension", action="store_true", help="of this fake: it takes no messages of ours")
    return parser.parse_args()


class FakeTrtllm:
    def __init__(self, arguments):
        self.arguments = arguments
        self.num_ids = 0
        self.receivers = {}
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
            web.post("/update_weights", signed(self.update)),
            *((web.post("/release_memory", signed(self.release)),) if self.arguments.sleeps else ()),
            *((web.post("/resume_memory", signed(self.resume)),) if self.arguments.sleeps else ()),
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
        try:
            async with aclosing(self.server.generate_stream(ours)) as chunks:
                async for chunk in chunks:
                    await write_choice(response, chunk.token_ids, chunk.logprobs, chunk.finish_reason)
        except GenerationError:  # the real one gives tokens all the same
            await write_choice(response, (0,), (math.nan,), FinishReason.LENGTH)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def update(self, body):
        (key, text) = next(iter(body["weights"].items()))
        assert isinstance(text, str)
        if self.arguments.without_extension:
            raise ValueError("Device UUID GPU-0 not found in ipc_handles")
        assert (body.keys(), body["weights"].keys(), key) == ({"weights"}, {"rl_ckpt"}, "rl_ckpt")
        if not (told := json.loads(text)):
            return
        if told["url"].startswith("layout://"):
            assert told.keys() == {"folder", "url"}
            tell_layout(told["url"])
            return
        assert told.keys() - {"version"} == {"url", "timeout_s", "folder"}
        if "version" not in told:
            assert Addresses.from_json(told["url"]) is not None
            touch(told["folder"])
            return
        while self.server.status()["num_running"]:  # noqa: ASYNC110  it finishes those whose client has left, too
            await asyncio.sleep(0.001)
        receiver = self.receivers.setdefault(told["url"], CkptReceiver(told["url"], timeout_s=told["timeout_s"]))
        try:
            await self.server.update_weights(receiver, told["version"])
        except RolloutError as error:
            tell_failure(told["folder"], error)

    async def release(self, body):
        assert body == {"tags": ["kv_cache"]}
        assert self.server.status()["num_running"] == 0  # its engine would be asked for memory that is gone
        await self.server.sleep(1)

    async def resume(self, body):
        assert body == {"tags": ["kv_cache"]}
        await self.server.wake(["kv_cache"])


def touch(folder):
    """This one lands everything in the update."""
    Path(folder, "landed-0").touch(exist_ok=False)


def tell_failure(folder, error):
    Path(folder, "failed-0").write_text(f"{type(error).__name__}: {error}")


async def write_choice(response, token_ids, logprobs, finish_reason):
    choice = {"index": 0, "text": "", "token_ids": token_ids, "logprobs": {"token_logprobs": logprobs}}
    data = json.dumps({"choices": [choice | {"finish_reason": finish_reason}]})
    await response.write(f"data: {data}\n\n".encode())


def signed(call):
    """Handler of requests that are signed, as TensorRT-LLM 1.3 and later want it."""

    async def answer(request):
        data = await request.read()
        mac = hmac.new(os.environ["RL_CKPT_CONTROL_KEY"].encode(), data, hashlib.sha256).hexdigest()
        if request.headers.get("x-trtllm-rl-control-auth") != f"sha256={mac}":
            return web.json_response({"error": "Invalid RL control request authentication"}, status=401)
        try:
            await call(json.loads(data))
        except Exception as error:  # noqa: BLE001  its framework answers so
            return web.Response(text=f"Internal Server Error ({error})", status=500)
        return web.json_response({"status": "success"})

    return answer


async def main():
    arguments = parse()
    fake = FakeTrtllm(arguments)
    await serve(fake, fake.server.start, web.TCPSite, arguments.host, arguments.port)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
