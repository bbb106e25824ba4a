"""vLLM backend: a subprocess in its own environment, over HTTP. Run against vLLM 0.32.

Token ids go in and come out of `/inference/v1/generate`; `/pause`, `/resume`, `/abort_requests` and the weight-transfer
endpoints are those of vLLM's development mode, on a UNIX socket in a folder of this user alone. Log-probs are of the
distribution that was sampled from (`--logprobs-mode processed_logprobs`); weight versions come from vLLM's own spans.
Weights arrive through rl-ckpt's plug-in, which must be installed next to vLLM. Images are prepared here, and sent with
the positions of their placeholders.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import aiohttp

from rl_csrc.inference.images import GRIDS, PIXELS
from rl_rollout.backends.external.external_server import ExternalServer
from rl_rollout.backends.external.options import (
    ADAPTER_OPTIONS,
    COMMON_OPTIONS,
    MTP_OPTIONS,
    Adapter,
    check_arguments,
    find_preparer,
    has_vision,
    is_quantised,
    read_environment,
    read_mtp_tokens,
    words,
)
from rl_rollout.backends.external.updates import TornUpdateError, new_files, wait_for_files
from rl_rollout.errors import ConfigError, GenerationError, RolloutError, UnsupportedError
from rl_rollout.receiver import SLICES
from rl_rollout.registry import check_options
from rl_rollout.types import Capabilities, FinishReason, TokenChunk, TokenOutput
from rl_rollout.validation import NO_LOGPROB, as_logprob, versions_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from rl_rollout.backends.external.calls import InFlightRequest
    from rl_rollout.base import PauseMode, RolloutServer
    from rl_rollout.multimodal import PreparedImages
    from rl_rollout.types import GenerateRequest, SamplingParams, ServerConfig, ServerParallel


OPTIONS = {
    "command": "what starts the server, a list or a line; default: this Python -m vllm.entrypoints.openai.api_server",
    **COMMON_OPTIONS,
    **ADAPTER_OPTIONS,
    **MTP_OPTIONS,
    "max_adapters": "LoRA adapters at once, all of which weight updates bring and remove; in place of `adapters`",
    "max_rank": "largest rank of these, which their memory is reserved for; default 64",
}

GENERATE = "/inference/v1/generate"
STREAM_TOKENS = 32
"""Tokens of a chunk: what a request loses at most when vLLM dies, and how seldom its front end works for it."""
SLEEP_ARGUMENT = "--enable-sleep-mode"
ROUTED_ARGUMENT = "--enable-return-routed-experts"
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""Only vLLM 0.32's second model runner returns routed experts; it does not start with the first."""
CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""Variable with the size of the KV cache in GiB; where it is set, vLLM on a CPU ignores the argument."""
BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
"""Variable with the cores of vLLM on a CPU, a thread on each; only with `nobind` it respects OMP_NUM_THREADS."""
LEAST_TEMPERATURE = 0.01
"""Temperature that vLLM uses in place of lower ones."""
NORMALISE_ARGUMENT = "--mm-device-do-normalize"
VISION_ARGUMENTS = ("--no-mm-device-do-normalize", "--limit-mm-per-prompt", '{"video": 0}')
"""Arguments for a vision-language model: images come normalised, and there are no videos."""
LAYOUT_ARGUMENTS = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), "tp"),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), "pp"),
    **dict.fromkeys(("--data-parallel-size", "-dp"), "dp"),
    **dict.fromkeys(("--enable-expert-parallel", "-ep"), "ep"),
}
"""Arguments that `ServerConfig.parallel` sets."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM can be configured for (`--max-lora-rank`)."""


def create_server(config: ServerConfig) -> RolloutServer:
    """Server whose vLLM is a subprocess, which ends with this process."""
    return VllmServer(config)


