"""SGLang takes weights from rl-ckpt, by `load_weights` as a custom weight loader.

Start the server with `--custom-weight-loader rl_ckpt.adapters.sglang.load_weights`, and POST what `session_request`
returns to `/update_weights_from_tensor`. That holds no weights, but which session to take them from. Every
tensor-parallel rank is a receiver of its own.
"""

# pyright: reportMissingImports=false
# SGLang is never in the environment that this is checked in.
from __future__ import annotations

import base64
import io
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch._utils import _rebuild_tensor_v2  # pyright: ignore[reportPrivateUsage]  # its name is in the pickle

from rl_ckpt.adapters import drafter
from rl_ckpt.adapters.engine_lora import TENSORS_FILE, Adapters, Copy, CopyRecorder, brings_adapters, pointer
from rl_ckpt.adapters.installer import Installer
from rl_ckpt.adapters.layout import SCHEME
from rl_ckpt.adapters.load_recorder import Held, LoadRecorder, filled_by
from rl_ckpt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from rl_ckpt.adapters.engine_lora import HeldAdapters

LOADER = "rl_ckpt.adapters.sglang.load_weights"
"""Value for `--custom-weight-loader`."""
TIMEOUT_S = 120.0
"""Longest wait for the sender: SGLang's scheduler is paused meanwhile."""
_UPDATE = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor"
"""Function of SGLang 0.5.23 that calls a custom loader."""
_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager.__init__"
"""Class of SGLang 0.5.23 that makes adapters."""
engines: dict[int, _Engine] = {}
"""Engines by the id of a model, which its engine keeps alive."""
DRAFTERS = ("NextN", "MTP")
"""Ends of the names of SGLang's classes of models that draft. Their call of a custom loader is before the model's."""
drafters: list[nn.Module] = []
"""The one of this process."""
managers: dict[int, Any] = {}
"""SGLang's LoRA managers, by the id of the model, which they keep alive."""


def session_tensors(url: str, version: int) -> list[tuple[str, Tensor]]:
    """The named tensors of an `update_weights_from_tensor` inside one process: the session, and the version to come."""
    return [(url, torch.tensor([version]))]


def session_request(url: str, version: int, *, tp_size: int = 1) -> dict[str, Any]:
    """Body of POST `/update_weights_from_tensor`, as JSON, to a server of `tp_size` tensor-parallel ranks.

    The answer has status 200 when the version is committed, and 400 when the sync failed.
    """
    payload = io.BytesIO()
    _Pickler(payload).dump(session_tensors(url, version))
    return {
        "serialized_named_tensors": [base64.b64encode(payload.getvalue()).decode()] * tp_size,
        "load_format": LOADER,
        "flush_cache": True,
        "weight_version": str(version),
    }


