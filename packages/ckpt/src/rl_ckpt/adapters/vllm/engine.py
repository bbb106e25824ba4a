"""The receiving end of a session inside a vLLM worker. See `rl_ckpt.adapters.installer` for what it guarantees."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# vLLM is never in the environment that this is checked in.
from __future__ import annotations

import json
import logging
import math
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise

from rl_ckpt.adapters import drafter
from rl_ckpt.adapters.engine_lora import HeldAdapters, brings_adapters
from rl_ckpt.adapters.installer import Installer
from rl_ckpt.adapters.layout import SCHEME
from rl_ckpt.adapters.load_recorder import Copy, Held, Layout, LoadRecorder, copies_in
from rl_ckpt.adapters.vllm.vllm_lora import VllmAdapters
from rl_ckpt.errors import TensorError, UsageError
from rl_ckpt.types import Addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from torch import Tensor, nn

logger = logging.getLogger("vllm.rl_ckpt")
PROBE_ROWS = 256
"""Rows of the identity matrix that a packed layer is read with at a time."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Body of `/init_weight_transfer_engine`, under `init_info`."""

    url: str
    """Of the session, as for `rl_ckpt.connect`; of many, as `rl_ckpt.Addresses.to_json` writes them; or a request of
    `rl_ckpt.adapters.layout`, which opens none."""
    token: str | None = None
    """Of the session; for `tcp` the variable RL_CKPT_TOKEN of the server is better."""
    timeout_s: float = 60.0
    """Longest wait for the sender, seconds."""
    attest: bool = True
    """Whether the model is read back after loading, before the vote."""
    landed: str | None = None
    """Folder in which every worker makes the file `landed-RANK` when all that it takes of a sync has landed after
    `/start_weight_update`, or the sync has failed: the server need not be paused before. Slices only.

    If the sync fails, every worker writes the reason to `failed-RANK` there and `/update_weights` gets no error: of
    several workers, vLLM 0.32 hears the first that fails, and takes what the others answered for answers to later
    calls. Then post `/finish_weight_update`, without a version."""
    adapters: dict[str, str] | None = None
    """Name to folder of each LoRA adapter of the server, in the order of `--lora-modules`: syncs may bring their
    tensors alone, named `adapters.NAME.` and as in the folder."""
    room: dict[str, str] | None = None
    """In place of `adapters`, name to folder of adapters without effect: each is room for one that a sync brings, with
    `adapters.NAME.scaling`, under any name and of any rank, and removes by `adapters.NAME.removed`. After a sync every
    worker writes in which room each adapter is to `adapters-RANK` in the folder `landed`, as JSON."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Body of `/update_weights`, under `update_info`."""

    version: int | None = None
    """Version that must come; None takes any."""
    partial: bool = False
    """Whether the sync may leave tensors out, which then stay as they are; the first of a session never may."""


class RlCkptWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One worker's receiving end. Every worker of the server is a separate receiver of the session."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = True

    _installer: Installer | None = None
    """Kept from session to session: it knows what the model holds."""
    _adapters: VllmAdapters | None = None
    """Once a session has named them."""
    _brings_adapters = False
    """Whether the last load was of adapters."""
    _landed: Path | None = None
    """File that reports that all has landed."""
    _failed: Path | None = None
    """File that reports why a sync has failed."""
    _named: Path | None = None
    """File that reports which adapters are served."""
    _attests = True
    _packed: list[Any] | None = None
    """Layers that may compute with a packed copy of their weight, on a CPU; None before the first load."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open the receiving end. The sender may come later."""
        parallel, url = self.parallel_config, init_info.url
        is_whole = not url.startswith(SCHEME) and Addresses.from_json(url) is None
        is_spread = parallel.pipeline_parallel_size > 1 or parallel.enable_expert_parallel
        adapters = init_info.adapters or init_info.room
        if adapters and parallel.pipeline_parallel_size > 1:
            raise UsageError(
                "adapters cannot be sent alone to a server of several pipeline stages, none of which has all of their "
                "layers; send them merged into the weights"
            )
        if is_whole and is_spread and init_info.attest and not adapters:
            raise UsageError(
                "attest is true, and this server spreads whole tensors over its workers (pipeline or expert "
                "parallelism), so that none of them can attest all; send slices, or pass attest=false in init_info"
            )
        if self._installer is None:
            self._installer = Installer(self.model, load=self._load, restore=self._restore)
        if adapters and self._adapters is None:
            self._adapters = VllmAdapters(self.model, adapters, is_room=init_info.adapters is None)
        self._attests = init_info.attest
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._landed = self._failed = self._named = None
        if init_info.landed is not None:
            names = ("landed", "failed", "adapters")
            self._landed, self._failed, self._named = (Path(init_info.landed, f"{what}-{rank}") for what in names)
        if url.startswith(SCHEME):
            self._installer.report_layout(url, rank, self._load_dry)
        else:
            self._installer.join(url, rank, timeout_s=init_info.timeout_s, token=init_info.token)

    def set_weight_update_target(self, model: nn.Module, model_config: object) -> None:
        """Let updates bring the model that drafts too; called by vLLM for `/start_draft_weight_update`."""
        drafter.join(self.model, model)

    def start_weight_update(self) -> None:
        """Let slices land from now on. The model goes on being whole until the new weights are verified."""
        self._require_session().begin(self._landed)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take one sync, from its first byte to the commit.

        Raises:
            rl_ckpt.CkptError: the sync failed; the model holds the weights before. Written to a file where `landed`
                names a folder.
        """
        try:
            installer = self._require_session()
            installer.take(update_info.version, is_partial=update_info.partial)
            if self._brings_adapters and self._adapters is not None and self._adapters.is_room:
                installer.forget()
                if self._named is not None:
                    self._named.write_text(json.dumps(self._adapters.slots))
        except Exception as error:
            if self._failed is None:
                raise
            logger.exception("a sync of weights has failed")
            self._failed.write_text("; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))

    def finish_weight_update(self) -> None:
        """Nothing is left to do: `receive_weights` ends with the commit."""

    def shutdown(self) -> None:
        """Leave the session."""
        if self._installer is not None:
            self._installer.detach()

    def _require_session(self) -> Installer:
        if self._installer is None:
            raise UsageError("no session is open; POST /init_weight_transfer_engine with a url in init_info first")
        return self._installer

    @property
    def _num_layers(self) -> int:
        return self.model_config.hf_text_config.num_hidden_layers

    def _load(self, weights: Mapping[str, Tensor], owner: str | None = None) -> Held | HeldAdapters | None:
        """Put weights into the model; return what it then holds of them, if that is to be attested."""
        self._brings_adapters = brings_adapters(weights)
        if self._brings_adapters:
            if self._adapters is None:
                raise UsageError("an adapter came, and the session was opened without the names of adapters")
            return self._adapters.load(weights)
        with _without_lora(self.model):
            return self._load_bare(weights, owner)

    def _load_bare(self, weights: Mapping[str, Tensor], owner: str | None) -> Held | None:
        must_fill = owner is None and self.model_config.quantization is None
        drafts = any(drafter.is_ahead(name, self._num_layers) for name in weights)
        expected = {
            name
            for name, _ in (self.model.named_parameters() if must_fill else ())
            if drafts or not name.startswith(drafter.PART)
        }
        recorder = LoadRecorder(self.model, weights, owner or "")
        with recorder:
            loaded = self._reload(weights.items(), owner or "")
        if (
            owner is None
            and loaded is not None
            and self.model_config.quantization is None
            and (missing := sorted(expected - loaded))
        ):
            raise TensorError(
                f"{len(missing)} parameters of the model got nothing, {missing[0]!r} the first; the first sync must "
                "bring all weights"
            )
        return Held(self.model, weights, recorder.bindings, _copies) if self._attests else None

    def _load_dry(self, weights: Mapping[str, Tensor]) -> None:
        """Call the model's loader on the layers as they were before they were packed: they have no memory."""
        with _without_lora(self.model):
            initialize_layerwise_reload(self.model)
            try:
                for layer in self.model.modules():
                    for tensor in layerwise.get_layer_tensors(layer).values():
                        tensor.weight_loader = layerwise._get_original_loader(tensor)
                self.model.load_weights(iter(weights.items()))
            finally:
                _abandon(self.model)
                finalize_layerwise_reload(self.model, self.model_config)

    def _restore(self) -> None:
        if self._brings_adapters:
            assert self._adapters is not None, "they were being loaded"
            self._adapters.restore()
        else:
            self._load_from_disk()

    def _load_from_disk(self) -> None:
        """What the server was started with."""
        loader = get_model_loader(self.vllm_config.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise UsageError(f"{type(loader).__name__} has no weights on disk")
        with _without_lora(self.model):
            self._reload(loader.get_all_weights(self.model_config, self.model))

    def _reload(self, weights: Iterable[tuple[str, Tensor]], owner: str = "") -> set[str] | None:
        """Call vLLM's loader; the names of the parameters that it filled, if the model reports them."""
        module = self.model.get_submodule(owner)
        initialize_layerwise_reload(module)
        with _repacked_experts(module):
            try:
                loaded = drafter.load(self.model, weights, self._num_layers)
                finalize_layerwise_reload(module, self.model_config)
            except BaseException:
                _abandon(module)
                finalize_layerwise_reload(module, self.model_config)  # no layer is left to it, but the model's flags
                raise
        if self._packed is None:
            self._packed = [layer for layer in self.model.modules() if hasattr(layer, "cpu_linear")]
        _repack_tied(self._packed, module)
        return loaded


@contextmanager
def _without_lora(model: nn.Module) -> Generator[None]:
    """Take away the wrappers of `--enable-lora` for a while: layers have the names that the model's loader knows.

    What they add to a layer is an adapter's, and no part of the weights.
    """
    wrapped = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    try:
        for parent, name, layer in wrapped:
            setattr(parent, name, layer.base_layer)
        yield
    finally:
        for parent, name, layer in wrapped:
            setattr(parent, name, layer)


def _abandon(model: nn.Module) -> None:
    """End a reload that failed: or what it was given of a layer would be taken for a part of the next version."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()


def _repack_tied(packed: Sequence[Any], loaded: nn.Module) -> None:
    """Let layers that share a weight with a loaded one pack it again: vLLM 0.32 leaves their old packed copy in use.

    That is so on CPUs alone, where a layer computes with a packed copy, and a tied `lm_head` would go on giving the
    log-probs of the version before. To be deleted when `finalize_layerwise_reload` does it; `Held` looks in any case.
    """
    layers: dict[int, list[Any]] = {}
    for layer in packed:
        weight = getattr(layer, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.numel():
            layers.setdefault(weight.data_ptr(), []).append(layer)
    fresh = set(loaded.modules())
    for alias in layers.values():
        for layer in alias if len(alias) > 1 and not fresh.isdisjoint(alias) else ():
            layer.quant_method.process_weights_after_loading(layer)


@contextmanager
def _repacked_experts(model: nn.Module) -> Generator[None]:
    """Let a load pack experts as the first load did: vLLM 0.32 does not on CPUs, and its kernel reads packed ones.

    To be deleted when `UnquantizedFusedMoEMethod` packs in every load.
    """
    layers: list[Any] = [layer for layer in model.modules() if _packed_experts(layer) is not None]
    kernels = [(layer.quant_method, layer.quant_method.moe_kernel) for layer in layers]
    for method, _ in kernels:
        method.moe_kernel = None  # another is made, in which the experts are packed
    try:
        yield
    finally:
        for method, kernel in kernels:
            method.moe_kernel = method.moe_kernel or kernel


def _packed_experts(layer: Any) -> Any:
    """The CPU kernel of a layer with packed experts; looked up by name, as builds for GPUs may lack it."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts: Any = getattr(kernel, "fused_experts", None)
    return experts if type(experts).__name__ == "CPUUnquantizedExperts" and not experts._use_zentorch else None


def _unpacked_experts(experts: Any, packed: Tensor, whole: Layout) -> Tensor:
    """The weights [E, N, K] of packed experts: where each number went is seen by packing their positions."""
    from vllm._custom_ops import cpu_prepack_moe_weight  # of builds for CPUs

    num_experts, num_outputs, num_inputs = whole.size
    count = num_outputs * num_inputs
    halves = 1 if num_outputs == packed.shape[1] else 2  # of gate and up, each with rows that were added
    positions = torch.zeros(packed.shape[1:], dtype=torch.int64)  # 0 where kernels want more than there is
    rows = positions.view(halves, -1, packed.shape[2])[:, : num_outputs // halves, :num_inputs]
    rows.copy_(torch.arange(1, count + 1).view(halves, -1, num_inputs))
    found = torch.zeros(positions.shape, dtype=torch.int64)
    for digit in range(0, count.bit_length(), 8):  # numbers up to 255 are exact in every format
        plane = (positions >> digit & 255).to(packed.dtype)[None]
        found += cpu_prepack_moe_weight(plane, experts.isa)[0].view_as(found).to(torch.int64) << digit
    weights = torch.empty(num_experts, count + 1, dtype=packed.dtype)
    weights[:, found.flatten()] = packed.reshape(num_experts, -1)
    return weights[:, 1:].contiguous().view(whole.size)


def _copies(model: nn.Module, path: str, whole: Layout) -> Sequence[Copy]:
    """All that vLLM computes with: the parameter, unless it was emptied, and on a CPU what its layer has packed."""
    owner, _, name = path.rpartition(".")
    layer: Any = model.get_submodule(owner)
    if name in {"w13_weight", "w2_weight"} and (experts := _packed_experts(layer)) is not None:
        return [_packed(whole, lambda: _unpacked_experts(experts, getattr(layer, name), whole))]
    packed = getattr(layer, "cpu_linear", None) if name == "weight" else None
    if packed is None or packed.__closure__ is None or len(whole.size) != 2:
        return copies_in(model, path, whole)  # no layer for CPUs, or one that computes with the parameter itself
    kept = [copy for copy in copies_in(model, path, whole) if math.prod(copy.layout.size)]
    return [*kept, _packed(whole, lambda: _unpacked(packed, kept[0].read() if kept else None, whole))]


def _packed(whole: Layout, read: Callable[[], Tensor]) -> Copy:
    """A packed copy, which is contiguous once it has been unpacked."""
    strides = torch.empty(whole.size, device="meta").stride()
    return Copy(Layout(whole.dtype, whole.size, strides, 0), read)


def _unpacked(
    packed: Callable[[Tensor, Tensor | None, Tensor | None], Tensor], kept: Tensor | None, whole: Layout
) -> Tensor:
    """The weight [N, K] of a packed layer: what it makes of the identity matrix, which no rounding touches."""
    num_outputs, num_inputs = whole.size
    weight = torch.empty(num_outputs, num_inputs, dtype=whole.dtype)
    for start in range(0, num_inputs, PROBE_ROWS):
        rows = torch.arange(start, min(start + PROBE_ROWS, num_inputs))
        probe = torch.nn.functional.one_hot(rows, num_inputs).to(whole.dtype)
        weight[:, start : start + len(rows)] = packed(probe, kept, None).t()
    return weight
