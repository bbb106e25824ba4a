"""The values that rl-engine takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

from rl_engine.errors import ConfigError
from rl_engine.types.manifest import digest_files as digest_files
from rl_engine.types.manifest import find_damage as find_damage
from rl_engine.types.manifest import read_manifest as read_manifest
from rl_engine.types.manifest import write_manifest as write_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDict
    from torch import Tensor

PeftConfig = Mapping[str, Any]
"""A peft adapter configuration as its JSON mapping."""


_MOMENTUM = 0.95


class Precision(StrEnum):
    """Number format of parameters and activations."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """Activations and gathered parameters; the optimizer's copy stays float32."""
    FLOAT64 = "float64"
    """For oracles and property tests."""
    AUTO = "auto"
    """bfloat16 where the device multiplies it, else float32: see `rl_engine.auto_precision`."""


class MatmulPrecision(StrEnum):
    """Precision of float32 matrix products, as in `torch.set_float32_matmul_precision`."""

    HIGHEST = "highest"
    """In float32."""
    HIGH = "high"
    """In TF32 or three bfloat16 products, where the device has them."""
    MEDIUM = "medium"
    """In bfloat16 with float32 sums, where the device has it."""


class Bridge(StrEnum):
    """Use of Megatron-Bridge by the megatron backend."""

    AUTO = "auto"
    """Families that the backend does not map itself are read by Bridge, where it is installed."""
    OWN = "own"
    """They are rejected."""


class Fp8(StrEnum):
    """Scaling of float8 matrix products in the layers."""

    OFF = "off"
    """None are made."""
    TENSORWISE = "tensorwise"
    """By the largest number of each tensor (`fsdp`, `megatron`)."""
    ROWWISE = "rowwise"
    """By the largest number of each row (`fsdp`)."""
    BLOCKWISE = "blockwise"
    """By blocks of 128 numbers, as DeepSeek-V3's (2412.19437) (`megatron`)."""
    MXFP8 = "mxfp8"
    """By blocks of 32 numbers (`megatron`, on Blackwell)."""

    @classmethod
    def _missing_(cls, value: object) -> Fp8 | None:
        return cls.OFF if value is False else None  # as YAML reads off


class Mtp(StrEnum):
    """Treatment of a folder's layers for multi-token prediction (DeepSeek-V3, GLM-4.5, Qwen3-Next)."""

    REFUSE = "refuse"
    """Such a folder is refused."""
    FREEZE = "freeze"
    """Neither computed nor trained; `save_model` and `exports_mtp` give them as they were."""
    TRAIN = "train"
    """Trained along with the policy, which they do not change: one layer of DeepSeek-V3 or GLM-4.5 (`fsdp`, `megatron`)
    or of Qwen3-Next and Qwen3.5 (`fsdp`)."""


class Head(StrEnum):
    """Head of the model: its output for a completion token."""

    LM = "lm"
    """The token's log-prob: policy, reference, SFT, DPO."""
    VALUE = "value"
    """Value of the state *before* the token, which has not read it: a critic."""
    REWARD = "reward"
    """Value of the state *after* the token: a reward model, whose outcome is that of the last token."""


class ModelInit(StrEnum):
    """Source of the weights."""

    PRETRAINED = "pretrained"
    """The safetensors files of the model folder."""
    RANDOM = "random"
    """The architecture's own initialisation, seeded; the folder needs only its config."""


