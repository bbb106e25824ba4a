"""`cuda-ipc://name`: between processes of one user that share a GPU, without a copy to the host.

What is said goes over a UNIX socket, as with `uds://`, whose other end the kernel vouches for. A source that was
registered (`register_source`) is not staged at all: the sender exports one handle for each allocation that its tensors
lie in, once; receivers map them, and copy straight to where the tensors belong. Everything else is packed into a ring
on the GPU. Digests are made and checked on the GPU.

Memory of expandable segments cannot be shared in this way, and is refused.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from rl_ckpt.errors import BackendError, ProtocolError
from rl_ckpt.protocol.messages import HANDLE_BYTES
from rl_ckpt.transports.base import Transport
from rl_ckpt.transports.cuda_driver import CudaDriver, Driver
from rl_ckpt.transports.mapped_source import map_source
from rl_ckpt.transports.unix import UnixReceive, UnixSend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rl_ckpt.protocol.channel import Channel
    from rl_ckpt.protocol.messages import Session
    from rl_ckpt.transports.mapped_source import SourceMap
    from rl_ckpt.types import SessionConfig

_RING = struct.Struct(f"<36s{HANDLE_BYTES}sQQ")
"""Device, handle and size of the allocation that contains the ring, and the ring's offset, bytes."""
MAX_RING_BYTES = 1 << 36


def driver_of(device_id: str | None = None) -> Driver:
    """The CUDA driver for a device; `rl_ckpt.testing.FakeGpu` takes its place in tests without a GPU."""
    return CudaDriver(device_id)


class CudaSend(UnixSend):
    """Sending end, which owns the ring."""

    bucket_bytes = 64 << 20

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        self._driver: Driver | None = None
        self._ring: Tensor | None = None
        self._memory = b""

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Allocate on the GPU, and export."""
        self._driver = driver_of()
        self._ring = self._driver.allocate(num_slots * bucket_bytes)
        address, size = self._driver.allocation_of(self._ring)
        offset = self._ring.data_ptr() - address
        self._memory = _RING.pack(self._driver.device_id.encode(), self._driver.export(address), size, offset)
        return list(self._ring.split(bucket_bytes))

    def map_source(self, items: Sequence[tuple[str, Tensor]]) -> SourceMap | None:
        """Map of the source's tensors on the device."""
        driver = self._driver
        if driver is None:
            return None

        def allocation_of(name: str, tensor: Tensor) -> tuple[int, int] | None:
            try:
                return driver.allocation_of(tensor) if driver.is_on_device(tensor) else None
            except BackendError as error:
                raise BackendError(f"{name!r} cannot be shared: {error}") from error

        return map_source(items, allocation_of, driver.export)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._driver is not None:
            self._driver.synchronize()

    def memory(self) -> bytes:
        """Memory of the ring."""
        return self._memory

    def close(self) -> None:
        """Free the name and the ring."""
        super().close()
        self._ring = self._driver = None


class CudaReceive(UnixReceive):
    """Receiving end, which maps what the sender names."""

    is_sender_memory = True

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        self._driver: Driver | None = None
        self._ring: Tensor | None = None
        self._segments: dict[tuple[bytes, int], Tensor] = {}

    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """Map the ring."""
        num_bytes = session.num_slots * session.bucket_bytes
        if len(session.memory) != _RING.size or not 0 < num_bytes <= MAX_RING_BYTES:
            raise ProtocolError(f"{channel.peer} announced a session without a ring on a GPU")
        device_id, handle, size, offset = _RING.unpack(session.memory)
        if offset + num_bytes > size:
            raise ProtocolError(f"{channel.peer} announced a ring of {num_bytes} bytes at {offset} of {size}")
        self._driver = driver_of(device_id.decode())
        self._ring = self._driver.open(handle, size)
        return list(self._ring[offset : offset + num_bytes].split(session.bucket_bytes))

    def map_segments(self, segments: Sequence[tuple[bytes, int]], channel: Channel) -> Sequence[Tensor]:
        """Map a registered source. Existing mappings stay; those no longer named are released."""
        if self._driver is None:
            raise ProtocolError(f"{channel.peer} offered memory to map before its session")
        for key in segments:
            if key not in self._segments:
                self._segments[key] = self._driver.open(*key)  # what was mapped before stays, should this fail
        for key in self._segments.keys() - set(segments):
            self._driver.close(self._segments.pop(key))
        return [self._segments[key] for key in segments]

    def release(self) -> None:
        """Give every mapping back."""
        if self._driver is not None:
            mapped = [*self._segments.values(), *([] if self._ring is None else [self._ring])]
            self._segments, self._ring = {}, None
            for memory in mapped:
                with suppress(BackendError):  # the process that owned it is gone
                    self._driver.close(memory)
            self._driver = None


class Backend(Transport):
    """CUDA IPC on one GPU. It has no options."""

    ends = (CudaSend, CudaReceive)
