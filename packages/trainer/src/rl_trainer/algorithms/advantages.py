"""What advantage estimators read, and the registry of them. Legend: `T` tokens (packed), `B` rows.

Each is a pure function from `AdvantageInput` to one value per token; positions with loss_mask 0 get 0 and are skipped
by every recurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from rl_trainer.algorithms.plugins import named
from rl_trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

GROUP = "rl_trainer.advantages"

Need = Literal["values", "components", "greedy_rewards", "logprobs", "sum_pi_squared", "ratio", "process_rewards"]
"""An optional field of `AdvantageInput` that an estimator cannot do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInput:
    """A batch of completions, packed. Which of the optional fields are there is what the estimator registered."""

    rewards: Tensor
    """(T,) float32, a completion's reward on its last model token, turn rewards on the last token of their turn."""
    loss_mask: Tensor
    """(T,) 1 where the model wrote the token."""
    cu_seqlens: Tensor
    """(B + 1,) int64 row offsets into T."""
    group_ids: Tensor
    """(B,) int64, equal for the completions of one prompt."""
    rollout_ids: Tensor | None = None
    """(B,) int64, equal for the trajectories of one rollout within a group; None: a rollout is one trajectory."""
    gamma: float = 1.0
    """Discount of rewards per model token."""
    lam: float = 1.0
    """Lambda of GAE and V-trace."""
    values: Tensor | None = None
    """(T,) float32, the critic's value of the state before each token."""
    components: Tensor | None = None
    """(B, K) float32, the parts that a completion's reward is made of."""
    component_weights: Tensor | None = None
    """(K,) float32; None: 1 each."""
    greedy_rewards: Tensor | None = None
    """(B,) float32, reward of the greedy completion of each row's prompt."""
    logprobs: Tensor | None = None
    """(T,) float32, by the trainer before the update."""
    sum_pi_squared: Tensor | None = None
    """(T,) float32, sum over the vocabulary of the squared probabilities that each token was chosen from."""
    ratio: Tensor | None = None
    """(T,) float32, trainer's probability over the sampler's."""
    weights: Tensor | None = None
    """(T,) float32, the weights that rollout correction gives the policy loss; None: 1 each."""
    process_rewards: Tensor | None = None
    """(T,) float32, beta times the log-ratio of the process reward model to its reference."""

    def sum_rewards(self) -> Tensor:
        """(B,) float32, the reward of each completion."""
        return self.sum_rows(self.rewards)

    def sum_rows(self, per_token: Tensor) -> Tensor:
        """(B,) float32, the sum over each row's tokens."""
        return torch.segment_reduce(per_token.float(), "sum", offsets=self.cu_seqlens)

    def rollouts(self) -> Rollouts:
        """Which rows are of one rollout: it enters its group once, however many trajectories it has."""
        if self.rollout_ids is None:
            return Rollouts(
                of_row=torch.arange(self.group_ids.numel(), device=self.group_ids.device), group_ids=self.group_ids
            )
        pairs = torch.stack([self.group_ids, self.rollout_ids], dim=1)
        found, of_row = torch.unique(pairs, dim=0, return_inverse=True)
        return Rollouts(of_row=of_row, group_ids=found[:, 0])

    def broadcast(self, per_row: Tensor) -> Tensor:
        """(T,) float32: a row's value at each of its model tokens, 0 elsewhere."""
        lengths = self.cu_seqlens.diff()
        return torch.repeat_interleave(per_row.float(), lengths) * self.loss_mask

    def needed(self, name: Need) -> Tensor:
        """An optional field that has to be there.

        Raises:
            ConfigError: it is not.
        """
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ConfigError(f"this advantage estimator reads {name}, which the batch has not got")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The rollouts of a batch. Legend: `S` rollouts."""

    of_row: Tensor
    """(B,) int64, the rollout of each row."""
    group_ids: Tensor
    """(S,) int64, equal for the rollouts of one prompt."""

    def sum(self, per_row: Tensor) -> Tensor:
        """(S,) float32 sum over the trajectories of each rollout."""
        return per_row.new_zeros(self.group_ids.numel(), dtype=torch.float32).index_add(0, self.of_row, per_row.float())

    def mean(self, per_row: Tensor) -> Tensor:
        """(S,) float32 mean over the trajectories of each rollout."""
        return self.sum(per_row) / self.sum(torch.ones_like(per_row))

    def to_rows(self, per_rollout: Tensor) -> Tensor:
        """(B,) a rollout's value for each of its trajectories."""
        return per_rollout[self.of_row]


AdvantageFunction = Callable[[AdvantageInput], "Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """A registered estimator and what has to be known before a run starts."""

    compute: AdvantageFunction
    """`AdvantageInput -> (T,) float32`."""
    needs: tuple[Need, ...] = ()
    """Optional fields that it reads."""
    compares_group: bool = False
    """Whether it compares completions of one prompt, so that groups of one teach nothing."""
    keys: tuple[str, ...] = ()
    """Keys of `algorithm` that it reads, of `gamma` and `lam`."""
    uses_weights: bool = False
    """Whether it looks at the weights of `algorithm.correction`, where there are any."""


ADVANTAGES: dict[str, Estimator] = {}


def register_advantage(
    name: str,
    compute: AdvantageFunction,
    *,
    needs: tuple[Need, ...] = (),
    compares_group: bool = False,
    keys: tuple[str, ...] = (),
    uses_weights: bool = False,
) -> None:
    """Add an estimator under a name that `algorithm.advantage` can then choose, in this process.

    For every process of a job, install an `Estimator` in the entry point group `rl_trainer.advantages`.
    """
    ADVANTAGES[name] = Estimator(
        compute=compute, needs=needs, compares_group=compares_group, keys=keys, uses_weights=uses_weights
    )


def estimator_named(name: str) -> Estimator:
    """A registered or installed estimator.

    Raises:
        ConfigError: there is none of that name; lists what there is.
    """
    return named(name, ADVANTAGES, group=GROUP, kind=Estimator, key="algorithm.advantage")


def compute_advantages(name: str, data: AdvantageInput) -> Tensor:
    """(T,) float32 advantages by a registered or installed estimator.

    Raises:
        ConfigError: no such estimator (lists them), or a field that it needs is not there.
    """
    return estimator_named(name).compute(data)


def members_of(group_ids: Tensor) -> list[Tensor]:
    """Row numbers of each group."""
    order = torch.argsort(group_ids, stable=True)
    counts = torch.unique_consecutive(group_ids[order], return_counts=True)[1]
    return list(order.split(counts.tolist()))
