"""The whole tree, and what is of the run itself."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rl_trainer.config._types import NonNegative, Positive  # noqa: TC001 - so it does these
from rl_trainer.config.algorithm import AlgorithmConfig, StalenessSection
from rl_trainer.config.data import BatchConfig, DataConfig
from rl_trainer.config.parts import (
    AgentSection,
    CriticSection,
    EngineSection,
    ModelConfig,
    RolloutSection,
    TeacherSection,
)
from rl_trainer.config.reward import RewardSection


def _with_options(trackers: object) -> object:
    """Names alone, as names without options."""
    return {name: {} for name in trackers} if isinstance(trackers, list | tuple) else trackers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSection:
    """Where numbers and samples are kept; `metrics.jsonl` is always written."""

    trackers: Annotated[Mapping[str, Mapping[str, Any]], BeforeValidator(_with_options)] = field(
        default_factory=lambda: {"console": {}}
    )
    """Installed trackers (console, tensorboard, wandb, trackio, or one of your own): names, such as [console, wandb],
    or names with options, such as {console: {}, wandb: {project: math, mode: offline}}."""
    profile: bool = False
    """Write `trace.json`, the spans of every process, for Perfetto; what it is made of stays in `trace/`."""
    keep_samples: bool = False
    """Keep every sample of every step in `samples/`, one parquet file per step; `rl-sample OUTPUT_DIR` shows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One training run."""

    name: str = "run"
    """Shown in reports and in the default output folder."""
    seed: int = 0
    """Seeds data order, sampling and initialisation."""
    steps: Positive = 100
    """Training steps."""
    output_dir: str | None = None
    """Where everything is written; None makes `outputs/<name>-<date>-<time>`."""
    runtime: Literal["ray", "inline"] = "ray"
    """`ray`: every role in processes of its own; `inline`: all in this one, for breakpoints."""
    pipeline: Literal["sync", "one_step_off", "fully_async"] = "sync"
    """`sync`: on-policy; `one_step_off`: the next batch is generated while this one trains; `fully_async`: generation
    runs ahead as far as `staleness` lets it, and weights change under it."""
    eval_every: NonNegative = 10
    """Steps between evaluations on held-out rows; 0 evaluates only first and last."""
    save_every: NonNegative = 0
    """Steps between checkpoints; 0 saves only the last."""
    resume_from: str | None = None
    """A `checkpoint-N` folder of an earlier run with the same configuration; training goes on after its step."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline of any single call to a worker, seconds."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 30.0
    """How long a process may be stopped, or its interpreter stuck, before it is ended, and replaced or restarted."""
    max_restarts: NonNegative = 3
    """How often a run whose engine or queue died goes on by itself from its last checkpoint, or from its start."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    engine: EngineSection = field(default_factory=EngineSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    agent: AgentSection = field(default_factory=AgentSection)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticSection | None = None
    """Train a critic, for the estimators that read what it says."""
    teacher: TeacherSection | None = None
    """Distill another model into the policy: beside the policy loss, or alone with `algorithm.loss=distill`."""
    reward: RewardSection = field(default_factory=RewardSection)
    staleness: StalenessSection = field(default_factory=StalenessSection)
    tracking: TrackingSection = field(default_factory=TrackingSection)
    weights_transport: str = "shm"
    """Name of an installed rl-ckpt backend, or a whole address, such as tcp://HOST:PORT, with its options."""
    queue_storage: str = "shm"
    """Name of an installed rl-tq storage, or a whole address."""