def load_weights(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Take the version that `session_tensors` names into the model. Called by SGLang.

    The token of a `tcp` session is the variable RL_CKPT_TOKEN of the server. What the model holds of each tensor is
    read back and attested before the commit; it must be stored as it was sent, not quantized.

    Raises:
        rl_ckpt.CkptError: the sync failed. The model holds the weights before or, if it cannot (a note then says so),
            raises whenever it is called, until a later sync succeeds.
    """
    if len(named_tensors) != 1 or "://" not in named_tensors[0][0]:
        raise UsageError(
            f"this loader takes weights over a session; it was given {len(named_tensors)} tensors, and not what "
            "rl_ckpt.adapters.sglang.session_tensors(url, version) returns"
        )
    if type(model).__name__.endswith(DRAFTERS):
        drafters[:] = [model]
        return
    url, version = named_tensors[0]
    if id(model) not in engines:
        if drafters:
            drafter.join(model, drafters[0])
        engines[id(model)] = _Engine(model)
    engines[id(model)].take(url, int(version))


def register() -> None:
    """Let a failed sync be the answer of its request. Called by SGLang, for its entry-point group `sglang.srt.plugins`.

    Without that, SGLang's scheduler ends with the error of a custom loader, and the server with its scheduler.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_UPDATE, answer, HookType.AROUND)
    HookRegistry.register(_MANAGER, remember, HookType.AFTER)


def remember(_: object, manager: Any, base_model: nn.Module, *__: object, **___: object) -> None:
    """Note the LoRA manager of a model, which a custom loader is not given."""
    managers[id(base_model)] = manager


def answer(update: Callable[..., tuple[bool, str]], *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Success of the update, and the message for the client: of ours only, other loaders raise unchanged."""
    try:
        return update(*args, **kwargs)
    except Exception as error:
        if kwargs.get("load_format") != LOADER:
            raise
        return False, "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


class _Engine:
    """Engine: one model and the session that it is in.

    During a sync, host memory holds what loading the version before would not write again: the whole model in the
    first one, hardly anything later.
    """

    def __init__(self, model: nn.Module) -> None:
        self.installer = Installer(model, load=self._load, restore=self._restore)
        self._model = model
        self._adapters: SglangAdapters | None = None
        """Once a sync has brought one."""
        self._brings_adapters = False
        """Whether the last load was of adapters."""
        self._url = ""
        self._loaded: set[str] = set()
        """The model's tensors that the last load filled."""
        self._committed: set[str] = set()
        """Bindings that loading the committed version fills."""
        self._kept: dict[str, Tensor] = {}
        """The others, as they were before a load."""

    def take(self, url: str, version: int) -> None:
        """Take this version over that session, or report this rank's layout."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if url.startswith(SCHEME):
            self.installer.report_layout(url, rank, self._load_dry)
            return
        if self._url != url:
            self.installer.join(url, rank, timeout_s=TIMEOUT_S)
            self._url = url
        try:
            self.installer.take(version)
            self._committed = self._loaded
        finally:
            self._kept = {}

    def _load_dry(self, weights: Mapping[str, Tensor]) -> None:
        loader: Any = self._model
        with torch.no_grad():
            loader.load_weights(iter(weights.items()))

    def _load(self, weights: Mapping[str, Tensor], owner: str | None = None) -> Held | HeldAdapters:
        self._brings_adapters = brings_adapters(weights)
        if self._brings_adapters:
            self._adapters = self._adapters or SglangAdapters(managers.get(id(self._model)))
            with torch.no_grad():
                return self._adapters.load(weights)
        if id(self._model) in managers:
            raise UsageError(
                "the model's weights came to an SGLang with adapters, whose layers have other names; send it adapters "
                "alone, or start it without them"
            )
        if owner is None:
            self._kept = {
                name: tensor.to("cpu", copy=True)
                for name, tensor in self._tensors().items()
                if name not in self._committed
            }
        recorder = LoadRecorder(self._model, weights, owner or "")
        with recorder, torch.no_grad():
            config: Any = getattr(self._model, "config", None)
            text = getattr(config, "text_config", config)  # of a model that takes images too
            drafter.load(self._model, weights.items(), getattr(text, "num_hidden_layers", sys.maxsize))
        self._loaded = filled_by(recorder.bindings) | (set() if owner is None else self._committed)
        return Held(self._model, weights, recorder.bindings)

    def _restore(self) -> None:
        if self._brings_adapters:
            if self._adapters is not None:
                self._adapters.restore()
            return
        tensors = self._tensors()
        for name, tensor in self._kept.items():
            tensors[name].copy_(tensor)

    def _tensors(self) -> dict[str, Tensor]:
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: tensor.detach() for name, tensor in named}


class SglangAdapters(Adapters):
    """LoRA adapters of one rank: in host memory, from where SGLang fills the slots of its memory pool.

    Args:
        manager: SGLang's; None where the server was started without adapters.

    Raises:
        UsageError: it was.
    """

    def __init__(self, manager: Any) -> None:
        if manager is None:
            raise UsageError("an adapter came to an SGLang without adapters; start it with --enable-lora")
        self._manager = manager
        self._refs = {ref.lora_name: ref for ref in manager.lora_refs.values()}
        super().__init__({name: load_file(Path(ref.lora_path) / TENSORS_FILE) for name, ref in self._refs.items()})

    def install(self, adapter: str, tensors: Mapping[str, Tensor]) -> Mapping[str, list[Copy]]:
        """See `Adapters`. SGLang stacks tensors of fused layers, so that a copy may have those of others as well."""
        manager, ref = self._manager, self._refs[adapter]
        mine = {key: tensor.to(manager.dtype, copy=True) for key, tensor in tensors.items()}
        manager.load_lora_weights_from_tensors(ref, mine)
        if (slot := manager.memory_pool.remove_lora(ref.lora_id)) is not None:
            manager._notify_lora_slots_updated({slot})
        placed = {name: each for layer in manager.loras[ref.lora_id].layers for name, each in layer.weights.items()}
        with CopyRecorder(placed) as recorder:
            manager.fetch_new_loras({ref.lora_id})
        pool = manager.memory_pool
        slots = {pointer(each) for kept in (pool.A_buffer, pool.B_buffer) for all_ in kept.values() for each in all_}
        copies: dict[str, list[Copy]] = {}
        for name, stacked in placed.items():
            made = [Copy(*each) for each in recorder.made.get(name, ()) if pointer(each[0]) in slots]
            for key, tensor in mine.items():
                if _place_of(key) == _place_of(name) and _has_rows(stacked, tensor):
                    copies.setdefault(key, []).extend(made)
        return copies


def _place_of(name: str) -> tuple[str, ...]:
    """Layer, block and factor of an adapter's tensor: what SGLang keeps when it stacks several."""
    parts = name.removeprefix("base_model.model.").split(".")
    return (*parts[:-3], parts[-2])


def _has_rows(stacked: Tensor, tensor: Tensor) -> bool:
    """Whether these rows are among those of the other."""
    count = len(tensor)
    if stacked.shape[1:] != tensor.shape[1:]:
        return False
    return any(torch.equal(stacked[at : at + count], tensor) for at in range(len(stacked) - count + 1))


class _Pickler(pickle.Pickler):
    """Pickles a tensor of int64 by value, with functions that SGLang's unpickler allows."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a tensor or its storage; all else as usual."""
        if isinstance(obj, torch.Tensor):
            hooks: OrderedDict[Any, Any] = OrderedDict()  # an alias that is called would pickle itself too
            return _rebuild_tensor_v2, (_Numbers(obj.tolist()), 0, tuple(obj.shape), obj.stride(), False, hooks)
        if isinstance(obj, _Numbers):
            return torch.LongStorage, (list(obj),)
        return NotImplemented


class _Numbers(tuple[int, ...]):
    """Stand-in for the storage of a tensor."""

    __slots__ = ()
