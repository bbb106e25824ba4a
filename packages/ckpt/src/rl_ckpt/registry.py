"""Factories: `connect` opens one end of a session from its URL, `create_sender` the sessions of a rank's shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_ckpt.session import capabilities as capabilities
from rl_ckpt.session import connect as connect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_ckpt.base import ShardSender
    from rl_ckpt.types import Shard


def create_sender(
    sources: Sequence[Sequence[Shard]],
    targets: Sequence[Sequence[Shard]] | None,
    rank: int,
    url: Callable[[int], str],
    *,
    timeout_s: float = 60.0,
    token: str | None = None,
) -> ShardSender:
    """Create the sender of one rank of a trainer whose weights go from shard to shard. Opens nothing.

    Args:
        sources: For each rank of the trainer, what it holds; the same on every rank.
        targets: For each rank of one replica of the server, what it takes; None: one rank takes the whole model.
        rank: Of the trainer.
        url: Of a session, for each rank of the server, with its options: `shm://job-0-1?delta=1`. The address that
            peers dial may differ; `ShardSender.prepare` returns it.
        timeout_s: Longest wait for a peer, seconds.
        token: Of the sessions, where their backend wants one.

    Raises:
        TensorError: nobody holds a part that is wanted, or the two sides disagree about a shape.
        UsageError: the backend does not know its receivers (`Capability.VOTES`).
        AddressError, BackendError: as `connect`.
    """
    from rl_ckpt.sharded import ShardedSender, ShardPlan  # torch, which `connect` does not need before it is called

    return ShardedSender(ShardPlan(sources, targets), rank, url, timeout_s=timeout_s, token=token)
