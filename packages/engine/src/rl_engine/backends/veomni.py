# pyright: reportMissingImports=false
"""The `veomni` backend: VeOmni's models, loader and FSDP2, fed packed rows like the other backends.

Its modelling code attends through transformers' attention interface, so that rows attend as with `fsdp`, on CPUs too.
Steps, losses, weights and checkpoints are those of `ModuleEngine`. The package is installed in an environment of its
own (docs/packages/engine/backends.md).
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from rl_engine.backends.fsdp import FsdpBackend, check_fit, sum_gradients
from rl_engine.checkpoint.hf_folder import empty_model, parameter_dtype, trains_narrow
from rl_engine.errors import BackendError, ConfigError, ModelFolderError
from rl_engine.model.hf import PolicyScorer
from rl_engine.model.module_engine import Capabilities, ModuleEngine
from rl_engine.model.settings import check_float8, refuse_fsdp_only, refuse_parts
from rl_engine.types import EngineConfig, Head, ModelInit, ParallelConfig, Precision

try:
    from veomni.arguments.arguments_types import MixedPrecisionConfig, OpsImplementationConfig
    from veomni.distributed.parallel_state import init_parallel_state
    from veomni.distributed.torch_parallelize import build_parallelize_model
    from veomni.models import build_foundation_model
except ImportError as error:
    raise BackendError(
        f"The veomni backend needs veomni 0.1.12 and transformers 5.9 ({error}); make an environment with them, and in "
        "rl-trainer set engine.environment to its folder."
    ) from error

if TYPE_CHECKING:
    from rl_engine.base import Engine
    from rl_engine.distributed.world import World


def create(config: EngineConfig) -> Engine:
    """The registry's entry."""
    return ModuleEngine(VeomniBackend(config))


class VeomniBackend(FsdpBackend):
    """See `ModuleBackend`: VeOmni's models, sharded over all ranks."""

    capabilities = Capabilities(has_loss_in_head=False)

    def check(self, world_size: int) -> str | None:
        """See `ModuleBackend`."""
        config = self.config
        if config.parallel != ParallelConfig():
            raise ConfigError(
                f"parallel is {config.parallel}; the veomni backend shards over all ranks and has no other layout: "
                "VeOmni's ep and sp need its GPU kernels. Leave it out, or use fsdp for dp_replicate, sp and ep."
            )
        if config.head != Head.LM:
            raise ConfigError(f"head is {config.head}; the veomni backend has language models only. Use fsdp.")
        if config.lora is not None:
            raise ConfigError("The veomni backend has no LoRA adapters; leave lora out, or use fsdp.")
        if world_size == 1 and trains_narrow(config):
            raise ConfigError(
                f"precision is {config.precision} on 1 rank; VeOmni computes in a narrower format than that of the "
                "weights on 2 ranks or more. Set engine.world_size, take float32, or use fsdp."
            )
        refuse_fsdp_only(config, "veomni")
        refuse_parts(config, "veomni")
        check_float8(config, "veomni", ())
        obstacle = check_fit(config, world_size)
        if not PolicyScorer(empty_model(config.model_path), config).is_packed:
            raise ModelFolderError(f"The layers of {config.model_path} do not take packed rows. Use fsdp.")
        return obstacle

    @property
    def needs_group(self) -> bool:
        """See `ModuleBackend`."""
        return True

    def build(self, world: World) -> tuple[PolicyScorer, None]:
        """See `ModuleBackend`."""
        config, folder = self.config, self.config.model_path
        if config.init != ModelInit.PRETRAINED:
            raise ConfigError(f"init is {config.init}; the veomni backend loads a folder's weights. Use fsdp.")
        init_parallel_state(dp_size=world.size, dp_shard_size=world.size, device_type=world.device.type)
        model = build_foundation_model(
            folder,
            weights_path=folder,
            torch_dtype=str(parameter_dtype(config)).removeprefix("torch."),
            init_device="meta" if world.size > 1 else world.device.type,
            ops_implementation=OpsImplementationConfig(**_plain_operations()),
        )
        wide = "float64" if config.precision == Precision.FLOAT64 else "float32"
        model = build_parallelize_model(
            model,
            weights_path=folder,
            mixed_precision=MixedPrecisionConfig(
                enable=trains_narrow(config), param_dtype=str(config.precision), reduce_dtype=wide, output_dtype=wide
            ),
            enable_gradient_checkpointing=config.activation_checkpointing,
            init_device="meta" if world.size > 1 else "cuda",  # on one rank it moves nothing, and takes no other name
        )
        scorer: Any = PolicyScorer(model, config)  # without `head`: the root makes the logits, and gathers its weight
        sum_gradients(scorer)
        scorer.requires_grad_(config.optimizer is not None)
        return scorer.train(config.optimizer is not None), None


def _plain_operations() -> dict[str, str]:
    """VeOmni's choice of kernels: its own defaults on GPUs, PyTorch's on CPUs."""
    if torch.cuda.is_available():
        return {}
    named = [field for field in fields(OpsImplementationConfig) if field.name.endswith("implementation")]
    return {field.name: "eager" for field in named if field.default != "none"}
