"""The interface of a model engine: forward, backward, step, and the weights out again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rl_engine.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.types import AdamParams, EngineOutput, ModelOutput, PeftConfig, ShardSpec

LossFunction = Callable[["ModelOutput", "TensorDict"], tuple["Tensor", dict[str, "Tensor"]]]
"""`(output, rows) -> (loss, metrics)` for one micro-batch.

Both results are this micro-batch's *share* of the global value: sums over its tokens or rows divided by
`output.counts`, never by a local count. The engine adds the shares up over micro-batches and ranks, so the result
does not depend on how the batch was cut. `rows` holds the micro-batch's other columns, row-aligned with `output`.

A loss may declare `is_token_local = True`: of the model it reads log-probs alone (and the entropy), and its gradient at
a token depends on that token's alone. An engine may then make log-probs, loss and gradient in one pass over the logits
(three products with the head, not four). Such a loss may be called several times for one micro-batch, with 0 at tokens
that are not scored yet; only the loss and metrics of the last call count, which sees all of them.

A loss may have a method `has_gradient(rows) -> Tensor | None`: (B,) bool of the batch's columns, false at rows whose
gradient is exactly 0 whatever the model says; None where any row may have one. An engine may then leave out their
backward pass.
"""


def is_token_local(loss_function: LossFunction | None) -> bool:
    """Whether a loss declares that its gradient at a token depends on that token alone; see `LossFunction`."""
    return bool(getattr(loss_function, "is_token_local", False))


class Engine(ABC):
    """A language model being trained or evaluated on one or many processes.

    SPMD: every rank of one engine calls the same methods in the same order; each passes its own rows (data parallel).
    One engine serves SFT, DPO, reward modelling, actor, critic and reference, because the loss comes from outside.

    Batch columns: `prompt_token_ids` and `completion_token_ids` (ragged int64; a row needs at least one of each) and
    `loss_mask` (ragged, aligned with the completion). Rows with the same `pair_id` ((B,) int64, optional) are never cut
    apart; with `is_chosen` ((B,) bool) next to it, they are a pair, one chosen and one not. `routed_experts` (ragged,
    one (layers, experts of a token) whole-number entry for each token of the row but the last, layers without experts
    left out) says which experts a mixture takes for each token, as a server did. `candidate_token_ids` (ragged, K token
    ids for each completion token) are scored in its place for the loss function. `pixel_values` (ragged, (patches,
    numbers of a patch) of a row's images) and `image_grid_thw` (ragged, (images, 3)), `pixel_values_videos`,
    `video_grid_thw` and, where the model asks for it, `second_per_grid_ts` (ragged, a number for each video) go with
    the placeholder tokens of the row. Whatever else the loss function reads is carried along.

    Order of a training step: `optimizer_zero_grad`, `forward_backward_batch` once or more, whose gradients add up,
    `optimizer_step`, `lr_scheduler_step`. An engine comes out of `initialize` ready for it; `train_mode` is needed
    after `to` alone. Without `config.optimizer` it is frozen: whatever trains raises `ConfigError`. Before `initialize`
    and after `close` every other call but `check` raises `EngineError`.

    Every collective has a deadline. Not picklable; not thread-safe.
    """

    batch_columns: tuple[str, ...] = ("prompt_token_ids", "completion_token_ids", "loss_mask")
    """Columns that a batch needs."""

    @abstractmethod
    def check(self, world_size: int) -> dict[str, str]:
        """Refuse what `initialize` would refuse on that many ranks. Any process may ask, before there are ranks.

        Starts nothing: settings, layout, config and the headers of the weights are looked at. `initialize` runs the
        same code. What only the ranks can tell (a GPU, a compiler, the values of the weights) is found there.

        Returns:
            By key, in words, what settings that are left to the engine come to: `prefix_sharing`, and of an engine that
            is trained `loss_in_head`.

        Raises:
            BackendError, ConfigError, ModelFolderError: as `initialize`.
        """

    @abstractmethod
    def initialize(self) -> None:
        """Load or build the model, its optimizer and scheduler. Collective.

        Raises:
            ModelFolderError: a file or tensor is missing or left over; nothing is half loaded.
            ConfigError: the backend cannot honour a setting on this world size.
        """

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Bring back what training needs on entry; offload again on exit if it was offloaded before."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """Like `train_mode` for forward passes only: no dropout, no gradients."""

    def adapter_off(self) -> AbstractContextManager[None]:
        """Turn the LoRA adapter off inside: reference log-probs at no extra memory.

        Raises:
            ConfigError: the engine has no adapter.
        """
        raise ConfigError("This engine has no adapter to turn off; give EngineConfig a lora, or a separate reference.")

    def named_adapters(self, *, max_resident: int, idle_folder: str | Path | None) -> Any:
        """Make a pool of LoRA adapters over the frozen model, a `rl_engine.model.adapter_pool.AdapterPool`.

        From then on the column `adapter` ((B,) int64) numbers each row's adapter among those that the pool lets rows
        use, -1 for none, and the pool's backward passes add to their gradients. `target_token_ids` (ragged) are scored
        in place of the completion's tokens.

        Raises:
            ConfigError: the engine is trained itself, or its backend, model or a setting does not allow it.
        """
        raise ConfigError("Adapters by name are trained by the fsdp backend alone; use that.")

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Drop accumulated gradients."""

    def check_batch(self, data: TensorDict) -> None:
        """Refuse rows that `forward_backward_batch` would refuse on this rank. Not collective.

        Raises:
            BatchError: as `forward_backward_batch`.
        """
        raise ConfigError(f"{type(self).__name__} checks rows in forward_backward_batch alone; use that.")

    @abstractmethod
    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Run one logical batch, cut into micro-batches by token budget. Collective; a rank may hold any rows, or none.

        Args:
            data: This rank's rows.
            loss_function: None computes log-probs only and implies `forward_only`.
            forward_only: No backward pass; the loss is still computed.

        Returns:
            Columns of every row in the order given, on the device of `data`, even of no rows; metrics where there is a
            loss function.

        Raises:
            BatchError: a column is missing or not aligned, a row lacks a prompt or a completion, is longer than the
                model's context or the token budget, a token id is outside the vocabulary, or half a pair is missing.
                Gradients are as they were.
        """

    @abstractmethod
    def optimizer_step(self, adam: AdamParams | None = None) -> float:
        """Clip, step, and return the global gradient norm before clipping, 0 without gradients.

        Args:
            adam: Numbers of this step and of those after it; None: those that are set.

        Raises:
            NonFiniteError: the norm is NaN or infinite; parameters and optimizer state are unchanged.
        """

    @abstractmethod
    def learning_rate(self) -> float:
        """The rate that the next step will use."""

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule and return the learning rate that the next step will use."""

    @abstractmethod
    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, Tensor]], PeftConfig | None]:
        """Stream full tensors under their Hugging Face names, tied weights once. Collective: every rank drains it.

        Consume each tensor before the next step: an engine may hand out a view of the live weight.

        The second value describes a LoRA adapter when only the adapter is exported, else None.
        """

    def get_local_shards(self) -> Iterator[tuple[ShardSpec, Tensor]]:
        """Shards of this rank, nothing gathered: the box of each in its tensor, and its numbers.

        Names, number format and lifetime are those of `get_per_tensor_param`. Over all ranks the parts cover every
        tensor; ranks that hold the same part all give it. A tensor that a rank has nothing of may be left out.

        Raises:
            ConfigError: the backend exports whole tensors only, or an adapter has to be merged.
        """
        raise ConfigError(f"{type(self).__name__} exports whole tensors only; use get_per_tensor_param.")

    @abstractmethod
    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parameters, optimizer state and gradients independently."""

    @abstractmethod
    def save_checkpoint(self, path: str | Path, step: int) -> None:
        """Write model, optimizer, scheduler, RNG and `step` for any world size to load. Collective.

        Atomic: the folder is complete or absent; one that was there before is replaced. What is complete has a file
        `manifest.json`, written last by `rl_engine.types.write_manifest`, with a digest of every other file.
        """

    @abstractmethod
    def load_checkpoint(self, path: str | Path, *, optimizer: bool = True) -> int:
        """Restore everything that `save_checkpoint` wrote and return its step. Collective.

        Args:
            path: The checkpoint.
            optimizer: False: its weights alone; the optimizer and the schedule begin anew, at step 0.

        Raises:
            CheckpointError: absent, incomplete, damaged (the file is named), or of another model; the engine is
                unchanged.
        """

    @abstractmethod
    def save_model(self, path: str | Path) -> None:
        """Write an ordinary Hugging Face folder (safetensors, config, tokenizer). Collective."""

    @abstractmethod
    def close(self) -> None:
        """Free the model and leave the process group. Idempotent."""
