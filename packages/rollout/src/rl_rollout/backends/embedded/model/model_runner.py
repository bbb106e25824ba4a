"""Model runner: a Hugging Face causal language model over packed tokens and the paged KV cache."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_csrc.inference.folder_tokens import OMNI
from rl_csrc.native import has_cuda
from rl_rollout.backends.embedded.image_prompt import ImagePrompt, ImageReader, load_image_reader
from rl_rollout.backends.embedded.model.cpu_decoder import FusedDecoder, agrees, fuse, is_known
from rl_rollout.backends.embedded.model.cuda_decoder import CudaDecoder, can_decode, joined_weights
from rl_rollout.backends.embedded.model.delta_state import LINEAR_LAYER, NAME, delta_nets, serve_delta_nets
from rl_rollout.backends.embedded.model.linear import ActiveAdapters, ServedLinear, can_pack, serve_linears
from rl_rollout.backends.embedded.model.named_adapters import AdapterStore
from rl_rollout.backends.embedded.model.paged_attention import (
    ATTENTION_NAME,
    Batch,
    PagedBatch,
    ProbeBatch,
    register_attention,
)
from rl_rollout.backends.embedded.model.weights import WeightMemory
from rl_rollout.backends.embedded.scheduling.sequence import ExpertRecorder
from rl_rollout.errors import ConfigError, ModelFolderError
from rl_rollout.validation import check_device, check_positions, folder_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from rl_rollout.backends.embedded.batch_state import BatchState
    from rl_rollout.backends.embedded.kv_cache import KVCache, LayerShape, Memory
    from rl_rollout.backends.embedded.scheduling.scheduler import Plan
    from rl_rollout.backends.embedded.scheduling.sequence import SequenceState
    from rl_rollout.types import ServerConfig


SERVED_LAYERS = {"full_attention", "sliding_attention", LINEAR_LAYER}
"""Layer types whose state is keys and values, or that of a gated delta net."""

_LOADING = threading.Lock()
"""Held while a model is loaded: transformers patches torch's initialisation meanwhile, for the whole process."""

PARAMETERS_PER_THREAD = 2**20
"""Parameters of a model for which one CPU thread is used, where the transformers module computes."""
FUSED_PARAMETERS_PER_THREAD = 2**18
"""The same where the fused CPU decoder computes, whose threads are joined less often."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Loaded model with its device, limits, cache shapes, adapters and decoders."""

    module: Any
    """The Hugging Face module, in eval mode."""
    device: torch.device
    """Device of the model."""
    dtype: torch.dtype
    """Dtype of weights, keys and values."""
    vocab_size: int
    """Rows of the input embedding."""
    max_model_len: int
    """Longest prompt plus completion, tokens."""
    eos_token_ids: tuple[int, ...]
    """End-of-sequence ids: a request stops at them unless it ignores them."""
    layer_shapes: dict[int, LayerShape]
    """Shapes of the keys and values that each attention layer caches."""
    states: dict[int, tuple[Tensor, Tensor]]
    """Convolution and recurrent state of one row, by gated delta net: shapes and dtypes."""
    experts: ExpertRecorder
    """Recorder of routed experts; has no routers where the model has none, or where they do not return their choice."""
    linears: dict[str, ServedLinear]
    """Linear layers of the module, by name."""
    active_adapters: ActiveAdapters
    """Tokens of each adapter, which the linear layers read during a pass."""
    adapters: AdapterStore
    """LoRA adapters that requests may ask for."""
    image_reader: ImageReader | None
    """Image preprocessor of a vision-language model; None of a text model."""
    fused: FusedDecoder | None
    """CPU decoder that computes in place of the module; None on a GPU, and for architectures that it does not know."""
    keeps_logits: bool = True
    """Whether the module computes the logits of chosen tokens alone; thinkers of omni models compute all."""
    on_cuda: CudaDecoder | None = None
    """CUDA decoder that computes in place of the module; None on a CPU, and for architectures that it does not know."""
    memory: WeightMemory | None = None
    """Allocation of the weights on a GPU, which can be unmapped and mapped again at the same address."""

    def logits(self, ids: Tensor, positions: Tensor, batch: Batch, kept: Sequence[int] | None = None) -> Tensor:
        """Forward pass: fill the cache, and return logits [T, V] float32 of every token, or of those at `kept`."""
        if self.fused is not None:
            assert isinstance(batch, PagedBatch)
            return self.fused.logits(ids, batch, None if kept is None else torch.tensor(kept, dtype=torch.int64))
        return self.raw_logits(ids, positions, batch, kept).float()

    def raw_logits(self, ids: Tensor, positions: Tensor, batch: Batch, kept: Sequence[int] | None = None) -> Tensor:
        """Logits as of `logits`, in the dtype that the LM head returns."""
        if self.on_cuda is not None and not self.experts.is_on:
            assert isinstance(batch, PagedBatch)
            return self.on_cuda.logits(ids, batch, None if kept is None else torch.tensor(kept, device=self.device))
        # To transformers 0 means all tokens, and it computes the logits of one at least.
        which = 0 if kept is None else torch.tensor(kept or [0], device=self.device)
        logits = self._run(ids[None], positions[None], batch, which)[0]
        return logits[: len(kept) if kept is not None else None]

    def note_new_weights(self) -> None:
        """Renew, or drop, the packed copies of the weights, after an update or a release."""
        for layer in self.linears.values():
            layer.repack()
        if self.fused is not None:
            self.fused.repack()

    def prefill_seen(self, ids: Tensor, seen: ImagePrompt, batch: Batch) -> None:
        """Prefill of a prompt with images: fill the cache with its first tokens, all image tokens among them."""
        positions = seen.positions[..., : len(ids)].to(self.device).unsqueeze(-2)
        images = {name: value.to(self.device) for name, value in seen.arguments.items()}
        assert self.image_reader is not None
        self.image_reader.given.ids = seen.given_ids[None, : len(ids)].to(self.device)
        self._run(ids[None], positions, batch, 1, **images)

    def _run(
        self, input_ids: Tensor, position_ids: Tensor, batch: Batch, logits_to_keep: int | Tensor, **images: Tensor
    ) -> Tensor:
        arguments = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "use_cache": False,
            "rl_batch": batch,
            **images,
        }
        which = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if self.active_adapters.tokens:
            self.active_adapters.kept = torch.arange(input_ids.shape[1], device=self.device)[which]
        if not self.keeps_logits:
            hidden = self.module.base_model(**arguments).last_hidden_state
            return self.module.get_output_embeddings()(hidden[:, which])
        return self.module(logits_to_keep=logits_to_keep, **arguments).logits


