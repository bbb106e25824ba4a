"""A process that speaks the part of vLLM 0.32's protocol that we use, over the embedded engine.

Written from vLLM's sources (`entrypoints/rl`, `scale_out/token_in_token_out`, `serve/dev`). It refuses what it does
not know, so that a misspelt argument, path or field fails a test.
"""

import argparse
import asyncio
import base64
import json
import sys
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import torch
from aiohttp import web
from layouts import tell_layout
from msgspec import msgpack
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
    WeightUpdateError,
    create_server,
    multimodal,
)
from rl_rollout.types import structure_of

SAMPLING = {
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
}
"""Of a request whose answer comes in one piece; a stream has `stream_interval` beside."""

DRAWING = SAMPLING & {each.name for each in fields(SamplingParams)} - {"stop_token_ids"}
"""Those that the server of a tiny model takes as they are."""


def parse():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model", "served-model-name", "uds", "dtype", "logprobs-mode", "weight-transfer-config"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("seed", "max-model-len", "max-num-seqs", "max-logprobs"):
        parser.add_argument(f"--{name}", required=True, type=int)
    parser.add_argument("--enable-scale-out", action="store_true", required=True)
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-loras", type=int)
    parser.add_argument("--max-lora-rank", type=int, choices=(1, 8, 16, 32, 64, 128, 256, 320, 512))
    parser.add_argument("--lora-modules", nargs="+", type=json.loads, default=[])
    parser.add_argument("--no-mm-device-do-normalize", action="store_true")
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--limit-mm-per-prompt", type=json.loads)
    parser.add_argument("--fail-finish", type=int, default=0, help="of this fake: the version whose finish fails")
    arguments = parser.parse_args()
    assert arguments.logprobs_mode == "processed_logprobs"
    # A request without an adapter is given what lies in the last slot, by the real one on a CPU.
    assert not arguments.lora_modules or arguments.max_loras > len(arguments.lora_modules)
    assert json.loads(arguments.weight_transfer_config) == {"backend": "rl_ckpt"}
    drafts = arguments.speculative_config
    assert drafts is None or (drafts.keys() == {"method", "num_speculative_tokens"} and drafts["method"] == "mtp")
    return arguments


def joined(images):
    return {name: torch.cat([image[name] for image in images]) for name in images[0]}


