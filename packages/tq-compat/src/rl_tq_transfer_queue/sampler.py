"""Samplers of TransferQueue: the protocol and four implementations. They run in the controller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rl_tq.types.batch_meta import balanced_order

Choice = tuple[list[int], list[int]]
"""Samples to give, and samples to mark as consumed."""


class BaseSampler(ABC):
    """Base class: selects ready samples. `_states` is stored per partition, task, `dp_rank` and `batch_index`."""

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Choice:
        """Return what to give and what to mark as consumed: two lists of global indexes, both empty to wait.

        Args:
            ready_indexes: have all fields asked for, and were not consumed by the task; in rising order.
            batch_size: how many are wanted.
            args: not used.
            kwargs: `task_name`, `partition_id`, `partition`, and the caller's `sampling_config`.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Choice:
        """See `sample`."""
        return self.sample(*args, **kwargs)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether the answer is cached, so that no further samples have to become ready."""
        config = sampling_config or {}
        cached = self._states.get(partition_id, {}).get(task_name, {}).get(config.get("dp_rank"), {})
        return config.get("dp_rank") is not None and config.get("batch_index") in cached

    def clear_cache(self, partition_id: str) -> None:
        """Drop the cached answers of a partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """State for `load_checkpoint`."""
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Restore the state of `save_checkpoint`."""
        self._states = state["_states"]

    def _answers(self, partition_id: str, task_name: str, dp_rank: int) -> dict[Any, Any]:
        return self._states.setdefault(partition_id, {}).setdefault(task_name, {}).setdefault(dp_rank, {})


class SequentialSampler(BaseSampler):
    """First-in, first-out sampler."""

    def __init__(self) -> None:
        super().__init__()

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Choice:
        """See `BaseSampler.sample`."""
        del args, kwargs
        return ready_indexes[:batch_size], ready_indexes[:batch_size]


class GRPOGroupNSampler(BaseSampler):
    """Group sampler: `n_samples_per_prompt` consecutive indexes each, beginning where the first ready one is."""

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}")
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Choice:
        """See `BaseSampler.sample`. With a `dp_rank` the answer is cached: the same `batch_index` gets the same."""
        del args
        rank, batch_index = kwargs.get("dp_rank"), kwargs.get("batch_index")
        if rank is not None and self.has_cached_result(partition_id, task_name, kwargs):
            return self._answers(partition_id, task_name, rank)[batch_index]
        size = self.n_samples_per_prompt
        if batch_size % size:
            raise ValueError(f"batch_size ({batch_size}) must be a multiple of n_samples_per_prompt ({size})")
        ready = sorted(ready_indexes)
        chosen: list[int] = []
        start = 0
        while len(chosen) < batch_size and start + size <= len(ready):
            is_whole = ready[start + size - 1] - ready[start] == size - 1
            if is_whole:
                chosen += ready[start : start + size]
            start += size if is_whole else 1
        if len(chosen) < batch_size:
            return [], []
        answer = (chosen, list(chosen))
        if rank is not None:
            self._answers(partition_id, task_name, rank)[batch_index] = answer
        return answer


class RankAwareSampler(BaseSampler):
    """First-in, first-out per rank: the same `dp_rank` and `batch_index` get the same."""

    def __init__(self) -> None:
        super().__init__()

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        dp_rank: int,
        batch_index: int,
        task_name: str,
        partition_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> Choice:
        """See `BaseSampler.sample`."""
        del args, kwargs
        if dp_rank < 0:
            raise ValueError(f"dp_rank {dp_rank} must be greater than or equal to 0")
        answers = self._answers(partition_id, task_name, dp_rank)
        if batch_index not in answers:
            if len(ready_indexes) < batch_size:
                return [], []
            answers[batch_index] = ready_indexes[:batch_size]
        return answers[batch_index], answers[batch_index]


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Group sampler that balances `dp_size` ranks so that their sums of the tag `total_lengths` are nearly equal.

    `batch_size` is one rank's. The first rank that asks for a `batch_index` assigns it for all. Greedy (LPT, as many
    groups for each), where the original uses the largest differencing method: ranks may get other groups than there.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt=n_samples_per_prompt)
        if dp_size <= 0:
            raise ValueError(f"dp_size must be positive, got {dp_size}")
        self.dp_size = dp_size

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Choice:
        """See `BaseSampler.sample`. As in the original, a `dp_rank` from `dp_size` on gets nothing."""
        del args
        rank, batch_index = kwargs.get("dp_rank", 0), kwargs.get("batch_index", 0)
        if rank < 0:
            raise ValueError(f"dp_rank {rank} must be greater than or equal to 0")
        if rank >= self.dp_size:
            return [], []
        answers = self._answers(partition_id, task_name, rank)
        if batch_index not in answers:
            chosen, _ = super().sample(ready_indexes, batch_size * self.dp_size)
            if not chosen:
                return [], []
            for each, mine in enumerate(self._assigned(chosen, kwargs.get("partition"))):
                self._answers(partition_id, task_name, each)[batch_index] = (mine, list(mine))
        return answers[batch_index]

    def _assigned(self, chosen: list[int], partition: Any) -> list[list[int]]:
        size = self.n_samples_per_prompt
        groups = [chosen[i : i + size] for i in range(0, len(chosen), size)]
        if len(groups) % self.dp_size:
            raise ValueError(
                f"{len(groups)} groups of {size} samples cannot be divided among {self.dp_size} ranks equally"
            )
        tags = partition.get_custom_meta(chosen) if partition is not None else {}
        lengths = [sum(tags.get(index, {}).get("total_lengths", 1) for index in group) for group in groups]
        order = balanced_order(lengths, self.dp_size)
        share = len(groups) // self.dp_size
        return [
            [index for i in order[rank * share : (rank + 1) * share] for index in groups[i]]
            for rank in range(self.dp_size)
        ]