class VllmServer(ExternalServer):
    """Rollout server over `vllm serve`.

    After a weight update the KV cache is recomputed (`/reset_prefix_cache`), that of requests in flight included. A
    seed determines a request's tokens on one server; its random stream starts over where a request is resumed.
    """

    worker_title = "VLLM::"
    quantizations: ClassVar = {
        "int8": ("--quantization", "int8_per_channel_weight_only"),
        "fp8": ("--quantization", "fp8_per_tensor"),
        "fp8_block": ("--quantization", "fp8_per_block"),
    }

    def __init__(self, config: ServerConfig) -> None:
        check_options(config.options, OPTIONS, "vllm")
        if config.device != "auto":
            raise ConfigError(
                f"device={config.device!r}: the device is that of the vLLM that is installed; leave it at auto, and "
                "choose among GPUs with the option env={'CUDA_VISIBLE_DEVICES': '0'}"
            )
        super().__init__(config, engine_name="vllm")
        if self._is_converted and config.dtype == "float32":
            raise ConfigError(
                f"quantization={config.quantization!r}: vLLM converts weights in bfloat16 or float16, and dtype is "
                "float32; set dtype=bfloat16 (rollout.dtype of rl-train)"
            )
        check_arguments(self.arguments, LAYOUT_ARGUMENTS)
        self._num_mtp_tokens = read_mtp_tokens(config, self.arguments)
        self._layout = layout_arguments(config.parallel)
        self._has_vision = has_vision(self.model_config)
        if NORMALISE_ARGUMENT in self.arguments:
            raise ConfigError(
                f"args have {NORMALISE_ARGUMENT}: images are normalised before vLLM gets them; leave it out"
            )
        self.preparer = find_preparer(config.model_path, self.model_config)
        self._wakes_cache = False
        self._folder = tempfile.mkdtemp(prefix="rl-rollout-")
        self._socket = f"{self._folder}/vllm"
        self._room = make_room(config.options, Path(self._folder))
        self._sessions: set[str] = set()
        self._has_begun = False
        """Whether vLLM awaits the end of an update."""
        # A connection per request: vLLM closes idle ones, perhaps while the next request is sent.
        self.run_as(
            self._command(),
            "http://vllm",
            lambda: aiohttp.UnixConnector(self._socket, limit=0, force_close=True),
            VLLM_SERVER_DEV_MODE="1",
            **self._variables(),
        )

    @property
    def capabilities(self) -> Capabilities:
        """See `RolloutServer.capabilities`; they depend on the arguments that vLLM was started with."""
        return Capabilities(
            updates_weights=not is_quantised(self.arguments, self.model_config),
            sleep_levels=(1, 2) if SLEEP_ARGUMENT in self.arguments else (),
            gives_routed_experts=ROUTED_ARGUMENT in self.arguments,
            has_adapters=bool(self.adapters or self._room),
            updates_adapters=self.config.parallel.pp == 1,
            takes_images=self.preparer is not None,
            num_receivers=self.config.parallel.num_ranks,
            takes_slices=not self._is_converted and not self._num_mtp_tokens,
            takes_mtp=bool(self._num_mtp_tokens),
            attests_weights=not self._is_spread and not self._is_converted,
            structured="restricted" if self._has_tokenizer else "none",
        )

    @property
    def _has_tokenizer(self) -> bool:
        """Whether vLLM gets a tokenizer, which structured outputs and vision towers need."""
        return self._has_vision or (Path(self.config.model_path) / "tokenizer.json").is_file()

    @property
    def _is_converted(self) -> bool:
        """Whether vLLM holds other numbers than were sent, which are verified before, and cannot be compared after."""
        return self.config.quantization != "none"

    @property
    def _is_spread(self) -> bool:
        """Whether each worker holds some of the tensors only, so that none can attest all of them."""
        return self.config.parallel.pp > 1 or self.config.parallel.ep > 1

    def _variables(self) -> dict[str, str]:
        """Environment variables of the subprocess, in addition to the option `env`.

        Raises:
            ConfigError: the environment has another value, which would overrule a setting of ours.
        """
        given = read_environment(self.config.options.get("env", {}))
        threads, cache = self.config.num_threads, self.config.kv_cache_bytes
        needed: dict[str, str] = {}
        for variable, value, setting, found in (
            (CACHE_VARIABLE, "", f"kv_cache_bytes={cache}" if cache else "", os.environ | given),
            (BIND_VARIABLE, "nobind", f"num_threads={threads}" if threads else "", os.environ | given),
            (RUNNER_VARIABLE, "1", ROUTED_ARGUMENT if ROUTED_ARGUMENT in self.arguments else "", given),
        ):
            if setting and found.get(variable, value) != value:
                raise ConfigError(
                    f"{setting} and {variable}={found[variable]!r} in the environment, which vLLM would take in its "
                    "place; leave one of them out"
                )
            needed |= {variable: value} if setting and value else {}
        return needed

    def _command(self) -> list[str]:
        config = self.config
        default = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        memory = ["--kv-cache-memory-bytes", str(config.kv_cache_bytes)] if config.kv_cache_bytes else []
        return [
            *words(config.options.get("command", default), "command"),
            *("--model", config.model_path, "--served-model-name", self.model_name, "--uds", self._socket),
            *("--dtype", config.dtype, "--seed", str(config.seed), "--max-model-len", str(self.max_model_len)),
            *("--max-num-seqs", str(config.max_num_seqs), "--logprobs-mode", "processed_logprobs"),
            *("--enable-scale-out", "--weight-transfer-config", '{"backend": "rl_ckpt"}', "--max-logprobs", "-1"),
            # Where there is a vision tower, vLLM needs the tokenizer at start, to try it with placeholders of its own.
            *(VISION_ARGUMENTS if self._has_vision else ()),
            *(() if self._has_tokenizer else ("--skip-tokenizer-init",)),
            *self.quantizations.get(config.quantization, ()),
            *mtp_arguments(self._num_mtp_tokens),
            *(*self._layout, *memory, *lora_arguments([*self._room.values()] or [*self.adapters.values()])),
            *self.arguments,
        ]

    async def after_start(self) -> None:
        """Name the version of the weights on disk 0, which vLLM calls `default`."""
        await self.upstream.command("/update_weight_version", {"new_version": "0"})

    async def stop(self) -> None:
        """See `RolloutServer.stop`."""
        await super().stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def post_generate(
        self, request: GenerateRequest, images: PreparedImages | None, flight: InFlightRequest
    ) -> TokenOutput:
        """See `ExternalServer`. Streamed, so that the tokens of a request survive vLLM's death."""
        params = request.sampling_params
        if 0 < params.temperature < LEAST_TEMPERATURE or params.seed == -1:
            raise UnsupportedError(
                f"request {request.request_id!r}: temperature={params.temperature}, seed={params.seed}: vLLM takes "
                f"{LEAST_TEMPERATURE} for lower temperatures than that, and -1 for no seed; choose 0 or others"
            )
        body: dict[str, Any] = {
            "request_id": flight.upstream_id,
            "model": self.adapters[request.adapter].name if request.adapter else self.model_name,
            "token_ids": request.prompt_token_ids,
            "sampling_params": {
                "max_tokens": self.limits.max_new_tokens(request),
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "min_p": params.min_p,
                "presence_penalty": params.presence_penalty,
                "frequency_penalty": params.frequency_penalty,
                "repetition_penalty": params.repetition_penalty,
                "stop_token_ids": self.limits.stop_ids(request),
                "ignore_eos": params.ignore_eos,
                "seed": params.seed,
                "logprobs": request.num_top_logprobs,
                "prompt_logprobs": 0 if request.returns_prompt_logprobs else None,
                "detokenize": False,
                **structured_outputs(params),
            },
        }
        if images is not None:
            body["features"] = features_of(images)
        if request.has_extras:  # chunks do not carry them
            layers = expert_layers(self.model_config) if request.returns_routed_experts else ()
            return read_answer(request, await self.upstream.call("POST", GENERATE, body), layers)
        body["stream"] = True
        body["sampling_params"]["stream_interval"] = STREAM_TOKENS
        async with aclosing(self.upstream.events(GENERATE, body)) as events:
            async for event in events:
                for choice in event["choices"]:
                    flight.add(read_chunk(choice, self.weight_version))
                    if choice["finish_reason"] is not None:
                        return read_stream(request, flight.chunks, choice["weight_versions"])
        raise await self.upstream.lost("it closed the connection before the end of a stream")

    async def post_abort(self, upstream_ids: Sequence[str]) -> None:
        """See `ExternalServer`. vLLM has its own ids for them."""
        await self.upstream.command("/abort_requests", {"request_ids": [f"generate-tokens-{i}" for i in upstream_ids]})

    async def post_pause(self, mode: PauseMode) -> None:
        """See `ExternalServer`."""
        await self.upstream.command("/pause", mode=mode)

    async def post_resume(self) -> None:
        """See `ExternalServer`."""
        if self._wakes_cache:
            await self.upstream.command("/wake_up", tags="kv_cache")
            self._wakes_cache = False
        await self.upstream.command("/resume")

    async def post_layout(self, url: str) -> None:
        """See `ExternalServer`."""
        await self.upstream.command("/init_weight_transfer_engine", {"init_info": {"url": url}})

    async def post_slices(self, address: str) -> None:
        """See `ExternalServer`. Slices land in threads of the workers, and a file of each reports when they have."""
        await self._open(address)
        if self._has_begun:
            return  # whoever asked for the last update has left while it landed: this one lands in `post_update`
        files = new_files(self._folder, "landed", self.capabilities.num_receivers)
        # The plug-in takes the weights of both models in one update, and knows the one that drafts by this call.
        await self.upstream.command(f"/start_{'draft_' if self._num_mtp_tokens else ''}weight_update")
        self._has_begun = True
        if address.startswith(SLICES):
            await wait_for_files(files, self.check_health, timeout_s=self.config.timeout_s)

    async def _open(self, address: str) -> None:
        """Have the workers open a session, if they are not in it."""
        if address not in self._sessions:
            is_attested = address.startswith(SLICES) or not (self._is_spread or self._is_converted)
            info: dict[str, Any] = {"url": address, "timeout_s": self.config.timeout_s, "attest": is_attested}
            info["landed"] = self._folder
            if self._room:
                info["room"] = {adapter.name: adapter.folder for adapter in self._room.values()}
            elif self.adapters and self.capabilities.updates_adapters:
                info["adapters"] = {adapter.name: adapter.folder for adapter in self.adapters.values()}
            await self.upstream.command("/init_weight_transfer_engine", {"init_info": info})
            self._sessions = {address}  # a new session takes the place of the one before

    async def post_update(self, address: str, version: int) -> None:
        """See `ExternalServer`. The plug-in installs and attests what has landed; after a failure it restores."""
        self._has_begun, failures = False, new_files(self._folder, "failed", self.capabilities.num_receivers)
        await self.upstream.command("/update_weights", {"update_info": {"version": version}})
        if messages := [file.read_text() for file in failures if file.exists()]:
            await self.upstream.command("/finish_weight_update")  # of no version: another may begin
            raise GenerationError("; ".join(dict.fromkeys(messages)))  # one rank's is the cause of the others'
        if self._room:
            self.adapters = served_adapters(Path(self._folder, "adapters-0"), self._room)
        try:
            await self.upstream.command("/finish_weight_update", {"weight_version": str(version)})
            await self.upstream.command("/reset_prefix_cache", reset_running_requests="true")
            if self._has_vision:
                await self.upstream.command("/reset_encoder_cache")
        except RolloutError as error:
            raise TornUpdateError(str(error)) from error

    async def post_sleep(self, level: int) -> None:
        """See `ExternalServer`. Requests in flight are recomputed after waking."""
        await self.upstream.command("/pause", mode="keep")
        await self.upstream.command("/reset_prefix_cache", reset_running_requests="true")
        await self.upstream.command("/sleep", level=str(level), mode="keep")

    async def post_wake(self, tags: Sequence[str]) -> None:
        """See `ExternalServer`.

        vLLM goes on by itself when all is awake. So its cache sleeps until it may: after level 2, until an update.
        """
        self._wakes_cache |= "kv_cache" in tags
        if "weights" in tags:
            await self.upstream.command("/wake_up", tags="weights")


