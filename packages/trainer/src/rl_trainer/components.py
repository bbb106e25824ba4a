"""The components of one job that the training loop drives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_trainer.algorithms.kl_controller import AdaptiveKl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_tq.base import TransferQueue
    from rl_trainer.data.rows import Row
    from rl_trainer.ema_reference import EmaReference
    from rl_trainer.metrics import HeldGroup
    from rl_trainer.replay_buffer import Replay
    from rl_trainer.replicas import AgentReplicas
    from rl_trainer.rollout_source import RolloutSource
    from rl_trainer.weight_sync import WeightSync
    from rl_trainer.workers.engine import CriticWorker, EngineWorker, ProcessRewardWorker
    from rl_trainer.workers.queue import SampleWorker
    from rl_trainer.workers.teacher import ServedTeacherWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Everything a pipeline drives."""

    actor: EngineWorker
    """The policy being trained."""
    reference: EngineWorker | None
    """The frozen start policy: an engine of its own, or the actor, if it trains an adapter; None without a penalty."""
    ema_reference: EmaReference | None = None
    """Has the reference follow the policy; None: it stands still."""
    teacher: EngineWorker | ServedTeacherWorker | None = None
    """A frozen model that the policy is pulled towards."""
    critic: CriticWorker | None = None
    """The value function; None without one."""
    process_reward: ProcessRewardWorker | None = None
    """The implicit process reward model; None without one."""
    kl: AdaptiveKl = field(default_factory=lambda: AdaptiveKl(coef=0.0, target=0.0))
    """Weight of the KL in the rewards."""
    source: RolloutSource
    """Generation."""
    weights: WeightSync
    """Actor to servers."""
    queue: TransferQueue
    """The controller's client: references only."""
    agents: AgentReplicas
    """What generation runs on."""
    eval_rows: Sequence[Row]
    """Held-out rows."""
    samples: SampleWorker | None = None
    """Writes what is learned from to disk; None keeps nothing."""
    replay: Replay | None = None
    """Groups that may be learned from again; None: every group is learned from once."""
    held: tuple[HeldGroup, ...] = ()
    """Groups that an earlier process finished and did not learn from; in the queue."""
    num_too_long: int = 0
    """Rows that were left out because their prompts are longer than `data.max_prompt_tokens`."""
