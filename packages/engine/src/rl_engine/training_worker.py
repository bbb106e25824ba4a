"""Training primitives over one engine, for scripts that need no trainer: forward_backward, optim_step, save, load.

The verbs are those of Tinker's training client; every rank calls them in the same order, each with its own rows.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rl_engine.batch.adapter_rows import (
    AdapterShare,
    LossByAdapter,
    batch_of,
    check_row,
    merge_shares,
    shares_of,
    width_of,
)
from rl_engine.distributed.world import gather_values
from rl_engine.errors import BatchError, ConfigError
from rl_engine.registry import create_engine
from rl_engine.types import RowsOutput

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.base import Engine, LossFunction
    from rl_engine.model.adapter_pool import AdapterPool
    from rl_engine.types import (
        AdamParams,
        EngineConfig,
        EngineOutput,
        LoraConfig,
        PeftConfig,
        TrainingRow,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Result of one optimizer step."""

    step: int
    """Steps taken so far, this one included."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """The rate that the next step will use."""


class TrainingWorker:
    """Worker that trains one engine and counts its steps. A context manager; leaving it frees the engine.

    Gradients of several `forward_backward` calls add up until `optim_step`.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: str = "fsdp",
        *,
        max_resident: int = 8,
        idle_folder: str | Path | None = None,
    ) -> None:
        """Build the engine; see `rl_engine.registry.create_worker`.

        Raises:
            BackendError: no such backend, or it cannot be imported.
            ConfigError, ModelFolderError: as `Engine.initialize`.
        """
        self.engine: Engine = create_engine(backend, config)
        self._is_frozen = config.optimizer is None
        self._pool: AdapterPool | None = None
        self._pool_options: dict[str, Any] = {"max_resident": max_resident, "idle_folder": idle_folder}
        self.step = 0
        self._modes = ExitStack()
        try:
            self.engine.initialize()
            if config.optimizer is not None:
                self._modes.enter_context(self.engine.train_mode())
                self.engine.optimizer_zero_grad()
        except BaseException:
            self.engine.close()
            raise

    def forward(self, data: TensorDict, loss_function: LossFunction | None = None) -> EngineOutput:
        """Score rows without gradients or dropout; with a loss function also its loss and metrics.

        Raises:
            BatchError: as `Engine.forward_backward_batch`.
        """
        with self.engine.eval_mode():
            return self.engine.forward_backward_batch(data, loss_function, forward_only=True)

    def forward_backward(self, data: TensorDict, loss_function: LossFunction) -> EngineOutput:
        """Add the gradient of one logical batch.

        Raises:
            BatchError, ConfigError: as `Engine.forward_backward_batch`.
        """
        return self.engine.forward_backward_batch(data, loss_function)

    def optim_step(self, adam: AdamParams | None = None, adapter: str | None = None) -> StepOutcome:
        """Step the optimizer and the schedule, and drop the gradients.

        Args:
            adam: Numbers of this step; None: those of the configuration and its schedule.
            adapter: Adapter that steps, which needs `adam`; None: the model.

        Raises:
            NonFiniteError: the gradient norm is NaN or infinite; weights and state are as before, the gradient is gone.
            ConfigError: no such adapter.
        """
        if adapter is not None:
            if adam is None:
                raise ConfigError(f"Adapter {adapter!r} steps by numbers of its own; give adam.")
            norm = self.pool.step(adapter, adam)
            return StepOutcome(step=self.pool[adapter].step, grad_norm=norm, lr=adam.lr)
        try:
            norm = self.engine.optimizer_step(adam)
        finally:
            self.engine.optimizer_zero_grad()
        self.step += 1
        rate = self.engine.lr_scheduler_step() if adam is None else adam.lr
        return StepOutcome(step=self.step, grad_norm=norm, lr=rate)

    def save_state(self, path: str | Path, adapter: str | None = None, *, optimizer: bool = True) -> None:
        """Write everything that `load_state` needs to go on as if nothing had happened; for any number of ranks.

        Args:
            path: Folder, which appears complete or not at all; one that was there is replaced.
            adapter: Adapter, whose folder peft reads too; None: the model.
            optimizer: Write the optimizer's state along with the weights (of the model: always).

        Raises:
            ConfigError: no such adapter.
        """
        if adapter is None:
            self.engine.save_checkpoint(path, self.step)
        else:
            self.pool.save(adapter, path, optimizer=optimizer)

    def load_state(self, path: str | Path, adapter: str | None = None, *, optimizer: bool = True) -> int:
        """Go on from `save_state`; returns the steps taken by then.

        Args:
            path: Its folder.
            adapter: Adapter that takes it, of the same rank and modules; None: the model.
            optimizer: Take the optimizer's state too; False: begin with a fresh one, at step 0.

        Raises:
            CheckpointError: incomplete, of another model or adapter, or without the state asked for; nothing changed.
            ConfigError: no such adapter.
        """
        if adapter is not None:
            return self.pool.load(adapter, path, optimizer=optimizer)
        self.step = self.engine.load_checkpoint(path, optimizer=optimizer)
        if not self._is_frozen:
            self.engine.optimizer_zero_grad()
        return self.step

    def save_weights(self, path: str | Path) -> None:
        """An ordinary Hugging Face folder."""
        self.engine.save_model(path)

    # Adapters by name, and rows that each name theirs

    @property
    def pool(self) -> AdapterPool:
        """Pool of the adapters, which is made when it is first needed.

        Raises:
            ConfigError: as `Engine.named_adapters`.
        """
        pool = self._pool or self.engine.named_adapters(**self._pool_options)
        self._pool = pool
        return pool

    @property
    def adapters(self) -> dict[str, LoraConfig]:
        """Adapters that rows may name, in the order in which they were added."""
        return {} if self._pool is None else {name: each.lora for name, each in self._pool.adapters.items()}

    def add_adapter(self, name: str, lora: LoraConfig, seed: int = 0) -> PeftConfig:
        """Add an adapter, equal to the one that an engine with this `lora` and `seed` begins with.

        Any other adapter's weights, gradients and state stay as they are, and nothing is compiled or allocated anew.

        Returns:
            Its description, as peft writes it to adapter_config.json.

        Raises:
            ConfigError: the name is taken or no name, the model is trained itself, or the settings do not suit it.
        """
        return self.pool.add(name, lora, seed)

    def remove_adapter(self, name: str) -> None:
        """Free an adapter with its gradient and state.

        Raises:
            ConfigError: no such adapter.
        """
        self.pool.remove(name)

    def check_rows(self, rows: Sequence[TrainingRow], losses: Mapping[str | None, LossFunction] | None = None) -> None:
        """Refuse rows that a pass would refuse, so that one tenant's do not fail another's batch. Not collective.

        Raises:
            BatchError: an unknown adapter or token, no entry or too many in a column, a row too long; names the row.
        """
        known = self.adapters
        for index, row in enumerate(rows):
            check_row(index, row)
            if row.adapter is not None and row.adapter not in known:
                raise BatchError(
                    f"Row {index} is for adapter {row.adapter!r}; there are: {', '.join(known) or 'none'}."
                )
            if losses is not None and row.adapter not in losses:
                raise BatchError(f"Row {index} is for adapter {row.adapter!r}, which has no loss in this pass.")
        for width, named in shares_of(rows).items():
            columns = {name for share in named.values() for name in share.columns}
            alike = [row for row in rows if width_of(row) == width]
            self.engine.check_batch(batch_of(alike, width, dict.fromkeys(named, -1), columns))

    def forward_rows(
        self, rows: Sequence[TrainingRow], losses: Mapping[str | None, LossFunction] | None = None
    ) -> RowsOutput:
        """Score rows, each under its adapter, without gradients. Collective; a rank may pass any rows, or none.

        Args:
            rows: Rows of any number of adapters.
            losses: Loss function by adapter; its metrics are reported.

        Raises:
            BatchError: as `check_rows`.
        """
        with self.engine.eval_mode():
            return self._run(rows, losses, has_backward=False)

    def forward_backward_rows(
        self, rows: Sequence[TrainingRow], losses: Mapping[str | None, LossFunction]
    ) -> RowsOutput:
        """Add the gradient of each row's loss to its adapter's, all in one pass. Collective.

        An adapter's gradient is that of a pass over its rows alone. `output.counts` of a loss function are those of
        its adapter's rows over all ranks. A NaN reaches the gradient of the adapter that made it and no other.

        Raises:
            BatchError: as `check_rows`, or a row's adapter has no loss or cannot be trained; gradients are unchanged.
        """
        return self._run(rows, losses, has_backward=True)

    def export_adapter(self, name: str) -> tuple[Iterator[tuple[str, Tensor]], PeftConfig]:
        """Stream an adapter's tensors as servers take them (`adapters.NAME.` + peft's name), with its description.

        `adapters.NAME.scaling` comes first: a server that does not know the adapter adds it.

        Raises:
            ConfigError: no such adapter.
        """
        tensors = {"scaling": torch.tensor(self.pool[name].scaling), **self.pool.named_tensors(name)}
        return ((f"adapters.{name}.{key}", tensor) for key, tensor in tensors.items()), self.pool[name].peft

    def _run(
        self, rows: Sequence[TrainingRow], losses: Mapping[str | None, LossFunction] | None, *, has_backward: bool
    ) -> RowsOutput:
        """One pass for each number of tokens that rows score at a position. Collective."""
        passes = self._agree(rows, losses, has_backward=has_backward)
        found = RowsOutput(logprobs=[torch.empty(0)] * len(rows), metrics={})
        if self._pool is not None:  # all of them, so that too many are refused before the first pass
            self._pool.open(sorted({name for shares in passes.values() for name in shares if name is not None}))
        for width, shares in passes.items():
            names = [name for name in shares if name is not None]
            if self._pool is not None:
                self._pool.use(names, trained=has_backward)
            numbers: dict[str | None, int] = {name: index for index, name in enumerate(names)} | {None: -1}
            loss = None
            if losses is not None:
                loss = LossByAdapter(
                    losses={numbers[name]: losses[name] for name in shares},
                    shares={numbers[name]: share for name, share in shares.items()},
                )
            mine = [index for index, row in enumerate(rows) if width_of(row) == width]
            columns = sorted({column for share in shares.values() for column in share.columns})
            data = batch_of([rows[index] for index in mine], width, numbers, columns)
            if loss is not None and has_backward and self._is_frozen:
                output = self.pool.forward_backward(data, loss)
            else:
                output = self.engine.forward_backward_batch(data, loss, forward_only=not has_backward)
            scored = output.columns.get("logprobs" if width == 1 else "asked_logprobs").float().cpu()
            for index, logprobs in zip(mine, scored.unbind(), strict=True):
                found.logprobs[index] = logprobs
            of_number = {f"{number}": name for name, number in numbers.items()}
            for key, value in output.metrics.items():
                number, _, metric = key.partition("/")
                if metric:  # the engine's own are of all adapters
                    own = found.metrics.setdefault(of_number[number], {})
                    own[metric] = own.get(metric, 0.0) + value
        return found

    def _agree(
        self, rows: Sequence[TrainingRow], losses: Mapping[str | None, LossFunction] | None, *, has_backward: bool
    ) -> dict[int, dict[str | None, AdapterShare]]:
        """Shares of all ranks, by pass; rows that one rank refuses are refused by all. Collective."""
        mine: str | dict[int, dict[str | None, tuple[Any, ...]]]
        try:
            self.check_rows(rows, losses)
            if has_backward and self._is_frozen and any(row.adapter is None for row in rows):
                raise BatchError("A row has no adapter, and the base model is frozen; name one, or set an optimizer.")
            mine = {
                width: {name: astuple(share) for name, share in named.items()}
                for width, named in shares_of(rows).items()
            }  # plain values, which ranks exchange
        except BatchError as error:
            mine = str(error)
        said = gather_values(mine) if dist.is_initialized() else [mine]
        for rank, answer in enumerate(said):
            if isinstance(answer, str):
                raise BatchError(answer if answer is mine else f"Rank {rank} refused its rows: {answer}")
        return merge_shares([answer for answer in said if not isinstance(answer, str)])

    def close(self) -> None:
        """Free the engine. Idempotent."""
        self._modes.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
