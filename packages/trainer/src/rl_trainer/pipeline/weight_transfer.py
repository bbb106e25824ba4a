"""Weight transfer from the engine's ranks to the replicas: from shard to shard, or gathered and sent by rank 0."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import rl_ckpt
from rl_trainer.errors import ConfigError
from rl_trainer.runtime.network import LISTENING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from rl_ckpt.types import SyncReport
    from rl_engine.types import LoraConfig
    from rl_trainer.workers.engine import EngineWorker


class WeightTransfer(ABC):
    """Weight transfer: sends versions from the actor to all replicas."""

    def __init__(self, actor: EngineWorker) -> None:
        self._actor = actor

    @abstractmethod
    def address(self) -> str:
        """Address that replicas receive from."""

    @abstractmethod
    def send(self, version: int, receivers: Mapping[int, int]) -> SyncReport:
        """Send and commit a version once all `receivers` (number by replica) have joined.

        Raises:
            SyncAbortedError: it is committed nowhere.
        """

    def call_off(self) -> None:
        """Abort a waiting `send`, from another thread."""
        self._actor.call_off()


class GatheredTransfer(WeightTransfer):
    """Gathered transfer: all ranks gather tensor by tensor, and rank 0 sends to every receiver."""

    def __init__(self, actor: EngineWorker, address: str) -> None:
        super().__init__(actor)
        self._address = address

    def address(self) -> str:
        """Address of rank 0's session."""
        return self._address

    def send(self, version: int, receivers: Mapping[int, int]) -> SyncReport:
        """See `WeightTransfer`."""
        report = self._actor.send_weights(version, sum(receivers.values()))
        assert report is not None, "rank 0 sends and reports"
        return report


class ShardedTransfer(WeightTransfer):
    """Sharded transfer: every rank sends its shards, receivers take their slices, one commit for all.

    The plan and the sessions are made before the first sync, and serve every later one.

    Args:
        actor: The engine's ranks.
        pattern: Of the address of a session, as `session_pattern` makes it.
    """

    def __init__(self, actor: EngineWorker, pattern: str) -> None:
        super().__init__(actor)
        self._pattern = pattern
        self._address = ""

    def address(self) -> str:
        """Addresses of the sessions of all ranks, which are opened on first use.

        Raises:
            ConfigError: the engine exports whole tensors only.
        """
        if not self._address:
            layouts = self._actor.weight_layout()
            held = tuple(layout for layout in layouts if layout is not None)
            if len(held) < len(layouts):
                raise ConfigError("this engine.backend exports whole tensors only; set weights.mode=gathered")
            opened = self._actor.open_sessions(held, self._pattern)
            self._address = rl_ckpt.join_addresses(opened, 1)
        return self._address

    def send(self, version: int, receivers: Mapping[int, int]) -> SyncReport:
        """See `WeightTransfer`."""
        try:
            digest = rl_ckpt.join_digest(self._actor.stage_weights(version, len(receivers)))
        except Exception as error:
            self._actor.abort_weights(str(error) or repr(error))
            raise
        reports = self._actor.commit_weights(version, digest)
        return rl_ckpt.merge_reports(reports, version=version, digest=digest)


def write_start_adapter(folder: Path, model_path: Path, lora: LoraConfig) -> Path:
    """Write an adapter that changes nothing, in peft's format: what servers start with before the first sync.

    Raises:
        ConfigError: no linear layer of the model has one of the target names.
    """
    tensors: dict[str, Tensor] = {}
    for file in sorted(model_path.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - a file, not a mapping
                shape = tuple(weights.get_slice(name).get_shape())
                layer = name.removesuffix(".weight")
                is_wanted = layer.rpartition(".")[2] in lora.target_modules if lora.target_modules else True
                if is_wanted and len(shape) == 2 and ".layers." in name and layer != name:
                    tensors[f"base_model.model.{layer}.lora_A.weight"] = torch.zeros(lora.rank, shape[1])
                    tensors[f"base_model.model.{layer}.lora_B.weight"] = torch.zeros(shape[0], lora.rank)
    if not tensors:
        raise ConfigError(f"engine.lora.target_modules={list(lora.target_modules)} names no layer of {model_path}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described: dict[str, object] = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "bias": "none"}
    described["target_modules"] = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def session_pattern(address: str, *, delta: bool) -> str:
    """The address of a session as one of many, with places for `{rank}`, `{target}` and `{host}`."""
    scheme, _, rest = address.partition("://")
    name, _, query = rest.partition("?")
    place = "{host}:0" if scheme in LISTENING else f"{name}-{{rank}}-{{target}}"
    options = "&".join([*([query] if query else []), *(["delta=1"] if delta else [])])
    return f"{scheme}://{place}{'?' if options else ''}{options}"
