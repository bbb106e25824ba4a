"""A process that speaks the part of SGLang 0.5.23's protocol that we use, over the embedded engine.

Written from SGLang's sources (`srt/entrypoints/http_server.py`, `managers/io_struct.py`) and from what the real server
was seen to answer. It refuses what it does not know, so that a misspelt argument, path or field fails a test.
"""

import argparse
import asyncio
import base64
import io
import json
import pickle
import sys
import warnings

import torch
from aiohttp import web
from layouts import tell_layout
from serving import serve, version_spans

from rl_rollout import (
    CkptReceiver,
    FinishReason,
    GenerateRequest,
    GenerationError,
    RolloutError,
    SamplingParams,
    ServerConfig,
    TokenOutput,
    create_server,
)

LOADER = "rl_ckpt.adapters.sglang.load_weights"
ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch", "LongStorage"),
    ("torch._utils", "_rebuild_tensor_v2"),
}
"""Of SGLang's `SafeUnpickler.ALLOWED_GLOBALS`, what is used."""


class SafeUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        assert (module, name) in ALLOWED
        return super().find_class(module, name)


def parse():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model-path", "served-model-name", "host", "dtype", "custom-weight-loader"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "random-seed", "context-length", "max-running-requests"):
        parser.add_argument(f"--{name}", required=True, type=int)
    parser.add_argument("--skip-tokenizer-init", action="store_true", required=True)
    parser.add_argument("--enable-deterministic-inference", action="store_true")
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-loras-per-batch", type=int)
    parser.add_argument("--lora-paths", nargs="+", type=json.loads, default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-total-tokens", type=int, default=2**20)
    parser.add_argument("--speculative-algorithm", choices=["EAGLE"])
    for name in ("num-steps", "eagle-topk", "num-draft-tokens"):
        parser.add_argument(f"--speculative-{name}", type=int)
    arguments = parser.parse_args()
    assert arguments.custom_weight_loader == LOADER
    # Requests without one take a slot of their own.
    assert not arguments.lora_paths or (arguments.enable_lora, arguments.max_loras_per_batch) == (
        True,
        len(arguments.lora_paths) + 1,
    )
    return arguments


class FakeSglang:
    def __init__(self, arguments):
        self.arguments = arguments
        self.server = create_server(
            "embedded",
            ServerConfig(
                model_path=arguments.model_path,
                max_model_len=arguments.context_length - 2,
                max_num_seqs=arguments.max_running_requests,
                seed=arguments.random_seed,
                dtype=arguments.dtype,
                num_threads=1,
                options={"adapters": {each["lora_name"]: each["lora_path"] for each in arguments.lora_paths}},
            ),
        )
        self.receivers = {}
        self.rids = set()
        self.is_updating = False

    def routes(self):
        async def health(request):
            return web.json_response({})

        async def info(request):
            return web.json_response({"tp_size": 1, "max_total_num_tokens": self.arguments.max_total_tokens})

        posts = {
            "/generate": self.generate,
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": lambda body: self.server.resume(),
            "/begin_weight_update": self.begin,
            "/update_weights_from_tensor": self.update,
            "/end_weight_update": self.end,
            "/update_weight_version": self.set_version,
        }
        if self.arguments.enable_memory_saver:
            posts["/release_memory_occupation"] = lambda body: self.server.sleep(len(body["tags"]))
            posts["/resume_memory_occupation"] = lambda body: self.server.wake(body["tags"])
        gets = [web.get("/health", health), web.get("/server_info", info)]
        return [*gets, *(web.post(path, handler(call)) for path, call in posts.items())]

    async def generate(self, body):
        params = dict(body["sampling_params"])
        seed = params.pop("sampling_seed", None)
        assert seed is None or self.arguments.enable_deterministic_inference
        assert body["return_logprob"] is True
        assert not (params["ignore_eos"] and params["stop_token_ids"])  # the real one would look at no stop ids
        params["top_k"] = max(params["top_k"], 0)
        params["stop_token_ids"] = tuple(params["stop_token_ids"])
        asked = GenerateRequest(
            request_id=body["rid"],
            prompt_token_ids=tuple(body["input_ids"]),
            sampling_params=SamplingParams(seed=seed, **params),
            num_top_logprobs=body["top_logprobs_num"],
            returns_prompt_logprobs=body["logprob_start_len"] == 0,
            adapter=body["lora_path"],
        )
        self.rids.add(asked.request_id)
        try:
            output = await self.server.generate(asked)
        except GenerationError:  # the real one gives tokens all the same
            output = drawn_from_nothing(asked, self.server.status()["weight_version"])
        finally:
            self.rids.discard(asked.request_id)
        drawn = list(zip(output.logprobs, output.token_ids, strict=True))
        told = {
            "finish_reason": {"type": str(output.finish_reason)},
            # Of logits / temperature: nothing that a caller may take where something is cut off.
            "output_token_logprobs": [[99.0 if body["return_sampling_mask"] else x, token, None] for x, token in drawn],
            "output_top_logprobs": [[[x, token, None] for token, x in top] for top in output.top_logprobs],
            "input_token_logprobs": [[None, body["input_ids"][0], None]],
            "weight_versions": version_spans(output.weight_versions),
        }
        scores = zip(output.prompt_logprobs, body["input_ids"][1:], strict=False)
        told["input_token_logprobs"] += [[x, token, None] for x, token in scores]
        if body["return_sampling_mask"]:
            told["output_token_sampling_logprobs"] = output.logprobs
        if output.finish_reason is FinishReason.ABORT:
            told["finish_reason"]["message"] = "Aborted by AbortReq."
        return {"output_ids": output.token_ids, "meta_info": told}

    async def abort(self, body):
        """Of all that begin with one that is known, as the real one does."""
        if body["rid"] in self.rids:
            await self.server.abort([rid for rid in self.rids if rid.startswith(body["rid"])])

    async def pause(self, body):
        assert body == {"mode": "retract"}
        await self.server.pause("keep")

    async def begin(self, body):
        assert self.server.status()["is_paused"] or self.server.status()["is_asleep"]
        self.is_updating = True

    async def end(self, body):
        self.is_updating = False

    async def update(self, body):
        assert self.is_updating
        assert (body["load_format"], body["flush_cache"]) == (LOADER, True)
        (payload,) = body["serialized_named_tensors"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of typed storages, which SGLang allows

            ((address, version),) = SafeUnpickler(io.BytesIO(base64.b64decode(payload))).load()
        assert isinstance(version, torch.Tensor)
        assert version.tolist() == [int(body["weight_version"])]
        if address.startswith("layout://"):
            tell_layout(address)
            return
        receiver = self.receivers.setdefault(address, CkptReceiver(address))
        await self.server.update_weights(receiver, int(version))

    async def set_version(self, body):
        assert body == {"new_version": "0", "abort_all_requests": False}


def drawn_from_nothing(asked, version):
    return TokenOutput(
        request_id=asked.request_id,
        token_ids=(0,),
        logprobs=(None,),
        weight_versions=(version,),
        finish_reason=FinishReason.LENGTH,
    )


def handler(call):
    async def answer(request):
        try:
            return web.json_response(await call(await request.json()) or {})
        except Exception as error:  # noqa: BLE001  told to the caller, as SGLang does
            message = f"{type(error).__name__}: {error}"
            status = 400 if isinstance(error, RolloutError) else 500
            return web.json_response({"error": {"message": message}}, status=status)

    return answer


async def main():
    arguments = parse()
    fake = FakeSglang(arguments)
    await serve(fake, fake.server.start, web.TCPSite, arguments.host, arguments.port)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
