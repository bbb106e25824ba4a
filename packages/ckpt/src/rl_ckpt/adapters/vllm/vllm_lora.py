"""LoRA adapters of a vLLM worker, in the slots of its layers.

vLLM loads adapters from folders alone, and again from there whenever base weights were updated. So what was sent is
put into its adapter manager, pinned there, and put back after such a reset.
"""

# pyright: reportMissingImports=false
# vLLM is never in the environment that this is checked in.
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from rl_ckpt.adapters.engine_lora import PREFIX, SCALING, TENSORS_FILE, Adapters, Copy, CopyRecorder, pointer
from rl_ckpt.adapters.load_recorder import Layout
from rl_ckpt.errors import TensorError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


class VllmAdapters(Adapters):
    """Adapters of one worker.

    Args:
        model: Whose layers vLLM has wrapped.
        folders: Of every adapter that the server was started with, in the order of `--lora-modules`, by which vLLM
            numbers them.
        is_room: Whether they are room for adapters that syncs bring, of any rank up to `--max-lora-rank`.

    Raises:
        UsageError: the server was started without adapters, or with others.
    """

    def __init__(self, model: nn.Module, folders: Mapping[str, str], *, is_room: bool = False) -> None:
        started = {name: load_file(Path(folder) / TENSORS_FILE) for name, folder in folders.items()}
        super().__init__(started, is_room=is_room)
        self._manager: Any = getattr(model, "lora_manager", None)
        if self._manager is None:
            raise UsageError("an adapter would be sent to a vLLM without adapters; start it with --enable-lora")
        self._model: Any = model
        self._folders = dict(folders)
        self._numbers = {name: number for number, name in enumerate(folders, start=1)}
        if (loaded := set(self._manager.list_adapters())) != set(self._numbers.values()):
            raise UsageError(
                f"vLLM has loaded adapters {sorted(loaded)}, and {len(folders)} were named: {', '.join(folders)}; name "
                "all of --lora-modules, in their order"
            )
        self._forget = self._manager.remove_all_adapters
        self._manager.remove_all_adapters = self._put_back

    def install(self, adapter: str, tensors: Mapping[str, Tensor]) -> Mapping[str, list[Copy]]:
        """See `Adapters`."""
        manager, number = self._manager, self._numbers[adapter]
        dtype = manager.lora_config.lora_dtype
        factors = {key: tensor for key, tensor in tensors.items() if key != SCALING}
        if self.is_room:
            rank = max(len(tensor) for key, tensor in factors.items() if ".lora_A." in key)
            if rank > manager.lora_config.max_lora_rank:
                most = manager.lora_config.max_lora_rank
                raise TensorError(f"an adapter of rank {rank} came; this vLLM was started with --max-lora-rank {most}")
            peft = PEFTHelper(r=rank, lora_alpha=tensors[SCALING].item() * rank, target_modules=[])
        else:
            peft = PEFTHelper.from_local_dir(self._folders[adapter], None)
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_rename_mapper()
        mine = {key: tensor.to(dtype, copy=True) for key, tensor in factors.items()}  # vLLM scales B in place
        lora = LoRAModel.from_lora_tensors(
            number,
            mine,
            peft,
            device="cpu",
            dtype=dtype,
            weights_mapper=mapper,
            skip_prefixes=getattr(self._model, "lora_skip_prefixes", None),
        )
        placed: dict[str, Tensor] = {}
        """Tensors as vLLM keeps them, perhaps in pinned memory."""
        for key in mine:
            module, is_a = parse_fine_tuned_lora_name(key, mapper)
            placed[key] = lora.loras[module].lora_a if is_a else lora.loras[module].lora_b
        manager.remove_adapter(number)
        manager.add_adapter(lora)
        with CopyRecorder(placed) as recorder:
            manager.activate_adapter(number)
        manager.pin_adapter(number)
        slots = {pointer(tensor) for layer in manager.modules.values() for tensor in _slots(layer)}
        copies: dict[str, list[Copy]] = {}
        for key, made in recorder.made.items():
            module, is_a = parse_fine_tuned_lora_name(key)
            scaling = 1.0 if is_a else peft.get_rank_and_scaling(module)[1]
            want = tensors[key].to(dtype, copy=True)
            if scaling != 1:
                want *= scaling
            copies[key] = [
                Copy(target, Layout.of(source).view(want))
                for target, source in made
                if pointer(target) in slots and pointer(source) == pointer(placed[key])
            ]
        return copies

    def _put_back(self) -> None:
        """Replacement of the manager's `remove_all_adapters`, which the worker calls after every update of weights."""
        self._forget()
        for adapter, tensors in self.sent.items():
            self.load({f"{PREFIX}{adapter}.{key}": tensor for key, tensor in tensors.items()}).require_all()


def _slots(layer: Any) -> list[Tensor]:
    """The tensors in which a layer has room for adapters."""
    return [*getattr(layer, "lora_a_stacked", ()), *getattr(layer, "lora_b_stacked", ())]
