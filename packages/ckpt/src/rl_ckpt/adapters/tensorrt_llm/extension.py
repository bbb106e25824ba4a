"""The receiving end of a session inside a worker of TensorRT-LLM. See `installer` for what it guarantees.

The worker's own `update_weights` is called with tensors in host memory where it expects handles of GPU memory, so that
TensorRT-LLM itself prepares its modules, loads, and finishes; where it copies to is noted, and read back.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# TensorRT-LLM is never in the environment that this is checked in.
from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from tensorrt_llm.llmapi import rlhf_utils

from rl_ckpt.adapters.installer import Installer
from rl_ckpt.adapters.layout import SCHEME
from rl_ckpt.adapters.load_recorder import Held, LoadRecorder
from rl_ckpt.adapters.tensorrt_llm import MESSAGE
from rl_ckpt.errors import TensorError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

logger = logging.getLogger("tensorrt_llm.rl_ckpt")
_LATCH = "first_pre_reload_weights"
"""Attribute of a model that is being loaded, which versions before 1.4 leave on it when that fails."""
_HANDLE = 7
"""Least number of arguments of a handle; TensorRT-LLM replaces the last of them, the device."""


class RlCkptExtension(rlhf_utils.WorkerExtension):
    """Worker extension that takes syncs of rl-ckpt as well as TensorRT-LLM's own calls."""

    _rl_ckpt: Receiver | None = None

    def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
        """Answer a message of `update_message`, or take handles as TensorRT-LLM does."""
        if ipc_handles is None or MESSAGE not in ipc_handles:
            super().update_weights(ipc_handles)
            return
        if fields := json.loads(ipc_handles[MESSAGE]):
            self._rl_ckpt = self._rl_ckpt or Receiver(self)
            self._rl_ckpt.answer(**fields)


class Receiver:
    """Receiving end of one worker. Every worker of the server is a separate receiver of the session."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model: torch.nn.Module = worker.engine.model_engine.model
        self._installer = Installer(self._model, load=self._load, restore=self._restore)
        self._url = ""

    def answer(self, *, url: str, folder: str, timeout_s: float = 60.0, version: int | None = None) -> None:
        """Take a version, or make ready for slices. Nothing is in flight in the engine while a version is taken.

        Args:
            url: Of the session, as for `rl_ckpt.connect`; of many, as `rl_ckpt.Addresses.to_json` writes them; or a
                request of `rl_ckpt.adapters.layout`. A token of `tcp` is the variable RL_CKPT_TOKEN of the server.
            folder: Where this worker writes the reason to the file `failed-RANK` if it fails (the model then holds the
                weights before, or refuses), and makes `landed-RANK` when all of the slices that it takes have landed.
            timeout_s: Longest wait for the sender, seconds.
            version: The one that must come. None: slices land from now on, while the engine goes on.
        """
        rank = int(self._worker.global_rank)
        try:
            if url.startswith(SCHEME):
                self._installer.report_layout(url, rank, self._reload)
                return
            # Every worker stands still, or none does: TensorRT-LLM has all of them wait for each other.
            with nullcontext() if version is None else self._worker.engine.control_action():
                if self._url != url:
                    self._installer.join(url, rank, timeout_s=timeout_s)
                    self._url = url
                if version is None:
                    self._installer.begin(Path(folder, f"landed-{rank}"))
                else:
                    self._take(version)
        except Exception as error:
            logger.exception("a sync of weights has failed")
            message = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
            Path(folder, f"failed-{rank}").write_text(message)

    def _take(self, version: int) -> None:
        try:
            self._installer.take(version)
        finally:
            self._worker.engine.reset_prefix_cache()

    def _load(self, weights: Mapping[str, Tensor], owner: str | None = None) -> Held:
        recorder = LoadRecorder(self._model, weights, owner or "")
        if owner is not None:  # a model whose layers are not as they were loaded has been refused by then
            with recorder:
                self._reload(weights)
            return Held(self._model, weights, recorder.bindings)
        update = getattr(rlhf_utils.WorkerExtension.update_weights, "__wrapped__", None)
        if update is None:  # the engine stands still already; a second time it would wait for itself
            raise UsageError("this TensorRT-LLM is newer than 1.4, and its update_weights is another; use 1.2 to 1.4")
        handles = [(name, (_given, (tensor, *[None] * (_HANDLE - 1)))) for name, tensor in weights.items()]
        try:
            with recorder, torch.no_grad():
                update(self._worker, {rlhf_utils.get_device_uuid(self._worker.device_id): handles})
            update(self._worker, None)
        except BaseException:
            if hasattr(self._model, _LATCH):
                delattr(self._model, _LATCH)
            raise
        filled = {binding.path for found in recorder.bindings.values() for binding in found}
        if left := sorted(name for name, _ in self._model.named_parameters() if name not in filled):
            raise TensorError(
                f"{len(left)} parameters of the model got nothing that can be read back, {left[0]!r} the first: a sync "
                "must bring all weights, and the server must not quantise them"
            )
        return Held(self._model, weights, recorder.bindings)

    def _reload(self, weights: Mapping[str, Tensor]) -> None:
        """Call the model's loader, and neither what prepares nor what finishes an update."""
        with torch.no_grad():
            self._worker.engine.model_engine.model_loader.reload(self._model, dict(weights), allow_partial_loading=True)

    def _restore(self) -> None:
        """Load what the server was started with."""
        folder = Path(self._worker._hf_model_dir)
        weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("model*.safetensors")):
            weights |= load_file(file)
        if not weights:
            raise UsageError(f"{folder} has no model*.safetensors to go back to")
        self._load(weights)


def _given(tensor: Tensor, *_: object) -> Tensor:
    """What TensorRT-LLM calls for the tensor of a handle."""
    return tensor
