"""A Hugging Face model as a scorer of packed rows: tokens in, one log-prob or one value of every completion token out.

Legend: `T` tokens fed, `C` completion tokens, `B` rows, `L` longest row, `V` vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from rl_csrc.inference.images import PACKED_LAYERS
from rl_engine.batch.micro_batches import cost_model
from rl_engine.batch.packed import take_rows
from rl_engine.checkpoint.hf_folder import PREFIX
from rl_engine.errors import ConfigError, ModelFolderError
from rl_engine.layers import packed_attention as attention
from rl_engine.layers.logprobs import LinearHead, score_logits, score_states, score_values
from rl_engine.layers.moe import Routers, routing_of
from rl_engine.layers.omni import multimodal_inputs
from rl_engine.layers.packed_delta import LINEAR_LAYER, delta_nets, pack_delta_nets
from rl_engine.model.scorer import Scorer

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from transformers import PreTrainedModel

    from rl_engine.batch.micro_batches import CostModel
    from rl_engine.batch.packed import PackedRows
    from rl_engine.layers.logprobs import HeadLoss
    from rl_engine.layers.moe import ExpertLoad, Experts, Routing
    from rl_engine.layers.packed_attention import SequenceGroup
    from rl_engine.layers.row_adapters import RowAdapters
    from rl_engine.types import EngineConfig, ModelOutput

ROPE_TYPES = ("default", "linear", "llama3")
"""Kinds of rotary tables that scale nothing but frequencies."""


class HuggingFaceScorer(Scorer):
    """Scores packed rows with a transformers model; the root module that is sharded."""

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, *, is_compiled: bool = False) -> None:
        super().__init__(model)
        self.sequence_group: SequenceGroup | None = None
        self.routers = Routers(model)
        self.adapters: RowAdapters | None = None
        """Adapters of rows; None: no row has one."""
        self.is_packed = _can_pack(model)
        self.has_state = bool(delta_nets(model))
        """Whether layers carry state from token to token."""
        if self.is_packed:
            name = attention.register(is_compiled=is_compiled)
            pack_delta_nets(model)
            self.multimodal = multimodal_inputs(model)
            model.set_attn_implementation(name if self.multimodal is None else {"text_config": name})

    @property
    def config(self) -> Any:
        """See `Scorer`."""
        return self.model.config.get_text_config()

    @property
    def experts(self) -> Experts | None:
        """See `Scorer`."""
        return self.routers.experts if self.is_packed else None

    def layers(self) -> list[nn.Module]:
        """See `Scorer`: the modules that transformers would not split, also once FSDP has made subclasses of them."""
        names = set(self.model._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]
        found = [module for module in self.modules() if any(kind.__name__ in names for kind in type(module).__mro__)]
        return [module for module in found if not {*module.modules()} & {*found} - {module}]  # a tower has layers

    def cost(self) -> CostModel:
        """See `Scorer`."""
        trunk = dict(self.model.base_model.named_parameters())
        table: Any = self.model.get_input_embeddings()
        shapes = {name: tuple(weight.shape) for name, weight in trunk.items() if weight is not table.weight}
        return cost_model(self.config, shapes)

    def named_weights(self) -> dict[str, Tensor]:
        """See `Scorer`."""
        named: dict[str, Tensor] = dict(self.model.named_parameters())
        saved = self.model.state_dict(keep_vars=True)
        return named | {name: buffer for name, buffer in self.model.named_buffers() if name in saved}

    def to_folder(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Scorer`: transformers joins tensors of the folder, such as the experts of a layer."""
        found = transformers.core_model_loading.revert_weight_conversion(self.model, named)
        prefix = getattr(self.model.config, PREFIX, "")
        return {name if name.startswith(prefix) else f"{prefix}{name}": tensor for name, tensor in found.items()}

    def route(self, rows: PackedRows, load: ExpertLoad | None, *, is_counting: bool = False) -> Routing | None:
        """See `Scorer`."""
        if self.experts is None:
            return None
        if self.sequence_group is None:
            self.routers.routing = routing_of(rows, load, is_counting=is_counting)
        else:
            rows = rows.padded(self.sequence_group.size)
            start, stop = self.sequence_group.token_range(rows)
            self.routers.routing = routing_of(rows, load, is_counting=is_counting, start=start, stop=stop)
        return self.routers.routing

    def forward(self, rows: PackedRows, head_loss: HeadLoss | None = None) -> ModelOutput:
        """See `Scorer`."""
        if self.sequence_group is None:
            missing = 0 if self.multimodal is None else self.multimodal.num_passes - self.multimodal.passes_in(rows)
            return self._score(*self._feed(rows), head_loss) if not missing else self._with_blanks(rows, missing)
        rows = rows.padded(self.sequence_group.size)
        return self.sequence_group.gather_scores(self._score(*self._feed_share(rows, self.sequence_group)), rows)

    def _with_blanks(self, rows: PackedRows, count: int) -> ModelOutput:
        """Scores for which the vision tower runs `count` times more, as it does elsewhere, and adds nothing."""
        assert self.multimodal is not None
        blanks = [self.multimodal.blank(rows.token_ids.device) for _ in range(count)]
        zero, output = torch.stack(blanks).sum(), self._score(*self._feed(rows))
        scores = output.scores + zero.to(output.scores.dtype)
        return replace(output, **{"token_values" if output.token_logprobs is None else "token_logprobs": scores})

    def _score(self, rows: PackedRows, arguments: dict[str, Any], head_loss: HeadLoss | None = None) -> ModelOutput:
        """Scores of the model's states at `rows.scored`, with the loss where the head can make it."""
        raise NotImplementedError

    def _hidden(self, rows: PackedRows, arguments: dict[str, Any]) -> Tensor:
        """`[C, H]`."""
        states = self.model.base_model(**arguments).last_hidden_state
        if self.mtp is not None and torch.is_grad_enabled():
            self.mtp.run(states, rows, arguments)
        return take_rows(states.flatten(0, 1), rows.scored)

    def _feed(self, rows: PackedRows) -> tuple[PackedRows, dict[str, Any]]:
        """The model's keyword arguments, and `rows` with `scored` counting its flattened output."""
        if self.is_packed:
            self._begin_adapters(rows, rows.lengths)
            layout = attention.row_layout(rows.lengths, rows.token_ids.device, shared=rows.shared)
            packed = {"input_ids": rows.token_ids[None], "position_ids": rows.position_ids[None]}
            arguments = {**packed, "use_cache": False, attention.LAYOUT_KWARG: layout}
            if self.multimodal is not None:
                arguments |= self.multimodal.arguments(rows)
            return rows, arguments
        slot, width = _padded_slots(rows)
        self._begin_adapters(rows, [width] * len(rows.lengths))
        token_ids = rows.token_ids.new_zeros(len(rows.lengths) * width)
        mask = torch.zeros_like(token_ids)
        token_ids[slot], mask[slot] = rows.token_ids, 1
        padded = {"input_ids": token_ids.view(-1, width), "attention_mask": mask.view(-1, width)}
        return replace(rows, score_index=slot[rows.score_index]), {**padded, "use_cache": False}

    def _begin_adapters(self, rows: PackedRows, lengths: Sequence[int]) -> None:
        if self.adapters is not None:
            self.adapters.begin(rows.adapters, lengths)

    def _feed_share(self, rows: PackedRows, sequence_group: SequenceGroup) -> tuple[PackedRows, dict[str, Any]]:
        """`_feed` of this rank's slice of the packed tokens."""
        start, stop = sequence_group.token_range(rows)
        return sequence_group.share(rows), {
            "input_ids": rows.token_ids[None, start:stop],
            "position_ids": rows.position_ids[None, start:stop],
            "use_cache": False,
            attention.LAYOUT_KWARG: attention.row_layout(rows.lengths, rows.token_ids.device, sequence_group),
        }


