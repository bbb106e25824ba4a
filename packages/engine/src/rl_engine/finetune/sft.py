"""Supervised fine-tuning on prompt-completion pairs or whole chats, with nothing but an engine.

A data row is `{"prompt": [chat messages], "completion": "text"}`, `{"messages": [chat messages]}` (every assistant turn
is learned), `{"text": "raw text"}` (all of it is learned, without a chat template), or has `prompt_token_ids`,
`completion_token_ids` and perhaps `loss_mask`. `tools` of a chat are shown to the template; `images` and `videos`
fill its places. The loss is the token negative log-likelihood. Packing, data parallelism (start with torchrun) and
accumulation are the engine's business.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_engine.errors import DataError
from rl_engine.finetune.data import ChatTokenizer, Columns, read_rows, refuse_empty
from rl_engine.finetune.images import ImageReader
from rl_engine.finetune.loop import Rows, RunConfig, train
from rl_engine.losses import sft_loss
from rl_engine.types import ModelInit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tensordict import TensorDict

    from rl_engine.base import LossFunction
    from rl_engine.types import EngineConfig

__all__ = ["SftConfig", "tokenize_file", "train"]

_SHAPES = (("prompt", "completion"), ("messages",), ("text",), ("prompt_token_ids", "completion_token_ids"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig(RunConfig):
    """Configuration of a supervised fine-tuning run."""

    init: ModelInit = ModelInit.PRETRAINED
    """random: start from new weights; the folder then needs only config and tokenizer."""
    dropout: bool = False
    """Train with the dropout that the model's config asks for; `lora.dropout` is the adapter's."""
    target_loss: float | None = None
    """Stop once the mean loss of the last `log_every` steps is at or below it."""
    target_sequence_accuracy: float | None = None
    """Stop once the mean sequence accuracy of the last `log_every` steps is at or above it, each measured on a batch
    before it is learned from."""

    @property
    def engine(self) -> EngineConfig:
        """See `RunConfig`."""
        return replace(self.engine_with(init=self.init), dropout=self.dropout)

    @property
    def loss_function(self) -> LossFunction:
        """See `RunConfig`."""
        return sft_loss

    def read(self, path: str) -> Rows:
        """See `RunConfig`."""
        return Rows(columns=tokenize_file(path, self.model_path))

    def is_reached(self, means: Mapping[str, float]) -> bool:
        """See `RunConfig`."""
        loss, accuracy = self.target_loss, self.target_sequence_accuracy
        return (loss is not None and means["loss"] <= loss) or (
            accuracy is not None and means["sequence_accuracy"] >= accuracy
        )

    def not_reached(self, means: Mapping[str, float]) -> str | None:
        """See `RunConfig`."""
        wanted = {"target_loss": "loss", "target_sequence_accuracy": "sequence_accuracy"}
        set_ones = {key: name for key, name in wanted.items() if getattr(self, key) is not None}
        if not set_ones or not means or self.is_reached(means):
            return None
        return "; ".join(
            f"{key}={getattr(self, key)} was not reached: {name.replace('_', ' ')} is {means[name]:.4f}"
            for key, name in set_ones.items()
        )


def tokenize_file(path: str | Path, model_path: str | Path) -> TensorDict:
    """Read a JSONL file into the jagged columns that an engine takes.

    Raises:
        DataError: names the row (from 1) and what is wrong with it.
    """
    columns, numbers = Columns(ImageReader(model_path)), list[int]()

    def use(row: Mapping[str, Any], number: int, tokenizer: ChatTokenizer) -> None:
        if "prompt_token_ids" in row:
            mask, completion = row.get("loss_mask"), row["completion_token_ids"]
            if mask is not None and len(mask) != len(completion):
                raise DataError(f"has {len(mask)} of loss_mask for {len(completion)} tokens")
            columns.add(row["prompt_token_ids"], completion, mask, tokenizer.images)
        elif "messages" in row:
            columns.add(*tokenizer.conversation(row["messages"]), tokenizer.images)
        elif "text" in row:
            columns.add(*tokenizer.text(row["text"]), images=tokenizer.images)
        else:
            columns.add(*tokenizer.turn(row["prompt"], row["completion"]), images=tokenizer.images)
        numbers.append(number)

    read_rows(path, model_path, _SHAPES, use)
    refuse_empty(path, columns, numbers)
    return columns.batch()
