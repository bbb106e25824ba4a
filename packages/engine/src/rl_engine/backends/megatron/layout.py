"""The process groups of one layout, and what lets megatron-core run where there is no CUDA device.

megatron-core keeps its groups in module globals: engines of one process share them, so they must share a layout.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator

    from rl_engine.distributed.world import World
    from rl_engine.types import ParallelConfig

_shared: dict[str, Any] = {"parallel": None, "engines": 0, "wraps": (None, None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """This rank's process group along one direction of the layout."""

    group: Any
    """torch.distributed process group."""
    ranks: tuple[int, ...]
    """Its global ranks, in order."""
    rank: int
    """This process's place among them."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def all_gather(self, part: Tensor) -> Tensor:
        """`[size, *part.shape]`, in rank order."""
        if self.size == 1:
            return part[None]
        out = part.new_empty((self.size, *part.shape))
        # torch 2.13 renames it; this is the name that 2.11 has too
        dist.all_gather_into_tensor(out.view(-1), part.contiguous().view(-1), group=self.group)  # pyright: ignore[reportDeprecated]
        return out

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum in place."""
        if self.size > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        """The `source`-th rank's value, in place."""
        if self.size > 1:
            dist.broadcast(value, self.ranks[source], group=self.group)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where this rank stands in every direction."""

    tp: Axis
    """Tensor parallel."""
    pp: Axis
    """Pipeline parallel."""
    vpp: int
    """Pieces of the model on each pipeline rank."""
    wraps: tuple[Any, Any]
    """Process groups of the pipeline's ranks for activations and gradients between its last and its first, which pass
    from one piece to the next; None with one piece."""
    cp: Axis
    """Context parallel."""
    ep: Axis
    """Expert parallel."""
    dp: Axis
    """Data and context parallel, for everything but experts."""
    expert_dp: Axis
    """Data parallel, for experts."""
    model: Axis
    """The ranks that hold one copy of the model and work on the same rows."""
    tp_mesh: DeviceMesh
    """The tensor-parallel ranks, for DTensors."""
    embedding: Axis
    """First and last pipeline stage, where both have the embedding; this rank alone elsewhere."""

    @property
    def is_last_stage(self) -> bool:
        """This rank has the head."""
        return self.pp.rank == self.pp.size - 1

    @property
    def copy(self) -> int:
        """Which of the copies of the model that compute rows of their own this rank is part of."""
        return self.dp.rank // self.cp.size


def check_parallel(parallel: ParallelConfig) -> None:
    """Refuse settings that cannot be honoured on any number of ranks, before anything starts.

    Raises:
        ConfigError: says which setting and why.
    """
    for name in ("tp", "pp", "vpp", "ep", "cp"):
        size = getattr(parallel, name)
        if size < 1:
            raise ConfigError(f"parallel.{name} is {size}; it must be 1 or more.")
    for name, instead in (("sp", "cp"), ("dp_replicate", "nothing: optimizer state is sharded")):
        if getattr(parallel, name) != 1:
            raise ConfigError(
                f"parallel.{name} is {getattr(parallel, name)}; it belongs to the fsdp backend. Here use {instead}."
            )
    if parallel.vpp > 1 and parallel.pp == 1:
        raise ConfigError(f"parallel.vpp is {parallel.vpp} and parallel.pp is 1; pieces need a pipeline. Set it to 1.")
    if parallel.sequence_parallel and parallel.tp == 1:
        raise ConfigError("parallel.sequence_parallel needs parallel.tp above 1; with tp=1 it would do nothing.")


def check_world(parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a number of ranks that the layout does not divide.

    Raises:
        ConfigError: says what does not divide what.
    """
    copy = parallel.tp * parallel.pp * parallel.cp
    if world_size % copy:
        raise ConfigError(
            f"parallel.tp * pp * cp = {parallel.tp} * {parallel.pp} * {parallel.cp} = {copy} does not divide "
            f"{world_size} ranks."
        )
    if (world_size // parallel.pp) % parallel.ep:
        raise ConfigError(
            f"parallel.ep = {parallel.ep} does not divide the {world_size // parallel.pp} ranks of a pipeline stage."
        )


def join_layout(parallel: ParallelConfig, world: World, timeout_s: float) -> Layout:
    """Make the groups, or join those of this process's other engines.

    Raises:
        ConfigError: another engine of this process has another layout, or the groups are somebody else's.
    """
    if _shared["engines"] and _shared["parallel"] != parallel:
        raise ConfigError(
            f"Another engine of this process is laid out as {_shared['parallel']}, this one as {parallel}; "
            "megatron-core has one layout per process. Close the other engine first, or use the same layout."
        )
    if not _shared["engines"]:
        if parallel_state.model_parallel_is_initialized():
            raise ConfigError(
                "Another program of this process uses megatron-core's groups; destroy_model_parallel first."
            )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=timeout_s / 60,  # pyright: ignore[reportArgumentType] - it makes a timedelta
            create_gloo_process_groups=False,
        )
        pipeline = _axis(parallel_state.get_pipeline_model_parallel_group())
        _shared["wraps"] = _more_groups(pipeline, world, timeout_s) if parallel.vpp > 1 else (None, None)
    _shared["parallel"] = parallel
    _shared["engines"] += 1
    tp_group: Any = parallel_state.get_tensor_model_parallel_group()
    return Layout(
        tp=_axis(tp_group),
        tp_mesh=DeviceMesh.from_group(tp_group, world.device.type),
        pp=_axis(parallel_state.get_pipeline_model_parallel_group()),
        vpp=parallel.vpp,
        wraps=_shared["wraps"],
        cp=_axis(parallel_state.get_context_parallel_group()),
        ep=_axis(parallel_state.get_expert_model_parallel_group()),
        dp=_axis(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        expert_dp=_axis(parallel_state.get_expert_data_parallel_group()),
        model=_axis(parallel_state.get_model_parallel_group()),
        embedding=_axis(parallel_state.get_embedding_group(check_initialized=False)),
    )


def leave_layout() -> None:
    """One engine less; the last one takes the groups down."""
    _shared["engines"] -= 1
    if not _shared["engines"]:
        parallel_state.destroy_model_parallel()


def _more_groups(axis: Axis, world: World, timeout_s: float) -> tuple[Any, Any]:
    """Two more process groups of the ranks of `axis`, which every rank makes for every such axis. Collective."""
    mine: list[Any] = [None, None]
    for ranks in sorted(set(world.exchange(axis.ranks))):
        made = [dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s)) for _ in mine]
        mine = made if ranks == axis.ranks else mine
    return mine[0], mine[1]


