"""Pool of LoRA adapters over one frozen model: gradients, AdamW and state of each, none of which touches another's.

An adapter's numbers are flat tensors, the same on every rank: A and B of all its layers are views of one, so that a
sum over ranks, a step, a move to the host and a file are one operation each.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_engine.checkpoint.hf_folder import previous_folder
from rl_engine.errors import BatchError, CheckpointError, ConfigError
from rl_engine.layers.peft_lora import write_adapter
from rl_engine.layers.row_adapters import LowRank, RowAdapters, draw_adapter
from rl_engine.optimizer import clip_grad_norm
from rl_engine.types import find_damage, read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tensordict import TensorDict

    from rl_engine.base import LossFunction
    from rl_engine.model.batch_runner import BatchRunner
    from rl_engine.model.scorer import BuiltModel
    from rl_engine.types import AdamParams, EngineOutput, LoraConfig, PeftConfig

_WEIGHTS, _STATE, _MANIFEST = "adapter_model.safetensors", "optimizer.safetensors", "manifest.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True, kw_only=True)
class Adapter:
    """One adapter of the pool."""

    lora: LoraConfig
    """Settings."""
    peft: PeftConfig
    """Settings, as peft describes them."""
    scaling: float
    """Factor of B @ A."""
    shapes: dict[str, tuple[torch.Size, torch.Size]]
    """Shapes of A and B by layer; in this order they are in the flat tensors."""
    parameters: dict[str, str | None]
    """Name of the experts' weight that a layer's is added to; None of linear layers."""
    flat: dict[str, Tensor]
    """`weights`, `exp_avg`, `exp_avg_sq`, and `grad` while there is a gradient, (numbers,) each; empty on disk."""
    layers: dict[str, LowRank] = field(default_factory=dict[str, LowRank])
    """Views of `weights` that are trained, while the adapter is on the device."""
    step: int = 0
    """Steps taken."""

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Parts of a flat tensor, as `LAYER.lora_A` and `LAYER.lora_B`."""
        start = 0
        for layer, (a, b) in self.shapes.items():
            for part, shape in (("A", a), ("B", b)):
                yield f"{layer}.lora_{part}", flat[start : start + shape.numel()].view(shape)
                start += shape.numel()

    def open(self, device: torch.device) -> None:
        """Put the numbers on `device`, ready for a pass."""
        self.flat = {name: tensor.to(device) for name, tensor in self.flat.items()}
        parts = {name: nn.Parameter(view) for name, view in self.views(self.flat["weights"])}
        self.layers = {
            layer: LowRank(parts[f"{layer}.lora_A"], parts[f"{layer}.lora_B"], self.scaling, parameter)
            for layer, parameter in self.parameters.items()
        }
        if "grad" in self.flat:
            self.collect()

    def collect(self) -> None:
        """Let backward passes add to the flat gradient, which is made if there is none."""
        self.flat.setdefault("grad", torch.zeros_like(self.flat["weights"]))
        for name, view in self.views(self.flat["grad"]):
            layer, _, part = name.rpartition(".")
            (self.layers[layer].a if part == "lora_A" else self.layers[layer].b).grad = view

    def drop_gradient(self) -> None:
        """Forget the gradient."""
        self.flat.pop("grad", None)
        for low in self.layers.values():
            low.a.grad = low.b.grad = None