def mtp_arguments(num_tokens: int) -> list[str]:
    """Arguments of vLLM for drafts of so many tokens by the model's layer for multi-token prediction."""
    settings = {"method": "mtp", "num_speculative_tokens": num_tokens}
    return ["--speculative-config", json.dumps(settings)] if num_tokens else []


def layout_arguments(layout: ServerParallel) -> list[str]:
    """Arguments of vLLM for the parallel layout of a replica.

    Raises:
        ConfigError: experts are to be shared out over some of the ranks.
    """
    if layout.ep not in (1, layout.tp * layout.dp):
        raise ConfigError(
            f"parallel.ep={layout.ep}: vLLM shares the experts out over all tp x dp = {layout.tp * layout.dp} ranks or "
            f"cuts them like other matrices; make it {layout.tp * layout.dp}, or 1"
        )
    sizes = {"--tensor-parallel-size": layout.tp, "--pipeline-parallel-size": layout.pp}
    sizes |= {"--data-parallel-size": layout.dp}
    flags = [word for flag, size in sizes.items() if size > 1 for word in (flag, str(size))]
    return [*flags, *(["--enable-expert-parallel"] if layout.ep > 1 else [])]


def make_room(options: Mapping[str, Any], folder: Path) -> dict[str, Adapter]:
    """Adapters without effect, whose places in vLLM weight updates give to others; none without `max_adapters`.

    vLLM loads no adapter without tensors: these have a pair for a layer that no model has.

    Raises:
        ConfigError: an option has no positive number, or adapters are named too.
    """
    numbers = options.get("max_adapters", 0), options.get("max_rank", 64)
    if any(not isinstance(each, int) for each in numbers) or numbers[0] < 0 or numbers[1] < 1:
        raise ConfigError(f"options max_adapters={numbers[0]!r}, max_rank={numbers[1]!r} must be positive numbers")
    if not numbers[0]:
        return {}
    if options.get("adapters"):
        raise ConfigError("options adapters and max_adapters exclude each other: give one, and send the adapters")
    import torch
    from safetensors.torch import save_file

    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    pair = {f"base_model.model.room.o_proj.lora_{each}.weight": torch.zeros(1, 1) for each in "AB"}
    save_file(pair, folder / "adapter_model.safetensors")
    names = [f"room-{number}" for number in range(1, numbers[0] + 1)]
    return {name: Adapter(name, str(folder), numbers[1], config) for name in names}


