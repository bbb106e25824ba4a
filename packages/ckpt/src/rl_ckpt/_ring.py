"""A ring of slots in a memfd: memory with a descriptor, that goes when the last process that has it goes."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING

from rl_ckpt.tensors.spec import buffer_tensor

if TYPE_CHECKING:
    from torch import Tensor


def make_ring(name: str, num_slots: int, bucket_bytes: int) -> tuple[int, list[Tensor]]:
    """Its descriptor, owned by the caller and sealed against resizing, and its slots, mapped and shared."""
    descriptor = os.memfd_create(f"rl-ckpt-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_slots * bucket_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor, cut(mmap.mmap(descriptor, num_slots * bucket_bytes, mmap.MAP_SHARED), num_slots, bucket_bytes)


def cut(memory: mmap.mmap, num_slots: int, bucket_bytes: int) -> list[Tensor]:
    """The slots, uint8 [bucket_bytes] each; they keep the mapping alive."""
    return [buffer_tensor(memory, offset=slot * bucket_bytes, num_bytes=bucket_bytes) for slot in range(num_slots)]