def choose_device(name: str) -> torch.device:
    """Device named by `ServerConfig.device`.

    Raises:
        ConfigError: not the name of a device, or CUDA is not available.
    """
    check_device(name)
    if name != "cpu" and torch.version.hip is not None and torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: torch is built for ROCm, and not for NVIDIA's GPUs; use cpu")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: there is no CUDA device here; use cpu")
    return device


def choose_num_threads(num_parameters: int, most: int, *, is_fused: bool) -> int:
    """Default number of CPU threads: one for every `PARAMETERS_PER_THREAD`, up to `most`.

    With fewer parameters per thread, threads wait for one another longer than they compute: two threads were slower
    than one with 0.8 M parameters in transformers' module, and 1.3 times as fast with 2.8 M.
    """
    return max(1, min(most, num_parameters // (FUSED_PARAMETERS_PER_THREAD if is_fused else PARAMETERS_PER_THREAD)))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Dtype named by `ServerConfig.dtype`; `auto` is float32 on a CPU and bfloat16 on a GPU.

    Raises:
        ConfigError: not a dtype that is served.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not served; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def load_model(config: ServerConfig) -> ServedModel:
    """Load a model folder onto its device, with adapters and the fastest decoder that supports it.

    Raises:
        ModelFolderError: it cannot be loaded, lacks weights, or its layers have other state than keys and values.
        ConfigError: the device or the dtype is not available.
    """
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    module = _load_module(config.model_path, dtype).eval()
    _check_architecture(module, config.model_path)
    new_memory = device_memory(device)
    memory = (
        None
        if new_memory is None
        else WeightMemory(module, joined_weights(module) if is_known(module) else [], new_memory)
    )
    module = module.to(device)
    register_attention()
    serve_delta_nets(module)
    # The language model's attention is ours; a vision tower keeps transformers'.
    parts = getattr(module.config, "sub_configs", None)
    names = {part: ATTENTION_NAME if part == "text_config" else "sdpa" for part in parts or ()}
    module.set_attn_implementation(names or ATTENTION_NAME)
    text_config = module.config.get_text_config()
    experts = ExpertRecorder(module)
    probe = _probe(module, device, text_config.num_hidden_layers, config.model_path, experts)
    model_limit = getattr(text_config, "max_position_embeddings", None) or config.max_model_len
    max_model_len = min(config.max_model_len, model_limit)
    check_positions(text_config, max_model_len)
    can_be_packed, adapters = can_pack(device, dtype), config.options.get("adapters", {})
    max_adapters = config.options.get("max_adapters", len(adapters))
    is_int8 = config.quantization == "int8"
    if is_int8 and device.type != "cpu":
        raise ConfigError(f"quantization 'int8' of the embedded backend is for device cpu; this one is {device.type}")
    fused = None if max_adapters or is_int8 else fuse(module, max_model_len, probe)
    on_cuda = None
    if memory is not None and is_known(module) and not max_adapters and can_decode(module, probe.shapes):
        decoder = CudaDecoder(module, max_model_len, probe.settings, memory)
        on_cuda = decoder if agrees(module, decoder, probe) else None
    active = ActiveAdapters()
    linears = serve_linears(module, active, is_packed=can_be_packed and fused is None, is_int8=is_int8)
    return ServedModel(
        module=module,
        device=device,
        dtype=dtype,
        vocab_size=module.get_input_embeddings().weight.shape[0],
        max_model_len=max_model_len,
        eos_token_ids=folder_tokens(config.model_path).end_ids,
        layer_shapes=probe.shapes,
        states=probe.states,
        experts=experts,
        linears=linears,
        active_adapters=active,
        adapters=AdapterStore(_adaptable(linears), adapters, max_adapters),
        image_reader=load_image_reader(module, config.model_path),
        fused=fused,
        keeps_logits="logits_to_keep" in inspect.signature(module.forward).parameters,
        on_cuda=on_cuda,
        memory=memory,
    )


def device_memory(device: torch.device) -> Callable[[int], Memory] | None:
    """Allocator of GPU memory that keeps its address; None on a CPU, and where rl-csrc was built without CUDA."""
    if device.type != "cuda" or not has_cuda():
        return None
    from rl_csrc.cuda.mapped import MappedMemory

    return lambda num_bytes: MappedMemory(num_bytes, device)


def _load_module(path: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    from transformers.utils import logging

    had_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would stand among the lines of a run
    try:
        config: Any = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        config = config.thinker_config if config.model_type in OMNI else config
        sees = hasattr(config, "vision_config") and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        load: Any = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained
        options = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
        with _LOADING:
            module, info = load(path, config=config, dtype=dtype, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelFolderError(f"model folder {path!r} cannot be loaded: {error}") from error
    finally:
        if had_bar:
            logging.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):
        raise ModelFolderError(
            f"model folder {path!r} lacks {len(missing)} weights of {type(module).__name__}, e.g. {missing[0]!r}"
        )
    return module


def _adaptable(linears: dict[str, ServedLinear]) -> dict[str, ServedLinear]:
    """Layers that adapters may change: those that see the packed tokens, not those of a tower or delta net."""
    others = {"visual", "vision_tower", "audio_tower", "multi_modal_projector", NAME}
    return {name: layer for name, layer in linears.items() if others.isdisjoint(name.split("."))}


def _check_architecture(module: Any, path: str) -> None:
    name, nets = type(module).__name__, delta_nets(module)
    layers = getattr(module.config.get_text_config(), "layer_types", None) or []
    others = {*layers} - SERVED_LAYERS
    if layers.count(LINEAR_LAYER) != len(nets):
        others.add(LINEAR_LAYER)  # of another kind
    if others:
        raise ModelFolderError(
            f"model folder {path!r}: {name} has layers of type {', '.join(sorted(others))}; "
            f"the embedded backend serves {', '.join(sorted(SERVED_LAYERS))}"
        )
    if not nets and not getattr(module, "_supports_attention_backend", False):  # not set where there are such nets
        raise ModelFolderError(f"model folder {path!r}: {name} does not use transformers' attention interface")


@torch.inference_mode()
def _probe(module: Any, device: torch.device, num_layers: int, path: str, experts: ExpertRecorder) -> ProbeBatch:
    """Run one token through the module, recording each layer's cache shape and settings and whether routers report.

    Raises:
        ModelFolderError: not every layer called the attention function.
    """
    probe = ProbeBatch()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    experts.is_on = True
    module(input_ids=zero, position_ids=zero, use_cache=False, rl_batch=probe)
    experts.is_on = False
    experts.reports_choice = experts.take() is not None
    if sorted([*probe.shapes, *probe.states]) != list(range(num_layers)):
        raise ModelFolderError(
            f"model folder {path!r}: {type(module).__name__} has {num_layers} layers and "
            f"{len(probe.shapes)} of them asked for attention"
        )
    return probe


class BatchBuilder:
    """Builds the input tensors of a forward pass from a plan of the scheduler."""

    def __init__(self, table: BatchState, cache: KVCache) -> None:
        self._table = table
        self._cache = cache
        self._first_rows = torch.arange(64, device=table.device)

    def rows(self, ascending: np.ndarray) -> Tensor:
        """Row numbers on the device. Nearly always they are 0..n-1, which needs no transfer."""
        count = len(ascending)
        if not count or ascending[-1] != count - 1:
            return torch.from_numpy(ascending).to(self._table.device)
        if count > len(self._first_rows):
            self._first_rows = torch.arange(2 * count, device=self._table.device)
        return self._first_rows[:count]

    def batch(self, plan: Plan, rows: Tensor) -> tuple[PagedBatch, Tensor]:
        """Attention batch of the planned tokens, those of `rows` first, and their ids [T]."""
        table = self._table
        positions = table.lengths[rows] - 1
        if plan.drafts:
            widths = plan.widths()
            repeats = torch.from_numpy(widths).to(table.device)
            rows = rows.repeat_interleave(repeats)
            positions = positions.repeat_interleave(repeats) + torch.from_numpy(offsets(widths)).to(table.device)
        num_single = len(rows)
        spans = [(each.sequence.row, each.start, each.count + plan.num_drafted(each.sequence)) for each in plan.chunks]
        if spans:
            # By numpy: torch would wake its threads for a few numbers, and they spin on a core for a while afterwards.
            chunk_rows = np.repeat([row for row, _, _ in spans], [count for _, _, count in spans])
            chunk_positions = np.concatenate([np.arange(start, start + count) for _, start, count in spans])
            rows = torch.cat([rows, torch.from_numpy(chunk_rows).to(table.device)])
            positions = torch.cat([positions, torch.from_numpy(chunk_positions).to(table.device)])
        batch = PagedBatch(
            self._cache,
            table.block_tables,
            rows,
            positions,
            num_single=num_single,
            num_blocks=int(table.num_blocks[plan.rows].max()) if num_single else 0,
            chunks=spans,
            states=table.states,
        )
        return batch, table.tokens[rows, positions]

    def choose_adapters(self, model: ServedModel, rows: Tensor, sequences: Iterable[SequenceState]) -> None:
        """Set the tokens of each adapter for the next pass.

        Args:
            model: Its linear layers read the choice.
            rows: [T] int64, row of each packed token.
            sequences: Sequences of the batch that have an adapter.
        """
        wanted = {sequence.request.adapter for sequence in sequences}
        chosen = self._table.adapters[rows] if wanted else rows
        model.active_adapters.tokens = {
            name: (chosen == model.adapters.slot(name)).nonzero()[:, 0]
            for name in model.adapters.names
            if name in wanted
        }


def offsets(widths: np.ndarray) -> np.ndarray:
    """0, 1, ... width - 1 for each width, one after the other."""
    return np.arange(widths.sum()) - np.repeat(widths.cumsum() - widths, widths)


def kept(plan: Plan, asked: Sequence[bool]) -> list[int] | None:
    """Indices of the planned tokens whose logits are needed: sampled ones first, then prompt tokens. None: all.

    Args:
        plan: The plan of the step.
        asked: For each chunk, whether the logits of its prompt tokens are needed.
    """
    if not plan.chunks:
        return None
    ends: list[range] = []
    """Of each chunk, its last token and the drafted ones."""
    spans: list[int] = []
    at = num_single = int(plan.widths().sum())
    for chunk, is_asked in zip(plan.chunks, asked, strict=True):
        if is_asked:
            spans.extend(range(at, at + chunk.count))
        at += chunk.count
        num_drafted = plan.num_drafted(chunk.sequence)
        ends.append(range(at - 1, at + num_drafted))
        at += num_drafted
    last = [end for end, chunk in zip(ends, plan.chunks, strict=True) if chunk.is_last]
    sampled = [*last, *(ends[split.chunk] for split in plan.splits)]
    return [*range(num_single), *(place for end in sampled for place in end), *spans]
