"""The process groups of one layout, and megatron-core's pipeline schedules over them.

megatron-core keeps its groups in module globals: engines of one process share them, so they must share a layout.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from rl_engine.distributed.world import World
    from rl_engine.types import ParallelConfig

_shared: dict[str, Any] = {"parallel": None, "engines": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Process group of this rank along one axis of the layout."""

    group: Any
    """torch.distributed process group."""
    ranks: tuple[int, ...]
    """Its global ranks, in order."""
    rank: int
    """Rank in the group."""

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
    """Process groups of this rank along every axis."""

    tp: Axis
    """Tensor parallel."""
    pp: Axis
    """Pipeline parallel."""
    vpp: int
    """Pieces of the model on each pipeline rank."""
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
    ep_mesh: DeviceMesh
    """The expert-parallel ranks, for DTensors."""
    embedding: Axis
    """First and last pipeline stage, where both have the embedding; this rank alone elsewhere."""

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the head."""
        return self.pp.rank == self.pp.size - 1

    @property
    def copy(self) -> int:
        """Index of the model replica that this rank is part of."""
        return self.dp.rank // self.cp.size


def check_parallel(parallel: ParallelConfig) -> None:
    """Refuse settings that cannot be honoured on any number of ranks, before anything starts.

    Raises:
        ConfigError: says which setting and why.
    """
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


def check_device() -> None:
    """Refuse a machine without a CUDA device: megatron-core allocates its buffers there, whatever the model is on.

    Raises:
        ConfigError: there is none.
    """
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"The megatron backend needs a CUDA device, as megatron-core allocates on one ({error}). Use the fsdp "
            "backend here."
        ) from error


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
    _shared["parallel"] = parallel
    _shared["engines"] += 1
    tp_group: Any = parallel_state.get_tensor_model_parallel_group()
    ep_group: Any = parallel_state.get_expert_model_parallel_group()
    return Layout(
        tp=_axis(tp_group),
        tp_mesh=DeviceMesh.from_group(tp_group, world.device.type),
        ep_mesh=DeviceMesh.from_group(ep_group, world.device.type),
        pp=_axis(parallel_state.get_pipeline_model_parallel_group()),
        vpp=parallel.vpp,
        cp=_axis(parallel_state.get_context_parallel_group()),
        ep=_axis(ep_group),
        dp=_axis(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        expert_dp=_axis(parallel_state.get_expert_data_parallel_group()),
        model=_axis(parallel_state.get_model_parallel_group()),
        embedding=_axis(parallel_state.get_embedding_group(check_initialized=False)),
    )


def leave_layout() -> None:
    """Leave the layout; the last engine of the process destroys the groups."""
    _shared["engines"] -= 1
    if not _shared["engines"]:
        parallel_state.destroy_model_parallel()


def _axis(group: Any) -> Axis:
    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
    me = dist.get_rank()
    if me not in ranks:
        return Axis(group=None, ranks=(me,), rank=0)
    return Axis(group=group, ranks=ranks, rank=ranks.index(me))


@contextmanager
def megatron_calls() -> Generator[None]:
    """Around everything that megatron-core does: without its deprecations of what it calls itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core\.")
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
        for said in ("torch.distributed is disabled", "The argument order of load"):  # as it reads a checkpoint
            warnings.filterwarnings("ignore", message=said)
        warnings.filterwarnings("ignore", message="Please use DTensor")  # its checkpoints are of torch's ShardedTensor
        yield


class StageWork(Protocol):
    """Work of one stage on micro-batch `index`."""

    def forward(self, chunk: int, index: int, received: Tensor | None) -> Tensor:
        """The activation to send on, or from the last piece of all a scalar to differentiate."""
        ...


def run_pipeline(work: StageWork, chunks: Iterable[Any], count: int, layout: Layout, *, has_backward: bool) -> None:
    """Run `count` micro-batches or more through this rank's stage by megatron-core's schedules (2104.04473).

    Gradients accumulate in the parameters. Micro-batches may differ in their number of tokens.

    Args:
        work: The stage.
        chunks: The pieces of the model on this rank.
        count: Micro-batches, the same on every stage; with several pieces a few idle ones may come after them.
        layout: Where this rank stands.
        has_backward: Whether to differentiate.
    """
    stages, num_chunks, pieces = layout.pp.size, layout.vpp, list(chunks)
    if count == 0:
        return
    if num_chunks > 1:
        count = -(-count // stages) * stages

    def step(indices: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
        number = chunk.vp_stage or 0
        return work.forward(number, next(indices), chunk.decoder.input_tensor), _as_it_is

    run: Any = get_forward_backward_func(pp_size=stages, vp_size=num_chunks if num_chunks > 1 else None)
    run(
        forward_step_func=step,
        data_iterator=[iter(range(count)) for _ in pieces],
        model=pieces,
        num_microbatches=count,
        seq_length=1,  # every activation comes with its shape
        micro_batch_size=1,
        forward_only=not has_backward,
    )


def _as_it_is(loss: Tensor) -> tuple[Tensor, Tensor, None]:
    """A share of the loss, which megatron-core is not to scale: its number of tokens is counted elsewhere."""
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), None
