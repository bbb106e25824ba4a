"""LoRA adapters by name: from folders in peft's format, or from weight updates; chosen per request.

In a weight update, the tensor `adapters.NAME.` + its name in the folder (`base_model.model.layers.0....lora_A.weight`)
belongs to adapter NAME. An update brings all tensors of an adapter or none. A name that is not served yet becomes a new
adapter, up to `max_adapters`; its update also brings `adapters.NAME.scaling`, a scalar. `adapters.NAME.removed`
(anything) ends an adapter. Nothing makes room by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_rollout.backends.embedded.model.linear import LowRank, ServedLinear
from rl_rollout.errors import ModelFolderError, WeightUpdateError
from rl_rollout.validation import read_adapter_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

UPDATE_PREFIX = "adapters."
_FOLDER_PREFIX = "base_model.model."


@dataclass(slots=True, kw_only=True)
class _Adapter:
    """One adapter, served or staged."""

    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """By their names in peft's file."""
    scaling: float | None = None
    """Factor of B @ A; None: not known yet."""
    slot: int = 0
    """Number of the adapter in the batch state, from 1."""
    installed: int = 0
    """Number of the installation; another one has other tensors."""


class AdapterStore:
    """LoRA adapters of a served model: those in use, and those staged by an update.

    Args:
        layers: Linear layers of the model, by name.
        folders: Folder of each adapter, by the adapter's name.
        max_adapters: Adapters at once; None: as many as there are folders.

    Raises:
        ModelFolderError: a folder is no LoRA adapter of this model, or uses a feature of peft that is not served.
    """

    def __init__(
        self, layers: Mapping[str, ServedLinear], folders: Mapping[str, str], max_adapters: int | None = None
    ) -> None:
        self._layers = layers
        self._served: dict[str, _Adapter] = {}
        self._staged: dict[str, _Adapter] = {}
        self._removed: set[str] = set()
        self._num_installed = 0
        self.max_adapters = len(folders) if max_adapters is None else max_adapters
        """Adapters at once."""
        like = next(iter(layers.values())).weight
        self.versions = torch.zeros(self.max_adapters + 1, dtype=torch.int64, device=like.device)
        """[1 + adapters] version of the tokens, by slot (0: without an adapter)."""
        for name, folder in folders.items():
            scaling = _read_scaling(name, Path(folder))
            self._install(name, _Adapter(tensors=self._read_tensors(name, Path(folder)), scaling=scaling))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters that requests may ask for."""
        return tuple(self._served)

    def slot(self, name: str | None) -> int:
        """Number of an adapter in the batch state; 0 without one."""
        return 0 if name is None else self._served[name].slot

    def installation(self, name: str | None) -> int:
        """Number that changes with an adapter's tensors; 0 without one."""
        return 0 if name is None or name not in self._served else self._served[name].installed

    @property
    def has_staged(self) -> bool:
        """Whether an adapter has changed since `begin`."""
        return bool(self._staged or self._removed)

    def begin(self) -> None:
        """Start an update: no tensor has arrived."""
        self._staged.clear()
        self._removed.clear()

    def stage(self, name: str, tensor: Tensor) -> None:
        """Stage one tensor of an update, named `adapters.NAME....`.

        Raises:
            WeightUpdateError: no such adapter to remove, no such tensor, or another shape.
        """
        adapter, _, key = name.removeprefix(UPDATE_PREFIX).partition(".")
        served = self._served.get(adapter)
        if key == "removed":
            if served is None:
                raise WeightUpdateError(f"there is no adapter {adapter!r} to remove; {self._listing()}")
            self._removed.add(adapter)
            return
        staged = self._staged.setdefault(adapter, _Adapter(scaling=None if served is None else served.scaling))
        if key == "scaling":
            staged.scaling = float(tensor)
            return
        if served is not None and key not in served.tensors:
            raise WeightUpdateError(
                f"adapter {adapter!r} has no tensor {key!r}; it has e.g. {next(iter(served.tensors))!r}"
            )
        if served is not None and tensor.shape != served.tensors[key].shape:
            raise WeightUpdateError(
                f"{name!r} arrived as {tuple(tensor.shape)}; the adapter holds {tuple(served.tensors[key].shape)}"
            )
        if problem := self._misfit(key, tensor):
            raise WeightUpdateError(f"adapter {adapter!r}: {problem}")
        like = self._layers[_layer_name(key)].weight
        staged.tensors[key] = tensor.to(like.dtype, copy=True).to(like.device)

    def check_complete(self) -> None:
        """Check that every adapter of the update is complete, and that there is room for all.

        Raises:
            WeightUpdateError: tensors of an adapter are missing; says how many, and the name of one.
        """
        num = len((self._served.keys() | self._staged.keys()) - self._removed)
        if num > self.max_adapters:
            new = ", ".join(sorted(self._staged.keys() - self._served.keys()))
            raise WeightUpdateError(
                f"there is no adapter {new!r}, and there would be {num} with it; {self._listing()}, and at most "
                f"{self.max_adapters} are served: remove one, or start the server with the option max_adapters={num}"
            )
        for adapter, staged in self._staged.items():
            if adapter in self._removed:
                raise WeightUpdateError(f"an update removes adapter {adapter!r} and brings it too; send two updates")
            wanted = set(self._served[adapter].tensors) if adapter in self._served else _in_pairs(staged.tensors)
            if missing := sorted(wanted - staged.tensors.keys()):
                raise WeightUpdateError(
                    f"{len(missing)} tensors of adapter {adapter!r} did not arrive, e.g. {missing[0]!r}"
                )
            if not staged.tensors or staged.scaling is None:
                what = "no tensor" if staged.scaling is not None else f"no {UPDATE_PREFIX}{adapter}.scaling"
                raise WeightUpdateError(f"adapter {adapter!r} is new, and {what} arrived; {self._listing()}")

    def swap(self, version: int, *, has_base: bool) -> set[str]:
        """Serve the staged adapters; the names of those that changed or are gone.

        Args:
            version: Version of their tokens from now on.
            has_base: Whether the model's weights changed too, and with them the tokens of every adapter.
        """
        if has_base:
            self.versions.fill_(version)
        for adapter in self._removed:
            del self._served[adapter]
            for layer in self._layers.values():
                layer.adapters.pop(adapter, None)
        for adapter, staged in self._staged.items():
            self._install(adapter, staged)
            self.versions[staged.slot] = version
        changed = self._removed | self._staged.keys()
        self.begin()
        return changed

    def _listing(self) -> str:
        return f"loaded are: {', '.join(self.names) or 'none'}"

    def _install(self, name: str, adapter: _Adapter) -> None:
        taken = {each.slot for each in self._served.values()}
        before = self._served.get(name)
        adapter.slot = before.slot if before else next(n for n in range(1, len(self.versions)) if n not in taken)
        self._num_installed += 1
        adapter.installed = self._num_installed
        self._served[name] = adapter
        assert adapter.scaling is not None
        for key, a in adapter.tensors.items():
            if key.endswith(".lora_A.weight"):
                b = adapter.tensors[key.replace(".lora_A.", ".lora_B.")]
                self._layers[_layer_name(key)].adapters[name] = LowRank(a=a, b=b, scaling=adapter.scaling)

    def _misfit(self, key: str, tensor: Tensor) -> str | None:
        """Reason that a tensor is none of an adapter of this model."""
        layer = self._layers.get(_layer_name(key))
        if layer is None or not key.endswith((".lora_A.weight", ".lora_B.weight")):
            return f"{key!r} belongs to no linear layer of the model"
        axis = 1 if key.endswith(".lora_A.weight") else 0
        if tensor.ndim != 2 or tensor.shape[axis] != layer.weight.shape[axis]:
            return f"{key!r} is {tuple(tensor.shape)}; the layer's width is {layer.weight.shape[axis]}"
        return None

    def _read_tensors(self, adapter: str, folder: Path) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        path = folder / "adapter_model.safetensors"
        if not path.is_file():
            raise ModelFolderError(f"adapter {adapter!r}: folder {str(folder)!r} has no {path.name}")
        found = load_file(path)
        for key, tensor in found.items():
            if problem := self._misfit(key, tensor):
                raise ModelFolderError(f"adapter {adapter!r}: {problem}")
        if missing := sorted(_in_pairs(found) - found.keys()):
            raise ModelFolderError(f"adapter {adapter!r} has one half of a pair and not {missing[0]!r}")
        like = next(iter(self._layers.values())).weight
        return {key: tensor.to(like.device, like.dtype) for key, tensor in found.items()}


def _in_pairs(tensors: Iterable[str]) -> set[str]:
    """Names of both halves of every pair of which there is one."""
    return {key.replace(f".lora_{one}.", f".lora_{half}.") for key in tensors for one in "AB" for half in "AB"}


def _layer_name(key: str) -> str:
    return key.removeprefix(_FOLDER_PREFIX).removesuffix(".weight").removesuffix(".lora_A").removesuffix(".lora_B")


def _read_scaling(adapter: str, folder: Path) -> float:
    config = read_adapter_config(adapter, folder)
    rank = config["r"]
    return config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
