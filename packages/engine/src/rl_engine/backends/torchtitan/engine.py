"""The engine of the `torchtitan` backend: rank 0 reads the folder, torchtitan shards the decoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.protocols.module import Module

from rl_engine.backends.fsdp.engine import ShardedEngine
from rl_engine.backends.fsdp.parallelize import check_replicas, hand_out, load_on_rank_0, sum_gradients
from rl_engine.backends.torchtitan.model import TorchtitanScorer, check_architecture
from rl_engine.checkpoint import hf_folder
from rl_engine.checkpoint.hf_folder import DTYPES
from rl_engine.errors import ConfigError
from rl_engine.model.logprobs import ScoreOptions
from rl_engine.model.moe import check_aux
from rl_engine.settings import check_candidates, refuse_fsdp_only, shares_prefixes
from rl_engine.types import Head, ParallelConfig, Precision

if TYPE_CHECKING:
    from torch import Tensor

    from rl_engine.distributed.world import World
    from rl_engine.types import EngineConfig


class TorchtitanEngine(ShardedEngine):
    """See `Engine`. Sharded data parallelism, with `parallel.dp_replicate` copies."""

    def _check(self, world_size: int) -> str | None:
        config = self._config
        check_aux(config.router_aux_loss_coef, None)
        if config.parallel.dp_replicate < 1 or replace(config.parallel, dp_replicate=1) != ParallelConfig():
            raise ConfigError(
                f"parallel is {config.parallel}; the torchtitan backend takes dp_replicate only, 1 or more. "
                "Use fsdp for sp, and megatron for the others."
            )
        check_replicas(config.parallel, world_size)
        refuse_fsdp_only(config, "torchtitan")
        source = hf_folder.read_config(Path(config.model_path)).get_text_config()
        check_architecture(source)
        check_candidates(config.num_candidates, source.vocab_size)

    def _needs_group(self) -> bool:
        return True

    def _build(self, world: World) -> TorchtitanScorer:
        config = self._config
        source = hf_folder.read_config(Path(config.model_path)).get_text_config()
        scorer = TorchtitanScorer(source, ScoreOptions.of(config) if config.head == Head.LM else None)
        loaded = load_on_rank_0(config, world)
        whole: dict[str, Tensor] = dict(loaded.named_parameters()) if world.rank == 0 else {}
        scorer.to(hf_folder.parameter_dtype(config))
        _parallelize(scorer, config, world)
        scorer.to_empty(device=world.device)
        scorer.tie()
        for module in scorer.modules():
            if isinstance(module, Module):
                module._init_self_buffers(buffer_device=world.device)  # pyright: ignore[reportPrivateUsage]
        hand_out(scorer.named_weights(), whole, world)
        scorer.requires_grad_(config.optimizer is not None)
        scorer.shares_prefixes = shares_prefixes(config, None)
        return scorer.train(config.optimizer is not None)


def _parallelize(scorer: TorchtitanScorer, config: EngineConfig, world: World) -> None:
    """What torchtitan's parallelize functions of dense models do, in any number format."""
    replicas = config.parallel.dp_replicate
    sizes, names = ((world.size,), ("fsdp",))
    if replicas > 1:
        sizes, names = (replicas, world.size // replicas), ("dp_replicate", "fsdp")
    if config.activation_checkpointing:
        FullAC.Config().build(dump_folder="").apply(scorer.model)
    apply_fsdp_to_decoder(
        scorer.model,
        init_device_mesh(world.device.type, sizes, mesh_dim_names=names),
        param_dtype=DTYPES[config.precision],
        reduce_dtype=torch.float64 if config.precision == Precision.FLOAT64 else torch.float32,
        pp_enabled=False,
    )
    sum_gradients(scorer)
