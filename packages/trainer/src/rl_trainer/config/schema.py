"""Configuration schema: one dataclass per section, which checks its own keys when it is made.

Errors of keys together are `PlanError`s, each a sentence; rules between sections are in `algorithms/rules.py`,
`pipeline/rules.py` and `planning/plan.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from rl_agent.registry import loop_of_environments
from rl_engine.types import (
    EngineConfig,
    Head,
    LoraExport,
    MatmulPrecision,
    ModelInit,
    OptimizerConfig,
    ParallelConfig,
    Precision,
)
from rl_rollout.types import ServerConfig
from rl_trainer.errors import ConfigError, PlanError

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
AggregationName = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
"""Aggregation of token losses to one number; seq-mean-token-sum-norm divides by rollout.max_new_tokens."""
Bounds = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]]


Correction = Literal["none", "tis", "icepop", "sequence_tis", "sequence_icepop"]
Rejection = Literal[
    "none",
    "token_k1", "token_k2", "token_k3",
    "sequence_k1", "sequence_k2", "sequence_k3",
    "sequence_mean_k1", "sequence_mean_k2", "sequence_mean_k3",
    "sequence_max_k1", "sequence_max_k2", "sequence_max_k3",
]  # fmt: skip


def refuse_unused(section: Any, where: str, unless: str, *keys: str) -> None:
    """Refuse keys of `section` that are set and would do nothing.

    Raises:
        PlanError: names the key, and what it needs.
    """
    for key in keys:
        value, usual = getattr(section, key), _default(section, key)
        if value != usual:
            raise PlanError(
                f"{where}.{key}={value} does nothing unless {unless}; leave it out, or set it back to {usual}"
            )


def _default(section: Any, key: str) -> Any:
    found = next(f for f in fields(section) if f.name == key)
    return found.default if found.default_factory is MISSING else found.default_factory()


def has_ray() -> bool:
    """Whether Ray is installed; it is not imported."""
    return find_spec("ray") is not None


ENGINE_POOL = "engine"
"""The policy's pool, of `engine.world_size` processes."""
ADAPTER = "policy"
"""Name of the trained adapter on the servers, where the adapter alone is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaSection:
    """EMA reference: how fast the reference of the KL follows the policy."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Share of its weights that the reference keeps per update; the rest is the policy's. 0 copies the policy."""
    every: Positive = 1
    """Training steps between two updates; each writes and reads the model once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """Algorithm: advantage estimator, policy loss, correction, KL, entropy, optimised per token."""

    advantage: str = "grpo"
    """Registered advantage estimator."""
    advantage_options: Mapping[str, float] = field(default_factory=dict)
    """Options of the estimator, such as {step_weight: 0.5} with advantage=gigpo; ALGORITHMS.md lists them."""
    stages: tuple[str, ...] = ()
    """Stages: plug-ins that write columns before the advantages are computed, in this order."""
    loss: str = "ppo"
    """Registered policy loss."""
    loss_options: Mapping[str, float] = field(default_factory=dict)
    """Options of the policy loss, such as {clip_low: 0.2, clip_high: 0.28, clip_dual: 3.0} with loss=ppo; ALGORITHMS.md
    lists them with their defaults."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per model token, of the estimators that look ahead."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of advantage=gae and vtrace."""
    aggregation: AggregationName = "token-mean"
    """Aggregation of token losses to one number, the critic's too; seq-mean-token-sum-norm divides by
    rollout.max_new_tokens."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL penalty against the frozen start policy; 0 starts no reference."""
    kl_in_reward: bool = False
    """Take the penalty off the rewards, token by token, instead of adding it to the loss."""
    kl_target: Annotated[float, Field(ge=0)] = 0.0
    """KL per token that the coefficient is steered to (arXiv 1909.08593); only with kl_in_reward; 0 keeps the
    coefficient."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+", "k3*"] = "k3"
    """Estimator of that KL; in the loss `+` takes the gradient of k2, and `k3*` is k3 times the ratio to the old
    policy, without bias where the sampler is not the policy under update (arXiv 2512.02556)."""
    ref_ema: EmaSection | None = None
    """The reference follows the policy; None keeps the start policy."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the entropy bonus; with entropy_target its first value."""
    entropy_target: Annotated[float, Field(ge=0)] = 0.0
    """Entropy per token, nats, below which the policy is kept from falling: the coefficient moves by entropy_step after
    each optimizer step, and a bonus is paid while the entropy is at most the target (arXiv 2505.22312); 0: fixed."""
    entropy_step: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Step by which the entropy coefficient moves, within 0 and 1."""
    mask_truncated: bool = False
    """Learn nothing from completions that were cut off by their length (or the deadline of the rollout): they have no
    term in any loss and count in no mean, and their rewards stay in the baseline of their group (arXiv 2503.14476)."""
    top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the step's tokens, those of largest entropy before the update, that have a policy gradient (arXiv
    2506.01939, which takes 0.2); means divide by all tokens still, and KL and entropy bonus are those of all."""
    off_policy_mask: Annotated[float, Field(ge=0)] = 0.0
    """Completions of negative advantage have no policy gradient where the mean of log(sampler / policy under update)
    over their tokens is above this, nats (arXiv 2512.02556); 0: all have."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """`recompute`: by the engine before the update, in a separate pass unless there is one mini-batch, whose update
    computes them; `rollout`: take the sampler's."""
    correction: Correction = "none"
    """Weight of a token for the sampler's differing probabilities: `tis` truncates the ratio engine / sampler at the
    upper bound, `icepop` drops what is outside the bounds; the ratio is the token's own, or its whole completion's
    (`sequence_tis`, `sequence_icepop`). With old_logprobs=rollout the engine's side is the policy under update, and the
    loss one without its own ratio, such as reinforce."""
    correction_bounds: Bounds | None = None
    """Bounds of the correction's ratio, [low, high]; None: [0.5, 2], for tis [0, 2]."""
    rejection: Rejection = "none"
    """Leave out tokens, or whole completions (by the sum, mean or largest of their tokens), whose probabilities differ
    too much between engine and sampler: LEVEL_DIVERGENCE, such as token_k1 or sequence_mean_k3. k1 bounds the ratio
    engine / sampler on both sides, k2 and k3 are distances. They lose every term of the loss: policy, KL, entropy,
    teacher. With old_logprobs=rollout the engine's side is the policy under update."""
    rejection_bounds: Bounds | None = None
    """Bounds of the rejection's ratio or distance, [low, high]; None: [0.5, 2], for distances [0, 2]."""
    rejection_counts: Literal["before", "after"] = "before"
    """Which tokens and completions the aggregation's means divide by: those of the mini-batch `before` rejection, so
    that a token's weight does not depend on what else was rejected, or those left `after` it (with
    old_logprobs=recompute, in a separate pass)."""

    def __post_init__(self) -> None:
        if self.kl_coef == 0:
            self._refuse("algorithm.kl_coef is positive", "kl_in_reward", "kl_estimator", "ref_ema")
        if not self.kl_in_reward:
            self._refuse("algorithm.kl_in_reward is set", "kl_target")
        elif self.kl_estimator.endswith(("+", "*")):
            raise PlanError(
                f"algorithm.kl_estimator={self.kl_estimator} is a gradient's, and a penalty in the rewards has none; "
                f"set kl_estimator={self.kl_estimator[:-1]}"
            )
        if self.entropy_target == 0:
            self._refuse("algorithm.entropy_target is positive", "entropy_step")
        elif self.entropy_coef > 1:
            raise PlanError(
                f"algorithm.entropy_coef={self.entropy_coef:g} is where a coefficient begins that entropy_target keeps "
                "within 0 and 1; give such a one"
            )
        if self.top_entropy < 1 and self.old_logprobs == "rollout":
            raise PlanError(
                f"algorithm.top_entropy={self.top_entropy:g} takes the entropies of the engine's pass before the "
                "update, which algorithm.old_logprobs=rollout leaves out; set old_logprobs=recompute"
            )
        if self.rejection == "none":
            self._refuse("algorithm.rejection is chosen", "rejection_bounds", "rejection_counts")
        if self.correction == "none":
            self._refuse("algorithm.correction is chosen", "correction_bounds")
        self._check_bounds("correction", has_low="icepop")
        self._check_bounds("rejection", has_low="k1")
        if self.old_logprobs == "rollout" and self.rejection_counts == "after":
            raise PlanError(
                "algorithm.rejection_counts=after counts what is left before the update, and with "
                "algorithm.old_logprobs=rollout the update itself decides the rejection; set rejection_counts=before, "
                "or old_logprobs=recompute"
            )

    def _refuse(self, unless: str, *keys: str) -> None:
        refuse_unused(self, "algorithm", unless, *keys)

    def _check_bounds(self, key: str, *, has_low: str) -> None:
        scheme, bounds = getattr(self, key), getattr(self, f"{key}_bounds")
        if bounds is None:
            return
        low, high = bounds
        if low >= high:
            raise PlanError(f"algorithm.{key}_bounds={[low, high]} are not bounds: the first has to be the lower one")
        if not scheme.endswith(has_low) and low > 0:
            raise PlanError(
                f"algorithm.{key}={scheme} has an upper bound alone, but algorithm.{key}_bounds={[low, high]}; give "
                f"[0, {high:g}]"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessSection:
    """How far generation may run ahead of learning, with `pipeline=fully_async`."""

    policy: str = "admission"
    """Staleness policy: `admission`, `oldest_token`, `group_age`, `batch_ratio`, `queue_length`,
    `threshold_fraction`, or one that is installed."""
    max_staleness: Annotated[float, Field(ge=0)] = 1
    """Highest staleness: in weight versions; with batch_ratio and queue_length in batches; with threshold_fraction as a
    share of a batch. At 0 every pipeline has the losses of `sync`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePart:
    """Part of a data mixture: one of several datasets that prompts are drawn from."""

    path: str
    """Path of the part, as `data.path`."""
    format: str | None = None
    """Format of the part; None: `data.format`."""
    options: Mapping[str, Any] | None = None
    """Options of the part's format; None: `data.options`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the part: prompts are drawn in proportion, whatever the sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSection:
    """Curriculum: rows are skipped by the mean reward of their last group, such as all right or all wrong."""

    pass_rate: tuple[float, float] = (0.0, 1.0)
    """Mean reward up to which a row is too hard, and from which it is too easy."""
    revisit: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Probability that a skipped row is taken all the same."""

    def __post_init__(self) -> None:
        if self.pass_rate[0] >= self.pass_rate[1]:
            raise PlanError(f"data.curriculum.pass_rate={list(self.pass_rate)}: the first has to be the lower")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Data: where prompts come from."""

    format: str = "rows"
    """`rows`: the dataset format; `gsm8k`: question/answer lines; `reasoning_gym`: procedural; or a plug-in, by its
    entry point or as `FILE.py:NAME`."""
    path: str | None = None
    """A .jsonl or .parquet file, a folder with train.* and test.*, `hf:NAME`, or a saved Dataset's folder."""
    eval_path: str | None = None
    """Held-out file; None takes test.* of the folder, or else the last `eval_size` rows of the file."""
    eval_size: Positive = 256
    """Held-out rows, at most; of a file from which they are held out at most a tenth."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the format: the keys of a class in `rl_trainer.data.rows`, or those of your own format."""
    mixture: Mapping[str, MixturePart] = field(default_factory=dict)
    """Several datasets by name, instead of `path`."""
    curriculum: CurriculumSection | None = None
    """Skip rows that taught nothing lately; None takes every row once per epoch."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are left out, and counted."""
    on_bad_row: Literal["error", "drop"] = "error"
    """`drop`: leave out rows that cannot be used, and count them; `error`: end before the first step, and name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySection:
    """Replay: part of a batch are groups that earlier steps learned from (arXiv 2506.05316); not in fully_async."""

    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Fraction of the batch drawn from the replay buffer (rounded down); missing groups are generated."""
    max_age: Positive = 4
    """Highest age of a replayed group's oldest token, in weight versions; also how often it is replayed at most. At
    least 3 with pipeline=one_step_off, where tokens are a version older and batches are made a step ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Batch sizes: prompts, completions, mini-batches; and which groups are used."""

    batch_size: Positive = 64
    """Prompts per training step."""
    group_size: Positive = 8
    """Completions per prompt."""
    given: NonNegative = 0
    """Completions of each group that are not sampled, but taken from the row: the first texts of its field `given`,
    such as solutions of a stronger model (arXiv 2504.14945). They are rewarded and compared as the others are."""
    mini_batch_size: Positive = 64
    """Prompts per optimizer step."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by other prompts."""
    filter: str | None = None
    """Filter of groups by the tags of their samples, a plug-in; refused groups are replaced by other prompts."""
    over_sampling: Annotated[float, Field(ge=0)] = 0.0
    """Share of extra groups that are started; the slowest are stopped once enough are complete. They continue in the
    next step from the tokens that they have, under its weights, and are waited for. After a resume they are generated
    anew. Needs a loss that corrects for older weights. Not with pipeline=fully_async, which does so by itself."""
    stream: bool = False
    """Stream: score a mini-batch, and learn from it, as soon as its groups are complete, while others are generated.
    With pipeline=sync. Where others are scored by weights that its update changes (old_logprobs=recompute, a critic) or
    learning needs the whole batch, each is scored as it comes and the updates follow; the plan says which."""
    replay: ReplaySection | None = None
    """Learn from groups again; None learns from each once."""
    max_refills: NonNegative = 2
    """Times that failed or dropped groups of a batch are replaced before the run gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """A small character-level model, made on the spot and taught a little by supervision before RL takes over.

    The one of the quickstart as it is shipped is there already.
    """

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
    """Model: the policy to train."""

    path: str | None = None
    """A Hugging Face model folder, or the hub's id of a model (Qwen/Qwen3-0.6B, or with @REVISION), which is downloaded
    into the hub's cache. None builds one from `warmup`."""
    warmup: WarmupConfig | None = None
    """How to build the small model; only with `path` unset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSection(EngineConfig):
    """Training engine: rl-engine's `EngineConfig`, less what the run fills in."""

    backend: str = "fsdp"
    """Name of an installed rl-engine backend."""
    world_size: Positive = 1
    """Processes (one GPU each where there are GPUs)."""
    environment: str | None = None
    """Folder of another Python environment, under whose interpreter the engine's processes run, and the roles that
    share them: for a backend whose packages do not go with those of the run. It has rl-post-trainer and Ray in the
    versions of the run, at the same path on every machine. With runtime=ray."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer and its schedule."""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: `cosine` falls to `min_lr_ratio` of the peak at the end of the run."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate over the peak; with lr_schedule=cosine."""
    router_replay: bool = False
    """A mixture takes the experts that the server chose for each token (arXiv 2510.11370, R3)."""
    model_path: str = field(init=False, default="")
    init: ModelInit = field(init=False, default=ModelInit.PRETRAINED)
    head: Head = field(init=False, default=Head.LM)
    temperature: float = field(init=False, default=1.0)
    dropout: bool = field(init=False, default=False)
    entropy: bool = field(init=False, default=False)
    sum_pi_squared: bool = field(init=False, default=False)
    num_candidates: int = field(init=False, default=0)
    exports_mtp: bool = field(init=False, default=False)
    seed: int = field(init=False, default=0)
    timeout_s: float = field(init=False, default=600.0)

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)  # `super()` does not find a class with slots before Python 3.14
        if self.lr_schedule == "cosine" and self.optimizer.total_steps is not None:
            raise PlanError(
                f"engine.lr_schedule=cosine falls to the end of the run, which engine.optimizer.total_steps="
                f"{self.optimizer.total_steps} contradicts; leave one of them out"
            )
        if self.lr_schedule != "cosine" and self.min_lr_ratio:
            raise PlanError(
                f"engine.min_lr_ratio={self.min_lr_ratio:g} does nothing with engine.lr_schedule={self.lr_schedule}; "
                "set lr_schedule=cosine, or leave it out"
            )
        if self.dist_checkpoint is not None and self.lora is not None and self.lora.export == LoraExport.ADAPTER:
            raise PlanError(
                "engine.lora.export=adapter sends the adapter alone to servers, which have read model.path and not "
                f"engine.dist_checkpoint={self.dist_checkpoint}; leave export out, and they are sent the whole model"
            )
        layout = self.parallel
        if self.world_size % (layout.tp * layout.pp * layout.cp):
            raise PlanError(
                f"engine.world_size={self.world_size} is not a multiple of engine.parallel tp x pp x cp = "
                f"{layout.tp} x {layout.pp} x {layout.cp}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSection:
    """Replicas are added and taken away while the run goes on, with a pipeline that generates ahead."""

    max_replicas: Positive
    """Replicas at most; those beyond rollout.num_replicas are placed when a policy asks for them."""
    min_replicas: Positive = 1
    """Replicas at least."""
    policy: str = "wait_share"
    """Who decides: `wait_share`, by the share of a step that learning waits for groups, or a plug-in."""
    patience: Positive = 3
    """Steps in a row that have to ask for a change before it is made."""
    lend: bool = False
    """Lend the engine's GPUs to further replicas while learning waits for groups, as many as they hold; a step takes
    the GPUs back, and requests in flight go on elsewhere. With pipeline=fully_async."""

    def __post_init__(self) -> None:
        if self.min_replicas > self.max_replicas:
            raise PlanError(
                f"rollout.elastic.min_replicas={self.min_replicas} is more than max_replicas={self.max_replicas}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection(ServerConfig):
    """Rollout servers: rl-rollout's `ServerConfig`, less what the run fills in."""

    backend: str = "embedded"
    """Name of an installed rl-rollout backend."""
    num_replicas: Positive = 1
    """Servers, each in its own process."""
    colocated: bool | None = None
    """Servers share the GPUs of the engine, all of them, in turn. With pipeline=sync. None: where there are fewer GPUs
    than the roles ask for."""
    sleep: bool | None = None
    """Colocated servers give their memory back while the engine trains, and it gives its back while they generate.
    None: where a GPU has no room for both at once, or that is not known (servers of other libraries, a cluster)."""
    elastic: ElasticSection | None = None
    """Add and take away replicas by a policy; None: as many as num_replicas says, or `replicas.json` in output_dir."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature; the trainer's log-probs use the same. vLLM would raise one below 0.01 to it."""
    eval_temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature on held-out rows; 0 is greedy."""
    eval_samples: Positive = 1
    """Completions per held-out row, whose mean counts; more than one needs eval_temperature above 0."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass."""
    max_new_tokens: Positive = 256
    """Longest completion, tokens."""
    max_num_seqs: Positive = 256
    """Requests that one server decodes at a time."""
    max_model_len: Positive = 4096
    """Longest prompt plus completion, tokens."""
    dtype: str = "auto"
    """`float32`, `bfloat16` or `float16`; `auto` is the number format of the engine, in which weights are sent."""
    model_path: str = field(init=False, default="")
    host: str = field(init=False, default="127.0.0.1")
    port: int = field(init=False, default=0)
    api_token: str | None = field(init=False, default=None)
    seed: int = field(init=False, default=0)
    timeout_s: float = field(init=False, default=600.0)

    def __post_init__(self) -> None:
        if 0 < self.eval_temperature < 0.01:
            raise PlanError(f"rollout.eval_temperature={self.eval_temperature} must be 0 (greedy), or 0.01 or above")
        if self.eval_samples > 1 and self.eval_temperature == 0:
            raise PlanError(
                f"rollout.eval_samples={self.eval_samples} greedy completions of a row are all the same; set "
                "rollout.eval_temperature, or leave eval_samples out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleEngineSection:
    """What a role's engine has in the place of the keys of `engine`; None: the policy's."""

    backend: str | None = None
    """As `engine.backend`."""
    precision: Precision | None = None
    """As `engine.precision`."""
    matmul_precision: MatmulPrecision | None = None
    """As `engine.matmul_precision`."""
    max_tokens_per_gpu: Positive | None = None
    """As `engine.max_tokens_per_gpu`."""
    parallel: ParallelConfig | None = None
    """As `engine.parallel`, the whole of it."""
    cpu_offload: bool | None = None
    """As `engine.cpu_offload`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSection:
    """The pool of processes that a role lives in."""

    pool: str = ENGINE_POOL
    """Its name: roles that name the same pool share its processes and GPUs; `engine` is the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSection(PoolSection):
    """The pool of processes that a role lives in, and what its engine has that the policy's has not."""

    num_gpus: Positive | None = None
    """Processes of that pool, each with a GPU where there are any. One role of the pool says it, or all say the same;
    if none does, there are `engine.world_size`."""
    engine: RoleEngineSection = field(default_factory=RoleEngineSection)
    """Backend, layout and number format of this role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSection:
    """The nodes of processes without GPUs, and the CPUs that Ray reserves for each."""

    num_cpus: Annotated[float, Field(gt=0)] = 1.0
    """CPUs per process, of agent workers with those of the rewards that they compute."""
    resource: str | None = None
    """Ray resource of the nodes to choose from (`ray start --resources='{"scorers": 1}'`); None: any node."""

    def __post_init__(self) -> None:
        if self.resource in ("CPU", "GPU", "memory", "object_store_memory"):
            raise PlanError(f"placement: resource={self.resource} is every node's; name one that only some nodes have")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSection:
    """Which roles share a pool of processes and their GPUs; by default all of them that of the policy.

    Servers have GPUs of their own, or with `rollout.colocated` the policy's; agent workers and the queue have none.
    """

    agent: NodeSection | None = None
    """Agent workers, in whose processes rewards are computed: CPU-heavy ones have their nodes here."""
    queue: NodeSection | None = None
    """The process of the queue."""

    reference: RoleSection | None = None
    """The start policy of the KL penalty."""
    critic: RoleSection | None = None
    """The value function, or the process reward model of prime."""
    teacher: RoleSection | None = None
    """The teacher of a distillation, unless a server at `teacher.url` has it."""
    reward: PoolSection | None = None
    """The reward models that the run serves. None: with `rollout.colocated` the policy's pool, in turn with it, else a
    pool `reward` of as many processes as a model has replicas."""

    def __post_init__(self) -> None:
        sizes: dict[str, tuple[str, int]] = {}
        for role in ROLES:
            if (section := getattr(self, role)) is None:
                continue
            key = f"placement.{role}"
            if section.pool in _POOLS_OF_OTHERS or not section.pool.isidentifier():
                raise PlanError(
                    f"{key}.pool={section.pool!r} cannot be: a pool has a name of letters, digits and underscores, and "
                    f"{', '.join(_POOLS_OF_OTHERS)} are those of other roles; choose another name, or {ENGINE_POOL}"
                )
            if (size := getattr(section, "num_gpus", None)) is None:
                continue
            if section.pool == ENGINE_POOL:
                raise PlanError(
                    f"{key}.num_gpus={size} does nothing in the policy's pool, which has engine.world_size processes; "
                    f"leave it out, or set {key}.pool"
                )
            other, same = sizes.setdefault(section.pool, (key, size))
            if size != same:
                raise PlanError(
                    f"{other}.num_gpus={same} and {key}.num_gpus={size} are of the same pool {section.pool!r}; make "
                    "them equal, or give each role a pool"
                )


ROLES = ("reference", "critic", "teacher", "reward")
"""That `placement` assigns to pools."""
_POOLS_OF_OTHERS = ("agent", "queue", "rollout")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSection:
    """Agents: the loops that turn rows into trajectories."""

    loop: str = "single_turn"
    """An installed rl-agent loop, or an `AgentLoop` class of yours as a plug-in, for rows that name none. With
    `environment` its own, `gym` for most."""
    environment: str | None = None
    """Environments to play: `FILE.py:NAME`, `MODULE:NAME`, or a hub's: `gymnasium:ID`, `harbor:FOLDER`,
    `openenv:URL-OR-PACKAGE`, `reasoning_gym:NAME`, `verifiers:NAME`. Without `data.path` it also gives the rows."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that loop."""
    num_workers: Positive = 1
    """Processes that run loops and score them."""
    max_concurrent: Positive = 2048
    """Rollouts in flight per process."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline of one rollout, seconds."""

    def __post_init__(self) -> None:
        if self.environment is not None and self.loop == _default(self, "loop"):
            object.__setattr__(self, "loop", loop_of_environments(self.environment))


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection:
    """Critic: the value function of gae and vtrace, or the process reward model of prime."""

    path: str | None = None
    """A Hugging Face folder or hub id to start from; None starts from the policy's, a value function with a head of
    zeros."""
    lr: float = 1e-5
    """Learning rate."""
    clip: Annotated[float, Field(ge=0)] = 0.2
    """A value may leave its old one by this much per step before it stops being pulled; 0 turns that off. Not of
    prime's."""
    warmup_steps: NonNegative = 0
    """First training steps in which the critic learns alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSection:
    """Teacher of on-policy distillation: a model that scores the policy's own completions."""

    path: str | None = None
    """A Hugging Face folder or hub id, with the same tokenizer; with `url` its tokenizer is all that is read. None: the
    policy itself, as it is before each step's updates, which knows more by `context` (self-distillation)."""
    by_source: Mapping[str, str] = field(default_factory=dict)
    """By `data_source` of a row, the folder of its teacher; rows of others have the one at `path`."""
    context: str | None = None
    """What the teacher reads below the last message of the prompt, and the policy does not, with {ground_truth},
    {data_source} and keys of the row's extra_info in it: "A solution: {solution}". For loops that ask the row's prompt
    as it is."""
    url: str | None = None
    """URL of a server that has the teacher: one of rl-rollout's, or with `model` any OpenAI-compatible one that has
    prompt_logprobs (/v1 included). With divergence=reverse."""
    model: str | None = None
    """Name of the teacher at the server."""
    divergence: Literal["reverse", "forward", "mixed", "jsd"] = "reverse"
    """`reverse`: KL(policy, teacher) from the tokens that were sampled; `forward`: KL(teacher, policy) over the
    teacher's likeliest tokens and the rest of the vocabulary as one; `mixed`: both; `jsd`: of both to their mixture,
    over the same tokens (generalized Jensen-Shannon divergence, arXiv 2306.13649)."""
    coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the divergence added to the policy loss."""
    forward_weight: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Weight of the forward part; mixed only."""
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the teacher in that mixture; jsd only."""
    num_candidates: Positive = 16
    """Number of the teacher's likeliest tokens that forward, mixed and jsd compare."""

    def __post_init__(self) -> None:
        kinds_of = {"forward_weight": ("mixed",), "jsd_beta": ("jsd",), "num_candidates": ("forward", "mixed", "jsd")}
        for name, kinds in kinds_of.items():
            if self.divergence not in kinds:
                refuse_unused(self, "teacher", f"teacher.divergence is {' or '.join(kinds)}", name)
        if self.path is None and (self.context is None or self.url is not None or self.by_source):
            raise PlanError(
                "teacher.path is not set, so that the policy is its own teacher: that takes teacher.context, as it has "
                "nothing to learn from what it says anyway, and neither url nor by_source; set path or context"
            )
        if self.by_source and self.url is not None:
            raise PlanError("teacher.by_source names folders, and teacher.url is one server; leave one of them out")
        if self.url is None and self.model is not None:
            raise PlanError(f"teacher.model={self.model} names a model of a server, and teacher.url is not set; set it")
        if self.url is not None and self.divergence != "reverse":
            raise PlanError(
                f"teacher.divergence={self.divergence} compares the teacher's likeliest tokens, which the server at "
                "teacher.url does not return for a prompt; choose reverse, or leave url out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Model of a judge or a classifier that the run serves itself, colocated as its servers are."""

    path: str
    """Its folder: of a judge a model that generates, of a classifier a reward model with one label."""
    num_replicas: Positive = 1
    """Servers with this model, which share its requests."""
    backend: str = "embedded"
    """Rollout backend of a judge, as `rollout.backend`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that backend, as `rollout.options`."""
    max_model_len: Positive = 4096
    """Longest sequence, tokens: the prompt of a judge and its answer, or what a classifier reads."""
    kv_cache_bytes: NonNegative = 0
    """Most memory of a judge's keys and values, bytes; 0: the backend chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """Reward part: one weighted term of a completion's reward."""

    kind: Literal["rule", "loop", "function", "classifier", "judge"]
    """`rule`: one of ours; `loop`: the agent loop's own; `function`: of yours; `classifier`, `judge`: a served
    model that gives a number, or that writes one."""
    weight: float = 1.0
    """Weight of the part in the sum."""
    rule: str | None = None
    """exact_match, format, regex, math, gsm8k, qa or code, or as verl scores: verl/default (by the row's data source),
    verl/gsm8k and others; None: the data source's; kind=rule."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the rule, such as {pattern: "answer: (.*)"}."""
    path: str | None = None
    """FILE.py:FUNCTION, MODULE:FUNCTION or an entry point of rl_trainer.rewards; kind=function."""
    url: str | None = None
    """URL: of a judge the base, /v1 included; of a classifier the endpoint, such as http://host:8000/classify."""
    model: str | ServedModel | None = None
    """Name of the model at the server; or, instead of url, the model that the run serves: {path: FOLDER}."""
    prompt: str | None = None
    """Prompt of the judge, with {completion} and perhaps {prompt} and {ground_truth} in it; or FILE.py:FUNCTION,
    MODULE:FUNCTION of a function of completion and row that gives it, as a text or as chat messages. A classifier
    without one is given the conversation as messages."""
    pattern: str = r"(?i)score[^\w-]*(-?\d+(?:\.\d+)?)"
    """Regular expression whose group is the score in what a judge writes; the last place counts."""
    parser: str | None = None
    """Instead of pattern: FILE.py:FUNCTION, MODULE:FUNCTION or an entry point of rl_trainer.rewards, a function of what
    the judge writes and the row. It gives the score, or None for "ask again"."""
    score_at: str = "data.0.probs.0"
    """Dotted path of the score in a classifier's JSON answer."""
    max_tokens: Positive = 512
    """Longest answer of a judge, in tokens."""
    max_attempts: Positive = 3
    """Requests for one score; a server's refusal (HTTP 4xx but 429) is final."""
    max_concurrent: Positive = 64
    """Requests at the same time, of all agent workers together."""
    requests_per_minute: NonNegative = 0
    """Requests per minute of all agent workers together; 0: any number."""
    tokens_per_minute: NonNegative = 0
    """Tokens per minute of all agent workers together, as the server counts them; 0: any number."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key."""

    @property
    def prompt_function(self) -> str | None:
        """Prompt that is a function; None if it is a text with `{completion}` in it, or there is none."""
        is_path = self.prompt is not None and re.fullmatch(r"[^\s{}]+:[A-Za-z_]\w*", self.prompt) is not None
        return self.prompt if is_path else None

    @property
    def served_model(self) -> ServedModel | None:
        """Model that the run serves; None if there is none."""
        return self.model if isinstance(self.model, ServedModel) else None

    def check(self, key: str) -> None:
        """Check that every key does something with this kind.

        Raises:
            PlanError: one does nothing, is missing, or cannot be meant.
        """
        for name in _NEEDED_KEYS.get(self.kind, ()):
            if getattr(self, name) is None:
                raise PlanError(f"{key} is of kind={self.kind}, which needs {key}.{name}")
        for name, kinds in _KEYS_OF_KINDS.items():
            if self.kind not in kinds and getattr(self, name) != _default(self, name):
                raise PlanError(
                    f"{key}.{name} does nothing with kind={self.kind}, only with {' or '.join(kinds)}; leave it out"
                )
        self._check_server(key)
        if self.prompt is not None and self.prompt_function is None and "{completion}" not in self.prompt:
            raise PlanError(
                f"{key}.prompt has no {{completion}} in it, so that every completion would be asked about alike; put "
                "it in, or name a function, FILE.py:FUNCTION"
            )
        if self.parser is not None and self.pattern != _default(self, "pattern"):
            raise PlanError(f"{key}.pattern and {key}.parser both read the score; leave one of them out")
        try:
            num_groups = re.compile(self.pattern).groups
        except re.error as error:
            raise PlanError(f"{key}.pattern={self.pattern!r} is not a regular expression: {error}") from error
        if num_groups != 1:
            raise PlanError(f"{key}.pattern={self.pattern!r} has {num_groups} groups; one is needed, around the score")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise PlanError(f"{key}.url={self.url!r} is not a URL; it starts with http:// or https://")

    def _check_server(self, key: str) -> None:
        """Check that the score comes from one server, and that the keys are of that."""
        if self.kind not in _SERVED_KINDS:
            return
        model = self.served_model
        if (self.url is None) == (model is None):
            raise PlanError(
                f"{key} is of kind={self.kind}, which needs one of {key}.url (of a server that runs) and "
                f"{key}.model.path (of a model that the run serves)"
            )
        if self.kind == "judge" and self.model is None:
            raise PlanError(f"{key} is of kind=judge, which needs {key}.model, the name of the model at {key}.url")
        for name in ("score_at", "api_key_env") if model is not None else ():
            if getattr(self, name) != _default(self, name):
                raise PlanError(
                    f"{key}.{name} is of a server at {key}.url, and the run serves {key}.model.path; leave it out"
                )
        for name in ("backend", "options", "kv_cache_bytes") if model is not None and self.kind != "judge" else ():
            if getattr(model, name) != _default(model, name):
                raise PlanError(f"{key}.model.{name} does nothing with kind={self.kind}, only with judge; leave it out")


_SERVED_KINDS = ("classifier", "judge")
_KEYS_OF_KINDS = {
    "rule": ("rule",),
    "options": ("rule",),
    "path": ("function",),
    "url": _SERVED_KINDS,
    "model": _SERVED_KINDS,
    "prompt": _SERVED_KINDS,
    "max_attempts": _SERVED_KINDS,
    "max_concurrent": _SERVED_KINDS,
    "requests_per_minute": _SERVED_KINDS,
    "tokens_per_minute": _SERVED_KINDS,
    "api_key_env": _SERVED_KINDS,
    "pattern": ("judge",),
    "parser": ("judge",),
    "max_tokens": ("judge",),
    "score_at": ("classifier",),
}
_NEEDED_KEYS = {"function": ("path",), "judge": ("prompt",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection:
    """Rewards: by default of the agent loop, or else by the rule of the row's data source."""

    path: str | None = None
    """A function of yours that gives the whole reward: FILE.py:FUNCTION, MODULE:FUNCTION or an entry point of
    rl_trainer.rewards, called with the completion's text and the row; it may be a coroutine function, and may give
    numbers by name, which are added."""
    parts: Mapping[str, RewardPart] = field(default_factory=dict)
    """Parts by name, weighted and added; instead of path."""
    num_processes: Positive = 1
    """Processes per function (or rule that parses) and agent worker."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Deadline of one call or request, seconds; a function that is stuck is killed."""
    thinking_end: str | None = None
    """Mark that ends the policy's thinking, which rules do not read as its answer; None: by the chat template, else
    </think>."""
    overlong_buffer: NonNegative = 0
    """Last tokens of rollout.max_new_tokens over which a longer completion is punished, linearly, up to 1; 0: none."""

    def __post_init__(self) -> None:
        if self.path is not None and self.parts:
            raise PlanError(
                "reward.path gives the whole reward, and reward.parts its parts; set one of them (a part of "
                "kind=function has its own path)"
            )
        if self.overlong_buffer and "overlong" in self.parts:
            raise PlanError(
                "reward.parts.overlong has the name of what reward.overlong_buffer takes off, and one would hide the "
                "other; give it another"
            )
        kinds = {part.kind for part in self.parts.values()}
        has_function = any(part.prompt_function or part.parser for part in self.parts.values())
        if (
            kinds
            and not kinds & {"function", "rule"}
            and not has_function
            and self.num_processes != _default(self, "num_processes")
        ):
            raise PlanError("reward.num_processes does nothing without a part of kind=function or rule; leave it out")
        for name, part in self.parts.items():
            part.check(f"reward.parts.{name}")


def _with_options(trackers: object) -> object:
    """Tracker names as a mapping to empty options."""
    if isinstance(trackers, list | tuple) and all(isinstance(name, str) for name in trackers):
        return {name: {} for name in trackers}
    return trackers


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerSection:
    """Profiler: what the processes of some roles record in some steps, into `profile/`; the summary names the files."""

    tools: tuple[Literal["torch", "memory", "nvtx"], ...] = ()
    """`torch`: a trace of torch.profiler, for Perfetto; `memory`: a snapshot of a GPU's memory, for
    pytorch.org/memory_viz; `nvtx`: ranges of spans and operators, for Nsight Systems."""
    roles: tuple[Literal["engine", "reference", "critic", "rollout"], ...] = ("engine",)
    """Roles whose processes record; `rollout` with `runtime=inline`."""
    steps: tuple[int, ...] = (2,)
    """Steps that are recorded, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSection:
    """Tracking: trackers, traces and saved samples; `metrics.jsonl` is always written."""

    trackers: Annotated[Mapping[str, Mapping[str, Any]], BeforeValidator(_with_options)] = field(
        default_factory=lambda: {"console": {}}
    )
    """Installed trackers (console, mlflow, swanlab, tensorboard, trackio, wandb, or a custom one): names, such as
    [console, wandb], or names with options, such as {console: {}, wandb: {project: math, mode: offline}}."""
    profile: bool = False
    """Write `trace.json`, the spans of every process, for Perfetto; what it is made of stays in `trace/`."""
    profiler: ProfilerSection = field(default_factory=ProfilerSection)
    """Profiler of torch, GPU memory or NVTX."""
    keep_samples: bool | Literal["some"] = "some"
    """Keep what is learned from in `samples/`, a parquet file per step, for `rl-view` and `rl-sample`. `true`: every
    sample of every step; `some`: eight groups of at most a hundred steps, from the second on; `false`: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSection:
    """Weight sync: how new weights travel from the engine's ranks to the servers."""

    mode: Literal["auto", "sharded", "gathered"] = "auto"
    """`sharded`: every rank sends what it holds, and nothing is gathered; `gathered`: rank 0 sends whole tensors.
    `auto` is sharded where engine, servers and transport can; the plan says why where they cannot."""
    delta: bool = False
    """Send what has changed to servers that hold the version before, bit for bit; for links slower than memory. Each
    rank keeps a copy of what it sent. With `weights_transport=file:///folder` or `file+s3://bucket/prefix` versions are
    there as differences from a whole one, and servers that are far away take those that they lack."""


_TAKEN = ("agent", "reward", "phase_s", "failures", "policy")
"""Names that replicas and metrics of every run have, and the model of requests that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySection:
    """Policy of several that learn: its own keys, in addition to those that the run gives all of them."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """As `model`; keys that are not given are the run's, as in every section of a policy."""
    engine: EngineSection = field(default_factory=EngineSection)
    """As `engine`: a policy has a pool of processes."""
    rollout: RolloutSection = field(default_factory=RolloutSection)
    """As `rollout`, but for the sampling parameters, which are the run's."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """As `algorithm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Configuration of one training run."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    name: str = "run"
    """Shown in reports and in the default output folder."""
    seed: int = 0
    """Seeds data order, sampling and initialisation."""
    steps: Positive = 100
    """Training steps."""
    epochs: NonNegative = 0
    """Passes over the training prompts, which then say how many steps there are, whatever `steps` is; 0: `steps`
    counts."""
    output_dir: str | None = None
    """Output folder; None makes `outputs/<name>-<date>-<time>`."""
    runtime: Literal["ray", "inline", "auto"] = field(default_factory=lambda: "ray" if has_ray() else "auto")
    """`ray` (`pip install 'rl-post-trainer[ray]'`): every role in its own processes; `inline`: all in this one, for
    breakpoints and small models. `auto`: inline where one process of each role is asked for and none works ahead of
    another, else ray. The default is ray where Ray is installed, else auto."""
    pipeline: str = "sync"
    """Schedule of the loop. `sync`: on-policy; `one_step_off`: the next batch is generated while this one trains;
    `fully_async`: generation runs ahead as far as `staleness` lets it, and weights change under it; or one that is
    installed (entry point group `rl_trainer.schedules`)."""
    eval_every: NonNegative = 10
    """Steps between evaluations on held-out rows; 0 evaluates only first and last."""
    save_every: NonNegative = 0
    """Steps between checkpoints; 0 saves only the last."""
    keep_checkpoints: NonNegative = 0
    """Complete checkpoints that are kept, the newest; older ones are removed once a newer one is whole. 0 keeps all."""
    resume_from: str | None = None
    """A `checkpoint-N` folder of an earlier run with the same configuration; training goes on after its step."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline of any single call to a worker, seconds."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that a process may be stopped, or its interpreter stuck, before it is ended and replaced."""
    max_restarts: NonNegative = 3
    """Restarts of a run whose engine or queue died, from its last checkpoint, or from its start."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    engine: EngineSection = field(default_factory=EngineSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    agent: AgentSection = field(default_factory=AgentSection)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    policies: Mapping[str, PolicySection] = field(default_factory=dict)
    """Several policies that learn in one environment, by name, each with what differs from the run's own sections:
    {proposer: {}, solver: {engine: {optimizer: {lr: 1.0e-6}}}}. An agent loop that names none has the first."""
    critic: CriticSection | None = None
    """Train a critic, for the estimators that read what it says."""
    teacher: TeacherSection | None = None
    """Distill another model into the policy: in addition to the policy loss, or alone with `algorithm.loss=distill`."""
    reward: RewardSection = field(default_factory=RewardSection)
    staleness: StalenessSection = field(default_factory=StalenessSection)
    tracking: TrackingSection = field(default_factory=TrackingSection)
    weights: WeightsSection = field(default_factory=WeightsSection)
    placement: PlacementSection = field(default_factory=PlacementSection)
    weights_transport: str | None = None
    """Name of an installed rl-ckpt backend, or a whole address, such as tcp://HOST:PORT, with its options. None:
    cuda-ipc where engine and server are processes on one GPU, else shm."""
    queue_storage: str | None = None
    """Name of an installed rl-tq storage, or a whole address. None: shm, and over several nodes ray, which keeps every
    sample on the node that made it."""

    def __post_init__(self) -> None:
        if wrong := [name for name in self.policies if not re.fullmatch(r"[\w-]+", name) or name in _TAKEN]:
            raise PlanError(
                f"policies.{wrong[0]}: a policy has a name of letters, digits, - and _, and not one of "
                f"{', '.join(_TAKEN)}; choose another"
            )
        if self.runtime == "auto":
            object.__setattr__(self, "runtime", "inline" if self._fits_one_process() else "ray")
        if self.agent.environment is not None and not (self.reward.path or self.reward.parts):
            own = replace(self.reward, parts={"environment": RewardPart(kind="loop")})
            object.__setattr__(self, "reward", own)

    def _fits_one_process(self) -> bool:
        def fits(engine: EngineSection, rollout: RolloutSection) -> bool:
            return (
                {engine.world_size, rollout.num_replicas, rollout.parallel.num_ranks} == {1}
                and (rollout.backend == "embedded" or not has_ray())
                and rollout.elastic is None
                and rollout.colocated is not False
                and engine.environment is None
            )

        return (
            self.agent.num_workers == 1
            and self.pipeline == "sync"
            and all(fits(each.engine, each.rollout) for each in (self, *self.policies.values()))
            and self.placement == PlacementSection()
            and "RAY_ADDRESS" not in os.environ
        )

    def check_runtime(self) -> None:
        """Check that Ray is installed, if the run takes it; before anything heavy is imported.

        Raises:
            ConfigError: it is not; has the pip line.
        """
        if self.runtime == "ray" and not has_ray():
            why = "runtime=ray needs Ray" if self._fits_one_process() else "this run has several processes, by Ray"
            raise ConfigError(
                f"{why}: pip install 'rl-post-trainer[ray]'. Or set runtime=inline, with one process of each role and "
                "pipeline=sync"
            )