class ValueScorer(HuggingFaceScorer):
    """A sequence classifier with one label, asked at every completion token."""

    def _score(self, rows: PackedRows, arguments: dict[str, Any], head_loss: HeadLoss | None = None) -> ModelOutput:
        """Score of each state, float32 (float64 for a float64 model)."""
        return score_values(self.model.score(self._hidden(rows, arguments)), rows)  # pyright: ignore[reportCallIssue]


class PolicyScorer(HuggingFaceScorer):
    """A causal LM whose logits are never stored."""

    def __init__(self, model: PreTrainedModel, wanted: EngineConfig, *, is_compiled: bool = False) -> None:
        super().__init__(model, is_compiled=is_compiled)
        self.head: LinearHead | None = None  # see `find_linear_head`; with None the model makes its logits itself
        self._wanted = wanted

    def _score(self, rows: PackedRows, arguments: dict[str, Any], head_loss: HeadLoss | None = None) -> ModelOutput:
        """Log-prob (and what else is wanted) of each completion token, and of candidates."""
        if self.head is None or (self.adapters is not None and self.adapters.need_logits):
            # The head does more than one product: let the model make the (C, V) logits.
            logits = take_rows(self.model(**arguments).logits.flatten(0, 1), rows.scored)
            return score_logits(logits, rows, self._wanted)
        output: Any = self.model.get_output_embeddings()
        hidden = self._hidden(rows, arguments)
        return score_states(hidden, output.weight, output.bias, rows, self.head, self._wanted, head_loss)


