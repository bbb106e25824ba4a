"""Scorer: the module that an engine trains, whatever library its layers are of."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_engine.batch.micro_batches import CostModel
    from rl_engine.batch.packed import PackedRows
    from rl_engine.batch.plan import ModelReplicas
    from rl_engine.distributed.world import World
    from rl_engine.layers.logprobs import HeadLoss
    from rl_engine.layers.moe import ExpertLoad, Experts, Routing
    from rl_engine.layers.mtp import MtpLayer
    from rl_engine.layers.multimodal import ImageInputs, MultimodalInputs
    from rl_engine.optimizer import StepOptimizer
    from rl_engine.types import EngineConfig, ModelOutput, PeftConfig


class Scorer(nn.Module):
    """Scores packed rows with one model. `model` holds every parameter."""

    multimodal: MultimodalInputs | ImageInputs | None = None
    """Multimodal inputs; None for a model that takes none in that way."""
    mtp: MtpLayer | None = None
    """Layer for multi-token prediction, where it is trained in the model."""
    shares_prefixes: bool = False
    """Whether tokens that rows begin with in common may be fed once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @abstractmethod
    def forward(self, rows: PackedRows, head_loss: HeadLoss | None = None) -> ModelOutput:
        """Score every completion token; the head makes `head_loss` itself where it can."""

    @property
    @abstractmethod
    def config(self) -> Any:
        """The language model's transformers config."""

    @property
    def experts(self) -> Experts | None:
        """Sizes of the mixture whose routers can be counted and replayed; None without such routers."""
        return None

    def route(self, rows: PackedRows, load: ExpertLoad | None, *, is_counting: bool = False) -> Routing | None:
        """Routing state of the next `forward`; None without `experts`."""
        return None

    @abstractmethod
    def cost(self) -> CostModel:
        """Cost model of a row (floating-point operations)."""

    def layers(self) -> Sequence[nn.Module]:
        """Decoder layers; their matrices are what Muon orthogonalises."""
        return ()

    @abstractmethod
    def named_weights(self) -> dict[str, Tensor]:
        """Parameters, tied ones once, and the buffers that belong to a checkpoint."""

    def named_layers(self, *, ahead: bool) -> dict[str, Tensor]:
        """Those of `named_weights` that are of the layer for multi-token prediction, or all others."""
        prefix = None if self.mtp is None else self.mtp.prefix
        return {
            name: tensor
            for name, tensor in self.named_weights().items()
            if (prefix is not None and name.startswith(prefix)) == ahead
        }

    def to_folder(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a Hugging Face folder that some of `named_weights` are made of."""
        return named


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """Model of an initialized engine, with what its parts share."""

    config: EngineConfig
    """Settings."""
    world: World
    """Ranks of the engine."""
    scorer: Scorer
    """The module, sharded over the ranks."""
    optimizer: StepOptimizer | None
    """Its optimizer; None: frozen."""
    peft: PeftConfig | None
    """Adapter, as peft describes it; None without one."""
    replicas: ModelReplicas
    """Ranks that share a model replica."""
    cost: CostModel
    """Cost model of a row."""


def reshard(module: nn.Module) -> None:
    """Put this rank's shards in the place of gathered parameters."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