class OptimizerKind(StrEnum):
    """The rule of an optimizer step."""

    ADAMW = "adamw"
    """Loshchilov and Hutter, 1711.05101."""
    MUON = "muon"
    """Muon (2502.16982) for the matrices of decoder layers, its update scaled to the size of AdamW's, so that both have
    one `lr` and `weight_decay`; AdamW for embedding, head, norms, biases and joined experts. fsdp and torchtitan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule. A number out of range raises `ConfigError`."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    """AdamW, or Muon with AdamW."""
    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW moment decays."""
    eps: float = 1e-8
    """AdamW denominator term."""
    momentum: float = _MOMENTUM
    """Muon's, with Nesterov's look ahead."""
    weight_decay: float = 0.01
    """Decoupled weight decay; not applied to one-dimensional parameters."""
    max_grad_norm: float = 1.0
    """Global gradient norm is clipped to this."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    total_steps: int | None = None
    """Steps over which the rate decays to `min_lr_ratio`; None keeps it constant."""
    min_lr_ratio: float = 0.0
    """Final rate over peak rate (cosine decay)."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        _need_named("optimizer.kind", self.kind, OptimizerKind)
        is_muon = self.kind == OptimizerKind.MUON
        for name, is_met, allowed in (
            ("momentum", 0 <= self.momentum < 1, "from 0 to below 1"),
            ("momentum", is_muon or self.momentum == _MOMENTUM, "left out without kind=muon"),
            ("lr", self.lr >= 0 and isfinite(self.lr), "0 or more"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "from 0 to below 1"),
            ("eps", self.eps > 0, "above 0"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("max_grad_norm", self.max_grad_norm > 0, "above 0 (inf: no clipping)"),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
            ("total_steps", self.total_steps is None or self.total_steps >= 1, "1 or more, or None"),
            ("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "from 0 to 1"),
            ("min_lr_ratio", self.min_lr_ratio == 0 or self.total_steps is not None, "0 without total_steps"),
        ):
            _need(is_met, f"optimizer.{name}", getattr(self, name), allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW's numbers for one step of one adapter; defaults are those of Tinker's client."""

    lr: float = 1e-4
    """Learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-12
    """Denominator term."""
    weight_decay: float = 0.0
    """Decoupled weight decay; not applied to one-dimensional parameters."""
    grad_clip_norm: float = 0.0
    """Global gradient norm is clipped to this; 0: no clipping."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        for name, is_met, allowed in (
            ("lr", self.lr >= 0 and isfinite(self.lr), "0 or more"),
            ("beta1", 0 <= self.beta1 < 1, "from 0 to below 1"),
            ("beta2", 0 <= self.beta2 < 1, "from 0 to below 1"),
            ("eps", self.eps > 0 and isfinite(self.eps), "above 0"),
            ("weight_decay", self.weight_decay >= 0 and isfinite(self.weight_decay), "0 or more"),
            ("grad_clip_norm", self.grad_clip_norm >= 0, "0 (no clipping) or more"),
        ):
            _need(is_met, f"adam.{name}", getattr(self, name), allowed)


class LoraExport(StrEnum):
    """Form in which a LoRA adapter is exported."""

    MERGED = "merged"
    """The whole model with the adapter added in, under its own names: any server takes it."""
    ADAPTER = "adapter"
    """The adapter alone, under the names that peft gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """A low-rank adapter, the only thing trained (Hu et al., 2106.09685), as made by peft."""

    rank: int = 16
    """Columns of A's transpose and of B."""
    alpha: float = 32.0
    """The adapter is scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout rate of the adapter's input while training."""
    target_modules: tuple[str, ...] = ()
    """Names of linear layers, such as q_proj; empty: every linear layer but the head (of a mixture whose experts are
    joined in one tensor, those of attention). `experts` is the weights of such joined experts (fsdp, without `ep`)."""
    export: LoraExport = LoraExport.MERGED
    """Form of `get_per_tensor_param` and `save_model`."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        _need_named("lora.export", self.export, LoraExport)
        _need(self.rank >= 1, "lora.rank", self.rank, "1 or more")
        _need(self.alpha > 0, "lora.alpha", self.alpha, "above 0")
        _need(0 <= self.dropout < 1, "lora.dropout", self.dropout, "from 0 to below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Layout of one model over ranks; the ranks that are left over are data parallel.

    The default is data parallelism alone. A backend refuses what it cannot do: fsdp takes `sp`, `dp_replicate` and
    `ep`, megatron all but the first two.
    """

    tp: int = 1
    """Tensor-parallel ranks: every weight matrix is cut (Shoeybi et al., 1909.08053)."""
    pp: int = 1
    """Pipeline-parallel ranks: every rank has its share of the layers (Narayanan et al., 2104.04473)."""
    ep: int = 1
    """Expert-parallel ranks: every rank has its share of the experts, to which tokens travel (Lepikhin et al.,
    2006.16668); taken from the data-parallel ranks. On fsdp the rest of them shard each expert."""
    vpp: int = 1
    """Virtual pipeline stages: the layers of every pipeline rank are this many pieces that are not adjacent,
    which shortens the time that ranks wait (interleaved 1F1B, Narayanan et al., 2104.04473). Needs `pp` above 1."""
    cp: int = 1
    """Context-parallel ranks, which cut the tokens of every micro-batch and trade heads for tokens in attention (as
    `sp` does on fsdp, and Megatron's `cp_comm_type=a2a`); a micro-batch then has up to `cp * max_tokens_per_gpu`
    tokens."""
    sequence_parallel: bool = False
    """Cut activations between tensor-parallel regions along the tokens (Korthikanti et al., 2205.05198)."""
    sp: int = 1
    """Ranks that cut the tokens of every micro-batch and trade heads for tokens in attention (Jacobs et al.,
    2309.14509); a micro-batch then has up to `sp * max_tokens_per_gpu` tokens."""
    dp_replicate: int = 1
    """Copies of the sharded model, one on each group of neighbouring ranks (hybrid sharding): parameters are gathered
    within a group, gradients are summed over all."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "vpp", "cp", "sp", "dp_replicate"):
            _need(getattr(self, name) >= 1, f"parallel.{name}", getattr(self, name), "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Every rank of an engine gets the same ones.

    A value that no backend could honour raises `ConfigError` here; what depends on backend, model and ranks is refused
    by `Engine.check`.
    """

    model_path: str
    """A Hugging Face model folder."""
    init: ModelInit = ModelInit.PRETRAINED
    """Source of the weights."""
    dist_checkpoint: str | None = None
    """Folder of weights in Megatron-LM's format (megatron-core's `dist_checkpointing`), or one with its iterations,
    read in the place of the weights of `model_path`, which still gives config and tokenizer. megatron alone."""
    head: Head = Head.LM
    """The model's head: what it gives for a completion token. A folder without the scalar head that `value` and
    `reward` need (a causal LM) gets one of zeros; `save_model` then writes a sequence classifier with one label, in
    Hugging Face's layout."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the model; needs `pip install 'rl-engine[lora]'`."""
    freeze_vision: bool = False
    """Leave the vision tower of a model that takes images as it is, the layer that merges its patches included, and
    without adapters (fsdp alone)."""
    dropout: bool = False
    """Train with the model's own dropout (fsdp alone). False: all of it is off, and so is the noise of routers: ratios
    compare log-probs of one model, not of two random parts of it. An adapter's is `lora.dropout`."""
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    """None builds a frozen engine (a reference): no optimizer state, no gradients."""
    precision: Precision = Precision.FLOAT32
    """Number format of parameters and activations; log-probs, losses and reductions are never narrower than float32."""
    fp8: Fp8 = Fp8.OFF
    """Make the products of the layers' linear modules in float8, forward and backward: `fsdp` by torchao, but for
    experts, `megatron` by Transformer Engine. Weights, gradients and the optimizer's state keep their format; embedding
    and head are as before. Needs precision=bfloat16 and a GPU of compute capability 8.9."""
    transformer_engine: bool = True
    """Build megatron's layers from Transformer Engine's modules where it is installed, on a GPU in bfloat16: linear
    layers, grouped experts, attention. False: from megatron-core's own."""
    bridge: Bridge = Bridge.AUTO
    """Whether megatron takes families beyond its own from Megatron-Bridge, where that is installed."""
    matmul_precision: MatmulPrecision = MatmulPrecision.HIGHEST
    """Precision of matrix products inside `forward_backward_batch`; matters for float32 only."""
    max_tokens_per_gpu: int = 16384
    """Tokens (prompt and completion) of one micro-batch; those that its rows share count once."""
    prefix_sharing: bool | None = None
    """Feed the model tokens once that several rows of a micro-batch begin with (a prompt, and the turns up to where
    trajectories branch, a tree of any depth), and keep such rows together: the same numbers for less work and memory.
    None: where backend, model and layout allow it, as `check` reports; true is refused where they do not."""
    temperature: float = 1.0
    """Log-probs are of softmax(logits / temperature)."""
    entropy: bool = False
    """Also compute the entropy of every predicting distribution (`ModelOutput.entropy`)."""
    sum_pi_squared: bool = False
    """Also compute the sum of squared probabilities of every predicting distribution, without gradient
    (`ModelOutput.sum_pi_squared` and a column of that name), as optimal baselines need it; costs one more product with
    the head, without a backward pass."""
    router_aux_loss_coef: float = 0.0
    """Weight of the auxiliary loss that evens out the load of experts, summed over layers (Fedus et al., 2101.03961),
    its load that of the whole logical batch. Added to the injected loss; reported unweighted as `router_aux_loss`. The
    load is counted in a separate forward pass, unless the batch has `routed_experts`."""
    num_candidates: int = 0
    """Also give, without gradient, each completion token's most likely alternatives: columns `candidate_token_ids` and
    `candidate_logprobs`, with this many of each per token, the likeliest first."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout of the model over ranks."""
    activation_checkpointing: bool | None = False
    """Recompute each layer in the backward pass. None: on a GPU, whose memory is scarce, and not on a CPU."""
    recompute: tuple[str, ...] = ()
    """Recompute these parts of each layer in the backward pass: `attention`, `mlp`, `moe`, `norm` (megatron: also the
    names of its `recompute_modules`; its `attention` is `core_attn` alone). fsdp and megatron; not with
    `activation_checkpointing`, which recomputes the whole layer."""
    activation_offload: bool | tuple[str, ...] = False
    """Keep what the backward pass needs of the forward pass in page-locked memory of the CPU, parameters excepted (with
    `activation_checkpointing` the inputs of layers), or that of these parts alone (fsdp, megatron). Refused without a
    GPU."""
    torch_compile: bool = False
    """Compile each layer with `torch.compile`, but for its attention over packed rows; fsdp alone. Takes a minute, and
    again where micro-batches become several times as long."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in the memory of the CPU, which takes the step; the GPU has the
    parameters of a layer while it computes (FSDP2's `CPUOffloadPolicy`). fsdp alone; refused without a GPU."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in the memory of the CPU between steps; a step brings it to the GPU and takes it back.
    Refused without a GPU, and with `cpu_offload`, which keeps it there always."""
    mtp: Mtp = Mtp.REFUSE
    """Treatment of layers for multi-token prediction. `train`: in every step the layer behind the last learns to
    predict completion tokens with `loss_mask` 1 from two tokens before (2412.19437, section 2.2), reported as
    `mtp_loss`. Trunk, embedding and head are given to it detached, and its gradient is not counted in the norm: the
    policy's steps are those without it. A frozen engine leaves the layers as with `freeze`."""
    exports_mtp: bool = False
    """Weights for servers include the layers for multi-token prediction, after the policy's and as whole tensors, but
    for their copies of embedding and head. Needs `mtp`."""
    async_checkpoints: bool = False
    """`save_checkpoint` returns once everything is copied to the CPU; a thread writes it. A failure is raised by the
    next `save_checkpoint` or `load_checkpoint`, or by `close`, which wait for it."""
    seed: int = 0
    """Seeds initialisation and dropout."""
    timeout_s: float = 600.0
    """Deadline of every collective, seconds."""

    def __post_init__(self) -> None:
        """Refuse names that are not among the allowed ones, and numbers out of range."""
        _need_named("precision", self.precision, Precision)
        _need_named("matmul_precision", self.matmul_precision, MatmulPrecision)
        _need_named("head", self.head, Head)
        _need_named("init", self.init, ModelInit)
        _need_named("mtp", self.mtp, Mtp)
        _need_named("fp8", self.fp8, Fp8)
        _need_named("bridge", self.bridge, Bridge)
        if self.fp8 != Fp8.OFF:
            for name, value, instead in (
                ("precision", self.precision, Precision.BFLOAT16),
                ("lora", self.lora, None),
            ):
                if value != instead:
                    raise ConfigError(
                        f"fp8 is {self.fp8} and {name} is {value}; it needs {name}={instead}. Or fp8=off."
                    )
        for name, is_met, allowed in (
            ("temperature", self.temperature > 0 and isfinite(self.temperature), "above 0"),
            ("max_tokens_per_gpu", self.max_tokens_per_gpu >= 1, "1 or more"),
            ("timeout_s", self.timeout_s > 0, "above 0"),
            ("num_candidates", self.num_candidates >= 0, "0 (none) or more"),
            ("router_aux_loss_coef", self.router_aux_loss_coef >= 0, "0 (off) or more"),
        ):
            _need(is_met, name, getattr(self, name), allowed)
        if self.dist_checkpoint is not None and self.init == ModelInit.RANDOM:
            raise ConfigError("dist_checkpoint is set and init is random. Use init=pretrained, or leave it out.")
        if self.optimizer_offload and (self.cpu_offload or self.optimizer is None):
            reason = "cpu_offload keeps its state on the CPU already" if self.cpu_offload else "there is no optimizer"
            raise ConfigError(f"optimizer_offload is true and {reason}. Set it to false.")
        if self.activation_offload and self.optimizer is None:
            raise ConfigError("activation_offload is true and a frozen engine keeps no activations. Set it to false.")
        if self.treats_parts and self.activation_checkpointing:
            raise ConfigError(
                f"recompute is {list(self.recompute)}, activation_offload is {self.activation_offload}, and "
                "activation_checkpointing is true, which recomputes whole layers. Set it to false, or name no parts."
            )
        if self.trains_mtp:
            for name, value, instead in (
                ("head", self.head, Head.LM), ("init", self.init, ModelInit.PRETRAINED), ("lora", self.lora, None),
            ):  # fmt: skip
                if value != instead:
                    raise ConfigError(
                        f"mtp is train and {name} is {value}; it trains with {name}={instead}. Or mtp=freeze."
                    )
        if self.exports_mtp and (self.mtp == Mtp.REFUSE or self.exports_adapter):
            raise ConfigError("exports_mtp is true; it needs mtp=freeze or train, and whole weights, not an adapter.")
        for name in ("entropy", "sum_pi_squared", "num_candidates"):
            if getattr(self, name) and self.head != Head.LM:
                raise ConfigError(f"{name} is {getattr(self, name)}; it needs head=lm, and head is {self.head}.")

    @property
    def exports_adapter(self) -> bool:
        """Whether weights leave the engine as an adapter alone."""
        return self.lora is not None and self.lora.export == LoraExport.ADAPTER

    @property
    def treats_parts(self) -> bool:
        """Whether activations of some parts of layers are recomputed or offloaded."""
        return bool(self.recompute or (isinstance(self.activation_offload, tuple) and self.activation_offload))

    @property
    def trains_mtp(self) -> bool:
        """Whether layers for multi-token prediction are computed and trained."""
        return self.mtp == Mtp.TRAIN and self.optimizer is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Shard of a tensor: the box that one rank holds, in the coordinates of the whole tensor."""

    name: str
    """Hugging Face name of the tensor."""
    shape: tuple[int, ...]
    """Elements of the whole tensor along each axis."""
    offsets: tuple[int, ...]
    """First index of the box along each axis, elements."""
    sizes: tuple[int, ...]
    """Its length along each axis, elements; 0 if the rank holds nothing of the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """Denominators of the logical batch, summed over all data-parallel ranks and micro-batches."""

    tokens: float
    """Completion tokens with loss_mask 1."""
    sequences: float
    """Rows with at least one such token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """Output of the model for one micro-batch. Token tensors are packed: T completion tokens of B rows.

    Read `logprobs` or `values`, whichever the engine's head gives; the other raises `ConfigError`.
    """

    token_logprobs: Tensor | None = None
    """Log-probs that the property `logprobs` returns; None with another head."""
    token_values: Tensor | None = None
    """Values that the property `values` returns; None with another head."""
    entropy: Tensor | None = None
    """(T,) float32 entropy of the predicting distribution, nats; None unless asked for."""
    sum_pi_squared: Tensor | None = None
    """(T,) float32 sum of squared probabilities of the predicting distribution, no gradient; None unless asked for."""
    token_candidate_logprobs: Tensor | None = None
    """Log-probs that the property `candidate_logprobs` returns; None without the column."""
    top_token_ids: Tensor | None = None
    """(T, K) int64, the K most likely tokens, the likeliest first; None unless `num_candidates` asks for them."""
    top_logprobs: Tensor | None = None
    """(T, K) float32, their log-probs, no gradient."""
    cu_seqlens: Tensor
    """(B + 1,) int64 row offsets into T."""
    counts: BatchCounts
    """Denominators of the whole logical batch."""

    @property
    def logprobs(self) -> Tensor:
        """(T,) float32, log-prob of each completion token under the current weights; carries gradient when training."""
        return _given(self.token_logprobs, "log-probs", "head=lm")

    @property
    def values(self) -> Tensor:
        """(T,) float32, the scalar head's number for each completion token; carries gradient when training."""
        return _given(self.token_values, "values", "head=value or head=reward")

    @property
    def candidate_logprobs(self) -> Tensor:
        """(T, K) float32, log-probs of the column `candidate_token_ids`; carries gradient when training."""
        return _given(self.token_candidate_logprobs, "candidate log-probs", "head=lm and a column candidate_token_ids")

    @property
    def scores(self) -> Tensor:
        """(T,) what the head gives, log-probs or values."""
        return self.values if self.token_logprobs is None else self.token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """Result of one call of `forward_backward_batch`."""

    columns: TensorDict
    """Jagged `logprobs` (and `entropy`, `sum_pi_squared`, `candidate_token_ids`, `candidate_logprobs`), or `values`;
    one row per row of this rank's input, detached."""
    metrics: dict[str, float]
    """Loss and the loss function's metrics, summed over micro-batches and ranks."""
    num_micro_batches: int
    """Micro-batches that ran on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """Row of a worker's batch: one sequence, the adapter it runs under, and what its loss reads. N tokens."""

    adapter: str | None = None
    """Adapter of the row; None: the base model."""
    token_ids: Sequence[int]
    """N tokens that the model is fed."""
    target_token_ids: Sequence[int] | Sequence[Sequence[int]]
    """Token scored at each of the N positions, usually the one that follows; or K tokens at each of them."""
    inputs: Mapping[str, Sequence[float] | Sequence[Sequence[float]]] = field(default_factory=dict[str, Any])
    """Columns of the loss, N entries each (N x K where K tokens are scored): `weights`, `logprobs`, `advantages`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOutput:
    """Result of a worker's pass over rows."""

    logprobs: list[Tensor]
    """(N,) or (N, K) float32 on the CPU, log-probs of the targets of each row that this rank passed, in its order."""
    metrics: dict[str | None, dict[str, float]]
    """By adapter, `loss` and the metrics of its loss function over the rows of all ranks; a NaN is in its own alone."""


def _given(tensor: Tensor | None, what: str, wanted: str) -> Tensor:
    if tensor is None:
        raise ConfigError(f"The loss reads {what}, which this engine does not give; it needs {wanted}.")
    return tensor


def _need(is_met: bool, name: str, value: object, allowed: str) -> None:
    if not is_met:
        raise ConfigError(f"{name} is {value}; it must be {allowed}.")


def _need_named(name: str, value: str, allowed: type[StrEnum]) -> None:
    if value not in list(allowed):
        raise ConfigError(f"{name} is {str(value)!r}; allowed are {', '.join(allowed)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about the model in a Hugging Face folder, by its configuration."""

    config: Mapping[str, Any]
    """Values of `config.json`; of a multimodal model, those of its language model are on top."""
    image_columns: tuple[str, ...]
    """Columns of images, videos and sounds that it takes; empty where it takes none, or there is no image processor."""
    why_blind: str
    """Why it takes no images, a clause that names its family."""
    longrope_limit: int | None
    """Longest sequence for which longrope does not depend on the batch, tokens; None: it does not use longrope."""
    is_pipeline: bool = False
    """Whether it is a pipeline of diffusers: several models, each in a folder of its own."""

    @property
    def takes_images(self) -> bool:
        """Whether it takes images."""
        return bool(self.image_columns)

    @property
    def takes_audio(self) -> bool:
        """Whether it takes sounds."""
        return "audio_feature_lengths" in self.image_columns

    @property
    def takes_videos(self) -> bool:
        """Whether it takes videos; where it does not, their frames are images."""
        return "video_grid_thw" in self.image_columns


class FolderTokens(Protocol):
    """Special tokens of a Hugging Face folder."""

    @property
    def num_tokens(self) -> int | None:
        """Ids of the tokenizer: one more than its highest. None without a `tokenizer.json`."""
        ...

    @property
    def lines(self) -> list[str]:
        """Lines of a plan: the tokens that end a turn, and a warning if no file lists the chat template's."""
        ...

    def ended(self, token_ids: Sequence[int]) -> list[int]:
        """An assistant's turn up to the token that ends it, which is added if there is none."""
        ...