def check_mapped(
    config: Any,
    backend: str,
    kinds: Sequence[str],
    *,
    layers: Collection[str] = ("full_attention",),
    ropes: Collection[str] = ROPE_TYPES,
    more: Mapping[str, bool] | None = None,
) -> None:
    """Refuse architectures, and variants of them, that a backend with custom layers would get silently wrong.

    Args:
        config: The language model's, of transformers.
        backend: Its name.
        kinds: Model types that it maps.
        layers: Kinds of attention layers that it has.
        ropes: Kinds of rotary tables that it takes from transformers.
        more: Flags by name: whether the model has another variant that the backend has not.

    Raises:
        ModelFolderError: says what it does not map.
    """
    kind, own = config.model_type, set(getattr(config, "layer_types", None) or ())
    if kind not in kinds:
        raise ModelFolderError(
            f"Model type {kind!r} has no mapping to the {backend} backend; mapped are {', '.join(kinds)}. "
            "Use the fsdp backend, which takes any causal LM."
        )
    rope = config.rope_parameters["rope_type"]
    found = {
        f"hidden_act={config.hidden_act}": config.hidden_act != "silu",
        f"layer types {sorted(own)}": not own <= set(layers),
        f"rope type {rope!r}": rope not in ropes,
        "attention_bias=true": kind not in ("qwen2", "glm4_moe", "gpt_oss")
        and bool(getattr(config, "attention_bias", False)),
        "mlp_bias=true": bool(getattr(config, "mlp_bias", False)),
        "attention dropout": bool(getattr(config, "attention_dropout", 0.0)),
        **(more or {}),
    }
    for what, is_there in found.items():
        if is_there:
            raise ModelFolderError(
                f"The {kind} model has {what}, which the {backend} backend does not map. Use the fsdp backend."
            )


def find_linear_head(model: PreTrainedModel) -> LinearHead | None:
    """Compare the model's logits with a bare product on four tokens; None where no scale of its config fits."""
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Linear) or model.base_model is model:
        return None
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        rows = _probe_rows(model)
        want = model(**rows).logits.double()
        bare = output(model.base_model(**rows).last_hidden_state).double()
    model.train(was_training)
    for scale in _scales(config):
        logits = bare * scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if torch.allclose(logits, want, rtol=2e-2, atol=2e-2 * float(want.abs().max())):
            return LinearHead(scale=scale, softcap=softcap)
    return None


