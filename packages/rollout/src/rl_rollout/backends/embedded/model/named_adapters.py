"""LoRA adapters by name: loaded from folders in peft's format, replaced by weight updates, chosen per request.

In a weight update, the tensor `adapters.NAME.` + its name in the folder (`base_model.model.layers.0....lora_A.weight`)
belongs to adapter NAME, which was loaded when the server started. An update brings all tensors of an adapter or none.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rl_rollout.backends.embedded.model.linear import LowRank, ServedLinear
from rl_rollout.errors import ModelFolderError, WeightUpdateError
from rl_rollout.validation import read_adapter_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

UPDATE_PREFIX = "adapters."
_FOLDER_PREFIX = "base_model.model."


class AdapterStore:
    """LoRA adapters of a served model: those in use, and those staged by an update.

    Args:
        layers: Linear layers of the model, by name.
        folders: Folder of each adapter, by the adapter's name.

    Raises:
        ModelFolderError: a folder is no LoRA adapter of this model, or uses a feature of peft that is not served.
    """

    def __init__(self, layers: Mapping[str, ServedLinear], folders: Mapping[str, str]) -> None:
        self._layers = layers
        self._scaling: dict[str, float] = {}
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._staged: dict[str, dict[str, Tensor]] = {}
        for name, folder in folders.items():
            self._scaling[name] = _read_scaling(name, Path(folder))
            self._tensors[name] = self._read_tensors(name, Path(folder))
            self._install(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters that requests may ask for."""
        return tuple(self._scaling)

    @property
    def has_staged(self) -> bool:
        """Whether any tensor of an adapter has arrived since `begin`."""
        return bool(self._staged)

    def begin(self) -> None:
        """Start an update: no tensor has arrived."""
        self._staged.clear()

    def stage(self, name: str, tensor: Tensor) -> None:
        """Stage one tensor of an update, named `adapters.NAME....`.

        Raises:
            WeightUpdateError: no such adapter or tensor, or another shape.
        """
        adapter, _, key = name.removeprefix(UPDATE_PREFIX).partition(".")
        known = self._tensors.get(adapter)
        if known is None:
            raise WeightUpdateError(f"there is no adapter {adapter!r}; loaded are: {', '.join(self.names) or 'none'}")
        if key not in known:
            raise WeightUpdateError(f"adapter {adapter!r} has no tensor {key!r}; it has e.g. {next(iter(known))!r}")
        if tensor.shape != known[key].shape:
            raise WeightUpdateError(
                f"{name!r} arrived as {tuple(tensor.shape)}; the adapter holds {tuple(known[key].shape)}"
            )
        self._staged.setdefault(adapter, {})[key] = tensor.to(known[key].dtype, copy=True).to(known[key].device)

    def check_complete(self) -> None:
        """Check that every adapter of the update is complete.

        Raises:
            WeightUpdateError: tensors of an adapter are missing; says how many, and the name of one.
        """
        for adapter, tensors in self._staged.items():
            if missing := sorted(self._tensors[adapter].keys() - tensors.keys()):
                raise WeightUpdateError(
                    f"{len(missing)} tensors of adapter {adapter!r} did not arrive, e.g. {missing[0]!r}"
                )

    def swap(self) -> None:
        """Serve the staged adapters."""
        self._tensors.update(self._staged)
        for adapter in self._staged:
            self._install(adapter)
        self._staged.clear()

    def _install(self, adapter: str) -> None:
        tensors = self._tensors[adapter]
        for key, a in tensors.items():
            if key.endswith(".lora_A.weight"):
                b = tensors[key.replace(".lora_A.", ".lora_B.")]
                layer = self._layers[_layer_name(key)]
                layer.adapters[adapter] = LowRank(a=a, b=b, scaling=self._scaling[adapter])

    def _read_tensors(self, adapter: str, folder: Path) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        path = folder / "adapter_model.safetensors"
        if not path.is_file():
            raise ModelFolderError(f"adapter {adapter!r}: folder {str(folder)!r} has no {path.name}")
        found = load_file(path)
        for key, tensor in found.items():
            layer = self._layers.get(_layer_name(key))
            if layer is None or not key.endswith((".lora_A.weight", ".lora_B.weight")):
                raise ModelFolderError(f"adapter {adapter!r}: {key!r} belongs to no linear layer of the model")
            is_a = key.endswith(".lora_A.weight")
            other = key.replace(".lora_A.", ".lora_B.") if is_a else key.replace(".lora_B.", ".lora_A.")
            if other not in found:
                raise ModelFolderError(f"adapter {adapter!r} has {key!r} and not {other!r}")
            width = layer.weight.shape[1 if is_a else 0]
            if tensor.shape[1 if is_a else 0] != width:
                raise ModelFolderError(
                    f"adapter {adapter!r}: {key!r} is {tuple(tensor.shape)}; the layer's width is {width}"
                )
        like = next(iter(self._layers.values())).weight
        return {key: tensor.to(like.device, like.dtype) for key, tensor in found.items()}


def _layer_name(key: str) -> str:
    return key.removeprefix(_FOLDER_PREFIX).removesuffix(".weight").removesuffix(".lora_A").removesuffix(".lora_B")


def _read_scaling(adapter: str, folder: Path) -> float:
    config = read_adapter_config(adapter, folder)
    rank = config["r"]
    return config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
