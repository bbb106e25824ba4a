"""The module that a backend of one scoring module builds: packed rows in, scores of their completion tokens out."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from rl_engine._cost import CostModel
    from rl_engine._packed import PackedRows
    from rl_engine._routing import ExpertLoad, Experts, Routing
    from rl_engine._scores import Scores
    from rl_engine._sight import Sight


class Scorer(nn.Module):
    """Scores packed rows with one model. `model` holds every parameter."""

    sight: Sight | None = None
    """How images are fed; None for a model that takes none in that way."""
    shares_prompts: bool = False
    """Whether rows that begin with the same prompt may be fed it once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @abstractmethod
    def forward(self, rows: PackedRows) -> Scores:
        """Score every completion token."""

    @property
    @abstractmethod
    def config(self) -> Any:
        """The language model's transformers config."""

    @property
    def experts(self) -> Experts | None:
        """What the routers that can be counted and replayed choose among; None without such routers."""
        return None

    def route(self, rows: PackedRows, load: ExpertLoad | None, *, is_counting: bool = False) -> Routing | None:
        """What the routers are to do with the next `forward`; None without `experts`."""
        return None

    @abstractmethod
    def cost(self) -> CostModel:
        """What a row costs on this model."""

    @abstractmethod
    def named_weights(self) -> dict[str, Tensor]:
        """Parameters, tied ones once, and the buffers that belong to a checkpoint."""

    def to_folder(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Some of `named_weights` as the tensors of a Hugging Face folder that they are made of."""
        return named
