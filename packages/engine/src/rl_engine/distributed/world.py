"""The process group of an engine: joined, made from torchrun's environment, or not needed at all."""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rl_engine.distributed.serialization import decode, encode
from rl_engine.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from collections.abc import Generator

_Value = TypeVar("_Value")
_MEETINGS: dict[tuple[str, ...], tuple[Store, int, int, itertools.count[int]]] = {}
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among the engine's data-parallel ranks."""

    rank: int
    """From 0."""
    size: int
    """Number of ranks."""
    device: torch.device
    """Where this rank computes."""
    owns_group: bool
    """The engine made the process group and takes it down."""
    group: Any = None
    """Another process group of the same ranks; None: the default one."""

    def exchange(self, value: _Value) -> list[_Value]:
        """Every rank's `value` (plain values and tensors, see `rl_engine.distributed.serialization`), in rank order.

        Raises:
            EngineError: a peer did not answer before the deadline, or went away.
        """
        if self.size == 1:
            return [value]
        with self.together():
            return gather_values(value, self.group)

    @contextmanager
    def together(self) -> Generator[None]:
        """Inside, a collective of torch that a peer leaves unanswered is an `EngineError`."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):  # torch has no class for gloo's
                raise
            raise EngineError(
                f"Rank {self.rank} of {self.size} got no answer from another rank (see its own error; a peer died, "
                f"or is not in the same call): {error}"
            ) from error

    def barrier(self) -> None:
        """Wait for every rank."""
        self.exchange(None)

    def leave(self) -> None:
        """Take the process group down if the engine made it."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def gather_values(value: _Value, group: Any = None) -> list[_Value]:
    """Every rank's `value` (see `rl_engine.distributed.serialization`), in rank order. Collective."""
    device = message_device(group)
    own = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8).to(device)
    lengths = _all_gather(torch.tensor(own.numel(), device=device), group)
    longest = max(int(length) for length in lengths)
    padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
    rows = _all_gather(padded, group)
    return [decode(row[: int(length)].cpu().numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]


def _all_gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def message_device(group: Any = None) -> torch.device:
    """Where `group` takes small messages: the CPU if it has a backend there, else this rank's accelerator."""
    return torch.device("cpu") if "cpu" in dist.get_backend_config(group) else _device()


def expected_size() -> int:
    """Ranks that `join_world` is going to find."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def join_world(*, timeout_s: float, needs_group: bool) -> World:
    """Use the initialised process group; else make one from torchrun's environment; else be alone.

    Args:
        timeout_s: Deadline of each collective, where the group is made here.
        needs_group: Make a group even for a single process.

    Raises:
        ConfigError: part of torchrun's environment is missing.
    """
    if dist.is_initialized():
        return World(rank=dist.get_rank(), size=dist.get_world_size(), device=_device(), owns_group=False)
    present = [name for name in _TORCHRUN if name in os.environ]
    alone = "WORLD_SIZE" not in os.environ or (os.environ["WORLD_SIZE"] == "1" and len(present) < len(_TORCHRUN))
    if not alone and len(present) < len(_TORCHRUN):
        missing = ", ".join(name for name in _TORCHRUN if name not in present)
        raise ConfigError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but {missing} is not set. Start with torchrun.")
    device = _device()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if alone:
        if needs_group:
            dist.init_process_group(
                backend,
                store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage] - public, typed as private
                rank=0,
                world_size=1,
                timeout=timeout,
            )
        return World(rank=0, size=1, device=device, owns_group=needs_group)
    store, rank, size = _meeting(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return World(rank=rank, size=size, device=device, owns_group=True)


def _meeting(timeout: timedelta) -> tuple[Store, int, int]:
    """Where the ranks of torchrun's environment meet for their next group, this one's number, and how many they are.

    One store is kept as long as the process: the one that torch makes for a group ends with it, and a rank that is
    quick to make the next group would meet the others at the store of the last.
    """
    key = tuple(os.environ[name] for name in _TORCHRUN)
    if key not in _MEETINGS:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        _MEETINGS[key] = store, rank, size, itertools.count()
    store, rank, size, number = _MEETINGS[key]
    return PrefixStore(f"rl-engine-{next(number)}", store), rank, size


def _device() -> torch.device:
    """This process's accelerator by LOCAL_RANK, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
