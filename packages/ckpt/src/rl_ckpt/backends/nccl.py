"""`nccl://host:port`: payload by broadcasts of NCCL from GPU to GPUs, control over TCP as in `tcp://`.

The sender's bucket lies on its GPU, and lands on those of the receivers; digests are made and checked there. Groups are
made as those of `gloo://`: anew when others take part than before, and after every sync that failed, when the
communicator is aborted, so that no kernel of it waits for a peer that is gone.

NCCL refuses two ranks on one GPU: every end needs its own. The current device of torch is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_ckpt.receiver.receiver import Receiver
from rl_ckpt.sender.sender import Sender
from rl_ckpt.transports.base import checked_options
from rl_ckpt.transports.group import GroupReceive, GroupSend, require_nccl
from rl_ckpt.transports.tcp import Listener, channel_of, dial, token_of
from rl_ckpt.types import Role

if TYPE_CHECKING:
    from torch import Tensor

    from rl_ckpt.base import CheckpointEngine
    from rl_ckpt.protocol.channel import Channel
    from rl_ckpt.protocol.messages import Session
    from rl_ckpt.types import SessionConfig


def open_session(config: SessionConfig) -> CheckpointEngine:
    """Return one end of a session over NCCL.

    Raises:
        AddressError: the URL has no host and port, there is an option, or there is no token.
        BackendError: there is no NCCL, or no GPU.
    """
    checked_options(config)
    token = token_of(config)
    require_nccl(config.address)
    if config.role is Role.SEND:
        return Sender(config, NcclSend(config, Listener, 0, token))
    return Receiver(config, NcclReceive(config, dial, channel_of, token))


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class NcclSend(GroupSend):
    """Rank 0 of every group, with its ring on a GPU."""

    bucket_bytes = 64 << 20

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """The ring."""
        self.device = _current_device()
        return [torch.empty(bucket_bytes, dtype=torch.uint8, device=self.device) for _ in range(num_slots)]


class NcclReceive(GroupReceive):
    """Any other rank, with its slots on a GPU."""

    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """Memory for what is broadcast."""
        self.device = _current_device()
        return super().map_slots(session, channel)
