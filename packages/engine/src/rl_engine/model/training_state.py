"""Training state: the tensors that a checkpoint of an engine has, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from rl_engine.optimizer import optimizer_tensors

if TYPE_CHECKING:
    from rl_engine.model.scorer import BuiltModel


class TrainingState:
    """Weights and optimizer state of this rank. Collective."""

    def __init__(self, built: BuiltModel) -> None:
        self._built = built

    def tensors(self) -> dict[str, Tensor]:
        """Checkpoint tensors of this rank: `restore` fills them, `take` then takes them over."""
        named = self._built.scorer.named_weights()
        state = {f"model.{name}": tensor for name, tensor in named.items()}
        if self._built.optimizer is not None:
            trained = [(name, tensor) for name, tensor in named.items() if isinstance(tensor, nn.Parameter)]
            state |= {
                f"optim.{name}": value for name, value in optimizer_tensors(self._built.optimizer, trained).items()
            }
        return state

    def described(self) -> dict[str, Tensor] | None:
        """Names and shapes of all ranks' checkpoint tensors; None: they are those of this rank."""
        return None

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Take what was read into `tensors()`, where that is not the live tensors themselves."""
