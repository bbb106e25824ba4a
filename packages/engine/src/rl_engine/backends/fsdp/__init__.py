"""The `fsdp` backend: any Hugging Face causal LM, or a scalar head on its trunk, sharded by FSDP2.

One rank computing in one number format needs neither sharding nor a process group and gets the bare module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_engine.backends.fsdp.engine import ShardedEngine
from rl_engine.backends.fsdp.parallelize import build_scorer, check_fit, needs_sharding
from rl_engine.errors import ConfigError
from rl_engine.model import lora
from rl_engine.types import EngineConfig, LoraExport, PeftConfig, ShardSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from rl_engine.base import Engine
    from rl_engine.distributed.world import World
    from rl_engine.model.hf import HuggingFaceScorer


def create(config: EngineConfig) -> Engine:
    """The registry's entry."""
    return FsdpEngine(config)


class FsdpEngine(ShardedEngine):
    """See `Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._peft: PeftConfig | None = None

    def _check(self, world_size: int) -> str | None:
        return check_fit(self._config, world_size)

    def _needs_group(self) -> bool:
        return needs_sharding(self._config, 1)

    def _build(self, world: World) -> HuggingFaceScorer:
        scorer, self._peft = build_scorer(self._config, world)
        return scorer

    def adapter_off(self) -> Any:
        """See `Engine`."""
        return super().adapter_off() if self._peft is None else lora.without_adapter(self._built().model)

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, Tensor]], PeftConfig | None]:
        """See `ShardedEngine`; with an adapter, merged into the model or alone, as the config says."""
        return self._exported(), self._peft if self._exports_adapter() else None

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        if self._peft is None:
            yield from super()._export()
            return
        scorer = self._built()
        named = scorer.named_weights()
        if self._exports_adapter():
            yield from ((name, self._as_exported(tensor)) for name, tensor in lora.adapter_weights(named))
            return
        for name, full in lora.merged_weights(scorer.model, named):
            yield from scorer.to_folder({name: self._as_exported(full)}).items()

    def get_local_shards(self) -> Iterator[tuple[ShardSpec, Tensor]]:
        """See `ShardedEngine`."""
        if self._peft is not None:
            raise ConfigError("An adapter is merged into whole tensors only; use get_per_tensor_param.")
        return super().get_local_shards()

    def _exports_adapter(self) -> bool:
        return self._config.lora is not None and self._config.lora.export == LoraExport.ADAPTER

    def _write_model(self, path: str | Path, weights: dict[str, Tensor]) -> None:
        if self._peft is not None and self._exports_adapter():
            lora.write_adapter(path, weights, self._peft, self._config.model_path)
        else:
            super()._write_model(path, weights)
