"""For tests of backends and of code that uses an engine: a fake, a conformance suite, a tiny model folder.

A backend passes when a subclass of `EngineConformance` that builds it is green:

    class TestMyBackend(EngineConformance):
        def make_engine(self, folder, **changes):
            return create_engine("mine", EngineConfig(model_path=str(write_tiny_model(folder)), **changes))
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor

from rl_engine.base import Engine, LossFunction
from rl_engine.batch.micro_batches import check_budget, plan_rows
from rl_engine.batch.packed import ragged, ragged_batch
from rl_engine.batch.results import MicroBatchResults
from rl_engine.batch.row_batch import RowBatch
from rl_engine.batch.step import apply_loss
from rl_engine.checkpoint import dcp
from rl_engine.checkpoint.hf_folder import publish
from rl_engine.checkpoint.shards import local_shards
from rl_engine.distributed.world import World
from rl_engine.errors import ConfigError, EngineError
from rl_engine.model.logprobs import ScoreOptions, score_logits
from rl_engine.optimizer import build_optimizer, clip_grad_norm, learning_rate, optimizer_tensors
from rl_engine.settings import check_settings, prefix_sharing_status
from rl_engine.testing.conformance import EngineConformance
from rl_engine.testing.tiny_models import write_tiny_model
from rl_engine.types import BatchCounts, EngineConfig, EngineOutput, PeftConfig, ShardSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["EngineConformance", "FakeEngine", "ragged", "ragged_batch", "write_tiny_model"]

_ALONE = World(rank=0, size=1, device=torch.device("cpu"), owns_group=False)


class FakeEngine(Engine):
    """A whole engine around a table of logits: the next token depends on the last alone. One process, CPU."""

    def __init__(self, config: EngineConfig, *, vocab_size: int = 32) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._table: torch.nn.Parameter | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._schedule_step = 0

    def check(self, world_size: int) -> dict[str, str]:
        """One process, no folder."""
        check_settings(self._config)
        if world_size != 1:
            raise ConfigError(f"FakeEngine is one process; it cannot run on {world_size} ranks.")
        return prefix_sharing_status(self._config, "a fake has no layers to spare")

    def initialize(self) -> None:
        """Draw the table."""
        self.check(1)
        generator = torch.Generator().manual_seed(self._config.seed)
        dtype = getattr(torch, self._config.precision)
        table = torch.randn(self._vocab_size, self._vocab_size, generator=generator, dtype=dtype)
        self._table = torch.nn.Parameter(table, requires_grad=self._config.optimizer is not None)
        if self._config.optimizer is not None:
            self._optimizer = build_optimizer([self._table], self._config.optimizer)

    def train_mode(self) -> AbstractContextManager[None]:
        """Nothing to bring back."""
        self._trained()
        return nullcontext()

    def eval_mode(self) -> AbstractContextManager[None]:
        """Turns gradients off."""
        return torch.no_grad()

    def optimizer_zero_grad(self) -> None:
        """Drop the gradient."""
        self._built().grad = None

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Cut, score, and add up shares as a real engine does."""
        has_backward = loss_function is not None and not forward_only
        if has_backward:
            self._trained()
        batch = RowBatch(data, needs_mask=loss_function is not None, device=torch.device("cpu"))
        batch.check_tokens(self._vocab_size)
        tokens, sequences = batch.counts()
        counts = BatchCounts(tokens=tokens, sequences=sequences)
        check_budget(batch.tokens(), batch.units(), self._config.max_tokens_per_gpu)
        plan = plan_rows(batch.tokens(), batch.units(), self._config.max_tokens_per_gpu)
        results, wanted = MicroBatchResults(), ScoreOptions.of(self._config)
        for rows in plan:
            packed, shares = batch.pack(rows), dict[str, Tensor]()
            with torch.set_grad_enabled(has_backward):
                logits = self._built()[packed.token_ids[packed.score_index]]
                scores = score_logits(logits, packed.labels, packed.candidates, wanted)
                if loss_function is not None:
                    shares = apply_loss(loss_function, packed, scores, counts, batch.select(rows))
            if has_backward:
                shares["loss"].backward()
            results.add(rows, scores, shares)
        found = results.columns or {"logprobs": [torch.empty(0)]}
        columns = {name: batch.restore(results.rows, parts) for name, parts in found.items()}
        return EngineOutput(
            columns=TensorDict(columns, batch_size=[batch.num_rows]),  # pyright: ignore[reportArgumentType]
            metrics=results.metric_values(is_leader=True),
            num_micro_batches=len(plan),
        )

    def optimizer_step(self) -> float:
        """Clip, then AdamW."""
        optimizer = self._trained()
        assert self._config.optimizer is not None
        norm = clip_grad_norm([self._built()], self._config.optimizer.max_grad_norm)
        optimizer.step()
        return norm

    def learning_rate(self) -> float:
        """Where the schedule stands."""
        return self._trained().param_groups[0]["lr"]

    def lr_scheduler_step(self) -> float:
        """Move the schedule on by one."""
        self._schedule_step += 1
        return self._apply_schedule()

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, Tensor]], PeftConfig | None]:
        """The table."""
        return iter([("bigram.weight", self._built().detach())]), None

    def get_local_shards(self) -> Iterator[tuple[ShardSpec, Tensor]]:
        """The table, whole."""
        return local_shards({"bigram.weight": self._built().detach()})

    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """The fake lives on the CPU."""
        if torch.device(device).type != "cpu":
            raise ConfigError(f"FakeEngine lives on the CPU; it cannot move to {device}.")

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        """The table and the optimizer's state, as the real engines write theirs."""
        manifest = dcp.Manifest(
            step=step,
            schedule_step=self._schedule_step,
            world_size=1,
            tensors={name: list(tensor.shape) for name, tensor in self._state().items()},
        )
        dcp.save(path, self._state() | {"rng.0": torch.get_rng_state()}, manifest, _ALONE)

    def load_checkpoint(self, path: str | Path) -> int:
        """Read what `save_checkpoint` wrote."""
        manifest = dcp.read_step(path)
        state = self._state()
        dcp.check_tensors(path, manifest, state)
        rng = dcp.known_rng(manifest, _ALONE)
        dcp.load(path, {**state, **rng}, _ALONE)
        dcp.take_rng(rng, manifest, _ALONE, self._config.seed)
        self._schedule_step = manifest.schedule_step
        if self._optimizer is not None:
            self._apply_schedule()
        return manifest.step

    def save_model(self, path: str | Path) -> None:
        """One safetensors file."""
        from safetensors.torch import save_file

        publish(path, lambda draft: save_file({"bigram.weight": self._built().detach()}, draft / "model.safetensors"))

    def close(self) -> None:
        """Drop the table."""
        self._table = self._optimizer = None

    def _apply_schedule(self) -> float:
        optimizer = self._trained()
        assert self._config.optimizer is not None
        rate = learning_rate(self._config.optimizer, self._schedule_step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {"model.bigram.weight": self._built().detach()}
        if self._optimizer is not None:
            named = [("bigram.weight", self._built())]
            state |= {f"optim.{name}": value for name, value in optimizer_tensors(self._optimizer, named).items()}
        return state

    def _built(self) -> torch.nn.Parameter:
        if self._table is None:
            raise EngineError("The engine holds no model; call initialize() first (close() is final).")
        return self._table

    def _trained(self) -> torch.optim.AdamW:
        self._built()
        if self._optimizer is None:
            raise ConfigError("A frozen engine cannot be trained; give EngineConfig an optimizer.")
        return self._optimizer