class AdapterPool:
    """Adapters by name, over one frozen model. Collective, but for `check`.

    Args:
        built: The model.
        runner: Runs its batches.
        rows: Its layers' adapters.
        max_resident: Adapters on the device at once.
        idle_folder: Others are in this folder; None: in host memory.
    """

    def __init__(
        self,
        built: BuiltModel,
        runner: BatchRunner,
        rows: RowAdapters,
        *,
        max_resident: int = 8,
        idle_folder: str | Path | None = None,
    ) -> None:
        if max_resident < 1:
            raise ConfigError(f"max_resident is {max_resident}; it is a number of adapters, 1 or more.")
        self._built, self._runner, self._rows = built, runner, rows
        self._max_resident = max_resident
        self._idle = None if idle_folder is None else Path(idle_folder) / f"rank-{built.world.rank}"
        self._known: dict[str, Adapter] = {}
        self._resident: OrderedDict[str, None] = OrderedDict()

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """Adapters by name, in the order in which they were added."""
        return self._known

    @property
    def resident(self) -> tuple[str, ...]:
        """Adapters on the device, the one idle for longest first."""
        return tuple(self._resident)

    def __getitem__(self, name: str) -> Adapter:
        if name not in self._known:
            raise ConfigError(f"There is no adapter {name!r}; there are: {', '.join(self._known) or 'none'}.")
        return self._known[name]

    def add(self, name: str, lora: LoraConfig, seed: int) -> PeftConfig:
        """See `TrainingWorker.add_adapter`."""
        if not name or "." in name or "/" in name:
            raise ConfigError(f"An adapter cannot be named {name!r}; use letters, digits, _ and -.")
        if name in self._known:
            raise ConfigError(f"There is an adapter {name!r} already; remove it, or choose another name.")
        if lora.dropout:
            raise ConfigError(f"lora.dropout is {lora.dropout}; adapters that share a batch have none. Set it to 0.")
        peft, layers = draw_adapter(self._built.config, lora, seed)
        self._rows.check(layers)
        weights = torch.cat([part.detach().flatten() for low in layers.values() for part in (low.a, low.b)])
        moments = {key: torch.zeros_like(weights) for key in _MOMENTS}
        self._known[name] = Adapter(
            lora=lora,
            peft=peft,
            scaling=next(iter(layers.values())).scaling,
            shapes={layer: (low.a.shape, low.b.shape) for layer, low in layers.items()},
            parameters={layer: low.parameter for layer, low in layers.items()},
            flat={"weights": weights, **moments},
        )
        self._rows.attach(layers)
        self.open([name])
        return peft

    def remove(self, name: str) -> None:
        """See `TrainingWorker.remove_adapter`."""
        self[name].drop_gradient()
        if self._idle is not None:
            self._file(name).unlink(missing_ok=True)
        del self._known[name]
        self._resident.pop(name, None)

    def open(self, names: Sequence[str]) -> list[Adapter]:
        """Bring adapters to the device; the ones idle for longest make room.

        Raises:
            BatchError: more than the device may have.
        """
        if len(names) > self._max_resident:
            raise BatchError(
                f"The rows have {len(names)} adapters and max_resident is {self._max_resident}; pass fewer at once."
            )
        found = [self[name] for name in names]
        for name in names:
            self._resident.pop(name, None)
        while len(self._resident) > self._max_resident - len(names):
            self._set_aside(self._resident.popitem(last=False)[0])
        for name, adapter in zip(names, found, strict=True):
            if not adapter.layers:
                if not adapter.flat:
                    adapter.flat = _load(self._file(name))
                adapter.open(self._built.world.device)
            self._resident[name] = None
        return found

    def _set_aside(self, name: str) -> None:
        """Move an adapter off the device."""
        adapter = self._known[name]
        adapter.layers = {}
        adapter.flat = {key: tensor.detach().cpu() for key, tensor in adapter.flat.items()}
        if self._idle is not None:
            self._idle.mkdir(parents=True, exist_ok=True)
            _save(self._file(name), adapter.flat)
            adapter.flat = {}

    def _file(self, name: str) -> Path:
        assert self._idle is not None
        return self._idle / f"{name}.safetensors"

    def use(self, names: Sequence[str], *, trained: bool) -> None:
        """Let rows number these adapters from 0; a backward pass adds to the gradients of those that are `trained`."""
        found = self.open(names)
        for adapter in found if trained else ():
            adapter.collect()
        self._rows.use([adapter.layers for adapter in found])

    def forward_backward(self, data: TensorDict, loss_function: LossFunction) -> EngineOutput:
        """Add to the gradients of the adapters in use; see `Engine.forward_backward_batch`."""
        scorer = self._built.scorer
        scorer.train()  # without which nothing is recomputed; there is no dropout
        try:
            return self._runner.forward_backward(data, loss_function, has_backward=True)
        finally:
            scorer.eval()

    def step(self, name: str, adam: AdamParams) -> float:
        """Step one adapter by AdamW; the gradient norm over all ranks before clipping, 0 without a gradient.

        Raises:
            NonFiniteError: the norm is NaN or infinite; weights and state are unchanged, the gradient is dropped.
        """
        (adapter,) = self.open([name])
        adapter.collect()
        weights = nn.Parameter(adapter.flat["weights"])
        weights.grad = adapter.flat["grad"]
        try:
            if self._built.world.size > 1:
                with self._built.world.together():
                    dist.all_reduce(weights.grad)
            norm = clip_grad_norm([weights], adam.grad_clip_norm or torch.inf)
            optimizer = torch.optim.AdamW(
                [weights],
                lr=adam.lr,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
                fused=True,
            )
            done = torch.tensor(float(adapter.step), device=weights.device)
            optimizer.state[weights] = {"step": done, **{key: adapter.flat[key] for key in _MOMENTS}}
            optimizer.step()
        finally:
            adapter.drop_gradient()
        adapter.step += 1
        return norm

    def named_tensors(self, name: str) -> dict[str, Tensor]:
        """Tensors of an adapter under the names that peft writes into adapter_model.safetensors."""
        (adapter,) = self.open([name])
        views = adapter.views(adapter.flat["weights"])
        return {f"base_model.model.{key}.weight": view.detach() for key, view in views}

    def save(self, name: str, path: str | Path, *, optimizer: bool) -> None:
        """See `TrainingWorker.save_state`."""
        tensors = {key: tensor.cpu() for key, tensor in self.named_tensors(name).items()}
        adapter = self[name]
        state = {key: adapter.flat[key].cpu() for key in _MOMENTS} if optimizer else {}

        def write() -> None:
            write_adapter(
                path,
                tensors,
                adapter.peft,
                self._built.config.model_path,
                {_STATE: state} if optimizer else {},
                {"step": adapter.step},
            )

        self._on_all(write if self._built.world.rank == 0 else None)

    def load(self, name: str, path: str | Path, *, optimizer: bool) -> int:
        """See `TrainingWorker.load_state`."""
        (adapter,) = self.open([name])
        found: dict[str, Tensor] = {}
        step = 0

        def read() -> None:
            nonlocal step
            folder = Path(path)
            if not folder.exists():  # a save was killed while it put the new one in its place
                folder = previous_folder(folder)
            step = read_manifest(folder / _MANIFEST)["step"]
            if damage := find_damage(folder / _MANIFEST):
                raise CheckpointError(f"{damage[0]}.")
            found.update(_read_adapter(folder, adapter, optimizer=optimizer))

        self._on_all(read)
        adapter.drop_gradient()
        with torch.no_grad():
            for key, tensor in found.items():
                adapter.flat[key].copy_(tensor)
            for key in () if optimizer else _MOMENTS:
                adapter.flat[key].zero_()
        adapter.step = step if optimizer else 0
        return adapter.step

    def _on_all(self, work: Callable[[], None] | None) -> None:
        """Do this rank's work; an error of one rank is raised on all."""
        problem = None
        try:
            if work is not None:
                work()
        except (CheckpointError, OSError) as error:
            problem = str(error)
        failed = [said for said in self._built.world.exchange(problem) if said is not None]
        if failed:
            raise CheckpointError(problem or failed[0])


