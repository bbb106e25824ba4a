"""AdamW by megatron-core's `DistributedDataParallel` and `DistributedOptimizer`.

Stage 1 of ZeRO (Rajbhandari et al., 1910.02054): gradients lie in flat buffers that are reduce-scattered, each rank
steps its shard of them, and parameters are gathered again. Gradients are summed: losses are shares of a whole batch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as AdamConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor, nn

from rl_engine.backends.megatron.layout import megatron_calls
from rl_engine.backends.megatron.weights import Cut
from rl_engine.optimizer import adamw_state, learning_rate, refuse_non_finite

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rl_engine.backends.megatron.layout import Axis, Layout
    from rl_engine.backends.megatron.weights import Entry
    from rl_engine.types import OptimizerConfig

STATES = ("exp_avg", "exp_avg_sq")
MASTER = "master"
STEP = "step"


class DistributedAdamW:
    """AdamW (Loshchilov and Hutter, 1711.05101) over the trained parameters of one rank. A step uses the gradients up.

    Its shards are views of the parameters, or float32 copies (kind `master`) where parameters are narrower.
    """

    def __init__(
        self, chunks: nn.ModuleList, entries: Mapping[str, Entry], layout: Layout, config: OptimizerConfig
    ) -> None:
        """Move the parameters into megatron-core's buffers and allocate state. Collective.

        Args:
            chunks: This rank's `GPTModel`s.
            entries: What each parameter is, by its name in `chunks`; those without an entry are like any other.
            layout: Where this rank stands.
            config: AdamW's numbers.
        """
        self.max_norm = config.max_grad_norm
        """Global gradient norm is clipped to this."""
        self.num_steps = 0.0
        """Steps taken so far."""
        named = {name: parameter for name, parameter in chunks.named_parameters() if parameter.requires_grad}
        for name, parameter in named.items():
            _mark(parameter, entries.get(name))
        settings: Any = chunks[0].config
        is_narrow = settings.params_dtype not in (torch.float32, torch.float64)
        buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=is_narrow)
        with megatron_calls():
            self._chunks: list[Any] = [DistributedDataParallel(settings, buffers, chunk) for chunk in chunks]
            adam = AdamConfig(
                lr=learning_rate(config, 0),
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=config.max_grad_norm,
                bf16=is_narrow,
                params_dtype=settings.params_dtype,
                use_distributed_optimizer=True,
            )
            stays = ParamPredicate(name="no_decay", fn=lambda parameter: not getattr(parameter, "decays", False))
            overrides: dict[Any, Any] = {ParamKey(predicate=stays): {"wd_mult": 0.0}}
            self._adam: Any = get_megatron_optimizer(adam, self._chunks, overrides, use_gloo_process_groups=False)
        self._inner: list[Any] = [part for part in self._adam.chained_optimizers if not part.is_stub_optimizer]
        for part in self._inner:
            _start(part)
        for group in self._adam.param_groups:  # megatron-core's scheduler of rates would
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        self._shards = {
            name: _Shard(parameter, self._inner, layout, entries.get(name)) for name, parameter in named.items()
        }
        self._kinds = (*STATES, MASTER) if is_narrow else STATES
        self._memory = [_Memory(buffer) for buffer in self._buffers()]

    def zero_grad(self) -> None:
        """Drop what has accumulated."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        with megatron_calls():
            self._adam.zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """See `StepOptimizer`."""
        return self._adam.param_groups

    @property
    def state(self) -> Mapping[Any, dict[str, Tensor]]:
        """See `StepOptimizer`; of this rank's shards."""
        return {shard: state for part in self._inner for shard, state in part.state.items()}

    def clip_and_step(self) -> float:
        """See `StepOptimizer`: reduce, clip, step, gather. The gradients are gone, also after an error."""
        try:
            with megatron_calls():
                finalize_model_grads(self._chunks)
                self._adam.prepare_grads()
                norm = float(self._adam.get_grad_norm())
                refuse_non_finite(norm)
                for part in self._inner:
                    clip_grad_by_total_norm_fp32(part.get_parameters(), self.max_norm, norm)
                self._adam.step_with_ready_grads()
            self.num_steps += 1
        finally:
            self.zero_grad()
        return norm

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state by kind of state and parameter name, each in its parameter's shape. Collective."""
        return {kind: {name: shard.whole(kind) for name, shard in self._shards.items()} for kind in self._kinds}

    def load_tensors(self, tensors: Mapping[str, Mapping[str, Tensor]], num_steps: float) -> None:
        """Take what `tensors` gave; parameters that are not narrow are their own master copy."""
        for kind in self._kinds:
            for name, shard in self._shards.items():
                shard.load(kind, tensors[kind][name])
        self.num_steps = num_steps
        for state in self.state.values():
            if STEP in state:
                state[STEP].fill_(num_steps)
        for group in self.param_groups:
            if STEP in group:
                group[STEP] = int(num_steps)

    def to(self, device: torch.device, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move the flat buffers and the state; parameters follow as views."""
        for memory in self._memory:
            memory.to(device, model=model, grad=grad)
        if model:
            self._listen()
        if not optimizer:
            return
        for part in self._inner:
            for state in part.state.values():
                state |= {key: value.to(device) for key, value in state.items()}
            for group in part.shard_fp32_from_float16_groups:
                for shard in group:
                    shard.data = shard.data.to(device)

    def _listen(self) -> None:
        """Hook parameters whose device has changed: torch then drops their gradients' accumulator and its hooks."""
        for chunk in self._chunks:
            for index, parameter in enumerate(filter(lambda each: each.requires_grad, chunk.module.parameters())):
                with torch.enable_grad():
                    accumulator = parameter.view_as(parameter).grad_fn.next_functions[0][0]
                if accumulator is not chunk.grad_accs[index]:
                    accumulator.register_hook(chunk._make_backward_post_hook(parameter))
                    chunk.grad_accs[index] = accumulator

    def _buffers(self) -> Iterable[Any]:
        for chunk in self._chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers


class _Shard:
    """What this rank's optimizer holds of one parameter."""

    def __init__(self, parameter: nn.Parameter, parts: Iterable[Any], layout: Layout, entry: Entry | None) -> None:
        self._parameter = parameter
        self._ranks: Axis = layout.expert_dp if entry is not None and entry.expert_rank is not None else layout.dp
        self._part = next((part for part in parts if parameter in part.model_param_gbuf_map), None)
        if self._part is not None:
            span = self._part._get_model_param_range_map(parameter)["param"]
            self._range, self._shard = slice(span.start, span.end), _shard_of(self._part, parameter)

    def _state(self, kind: str) -> Tensor:
        assert self._part is not None
        return self._shard if kind == MASTER else self._part.state[self._shard][kind]

    def whole(self, kind: str) -> Tensor:
        """State of the whole parameter, in its shape. Collective."""
        wide = torch.promote_types(self._parameter.dtype, torch.float32)
        full = torch.zeros(self._parameter.numel(), dtype=wide, device=self._parameter.device)
        if self._part is not None:
            full[self._range] = self._state(kind).detach().to(full.device)
        return self._ranks.all_reduce(full).view(self._parameter.shape)

    def load(self, kind: str, full: Tensor) -> None:
        """Take this rank's shard of the state of the whole parameter."""
        with torch.no_grad():
            if self._part is not None:
                self._state(kind).copy_(full.flatten()[self._range])
            if kind == MASTER:
                self._parameter.copy_(full)


class _Memory:
    """One of megatron-core's flat buffers, whose memory is let go while its numbers are elsewhere."""

    def __init__(self, buffer: Any) -> None:
        self._buffer, self._home = buffer, buffer.grad_data.device
        self._sizes = {name: getattr(buffer, name).untyped_storage().nbytes() for name in ("param_data", "grad_data")}
        self._away: dict[str, Tensor] = {}

    def to(self, device: torch.device, *, model: bool, grad: bool) -> None:
        for name, is_wanted in (("param_data", model), ("grad_data", grad)):
            if is_wanted and (device == self._home or name in self._away):
                self._bring_back(name)
            if is_wanted and device != self._home:
                self._take_away(name, device)
        if model:
            self._attach()

    def _take_away(self, name: str, device: torch.device) -> None:
        data = getattr(self._buffer, name)
        self._away[name] = torch.empty_like(data, device=device).copy_(data)
        data.untyped_storage().resize_(0)

    def _bring_back(self, name: str) -> None:
        if (away := self._away.pop(name, None)) is not None:
            data = getattr(self._buffer, name)
            data.untyped_storage().resize_(self._sizes[name])
            data.copy_(away)

    def _attach(self) -> None:
        """Parameters become views of where their numbers are."""
        flat: Any = self._away.get("param_data", self._buffer.param_data)
        for parameter, (start, stop, _) in self._buffer.param_index_map.items():
            parameter.data = flat[start:stop].view(parameter.shape)


def _start(part: Any) -> None:
    """State before the first step. torch's AdamW counts steps there, Transformer Engine's and Apex's by group."""
    if isinstance(part.optimizer, torch.optim.AdamW):
        for shard in (shard for group in part.param_groups for shard in group["params"]):
            part.state[shard] |= adamw_state(shard)
        return
    part.init_state_fn(part.optimizer)
    for group in part.param_groups:
        group[STEP] = 0


def _shard_of(part: Any, parameter: nn.Parameter) -> Tensor:
    """This rank's shard of a parameter among megatron-core's groups of them."""
    for whole, shards in (
        (part.model_fp32_groups, part.shard_fp32_groups),
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
    ):
        for group, found in zip(whole, shards, strict=True):
            for candidate, shard in zip(group, found, strict=True):
                if candidate is parameter:
                    return shard
    raise KeyError(parameter)


def _mark(parameter: Any, entry: Entry | None) -> None:
    """Set what megatron-core reads off a parameter: where it is reduced, and whether its gradient counts twice."""
    parameter.decays = parameter.ndim > 1 or (entry is not None and entry.index is not None)  # as where it is joined
    if entry is None:
        return
    parameter.tensor_model_parallel = entry.cut != Cut.WHOLE or entry.expert_rank is not None
    if entry.expert_rank is not None:
        parameter.allreduce = False  # over the ranks that hold this expert, also where `ep` is 1 and `tp` is not,
        parameter.sequence_parallel = False  # which are all that have tokens of it
    if entry.is_mtp:
        parameter.shared = True  # which megatron-core leaves out of the norm: the policy is clipped as without it
    if entry.is_tied:
        parameter.shared_embedding = True
        parameter.shared = entry.is_copy
