"""Interface of a flow-matching model: the velocity of latents between noise and data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Condition:
    """Encoded prompt."""

    sequence: Tensor
    """(L, H) hidden state of each token of the text encoder."""
    pooled: Tensor
    """(P,) vector of the whole prompt."""


class FlowModel(ABC):
    """Flow-matching model with latents x_t = (1 - t) data + t noise, where t falls from 1 to 0.

    Only `transformer` is trained. Text encoder and VAE are frozen.
    """

    transformer: torch.nn.Module
    """Network that predicts the velocity."""

    @abstractmethod
    def encode(self, prompt_token_ids: tuple[int, ...]) -> Condition:
        """Encode a prompt, given as token ids of the text encoder's tokenizer.

        Raises:
            PipelineError: it is empty or too long, or an id is outside the vocabulary.
        """

    @abstractmethod
    def velocity(self, latents: Tensor, times: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """Predict noise - data, of the shape of `latents`.

        Args:
            latents: (B, C, H, W) latents x_t.
            times: (B,) times t, from 0 to 1.
            conditions: B encoded prompts.
        """

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode (B, C, H, W) latents at t = 0 into (B, 3, H', W') pictures, 0 to 1."""