def _read_adapter(folder: Path, adapter: Adapter, *, optimizer: bool) -> dict[str, Tensor]:
    """Flat tensors of a saved adapter.

    Raises:
        CheckpointError: it is another adapter's, or has no state of the optimizer.
    """
    described = json.loads((folder / "adapter_config.json").read_text())
    for key in ("r", "lora_alpha", "target_modules"):
        if described[key] != adapter.peft[key]:
            raise CheckpointError(
                f"{folder} has an adapter with {key} {described[key]}, and this one's is {adapter.peft[key]}."
            )
    named = _load(folder / _WEIGHTS)
    names = [f"base_model.model.{key}.weight" for key, _ in adapter.views(adapter.flat["weights"])]
    if set(names) != named.keys():
        raise CheckpointError(
            f"{folder} has an adapter of other layers: it has {len(named)} tensors, not {len(names)}."
        )
    found = {"weights": torch.cat([named[key].flatten() for key in names])}
    if optimizer:
        if not (folder / _STATE).is_file():
            raise CheckpointError(f"{folder} was saved without the optimizer's state; load it with optimizer=False.")
        found |= _load(folder / _STATE)
    if (sizes := {key: len(tensor) for key, tensor in found.items()}) != dict.fromkeys(
        sizes, len(adapter.flat["weights"])
    ):
        raise CheckpointError(f"{folder} has {sizes} numbers, and the adapter {len(adapter.flat['weights'])}.")
    return found


def _load(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def _save(file: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), file)
