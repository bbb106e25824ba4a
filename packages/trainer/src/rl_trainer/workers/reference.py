"""Reference worker of `algorithm.ref_ema`: a frozen engine whose weights become averages."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import rl_engine.registry
from rl_engine.errors import naming
from rl_trainer.errors import InputError
from rl_trainer.runtime.base import Dispatch, WorkerContext, register
from rl_trainer.workers.engine_worker import EngineWorker

if TYPE_CHECKING:
    from rl_engine.types import EngineConfig


class ReferenceWorker(EngineWorker):
    """Reference worker of `algorithm.ref_ema`: one rank of a frozen engine whose weights are replaced by averages."""

    def __init__(self, context: WorkerContext, *, backend: str, config: EngineConfig, **rest: Any) -> None:
        super().__init__(context, backend=backend, config=config, **rest)
        self._backend, self._config = backend, config

    @register(Dispatch.RANK_ZERO)
    def average(self, policy: str, into: str, decay: float) -> None:
        """Write folder `into`: `average_folders` of this reference's weights and those in `policy`."""
        average_folders(Path(self._config.model_path), Path(policy), Path(into), decay)

    @register(Dispatch.ONE_TO_ALL)
    def load_model(self, path: str) -> None:
        """Load the weights of a folder."""
        self._engine.close()
        self._config = replace(self._config, model_path=path)
        self._engine = rl_engine.registry.create_engine(self._backend, self._config)
        self._engine.initialize()


def average_folders(reference: Path, policy: Path, into: Path, decay: float) -> None:
    """Write a model folder with `decay * reference + (1 - decay) * policy`, in float32.

    In bfloat16 a small step would be rounded away. What is no float is the policy's, and so is the rest of the folder.

    `into` is made anew.

    Raises:
        InputError: the reference lacks a tensor.
    """
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(policy, into, ignore=shutil.ignore_patterns("*.safetensors"))
    places = {name: file for file in reference.glob("*.safetensors") for name in _names(file)}
    for file in policy.glob("*.safetensors"):
        averaged: dict[str, torch.Tensor] = {}
        with safe_open(file, "pt") as theirs:
            for name in theirs.keys():  # noqa: SIM118 - a file, not a mapping
                if name not in places:
                    raise InputError(f"the reference in {reference} has no tensor {name!r}, which the policy has")
                with safe_open(places[name], "pt") as own:
                    averaged[name] = _average(own.get_tensor(name), theirs.get_tensor(name), decay)
        with naming(into / file.name):
            save_file(averaged, into / file.name, metadata={"format": "pt"})


def _average(own: torch.Tensor, policy: torch.Tensor, decay: float) -> torch.Tensor:
    if not policy.is_floating_point():
        return policy
    return torch.lerp(policy.float(), own.float(), decay)


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())