def without_layers(model: PreTrainedModel) -> PreTrainedModel:
    """An empty model made real on the CPU without its layers, in place: what `find_linear_head` needs to look at.

    Weights are drawn; those of a vision tower stay untouched memory.
    """
    layers = set(model._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and any(type(layer).__name__ in layers for layer in module):
            del module[:]
    made = make_buffers(model)
    model.to_empty(device="cpu")
    model.tie_weights()
    for name, buffer in made.items():
        set_buffer(model, name, buffer)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        tables += [head.weight for head in (model.get_input_embeddings(), model.get_output_embeddings()) if head]
        for parameter in model.parameters():
            if parameter.ndim == 1 or any(parameter is table for table in tables):
                parameter.normal_(generator=generator)
    return model


def make_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Compute what no folder has, such as the frequencies of rotary embeddings, on the CPU; the model is empty."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue] - transformers leaves those alone
    for name, buffer in list(model.named_non_persistent_buffers()):
        set_buffer(model, name, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()
    return {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}


def set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Put a buffer in the place of the one of that name."""
    owner, _, own = name.rpartition(".")
    setattr(module.get_submodule(owner), own, value)


def _can_pack(model: PreTrainedModel) -> bool:
    """Whether every layer attends through transformers' attention interface and takes positions from outside.

    Or is a gated delta net, whose state can begin anew in each row.
    """
    layers = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"]
    has_nets = layers.count(LINEAR_LAYER) == len(delta_nets(model)) > 0  # transformers calls these not compatible
    attends = has_nets or model.is_backend_compatible()
    takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
    return attends and takes_positions and {*layers} <= (PACKED_LAYERS | {LINEAR_LAYER} if has_nets else PACKED_LAYERS)


def _probe_rows(model: PreTrainedModel) -> dict[str, Any]:
    token_ids = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
    positions = {"position_ids": torch.arange(4, device=model.device)[None]} if _can_pack(model) else {}
    layout = {attention.LAYOUT_KWARG: attention.row_layout([4], model.device)} if _can_pack(model) else {}
    return {"input_ids": token_ids, "use_cache": False, **positions, **layout}


def check_attention(scorer: HuggingFaceScorer) -> None:
    """Run an empty model up to what needs numbers, and refuse attention layers that cannot attend within packed rows.

    Raises:
        ConfigError: they add masks or biases, or do not hand keyword arguments on.
        ModelFolderError: they fail in another way.
    """
    if not scorer.is_packed:
        return
    try:
        with torch.no_grad():
            scorer.model.base_model(**_probe_rows(scorer.model))
    except ConfigError:
        raise
    except Exception as error:  # of modules that look at numbers, which an empty model has not, and of attention
        modules = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
        found = [module for module in modules if isinstance(module, nn.Module) and _attends(module)]
        if found and isinstance(error, RuntimeError) and "meta" not in str(error):
            message = " ".join(str(error).split())
            raise ModelFolderError(f"{type(found[0]).__name__} cannot attend within packed rows: {message}") from error


def _attends(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower()


def _scales(config: Any) -> list[float]:
    """Factors that architectures put on their logits, under the names they give them; 1 first."""
    scales = [1.0]
    scales += [float(value) for name in ("logit_scale", "lm_head_multiplier") if (value := getattr(config, name, None))]
    scales += [1.0 / value for name in ("logits_scaling",) if (value := getattr(config, name, None))]
    return scales


def _padded_slots(rows: PackedRows) -> tuple[Tensor, int]:
    """Slot of each of the T tokens in a right-padded (B, L) block, and L."""
    width = max(rows.lengths)
    row = torch.repeat_interleave(torch.tensor(rows.lengths)).to(rows.token_ids.device)
    return row * width + rows.position_ids, width
