"""The engine of the `megatron` backend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rl_engine.backends.fsdp.engine import mode
from rl_engine.backends.megatron.bridge import difference, plan, probe_row, refusal
from rl_engine.backends.megatron.config import check_divides, read_architecture
from rl_engine.backends.megatron.folder import SliceReader
from rl_engine.backends.megatron.layout import (
    check_parallel,
    check_world,
    join_layout,
    leave_layout,
    megatron_calls,
)
from rl_engine.backends.megatron.pipeline import run_pipeline
from rl_engine.backends.megatron.state import MicroBatches, State
from rl_engine.backends.megatron.weights import shapes_of
from rl_engine.base import Engine, LossFunction
from rl_engine.batch.row_batch import CANDIDATES, VISUAL, RowBatch
from rl_engine.batch.step import BatchPlan, add_up, columns_of, plan_batch, work_of
from rl_engine.checkpoint import dcp, hf_folder
from rl_engine.checkpoint.shards import local_shards
from rl_engine.distributed.world import expected_size, join_world
from rl_engine.errors import BatchError, ConfigError, EngineError
from rl_engine.model.moe import ExpertLoad, check_aux, check_replay, counts_of_column
from rl_engine.optimizer import learning_rate
from rl_engine.settings import check_candidates, check_settings, prefix_sharing_status, refuse_fsdp_only
from rl_engine.types import EngineConfig, EngineOutput, Head, ModelInit, PeftConfig, ShardSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_engine.backends.megatron.architecture import Architecture
    from rl_engine.backends.megatron.optimizer import ShardedAdamW


_NO_SHARING = "the megatron backend feeds every row its prompt"


class MegatronEngine(Engine):
    """See `Engine`. Every rank passes its own rows, whatever the layout; a step uses the gradients up.

    megatron-core keeps process groups per process: engines alive at the same time in one process share a layout.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._state: State | None = None

    # Building

    def check(self, world_size: int) -> dict[str, str]:
        """See `Engine`."""
        config = self._config
        _, arch = self._checked(world_size)
        if config.init == ModelInit.PRETRAINED:
            layout = config.parallel
            wanted = shapes_of(plan(arch, pp=layout.pp, vpp=layout.vpp, ep=layout.ep))
            with SliceReader(config.model_path, wanted, head=config.head, is_tied=arch.is_tied):
                pass
        return prefix_sharing_status(config, _NO_SHARING)

    def _checked(self, world_size: int) -> tuple[Any, Architecture]:
        """The folder's config, and what is taken from it, where nothing is to be refused."""
        config = self._config
        check_settings(config)
        prefix_sharing_status(config, _NO_SHARING)
        refuse_fsdp_only(config, "megatron")
        folder = Path(config.model_path)
        source = hf_folder.read_config(folder)
        check_parallel(config.parallel)
        arch = read_architecture(folder, source, config.head)
        check_divides(arch, config.parallel)
        check_world(config.parallel, world_size)
        check_candidates(config.num_candidates, arch.vocab_size)
        check_aux(config.router_aux_loss_coef, arch.experts)
        return source, arch

    def initialize(self) -> None:
        """Build this rank's stage, read its part of the folder, and allocate the optimizer."""
        if self._state is not None:
            raise ConfigError("This engine is initialised already; make another one with create_engine.")
        config = self._config
        source, arch = self._checked(expected_size())
        world = join_world(timeout_s=config.timeout_s, needs_group=True)
        try:
            layout = join_layout(config.parallel, world, config.timeout_s)
        except ConfigError:
            world.leave()
            raise
        try:
            self._state = State(config, source, arch, world, layout)
            if arch.registry is not None:
                self._check_scores()
        except BaseException:
            self._state = None
            leave_layout()
            world.leave()
            raise
        torch.manual_seed(config.seed + world.rank)

    def close(self) -> None:
        """Free everything and take down groups made here."""
        state, self._state = self._state, None
        if state is None:
            return
        try:
            state.writer.wait()
        finally:
            leave_layout()
            state.world.leave()

    def _check_scores(self) -> None:
        """Compare a probe row with transformers' own model, which rank 0 loads whole. Collective.

        Raises:
            ModelFolderError: the layers of an architecture that Megatron-Bridge maps compute something else.
        """
        state = self._built()
        row, wrong = probe_row(state.arch), None
        tokens = torch.tensor([row], device=state.world.device)
        sizes = {"prompt_token_ids": slice(0, 1), "completion_token_ids": slice(1, None)}
        columns = {
            name: torch.nested.as_nested_tensor(tokens[:, part], layout=torch.jagged) for name, part in sizes.items()
        }
        batch = TensorDict(columns, batch_size=[1])
        with self.eval_mode():
            scored = self.forward_backward_batch(batch, None).columns["logprobs"].values()
        if state.world.rank == 0:
            wrong = difference(self._config, row, scored)
        if (wrong := state.world.exchange(wrong)[0]) is not None:
            raise refusal(state.arch.model_type, wrong)

    # Modes and places

    def train_mode(self) -> Any:
        """Everything onto the device; back on exit."""
        self._optimizer("be trained")
        state = self._built()
        return mode(self, state.stage, state.world.device, state.places, train=True, grad=True)

    def eval_mode(self) -> Any:
        """The model onto the device, gradients off; back on exit."""
        state = self._built()
        return mode(self, state.stage, state.world.device, state.places, train=False, grad=False)

    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move what is asked for; what is there already is not touched."""
        self._built().move(torch.device(device), {"model": model, "optimizer": optimizer, "grad": grad})

    # A step

    def optimizer_zero_grad(self) -> None:
        """Set every gradient to zero."""
        state = self._built()
        if state.optimizer is not None:
            state.optimizer.zero_grad()

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Plan with all ranks, run the micro-batches through the pipeline, add up their shares."""
        has_backward = loss_function is not None and not forward_only
        if has_backward:
            self._optimizer("run a backward pass (say forward_only=True)")
        state, needs_mask = self._built(), loss_function is not None

        def make(rows: TensorDict) -> RowBatch:
            feeds_last = self._config.head == Head.REWARD
            batch = RowBatch(rows, needs_mask=needs_mask, device=state.world.device, feeds_last=feeds_last)
            self._check_fit(batch)
            return batch

        budget = self._config.max_tokens_per_gpu * self._config.parallel.cp
        what = work_of(loss_function, has_backward)
        plan = plan_batch(state.world, state.replicas, data, make, budget, state.cost, what)
        load = self._expert_load(plan) if has_backward else None
        work = MicroBatches(state, plan, loss_function, load)
        self._run(work, plan.num_micro_batches, has_backward=has_backward)
        shares = work.results.metric_values(is_leader=state.world.rank in state.replicas.leaders)
        metrics = add_up(state.world, shares) if loss_function is not None else {}
        place, main = data.get("completion_token_ids").device, "logprobs" if self._config.head == Head.LM else "values"
        columns = columns_of(state.world, plan, work.results, place, main)
        return EngineOutput(columns=columns, metrics=metrics, num_micro_batches=plan.num_micro_batches)

    def optimizer_step(self) -> float:
        """Reduce, clip, then AdamW."""
        optimizer = self._optimizer("step")
        with self._built().world.together():
            return optimizer.step()

    def learning_rate(self) -> float:
        """Where the schedule stands."""
        return self._optimizer("have a schedule").rate

    def lr_scheduler_step(self) -> float:
        """Move the schedule on by one."""
        optimizer, state = self._optimizer("have a schedule"), self._built()
        state.schedule_step += 1
        return self._apply_schedule(optimizer)

    def _run(self, work: MicroBatches, count: int, *, has_backward: bool) -> None:
        """All micro-batches through the pipeline."""
        state, before = self._built(), torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self._config.matmul_precision)
        try:
            with state.world.together(), torch.set_grad_enabled(has_backward), megatron_calls():
                run_pipeline(work, count, state.layout, has_backward=has_backward)
        finally:
            torch.set_float32_matmul_precision(before)

    def _expert_load(self, plan: BatchPlan) -> ExpertLoad | None:
        """Where the whole batch's tokens go: as `routed_experts` says, or found out by a forward pass. Collective."""
        state, coef = self._built(), self._config.router_aux_loss_coef
        if not coef or state.experts is None:
            return None
        if plan.own.routed_experts() is not None:
            counts = counts_of_column(plan.own, state.experts)
        else:
            size = (state.experts.num_layers, state.experts.num_experts)
            counts = torch.zeros(size, dtype=torch.float64, device=state.world.device)
            work = MicroBatches(state, plan, None, counts=counts)
            self._run(work, plan.num_micro_batches, has_backward=False)
        dist.all_reduce(counts)
        return ExpertLoad(counts=counts, coef=coef)

    def _check_fit(self, batch: RowBatch) -> None:
        arch = self._built().arch
        longest = max(batch.lengths, default=0)
        if longest > arch.context:
            raise BatchError(f"A row has {longest} tokens; the model's context is {arch.context}. Shorten the row.")
        batch.check_tokens(arch.vocab_size)
        if batch.has(CANDIDATES) and self._config.head != Head.LM:
            raise BatchError(f"Column {CANDIDATES} needs a language-model head. Drop it.")
        for name in VISUAL:
            if batch.has(name):
                raise BatchError(f"The megatron backend takes no images; use the fsdp backend, or drop {name}.")
        check_replay(batch, self._built().experts)

    # Weights out, and to disk and back

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, Tensor]], PeftConfig | None]:
        """Full tensors in `precision` on every rank; one parameter at a time is gathered."""
        return self._built().export(), None

    def get_local_shards(self) -> Iterator[tuple[ShardSpec, Tensor]]:
        """This rank's layers, experts and tensor-parallel parts."""
        return local_shards(self._built().local_weights())

    def save_model(self, path: str | Path) -> None:
        """Rank 0 writes; the others take part in gathering."""
        state = self._built()
        weights = {name: tensor.cpu() for name, tensor in state.export() if state.world.rank == 0}
        if state.world.rank == 0:
            source = self._config.model_path
            hf_folder.write_model(path, hf_folder.empty_model(source, head=self._config.head), weights, source)
        state.world.barrier()

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        """See `rl_engine.checkpoint.dcp`; the names and shapes are the fsdp backend's."""
        state = self._built()
        manifest = dcp.Manifest(
            step=step,
            schedule_step=state.schedule_step,
            world_size=state.world.size,
            tensors={name: list(tensor.shape) for name, tensor in state.described().items()},
        )
        rng = {f"rng.{state.world.rank}": dcp.rng_state(state.world.device)}
        tensors = state.checkpoint_tensors() | rng
        state.writer.save(path, tensors, manifest)

    def load_checkpoint(self, path: str | Path) -> int:
        """A frozen engine reads the model alone. A rank that was not there when it was written seeds itself anew."""
        state = self._built()
        state.writer.wait()
        manifest = dcp.read_step(path)
        dcp.check_tensors(path, manifest, state.described())
        tensors = state.checkpoint_tensors()
        rng = dcp.known_rng(manifest, state.world)
        dcp.load(path, {**tensors, **rng}, state.world)
        state.take_checkpoint(tensors)
        dcp.take_rng(rng, manifest, state.world, self._config.seed)
        state.schedule_step = manifest.schedule_step
        if state.optimizer is not None:
            self._apply_schedule(state.optimizer)
        return manifest.step

    # Small helpers

    def _apply_schedule(self, optimizer: ShardedAdamW) -> float:
        assert self._config.optimizer is not None
        rate = learning_rate(self._config.optimizer, self._built().schedule_step)
        optimizer.set_rate(rate)
        return rate

    def _built(self) -> State:
        if self._state is None:
            raise EngineError("The engine holds no model; call initialize() first (close() is final).")
        return self._state

    def _optimizer(self, what: str) -> ShardedAdamW:
        optimizer = self._built().optimizer
        if optimizer is None:
            raise ConfigError(f"A frozen engine cannot {what}; give EngineConfig an optimizer.")
        return optimizer
