"""A data plane of one's own for rl-ckpt: buckets go through a memory-mapped file, `mmap://name?folder=/dev/shm`.

Written from rl-ckpt's README, `rl_ckpt.transports` and WIRE.md. The control connection, the two-phase commit, digests,
differences and kill safety are rl-ckpt's; what is here is where the bytes of a bucket lie. To install it, a package
names this module in its metadata:

    [project.entry-points."rl_ckpt.backends"]
    mmap = "mmap_transport"
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from rl_ckpt.errors import AddressError, ProtocolError
from rl_ckpt.transports import Transport, UnixReceive, UnixSend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rl_ckpt.transports import Channel, Session
    from rl_ckpt.types import SessionConfig


class MappedFileSend(UnixSend):
    """Sending end: makes the file, and tells receivers where it is."""

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        self._folder = config.option("folder", tempfile.gettempdir())
        if not Path(self._folder).is_absolute():
            raise AddressError(f"folder is {self._folder!r} in {config.address!r}; give an absolute path")
        self._path: Path | None = None

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """A new file with room for all slots, mapped and shared."""
        descriptor, name = tempfile.mkstemp(prefix="mmap-transport-", dir=self._folder)  # mode 0600
        os.truncate(descriptor, num_slots * bucket_bytes)
        os.close(descriptor)
        self._path = Path(name)
        return _slots(self._path, num_slots, bucket_bytes)

    def memory(self) -> bytes:
        """What a receiver needs to find the file: its path."""
        return str(self._path).encode()

    def close(self) -> None:
        """Give the name and the file back; who has it mapped keeps it."""
        super().close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


class MappedFileReceive(UnixReceive):
    """Receiving end: maps the sender's file, and reads buckets where they are."""

    is_sender_memory = True  # a consumer that iterates is given copies: the mapping is everybody's

    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """The sender's slots, after a look at what was named."""
        path = Path(os.fsdecode(session.memory))
        num_bytes = session.num_slots * session.bucket_bytes
        try:
            found = path.stat()
        except OSError as error:
            raise ProtocolError(f"{channel.peer} named {str(path)!r}, which cannot be opened: {error}") from error
        if found.st_uid != os.getuid() or found.st_size != num_bytes:
            raise ProtocolError(f"{channel.peer} named {str(path)!r}, not this user's file of {num_bytes} bytes")
        return _slots(path, session.num_slots, session.bucket_bytes)


def _slots(path: Path, num_slots: int, bucket_bytes: int) -> list[Tensor]:
    whole = torch.from_file(str(path), shared=True, size=num_slots * bucket_bytes, dtype=torch.uint8)
    return list(whole.split(bucket_bytes))


class Backend(Transport):
    """Buckets in a memory-mapped file that only this user can open."""

    options: ClassVar[Mapping[str, str]] = {"folder": "where the file is made, an absolute path; the default is /tmp"}
    ends = (MappedFileSend, MappedFileReceive)