def served_adapters(file: Path, room: Mapping[str, Adapter]) -> dict[str, Adapter]:
    """Adapters by the names that updates gave them, each as the room that it is in; a worker writes the file."""
    return {name: room[each] for name, each in json.loads(file.read_text()).items()} if file.exists() else {}


def lora_arguments(adapters: Sequence[Adapter]) -> list[str]:
    """Arguments of vLLM for adapters.

    A slot more than there are adapters stays empty for good: vLLM's CPU kernels give to a request without an adapter
    what lies in the last slot.

    Raises:
        ConfigError: a rank is above what vLLM takes.
    """
    if not adapters:
        return []
    largest = max(adapters, key=lambda adapter: adapter.rank)
    room = next((rank for rank in LORA_RANKS if rank >= largest.rank), None)
    if room is None:
        raise ConfigError(f"adapter {largest.name!r} has rank {largest.rank}; vLLM takes at most {LORA_RANKS[-1]}")
    modules = [json.dumps({"name": adapter.name, "path": adapter.folder}) for adapter in adapters]
    slots = str(len(adapters) + 1)
    return ["--enable-lora", "--max-loras", slots, "--max-lora-rank", str(room), "--lora-modules", *modules]


def read_answer(request: GenerateRequest, answer: Mapping[str, Any], layers: Sequence[int] = ()) -> TokenOutput:
    """Output of one request, from vLLM's response; `layers` have the experts that it may have asked for."""
    choice = answer["choices"][0]
    ids = tuple(choice["token_ids"] or ())
    if not ids:
        return TokenOutput.empty(request)
    content = choice["logprobs"]["content"]
    extras: dict[str, Any] = {}
    if request.num_top_logprobs:
        extras["top_logprobs"] = tuple(most_likely(each["top_logprobs"], request.num_top_logprobs) for each in content)
    if request.returns_prompt_logprobs:
        rows = zip(answer["prompt_logprobs"][1:], request.prompt_token_ids[1:], strict=True)
        extras["prompt_logprobs"] = tuple(as_logprob(row[str(token)]["logprob"]) for row, token in rows)
    if request.returns_routed_experts:
        extras["routed_experts"] = read_experts(choice["routed_experts"], layers)
    return TokenOutput(
        request_id=request.request_id,
        token_ids=ids,
        logprobs=tuple(as_logprob(each["logprob"]) for each in content),
        weight_versions=tuple(versions_of(choice["weight_versions"], len(ids), "vllm")),
        finish_reason=FinishReason(choice["finish_reason"]),
        **extras,
    )