class Pictures:
    """What requests show, by its hash: in place of the image processor of the engine beneath."""

    def __init__(self, server):
        self.known = {}
        self.token_id = None
        if (sight := server.model.image_reader) is not None:
            self.token_id = sight._token_id
            processor = SimpleNamespace(token_id=self.token_id, read=self.processed, join=joined)
            sight._prepare = multimodal.ImagePreparer(processor).prepare
            multimodal._decoded = lambda request_id, index, key: self.known[key]

    def processed(self, image):
        pixels, grid = image
        run = (self.token_id,) * (int(grid.prod()) // 4)
        return run, {"pixel_values": pixels, "image_grid_thw": grid[None]}

    def read(self, ids, features):
        """Of `features`: the images, and where the prompt has placeholders that stand for none."""
        assert features.keys() == {"mm_hashes", "mm_placeholders", "kwargs_data"}
        keys, data, places = (features[name]["image"] for name in ("mm_hashes", "kwargs_data", "mm_placeholders"))
        for key, encoded in zip(keys, data, strict=True):
            self.known[key] = read_item(base64.b64decode(encoded))
        shown = {place["offset"] + i for place in places for i in range(place["length"])}
        assert {ids[i] for i in shown} == {self.token_id}
        return tuple(keys), [(i, i + 1) for i, token in enumerate(ids) if token == self.token_id and i not in shown]


def read_item(data):
    item = msgpack.decode(data)
    assert item["image_grid_thw"]["field"] == ["batched", {"keep_on_cpu": True}]
    pixels, grid = (read_tensor(item[name]["data"]) for name in ("pixel_values", "image_grid_thw"))
    slices = {"keep_on_cpu": False, "slices": [[0, len(pixels), None]], "dim": 0}
    assert item["pixel_values"]["field"] == ["flat", slices]
    return pixels, grid


def read_tensor(told):
    dtype, shape, data = told
    assert data.code == 3
    return torch.frombuffer(bytearray(data.data), dtype=getattr(torch, dtype)).reshape(shape)


class FakeVllm:
    def __init__(self, arguments):
        self.arguments = arguments
        modules = {each["name"]: each["path"] for each in arguments.lora_modules}
        self.has_room = "room-1" in modules
        self.server = create_server(
            "embedded",
            ServerConfig(
                model_path=arguments.model,
                max_model_len=arguments.max_model_len,
                max_num_seqs=arguments.max_num_seqs,
                seed=arguments.seed,
                dtype=arguments.dtype,
                num_threads=1,
                options={"max_adapters": len(modules)} if self.has_room else {"adapters": modules},
            ),
        )
        self.rooms = {}
        self.receiver, self.is_updating = None, False
        self.ranks = [Rank() for _ in range(arguments.tensor_parallel_size - 1)]
        self.label = "default"
        self.has_weights = True

    async def start(self):
        await self.server.start()
        self.pictures = Pictures(self.server)
        sees = self.pictures.token_id is not None
        # The real one needs its tokenizer where there is a vision tower.
        assert not (sees and self.arguments.skip_tokenizer_init)
        assert sees == self.arguments.no_mm_device_do_normalize

    def routes(self):
        async def health(request):
            return web.json_response({})

        posts = {
            "/abort_requests": self.abort,
            "/pause": lambda body, query: self.server.pause(query["mode"]),
            "/resume": self.resume,
            "/init_weight_transfer_engine": self.init,
            f"/start_{'draft_' if self.arguments.speculative_config else ''}weight_update": self.begin,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
            "/update_weight_version": self.set_version,
            "/reset_prefix_cache": self.reset,
            "/reset_encoder_cache": self.nothing,
        }
        if self.arguments.enable_sleep_mode:
            posts |= {"/sleep": self.sleep, "/wake_up": self.wake}
        generate = web.post("/inference/v1/generate", self.answer_generate)
        return [web.get("/health", health), generate, *(web.post(path, handler(call)) for path, call in posts.items())]

    async def nothing(self, body, query):
        return {}

    async def sleep(self, body, query):
        self.has_weights = query["level"] != "2"
        await self.server.sleep(int(query["level"]))

    async def wake(self, body, query):
        # The real one goes on by itself when all is awake, with whatever lies where the weights were.
        assert self.has_weights or query["tags"] == "weights"
        await self.server.wake([query["tags"]])

    async def resume(self, body, query):
        assert self.has_weights
        await self.server.resume()

    async def answer_generate(self, request):
        body = await request.json()
        if body.get("stream"):
            return await self.stream(request, body)
        try:
            return web.json_response(await self.generate(body))
        except Exception as error:  # noqa: BLE001  told to the caller, as vLLM does
            return failure(error)

    def asked(self, body):
        params, is_stream = body["sampling_params"], "stream" in body
        structure = {name: value for name, value in params.get("structured_outputs", {}).items() if value is not None}
        assert not (structure and self.arguments.skip_tokenizer_init)
        plain = params.keys() - {"structured_outputs"}
        assert plain == SAMPLING | ({"stream_interval"} if is_stream else set())
        assert body.keys() - {"features", "stream"} == {"request_id", "model", "token_ids", "sampling_params"}
        images, sampled = (), ()
        if "features" in body:
            images, sampled = self.pictures.read(body["token_ids"], body["features"])
        names = [each["name"] for each in self.arguments.lora_modules]
        assert body["model"] in (self.arguments.served_model_name, *names)
        return GenerateRequest(
            request_id=f"generate-tokens-{body['request_id']}",
            prompt_token_ids=tuple(body["token_ids"]),
            sampling_params=SamplingParams(
                max_new_tokens=params["max_tokens"],
                stop_token_ids=tuple(params["stop_token_ids"]),
                **{name: params[name] for name in DRAWING},
                **structure_of(None, structure or None),
            ),
            adapter=self.adapter_of(body["model"]) if body["model"] in names else None,
            num_top_logprobs=params["logprobs"],
            returns_prompt_logprobs=params["prompt_logprobs"] is not None,
            images=images,
            sampled_spans=tuple(sampled),
        )

    def adapter_of(self, name):
        return {room: adapter for adapter, room in self.rooms.items()}[name] if self.has_room else name

    def report_rooms(self):
        """Each adapter that came in the first room that is free, as rl-ckpt's plug-in has it."""
        rooms = [each["name"] for each in self.arguments.lora_modules]
        served = self.server.model.adapters.names
        self.rooms = {name: room for name, room in self.rooms.items() if name in served}
        for name in served:
            if name not in self.rooms:
                self.rooms[name] = next(room for room in rooms if room not in self.rooms.values())
        self.named.write_text(json.dumps(self.rooms))

    async def generate(self, body):
        asked = self.asked(body)
        try:
            output = await self.server.generate(asked)
        except GenerationError:
            output = self.made_up(asked)
        scores = zip(body["token_ids"][1:], output.prompt_logprobs, strict=False)
        return {
            "prompt_logprobs": [None, *({str(token): {"logprob": x}} for token, x in scores)],
            "choices": [choice_of(output, output.top_logprobs)],
        }

    def made_up(self, asked):
        """In place of NaN the real one gives tokens all the same."""
        return TokenOutput(
            request_id=asked.request_id,
            token_ids=(0,),
            logprobs=(-9999.0,),
            weight_versions=(self.server.status()["weight_version"],),
            finish_reason=FinishReason.LENGTH,
        )

    async def stream(self, request, body):
        """Server-sent events, each of the first token or of `stream_interval` ones; versions with the last alone."""
        response, asked, every = None, self.asked(body), body["sampling_params"]["stream_interval"]
        pending, versions = TokenOutput.empty(asked), ()
        try:
            async with aclosing(self.server.generate_stream(asked)) as chunks:
                async for chunk in chunks:
                    versions += chunk.weight_versions
                    pending = pending.extended(chunk)
                    is_last = chunk.finish_reason is not None
                    if not is_last and response is not None and len(pending.token_ids) < every:
                        continue
                    response = response or await start_events(request)
                    choice = choice_of(pending) | {
                        "weight_versions": (version_spans(versions) or None) if is_last else None
                    }
                    await write_event(response, {"choices": [choice | ({} if is_last else {"finish_reason": None})]})
                    pending = TokenOutput.empty(asked)
        except GenerationError:
            response = response or await start_events(request)
            await write_event(response, {"choices": [choice_of(self.made_up(asked))]})
        except Exception as error:  # noqa: BLE001  told to the caller, as vLLM does
            if response is None:
                return failure(error)
            await write_event(response, {"error": {"message": str(error), "code": 500}})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def abort(self, body, query):
        await self.server.abort(body["request_ids"])

    async def init(self, body, query):
        if body["init_info"]["url"].startswith("layout://"):
            assert body["init_info"].keys() == {"url"}
            tell_layout(body["init_info"]["url"])
            return
        if self.receiver is not None:
            await self.receiver.close()
        told = body["init_info"]
        assert told.keys() - {"adapters", "room"} == {"url", "timeout_s", "attest", "landed"}
        self.named = Path(told["landed"], "adapters-0")
        self.landed = [Path(told["landed"], f"landed-{rank}") for rank in range(1 + len(self.ranks))]
        self.failed = Path(told["landed"], "failed-0")
        # The real one numbers them in this order.
        assert told.get("room" if self.has_room else "adapters", {}) == {
            each["name"]: each["path"] for each in self.arguments.lora_modules
        }
        self.receiver = CkptReceiver(body["init_info"]["url"], timeout_s=body["init_info"]["timeout_s"])
        for rank in self.ranks:
            await rank.tell({"url": body["init_info"]["url"], "timeout_s": body["init_info"]["timeout_s"]})

    async def begin(self, body, query):
        """This one lands everything in the update."""
        assert not self.is_updating, "the update before was not finished"
        self.is_updating = True
        for file in self.landed:
            assert not file.exists()
            file.touch()

    async def update(self, body, query):
        version = body["update_info"]["version"]
        updates = [self.server.update_weights(self.receiver, version), *(rank.update(version) for rank in self.ranks)]
        try:
            await asyncio.gather(*updates)
        except WeightUpdateError as error:
            self.failed.write_text(str(error))
        else:
            self.has_weights = True
            if self.has_room:
                self.report_rooms()

    async def finish(self, body, query):
        self.is_updating = False
        if "weight_version" not in body:
            return
        if int(body["weight_version"]) == self.arguments.fail_finish:
            raise RuntimeError("finish was told to fail")
        self.label = body["weight_version"]

    async def set_version(self, body, query):
        assert body["new_version"] == "0"

    async def reset(self, body, query):
        assert query == {"reset_running_requests": "true"}


class Rank:
    """A further rank in a process of its own."""

    process = None

    async def tell(self, message):
        if self.process is None:
            program = str(Path(__file__).parent / "fake_vllm_rank.py")
            pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
            self.process = await asyncio.create_subprocess_exec(sys.executable, program, **pipes)
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def update(self, version):
        await self.tell({"version": version})
        line = await self.process.stdout.readline()
        assert line, "a rank has died"
        assert json.loads(line)["count"] > 0


def handler(call):
    async def answer(request):
        try:
            body = await request.json() if request.can_read_body else {}
            return web.json_response(await call(body, dict(request.query)) or {})
        except Exception as error:  # noqa: BLE001  told to the caller, as vLLM does
            return failure(error)

    return answer


def failure(error):
    message = f"{type(error).__name__}: {error}"
    status = 400 if isinstance(error, RolloutError) and isinstance(error, ValueError) else 500
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def choice_of(output, tops=()):
    content = [
        {
            "token_id": token,
            "logprob": logprob,
            "top_logprobs": [{"token_id": i, "logprob": x} for i, x in ((token, logprob), *top)][: len(top) + 1]
            if token not in dict(top)
            else [{"token_id": i, "logprob": x} for i, x in sorted(top, key=lambda pair: pair[0] != token)],
        }
        for token, logprob, top in zip(
            output.token_ids, output.logprobs, tops or ((),) * len(output.token_ids), strict=True
        )
    ]
    return {
        "finish_reason": str(output.finish_reason),
        "token_ids": output.token_ids,
        "logprobs": {"content": content},
        "weight_versions": version_spans(output.weight_versions) or None,
        "routed_experts": None,
    }


async def start_events(request):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def write_event(response, event):
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def main():
    arguments = parse()
    fake = FakeVllm(arguments)
    await serve(fake, fake.start, web.UnixSite, arguments.uds)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
