"""`nixl://host:port`: receivers read the sender's ring by RDMA, through NVIDIA's NIXL; `pip install 'rl-ckpt[nixl]'`.

What is said goes over TCP, as with `tcp://`, and with the same token. Payload does not: the sender registers its ring
once, each receiver prepares descriptors of it once, and pulls every bucket with one call. UCX, which NIXL uses, chooses
the wire; if you set UCX_TLS yourself, leave `tcp` in it, because UCX sets up its connections with that.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from nixl._api import nixl_agent, nixl_agent_config

from rl_ckpt.errors import CkptError, PeerLostError, ProtocolError
from rl_ckpt.transports.base import Transport
from rl_ckpt.transports.tcp import TcpReceive, TcpSend, host_and_port

if TYPE_CHECKING:
    from torch import Tensor

    from rl_ckpt.protocol.channel import Channel
    from rl_ckpt.protocol.messages import Session
    from rl_ckpt.transports.base import PayloadWaits
    from rl_ckpt.types import SessionConfig

CHUNK_BYTES = 1 << 20
"""Bytes that one prepared descriptor covers: a bucket that is not full is pulled as far as it is filled."""
MAX_RING_BYTES = 1 << 34
_ADDRESS = struct.Struct("<Q")
_IN_FLIGHT = "PROC"
_DONE = "DONE"
_DEVICES = "UCX_NET_DEVICES"
"""UCX's variable: network interfaces that it listens on and connects by. One of the user's is left as it is."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _agent(role: str, host: str) -> Any:
    """An end of NIXL; its name must be unique.

    UCX's listeners take no token, so that they are on loopback alone where the session's `host` is.
    """
    is_held = _is_loopback(host) and _DEVICES not in os.environ
    if is_held:
        os.environ[_DEVICES] = "lo"
    try:
        return nixl_agent(f"rl-ckpt-{role}-{os.getpid()}-{secrets.token_hex(8)}", nixl_agent_config(backends=["UCX"]))
    finally:
        if is_held:
            del os.environ[_DEVICES]


def _chunks(address: int, num_slots: int, bucket_bytes: int) -> list[tuple[int, int, int]]:
    """(address, length, device) of every chunk of every slot."""
    chunks: list[tuple[int, int, int]] = []
    for slot in range(num_slots):
        start = address + slot * bucket_bytes
        offsets = range(0, bucket_bytes, CHUNK_BYTES)
        chunks += [(start + offset, min(CHUNK_BYTES, bucket_bytes - offset), 0) for offset in offsets]
    return chunks


class NixlSend(TcpSend):
    """Sending end, which owns the registered ring."""

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        self._host, _ = host_and_port(config)
        self._agent: Any = None
        self._ring: Tensor | None = None
        self._memory = b""

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Allocate the ring and register it."""
        self._ring = torch.empty(num_slots * bucket_bytes, dtype=torch.uint8)
        self._agent = _agent("sender", self._host)
        self._agent.register_memory([self._ring])
        self._memory = _ADDRESS.pack(self._ring.data_ptr()) + self._agent.get_agent_metadata()
        return list(self._ring.split(bucket_bytes))

    def memory(self) -> bytes:
        """The ring's address in this process, and how NIXL reaches it."""
        return self._memory

    def close(self) -> None:
        """Give port and memory back."""
        super().close()
        self._agent = self._ring = None  # in this order: the memory outlives its registration


class Reader:
    """Local memory for every slot, and everything prepared to read a sender's ring into it."""

    def __init__(self, session: Session, host: str) -> None:
        memory = torch.empty(session.num_slots * session.bucket_bytes, dtype=torch.uint8)
        self.slots = list(memory.split(session.bucket_bytes))
        self._num_chunks = -(-session.bucket_bytes // CHUNK_BYTES)
        self._agent: Any = _agent("receiver", host)
        self._agent.register_memory([memory])
        (address,) = _ADDRESS.unpack_from(session.memory)
        peer = self._agent.add_remote_agent(session.memory[_ADDRESS.size :])
        theirs = _chunks(address, session.num_slots, session.bucket_bytes)
        mine = _chunks(memory.data_ptr(), session.num_slots, session.bucket_bytes)
        self._theirs = self._agent.prep_xfer_dlist(peer, theirs, "DRAM")
        self._mine = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", mine, "DRAM")
        self._handle: Any = None
        self._state = _DONE

    def close(self) -> None:
        """Let go of the sender's memory. Reads that are under way end with the agent, before the slots' memory goes."""
        self._handle = self._mine = self._theirs = None
        self._agent = None

    def start(self, slot: int, num_bytes: int) -> None:
        """Begin to read the first bytes of a slot."""
        first = slot * self._num_chunks
        chunks = list(range(first, first - (-num_bytes // CHUNK_BYTES)))
        self._handle = self._agent.make_prepped_xfer("READ", self._mine, chunks, self._theirs, chunks)
        self._state = self._agent.transfer(self._handle)

    def is_done(self) -> bool:
        """Whether everything is here.

        Raises:
            OSError: NIXL says that it failed.
        """
        if self._state == _IN_FLIGHT:
            self._state = self._agent.check_xfer_state(self._handle)
        if self._state == _IN_FLIGHT:
            return False
        self._agent.release_xfer_handle(self._handle)
        if self._state != _DONE:
            raise OSError(f"the transfer is in state {self._state}")
        return True


class NixlReceive(TcpReceive):
    """Receiving end, which reads buckets into its own slots."""

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        self._host, _ = host_and_port(config)
        self._session: Session | None = None
        self._reader: Reader | None = None
        self._slots: list[Tensor] = []
        self._peer = "the sender"

    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """Map as many slots as the sender has."""
        self._peer = channel.peer
        num_bytes = session.num_slots * session.bucket_bytes
        if len(session.memory) <= _ADDRESS.size or not 0 < num_bytes <= MAX_RING_BYTES:
            raise ProtocolError(f"{channel.peer} announced a session without a ring that NIXL could read")
        try:
            self._session, self._reader = session, Reader(session, self._host)
        except Exception as error:  # NIXL has a class for each of its errors, and no common one that it exports
            raise PeerLostError(f"NIXL could not reach the ring of {channel.peer}: {error!r}") from error
        self._slots = list(self._reader.slots)
        return self._slots

    def pull(self, slot: int, content: Tensor, waits: PayloadWaits) -> None:
        """Read a bucket."""
        if self._reader is None or self._session is None:
            raise PeerLostError(f"the ring of {self._peer} was let go")
        try:
            self._reader.start(slot, content.numel())
            waits.until(self._reader.is_done)
        except BaseException as error:  # the read may go on, so nothing else may land in that memory
            self._renew()
            if isinstance(error, CkptError) or not isinstance(error, Exception):
                raise
            raise PeerLostError(f"NIXL could not read the memory of {self._peer}: {error!r}") from error

    def _renew(self) -> None:
        """Read into other memory from now on; into none if the sender is gone, which the next read then says."""
        if self._reader is None or self._session is None:
            return
        self._reader.close()
        self._reader = None
        with suppress(Exception):  # NIXL's errors have no common class
            self._reader = Reader(self._session, self._host)
            self._slots[:] = self._reader.slots

    def release(self) -> None:
        """Let go of the sender's memory."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class Backend(Transport):
    """RDMA reads through NIXL. It has no options."""

    ends = (NixlSend, NixlReceive)
