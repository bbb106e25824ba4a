"""Components of a training run, which the loop calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_trainer.algorithms.kl_controller import AdaptiveEntropy, AdaptiveKl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_tq.base import TransferQueue
    from rl_trainer.data import Row
    from rl_trainer.metrics import HeldGroup
    from rl_trainer.pipeline.ema_reference import EmaReference
    from rl_trainer.pipeline.replay_buffer import Replay
    from rl_trainer.pipeline.replicas import AgentReplicas, SomeSamples
    from rl_trainer.pipeline.rollout_source import RolloutSource
    from rl_trainer.pipeline.weight_sync import WeightSync
    from rl_trainer.workers.critic import CriticWorker
    from rl_trainer.workers.engine_worker import EngineWorker
    from rl_trainer.workers.queue import SampleWorker
    from rl_trainer.workers.teacher import Teachers


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Components of a training run: the worker groups and clients that the loop calls. `setup.place` makes them."""

    actor: EngineWorker
    reference: EngineWorker | None
    """The reference: an engine with the start policy, or the actor itself if it trains an adapter; None without KL."""
    ema_reference: EmaReference | None = None
    """Moves the reference's weights after the policy's; None: they stay those of the start policy."""
    teacher: EngineWorker | Teachers | None = None
    """The teacher of distillation, or several; the actor, where the policy is its own; None without one, or served."""
    critic: CriticWorker | None = None
    """The critic: a value function, or PRIME's process reward model; None without one."""
    kl: AdaptiveKl = field(default_factory=lambda: AdaptiveKl(coef=0.0, target=0.0))
    """The coefficient of the KL penalty in the rewards."""
    entropy: AdaptiveEntropy = field(default_factory=lambda: AdaptiveEntropy(coef=0.0, target=0.0, step=0.005))
    """The coefficient of the entropy bonus, where it follows a target."""
    source: RolloutSource
    weights: WeightSync
    queue: TransferQueue
    """The controller's client of the queue: ids and tags, no tensors."""
    agents: AgentReplicas
    eval_rows: Sequence[Row]
    samples: SampleWorker | SomeSamples | None = None
    """Writes samples to disk; None: none are kept."""
    replay: Replay | None = None
    """The replay buffer; None: every group is learned from once."""
    held: tuple[HeldGroup, ...] = ()
    """Resumed groups: in the queue, finished by an earlier process that did not learn from them."""
    num_too_long: int = 0
    """Rows that were left out because their prompts are longer than `data.max_prompt_tokens`."""
    num_bad: int = 0
    """Rows that were left out because they cannot be asked (`data.on_bad_row=drop`)."""
    pools: Mapping[str, str] = field(default_factory=dict[str, str])
    """By scoring stage, the pool that computes it, of those that have one of their own; the others have the actor's."""
    policy: str = ""
    """Name of the policy, where there are several."""
    others: tuple[Components, ...] = ()
    """Components as each further policy has them: its engines and weight sync, and what all policies share."""

    @property
    def by_policy(self) -> dict[str, Components]:
        """Components as each policy has them, by its name; the only one has an empty name."""
        return {each.policy: each for each in (self, *self.others)}
