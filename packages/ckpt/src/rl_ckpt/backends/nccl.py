"""`nccl://host:port`: payload by broadcasts of NCCL from GPU to GPUs, control over TCP as in `tcp://`.

The sender's bucket lies on its GPU, and lands on those of the receivers; digests are made and checked there. Groups are
made as those of `gloo://`: anew when others take part than before, and after every sync that failed, when the
communicator is aborted, so that no kernel of it waits for a peer that is gone.

NCCL refuses two ranks on one GPU: every end needs its own. The current device of torch is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_ckpt.transports import group
from rl_ckpt.transports.base import Transport
from rl_ckpt.transports.group import GroupReceive, GroupSend

if TYPE_CHECKING:
    from torch import Tensor

    from rl_ckpt.protocol.channel import Channel
    from rl_ckpt.protocol.messages import Session
    from rl_ckpt.types import SessionConfig


class Backend(Transport):
    """Broadcasts of NCCL between GPUs. It has no options."""

    def sender(self, config: SessionConfig) -> NcclSend:
        """The sending end; raises `AddressError` as `tcp://` does, `BackendError` without NCCL or a GPU."""
        group.require_nccl(config.address)
        return NcclSend(config)

    def receiver(self, config: SessionConfig) -> NcclReceive:
        """A receiving end; raises as `sender` does."""
        group.require_nccl(config.address)
        return NcclReceive(config)


def current_device() -> torch.device:
    """Device of this end's buckets."""
    return torch.device("cuda", torch.cuda.current_device())


class NcclSend(GroupSend):
    """Rank 0 of every group, with its ring on a GPU."""

    bucket_bytes = 64 << 20

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """The ring."""
        self.device = current_device()
        return super().allocate(num_slots, bucket_bytes)


class NcclReceive(GroupReceive):
    """Any other rank, with its slots on a GPU."""

    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """Memory for broadcasts."""
        self.device = current_device()
        return super().map_slots(session, channel)
