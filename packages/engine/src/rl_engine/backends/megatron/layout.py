"""The process groups of one layout, the pipeline schedule over them, and megatron-core without a CUDA device.

The schedule is one forward, one backward (Narayanan et al., 2104.04473). With one piece of the model on each rank it is
the plain one, with several the interleaved one: an activation passes from rank to rank through the first pieces, then
from the last rank back to the first and through the second pieces. Every stage knows every micro-batch, so shapes are
not exchanged, and micro-batches may differ in size.

megatron-core keeps its groups in module globals: engines of one process share them, so they must share a layout.
"""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

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
    """Leave the layout; the last engine of the process destroys the groups."""
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
    """Stand-ins for the CUDA calls of megatron-core, where there is no CUDA device.

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


class StageWork(Protocol):
    """Work of one stage on micro-batch `index`."""

    def buffer(self, index: int) -> Tensor:
        """Receive buffer for the activation of the stage before."""
        ...

    def forward(self, chunk: int, index: int, received: Tensor | None) -> Tensor | None:
        """The activation to send on, or from the last piece of all the loss (None: nothing to differentiate)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Forward or backward pass of one micro-batch through one virtual stage."""

    is_forward: bool
    """Else backward."""
    chunk: int
    """The piece, from 0."""
    index: int
    """The micro-batch."""


def schedule(count: int, *, stage: int, num_stages: int, num_chunks: int, has_backward: bool) -> list[Turn]:
    """Schedule of one rank: its forward and backward passes over micro-batches 0 to `count` - 1, in order.

    Args:
        count: Micro-batches; with several pieces a multiple of `num_stages`.
        stage: The rank's place in the pipeline.
        num_stages: Ranks of the pipeline.
        num_chunks: Pieces on each.
        has_backward: Whether to differentiate.
    """
    groups = [range(first, min(first + num_stages, count)) for first in range(0, count, num_stages)]
    passes = [(chunk, index) for group in groups for chunk in range(num_chunks) for index in group]
    forward = [Turn(is_forward=True, chunk=chunk, index=index) for chunk, index in passes]
    if not has_backward:
        return forward
    backward = [Turn(is_forward=False, chunk=num_chunks - 1 - chunk, index=index) for chunk, index in passes]
    ahead = num_stages - 1 - stage
    warmup = min(len(passes), ahead if num_chunks == 1 else 2 * ahead + (num_chunks - 1) * num_stages)
    steady = [turn for pair in zip(forward[warmup:], backward, strict=False) for turn in pair]
    return [*forward[:warmup], *steady, *backward[len(passes) - warmup :]]


def run_pipeline(work: StageWork, count: int, layout: Layout, *, has_backward: bool) -> None:
    """Run `count` micro-batches or more through this rank's stage; gradients accumulate in the parameters.

    Args:
        work: The stage.
        count: Micro-batches, the same on every stage; with several pieces a few idle ones may come after them.
        layout: Where this rank stands.
        has_backward: Whether to differentiate.
    """
    stages, num_chunks = layout.pp, layout.vpp
    if num_chunks > 1:
        count = -(-count // stages.size) * stages.size
    pipe = _Pipe(work, layout)
    for turn in schedule(
        count, stage=stages.rank, num_stages=stages.size, num_chunks=num_chunks, has_backward=has_backward
    ):
        if turn.is_forward:
            pipe.forward(turn.chunk, turn.index, keep=has_backward)
        else:
            pipe.backward(turn.chunk)
    pipe.flush()


@dataclass(frozen=True, slots=True)
class _Edge:
    """Neighbour in the pipeline, with a group for activations and one for gradients.

    They are different groups: NCCL runs what one group exchanges between two ranks in order, and an activation and a
    gradient that cross would each wait for the other.
    """

    peer: int
    activations: Any
    gradients: Any


class _Pipe:
    """Sends are started and waited for later, so that two neighbours sending to each other never wait in a circle."""

    def __init__(self, work: StageWork, layout: Layout) -> None:
        self._work, self._layout = work, layout
        self._alive: list[deque[tuple[Tensor | None, Tensor | None]]] = [deque() for _ in range(layout.vpp)]
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._most_sending = 4 * layout.pp.size * layout.vpp  # more than a schedule has under way

    def forward(self, chunk: int, index: int, *, keep: bool) -> None:
        received = None
        if (before := self._before(chunk)) is not None:
            received = _receive(self._work.buffer(index), before.peer, before.activations).requires_grad_(keep)
        result = self._work.forward(chunk, index, received)
        if (after := self._after(chunk)) is not None:
            assert result is not None
            self._send(result.detach(), after.peer, after.activations)
        if keep:
            self._alive[chunk].append((received, result))

    def backward(self, chunk: int) -> None:
        received, result = self._alive[chunk].popleft()
        if (after := self._after(chunk)) is not None:
            assert result is not None
            grad = _receive(torch.empty_like(result), after.peer, after.gradients)
            torch.autograd.backward(result, grad)
        elif result is not None:
            result.backward()
        if (before := self._before(chunk)) is not None:
            assert received is not None
            grad = torch.zeros_like(received) if received.grad is None else received.grad
            self._send(grad, before.peer, before.gradients)

    def flush(self) -> None:
        while self._sending:
            self._sending.popleft()[0].wait()

    def _before(self, chunk: int) -> _Edge | None:
        stages = self._layout.pp
        if stages.rank:
            return _Edge(stages.ranks[stages.rank - 1], stages.group, self._layout.model.group)
        return _Edge(stages.ranks[-1], *self._layout.wraps) if chunk else None

    def _after(self, chunk: int) -> _Edge | None:
        stages = self._layout.pp
        if stages.rank + 1 < stages.size:
            return _Edge(stages.ranks[stages.rank + 1], stages.group, self._layout.model.group)
        return _Edge(stages.ranks[0], *self._layout.wraps) if chunk + 1 < self._layout.vpp else None

    def _send(self, value: Tensor, to: int, group: Any) -> None:
        value = value.contiguous()
        sent = dist.isend(value, to, group=group)
        assert sent is not None
        self._sending.append((sent, value))
        while len(self._sending) > self._most_sending:  # bounds what is kept alive
            self._sending.popleft()[0].wait()


def _receive(buffer: Tensor, source: int, group: Any) -> Tensor:
    dist.recv(buffer, source, group=group)
    return buffer
