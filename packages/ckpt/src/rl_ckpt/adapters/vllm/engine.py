"""The receiving end of a session inside a vLLM worker. See `rl_ckpt.adapters.installer` for what it guarantees."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# vLLM is never in the environment that this is checked in.
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)

from rl_ckpt.adapters.installer import Installer
from rl_ckpt.adapters.layout import SCHEME
from rl_ckpt.adapters.load_recorder import Held, Layout, LoadRecorder, copies_in
from rl_ckpt.errors import TensorError, UsageError
from rl_ckpt.sharded import split_address

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from torch import Tensor, nn

PROBE_ROWS = 256
"""Rows of the identity matrix that a packed layer is read with at a time."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Body of `/init_weight_transfer_engine`, under `init_info`."""

    url: str
    """Of the session, as for `rl_ckpt.connect`; of many, as `rl_ckpt.join_addresses` joins them; or a request of
    `rl_ckpt.adapters.layout`, which opens none."""
    token: str | None = None
    """Of the session; for `tcp` the variable RL_CKPT_TOKEN of the server is better."""
    timeout_s: float = 60.0
    """Longest wait for the sender, seconds."""
    attest: bool = True
    """Whether the model is read back after loading, before the vote."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Body of `/update_weights`, under `update_info`."""

    version: int | None = None
    """Version that must come; None takes any."""
    partial: bool = False
    """Whether the sync may leave tensors out, which then stay as they are; the first of a session never may."""


class RlCkptWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One worker's receiving end. Every worker of the server is a receiver of its own in the session."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _installer: Installer | None = None
    """Kept from session to session: it knows what the model holds."""
    _attests = True

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open the receiving end. The sender may come later."""
        parallel, url = self.parallel_config, init_info.url
        is_whole = not url.startswith(SCHEME) and split_address(url) is None
        is_spread = parallel.pipeline_parallel_size > 1 or parallel.enable_expert_parallel
        if is_whole and is_spread and init_info.attest:
            raise UsageError(
                "attest is true, and this server spreads whole tensors over its workers (pipeline or expert "
                "parallelism), so that none of them can attest all; send slices, or pass attest=false in init_info"
            )
        if self._installer is None:
            self._installer = Installer(self.model, load=self._load, restore=self._load_from_disk)
        self._attests = init_info.attest
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        if url.startswith(SCHEME):
            self._installer.tell_layout(url, rank, self._load_dry)
        else:
            self._installer.join(url, rank, timeout_s=init_info.timeout_s, token=init_info.token)

    def start_weight_update(self) -> None:
        """Nothing: the model goes on being whole until the new weights are verified."""
        self._require_session()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take one sync, from its first byte to the commit.

        Raises:
            rl_ckpt.CkptError: the sync failed; the model holds the weights before.
        """
        self._require_session().take(update_info.version, is_partial=update_info.partial)

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

    def _load(self, weights: Mapping[str, Tensor]) -> Held | None:
        """Put all weights into the model; return what it then holds of them, if that is to be attested."""
        with _without_lora(self.model):
            return self._load_bare(weights)

    def _load_bare(self, weights: Mapping[str, Tensor]) -> Held | None:
        expected = {name for name, _ in self.model.named_parameters()}
        recorder = LoadRecorder(self.model, weights)
        with recorder:
            loaded = self._reload(weights.items())
        if loaded is not None and self.model_config.quantization is None and (missing := sorted(expected - loaded)):
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

    def _load_from_disk(self) -> None:
        """What the server was started with."""
        loader = get_model_loader(self.vllm_config.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise UsageError(f"{type(loader).__name__} has no weights on disk")
        with _without_lora(self.model):
            self._reload(loader.get_all_weights(self.model_config, self.model))

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        """Call vLLM's loader; the names of the parameters that it filled, if the model tells."""
        initialize_layerwise_reload(self.model)
        try:
            loaded: set[str] | None = self.model.load_weights(iter(weights))
            finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:
            _abandon(self.model)
            finalize_layerwise_reload(
                self.model, self.model_config
            )  # no layer is left to it, but the model's own flags
            raise
        _repack_tied(self.model)
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


def _repack_tied(model: nn.Module) -> None:
    """Let layers that share a weight with a loaded one pack it again: vLLM 0.32 leaves their old packed copy in use.

    That is so on CPUs alone, where a layer computes with a packed copy, and a tied `lm_head` would go on giving the
    log-probs of the version before. To be deleted when `finalize_layerwise_reload` does it; `Held` looks in any case.
    """
    layers: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.numel():
            layers.setdefault(weight.data_ptr(), []).append(layer)
    for alias in layers.values():
        for layer in alias if len(alias) > 1 else ():
            layer.quant_method.process_weights_after_loading(layer)


def _copies(model: nn.Module, path: str, whole: Layout) -> Sequence[Tensor]:
    """All that vLLM computes with: the parameter, unless it was emptied, and on a CPU what its layer has packed."""
    owner, _, name = path.rpartition(".")
    packed = getattr(model.get_submodule(owner), "cpu_linear", None) if name == "weight" else None
    if packed is None or len(whole.size) != 2:
        return copies_in(model, path, whole)
    kept = [tensor for tensor in copies_in(model, path, whole) if tensor.numel()]
    return [*kept, _unpacked(packed, kept[0] if kept else None, whole)]


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
