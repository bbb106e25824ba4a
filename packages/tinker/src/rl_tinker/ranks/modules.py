"""Modules that a LoRA adapter goes on, by the names in the base model's weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetensors import safe_open

from rl_tinker.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from rl_tinker.types import AdapterSpec

ATTENTION = frozenset(
    ["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
)
MLP = frozenset(["gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2"])
UNEMBED = "lm_head"
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModules:
    """Linear modules of a base model, by group; experts of a mixture, whose adapters no server takes, are in none."""

    attention: tuple[str, ...]
    mlp: tuple[str, ...]

    def of(self, adapter: AdapterSpec) -> tuple[str, ...]:
        """Modules of an adapter.

        Raises:
            RequestError: there are none.
        """
        found = (
            *(self.attention if adapter.train_attn else ()),
            *(self.mlp if adapter.train_mlp else ()),
            *((UNEMBED,) if adapter.train_unembed else ()),
        )
        if not found:
            raise RequestError("train_mlp adapts nothing: the model's MLPs are experts; set train_attn")
        return found


def lora_modules(folder: Path) -> LoraModules:
    """Modules of the model in a folder.

    Raises:
        ConfigError: the weights cannot be read, or have no module that an adapter goes on.
    """
    try:
        names = _tensor_names(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path={folder}: its weights cannot be listed: {error}") from error
    plain = [name.removesuffix(".weight") for name in names if name.endswith(".weight") and _EXPERTS not in name]
    found = {name.rpartition(".")[2] for name in plain}
    modules = LoraModules(attention=tuple(sorted(found & ATTENTION)), mlp=tuple(sorted(found & MLP)))
    if not modules.attention or not (modules.mlp or any(_EXPERTS in name for name in names)):
        raise ConfigError(
            f"model.path={folder} has no attention or MLP projections that adapters are known for; its modules are "
            f"{', '.join(sorted(found)[:8])}"
        )
    return modules


def _tensor_names(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return list(json.loads(index.read_text())["weight_map"])
    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())
