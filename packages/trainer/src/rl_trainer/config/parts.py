"""Keys of the parts that a run is composed of: `model`, `engine`, `rollout`, `agent`, `critic` and `teacher`."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from rl_engine.types import ParallelConfig
from rl_trainer.config._types import NonNegative, Positive  # noqa: TC001 - so it does these


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """A small character-level model, made on the spot and taught a little by supervision before RL takes over."""

    hidden_size: Positive = 224
    """Width."""
    num_layers: Positive = 2
    """Transformer layers."""
    steps: Positive = 400
    """Supervised optimizer steps at most."""
    batch_size: Positive = 256
    """Rows per step."""
    lr: float = 3e-3
    """Peak learning rate."""
    target_accuracy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Stop once the model gives every token of this share of the completions more than half of the probability. (The
    loss would not do: at the same loss one seed solves a fifth of the problems and another half of them.)"""
    num_rows: Positive = 20000
    """Problems in the supervised file."""
    calculator_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of them that are answered by a call of the calculator (Hermes format); the others are answered at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy to train."""

    path: str | None = None
    """A Hugging Face model folder. None builds one from `warmup`."""
    warmup: WarmupConfig | None = None
    """How to build the small model; only with `path` unset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSection:
    """A low-rank adapter that is trained instead of the model; servers get the model with it added in."""

    rank: Positive = 16
    """Columns of A's transpose and of B."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Names of linear layers, such as q_proj; empty: every linear layer but the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSection:
    """The model engine that trains."""

    backend: str = "fsdp"
    """Name of an installed rl-engine backend."""
    world_size: Positive = 1
    """Processes (one GPU each where there are GPUs)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the model is laid out over them, such as {tp: 2}; the rest is data parallel. A backend refuses what it cannot
    do: fsdp takes sp and dp_replicate, megatron the others."""
    lora: LoraSection | None = None
    """Train an adapter; None trains the model."""
    lr: float = 1e-6
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW moment decays."""
    weight_decay: float = 0.01
    """AdamW decoupled decay."""
    max_grad_norm: float = 1.0
    """Gradient norm is clipped to this."""
    lr_warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up."""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: `cosine` falls to nothing at the end of the run."""
    precision: Literal["float32", "float32_high", "float32_medium", "bfloat16"] = "float32"
    """Of parameters and activations; float32_high and float32_medium compute the matrix products inside float32 in
    TF32 or bfloat16 where the processor is faster so (torch.set_float32_matmul_precision)."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the loss that evens out the load of a mixture's experts."""
    router_replay: bool = False
    """A mixture takes the experts that the server chose for each token (arXiv 2510.11370, R3)."""
    async_checkpoints: bool = False
    """Training goes on while a checkpoint is written; until it is whole, --resume takes the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    """The rollout engine that generates."""

    backend: str = "embedded"
    """Name of an installed rl-rollout backend."""
    num_replicas: Positive = 1
    """Servers, each a process of its own."""
    colocated: bool = False
    """Servers share the GPUs of the engine, one on each: they give their memory back while it trains, and it gives its
    back while they generate. With pipeline=sync."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the trainer's log-probs use the same."""
    eval_temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature on held-out rows; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass."""
    max_new_tokens: Positive = 256
    """Longest completion, tokens."""
    max_num_seqs: Positive = 256
    """Requests that one server decodes at a time."""
    max_model_len: Positive = 4096
    """Longest prompt plus completion, tokens."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of that backend alone, such as the command and arguments of a server of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSection:
    """The agent loops that turn rows into trajectories."""

    loop: str = "single_turn"
    """Name of an installed rl-agent loop, for rows that name none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that loop."""
    num_workers: Positive = 1
    """Processes that run loops and score them."""
    max_concurrent: Positive = 2048
    """Rollouts in flight per process."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline of one rollout, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection:
    """What learns beside the policy: the value function of gae and vtrace, or the process reward model of prime."""

    path: str | None = None
    """A Hugging Face folder to start from; None starts from the policy's, a value function with a head of zeros."""
    lr: float = 1e-5
    """Learning rate."""
    clip: Annotated[float, Field(ge=0)] = 0.2
    """A value may leave its old one by this much per step before it stops being pulled; 0 turns that off. Not of
    prime's."""
    warmup_steps: NonNegative = 0
    """First training steps in which the critic learns alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSection:
    """A larger model that the policy is pulled towards on its own completions: on-policy distillation."""

    path: str
    """A Hugging Face folder, with the same tokenizer; with `url` its tokenizer is all that is read."""
    url: str | None = None
    """Of a server that has the teacher already: one of rl-rollout's, or with `model` any OpenAI-compatible one that
    tells prompt_logprobs (/v1 included). With divergence=reverse."""
    model: str | None = None
    """What the server at `url` calls it."""
    divergence: Literal["reverse", "forward", "mixed"] = "reverse"
    """`reverse`: KL(policy, teacher) from the tokens that were sampled; `forward`: KL(teacher, policy) over the
    teacher's likeliest tokens and the rest of the vocabulary as one; `mixed`: both."""
    coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the divergence beside the policy loss."""
    forward_weight: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Of the forward part; mixed only."""
    num_candidates: Positive = 16
    """Of the teacher's likeliest tokens that the forward part compares."""
