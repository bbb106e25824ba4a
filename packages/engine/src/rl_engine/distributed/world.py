"""Ranks of an engine: their process group (joined, or made from torchrun's environment), and their exchange of values.

Messages are plain values and tensors, packed as a frame of rl-csrc. Not pickle: bytes that come from a socket can name
no code here. None, bool, int, float (NaN and infinities too), str, tensors, and lists, tuples and dictionaries of these
come back as they were; anything else is refused where it is sent.
"""

from __future__ import annotations

import itertools
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rl_csrc import frames
from rl_engine.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

_Value = TypeVar("_Value")
_MEETINGS: dict[tuple[str, ...], tuple[Store, int, int, itertools.count[int]]] = {}
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Rank, number of ranks and device of this process in its engine."""

    rank: int
    """Rank, from 0."""
    size: int
    """Number of ranks."""
    device: torch.device
    """Compute device of this rank."""
    owns_group: bool
    """The engine made the process group and takes it down."""
    group: Any = None
    """Another process group of the same ranks; None: the default one."""

    def exchange(self, value: _Value) -> list[_Value]:
        """Every rank's `value` (plain values and tensors, see `rl_engine.distributed.world`), in rank order.

        Raises:
            EngineError: a peer did not answer before the deadline, or went away.
        """
        if self.size == 1:
            return [value]
        with self.together():
            return gather_values(value, self.group)

    @contextmanager
    def together(self) -> Generator[None]:
        """Turn failed collectives inside (a peer died or called something else) into `EngineError`s."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):  # torch has no class for gloo's
                raise
            raise EngineError(
                f"Rank {self.rank} of {self.size} got no answer from another rank (see its own error; a peer died, "
                f"or is not in the same call): {error}"
            ) from error

    def all_to_all(self, payloads: Sequence[Any]) -> list[Any]:
        """Send `payloads[r]` (plain values and tensors) to rank r; returns what each rank sent here. Collective.

        Raises:
            EngineError: a peer did not answer before the deadline, or went away.
        """
        if self.size == 1:
            return list(payloads)
        device = message_device()
        packed = [b"" if payload is None else encode(payload) for payload in payloads]
        sizes = torch.tensor([len(payload) for payload in packed], device=device)
        joined = bytearray(b"".join(packed)) or bytearray(1)
        sent = torch.frombuffer(joined, dtype=torch.uint8)[: int(sizes.sum())].to(device)
        incoming = torch.empty_like(sizes)
        with self.together():
            dist.all_to_all_single(incoming, sizes)
            received = torch.empty(int(incoming.sum()), dtype=torch.uint8, device=device)
            dist.all_to_all_single(received, sent, incoming.tolist(), sizes.tolist())
        parts = received.cpu().split(incoming.tolist())
        return [decode(part.numpy().tobytes()) if part.numel() else None for part in parts]

    def barrier(self) -> None:
        """Wait for every rank."""
        self.exchange(None)

    def leave(self) -> None:
        """Take the process group down if the engine made it."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def gather_values(value: _Value, group: Any = None) -> list[_Value]:
    """Every rank's `value` (see `rl_engine.distributed.world`), in rank order. Collective."""
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
    """Device of small messages in `group`: the CPU if it has a backend there, else this rank's accelerator."""
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
        EngineError: the address of the environment cannot be used.
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
    """Rendezvous store of the next group in torchrun's environment, this process's rank, and the number of ranks.

    One store is kept as long as the process: the one that torch makes for a group ends with it, and a rank that is
    quick to make the next group would meet the others at the store of the last.
    """
    key = tuple(os.environ[name] for name in _TORCHRUN)
    if key not in _MEETINGS:
        try:
            store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        except dist.DistError as error:
            message = str(error).partition("\n")[0]
            raise EngineError(
                f"The ranks cannot meet at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {message}. "
                "See that the port is free on rank 0's machine, and can be reached from the others."
            ) from error
        _MEETINGS[key] = store, rank, size, itertools.count()
    store, rank, size, number = _MEETINGS[key]
    return PrefixStore(f"rl-engine-{next(number)}", store), rank, size


def _device() -> torch.device:
    """Accelerator of this process by LOCAL_RANK, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


# Messages


def encode(value: Any) -> bytearray:
    """`value` as bytes; tensors come back on the CPU, detached.

    Raises:
        EngineError: it holds something that is no plain value, which is named.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_to_json(value, tensors), separators=(",", ":")).encode()
    named = {str(index): tensor for index, tensor in enumerate(tensors)}
    return frames.encode({"json": text, **named}).to_bytes()


def decode(data: bytes | bytearray) -> Any:
    """The value that `encode` was given.

    Raises:
        EngineError: the bytes are not `encode`'s.
    """
    try:
        frame = frames.decode(bytearray(data))  # a copy: tensors are views of it, aligned and writable
        if frame.nbytes != len(data):
            raise ValueError(f"the frame has {frame.nbytes}")
        return _from_json(json.loads(bytes(frame["json"])), frame)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EngineError(f"A rank sent {len(data)} bytes that are not a message ({error!r}).") from error


def _to_json(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, (int, float)):  # a subclass, such as a NumPy scalar or an enum
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, list):
        return [_to_json(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_json(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_to_json(key, tensors), _to_json(item, tensors)] for key, item in value.items()]}
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu())
        return {"tensor": len(tensors) - 1}
    raise EngineError(
        f"Ranks exchange plain values and tensors; a {type(value).__name__} is neither. Send its parts instead."
    )


def _from_json(found: Any, frame: frames.FrameView) -> Any:
    if isinstance(found, list):
        return [_from_json(item, frame) for item in found]
    if not isinstance(found, dict):
        return found
    ((mark, content),) = found.items()
    if mark == "tuple":
        return tuple(_from_json(item, frame) for item in content)
    if mark == "dict":
        return {_from_json(key, frame): _from_json(item, frame) for key, item in content}
    if mark == "tensor" and isinstance(tensor := frame[str(int(content))], Tensor):
        return tensor
    raise ValueError(f"{mark} of {content!r:.40} is none of tensor, tuple, dict")