def _axis(group: Any) -> Axis:
    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
    me = dist.get_rank()
    if me not in ranks:
        return Axis(group=None, ranks=(me,), rank=0)
    return Axis(group=group, ranks=ranks, rank=ranks.index(me))


class _NoStream:
    """Stands for a CUDA stream and its events: on a CPU everything has happened when a call returns."""

    @classmethod
    def of(cls, stream: object) -> _NoStream:
        return cls()

    def wait_stream(self, stream: object) -> None: ...

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *details: object) -> None: ...


@contextmanager
def megatron_calls() -> Generator[None]:
    """Around everything that megatron-core does: without its deprecations of what it calls itself, on any device."""
    with warnings.catch_warnings(), _cuda_calls_answered():
        warnings.filterwarnings("ignore", module=r"megatron\.core\.")
        yield


@contextmanager
def _cuda_calls_answered() -> Generator[None]:
    """Where there is no CUDA device, answer megatron-core's calls for the current one with the CPU.

    megatron-core 0.16 allocates every communication buffer on `torch.cuda.current_device()`, and its all-to-all of
    tokens uses streams, whatever device the model is on. Only calls that would raise, or give what cannot be used, are
    answered. Delete this when megatron-core allocates beside its inputs.
    """
    if torch.cuda.is_available():
        yield
        return
    stream = _NoStream()
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "current_stream", lambda: stream),
        (torch.cuda, "stream", _NoStream.of),
        (torch.cuda, "Stream", lambda: stream),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _split_sizes),
    ]
    before = [getattr(owner, name) for owner, name, _ in answers]
    try:
        for owner, name, answer in answers:
            setattr(owner, name, answer)
        yield
    finally:
        for (owner, name, _), original in zip(answers, before, strict=True):
            setattr(owner, name, original)


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """megatron-core makes the plain numbers that all-to-all wants from CUDA tensors only."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