def read_chunk(choice: Mapping[str, Any], version: int) -> TokenChunk:
    """Chunk of a stream. vLLM reports versions with the last one only: until then, they are the served `version`."""
    ids = tuple(choice["token_ids"] or ())
    content = choice["logprobs"]["content"] if ids else ()
    reason = choice["finish_reason"]
    return TokenChunk(
        token_ids=ids,
        logprobs=tuple(as_logprob(each["logprob"]) for each in content),
        weight_versions=(version,) * len(ids),
        finish_reason=None if reason is None else FinishReason(reason),
    )


def read_stream(request: GenerateRequest, chunks: Sequence[TokenChunk], spans: Any) -> TokenOutput:
    """Output of one request, from the chunks of vLLM's stream and the spans of weight versions of the last one."""
    output = TokenOutput.joined(request.request_id, chunks)
    if not output.token_ids:
        return TokenOutput.empty(request)
    return replace(output, weight_versions=tuple(versions_of(spans, len(output.token_ids), "vllm")))


def most_likely(found: Sequence[Mapping[str, Any]], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most likely tokens: vLLM lists the sampled token first, however likely it is."""
    pairs = [(each["token_id"], each["logprob"]) for each in found if each["logprob"] > NO_LOGPROB]
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:count])


def expert_layers(model_config: Mapping[str, Any]) -> list[int]:
    """Layers with experts of a model's config.json: vLLM returns rows for the dense ones too."""
    values = model_config.get("text_config") or model_config
    layers, step = range(values["num_hidden_layers"]), values.get("decoder_sparse_step") or 1
    if kinds := values.get("mlp_layer_types"):
        return [layer for layer in layers if kinds[layer] == "sparse"]
    first, dense = values.get("first_k_dense_replace") or 0, values.get("mlp_only_layers") or ()
    return [layer for layer in layers if layer >= first and layer not in dense and (layer + 1) % step == 0]


def read_experts(encoded: str, layers: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Routed experts [tokens][layers][experts] of these layers, decoded from base64 of a .npy file."""
    import numpy as np  # needed for this alone

    array: Any = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    return tuple(tuple(map(tuple, token)) for token in array[:, layers].tolist())


RAW_VIEW = 3
"""Msgpack extension type of a tensor's bytes."""


def features_of(images: PreparedImages) -> dict[str, Any]:
    """`features` of a request with images; vLLM's cache knows an image by the hash of its data URL."""
    from msgspec import msgpack  # needed for this alone

    grids = images.columns[GRIDS]
    pixels = images.columns[PIXELS].split(grids.prod(-1).tolist())
    items = [_item(*pair) for pair in zip(pixels, grids, strict=True)]
    return {
        "mm_hashes": {"image": [hashlib.sha256(url.encode()).hexdigest() for url in images.urls]},
        "mm_placeholders": {"image": [{"offset": start, "length": end - start} for start, end in images.spans]},
        "kwargs_data": {"image": [base64.b64encode(msgpack.encode(item)).decode() for item in items]},
    }


def _item(pixel_values: Tensor, grid_thw: Tensor) -> dict[str, Any]:
    """Fields of one image, each with how vLLM batches it over several images."""
    rows = [[0, len(pixel_values), None]]
    return {
        "pixel_values": {
            "data": _tensor(pixel_values),
            "field": ("flat", {"keep_on_cpu": False, "slices": rows, "dim": 0}),
        },
        "image_grid_thw": {"data": _tensor(grid_thw), "field": ("batched", {"keep_on_cpu": True})},
    }


def _tensor(tensor: Tensor) -> tuple[str, tuple[int, ...], Any]:
    from msgspec.msgpack import Ext

    data = tensor.contiguous().numpy().tobytes()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), Ext(RAW_VIEW, data)


def structured_outputs(params: SamplingParams) -> dict[str, Any]:
    """VLLM's field for a structured output; none for other text."""
    asked = {"json": params.json_schema, "regex": params.regex, "choice": list(params.choice) or None}
    return {"structured_outputs": asked} if params.is_structured else {}
