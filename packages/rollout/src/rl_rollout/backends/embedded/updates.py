"""Weight updates of the embedded server: staged while decoding goes on, swapped in between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_rollout.backends.embedded.model.named_adapters import UPDATE_PREFIX
from rl_rollout.errors import WeightUpdateError
from rl_rollout.receiver import CkptReceiver
from rl_rollout.validation import check_version

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from rl_rollout.backends.embedded.decode_engine import Engine
    from rl_rollout.backends.embedded.model.model_runner import ServedModel
    from rl_rollout.backends.embedded.model.weights import WeightStore
    from rl_rollout.base import WeightReceiver


class WeightUpdates:
    """Weight updates of one model. `stage` runs on the event loop, everything else in the engine's thread."""

    def __init__(self, model: ServedModel, weights: WeightStore) -> None:
        self._model, self._weights = model, weights
        self._may_hold_weights = True
        self._keeps_staged = False
        """Whether the update under way keeps its staging copy as the base of differences."""

    async def stage(self, receive: WeightReceiver, version: int) -> None:
        """Receive a version next to the one that serves.

        Raises:
            WeightUpdateError: another version arrived, or less than all of it.
        """
        if not self._may_hold_weights:
            raise WeightUpdateError("the server sleeps without weights; call wake(['weights']) first")
        check_version(version)
        self._weights.begin()
        self._model.adapters.begin()
        self._keeps_staged = isinstance(receive, CkptReceiver) and receive.takes_differences
        if isinstance(receive, CkptReceiver) and receive.takes_slices:
            await self._stage_slices(receive, version)
            return
        self._weights.forget_targets()
        iterator = receive.receive_weights()
        try:
            async for name, tensor in iterator:
                self._check_version(receive, version)
                (self._model.adapters if name.startswith(UPDATE_PREFIX) else self._weights).stage(name, tensor)
        finally:
            # Closed at once, so that the sender learns that this end stopped reading.
            if (aclose := getattr(iterator, "aclose", None)) is not None:
                await aclose()
        self._check_version(receive, version)
        self._check_complete()

    async def _stage_slices(self, receive: CkptReceiver, version: int) -> None:
        """Receive slices into the store's targets, where they are read back (digest) before the vote."""

        def on_landed(names: AbstractSet[str]) -> None:  # in a thread of the receiver's
            self._check_version(receive, version)
            self._weights.note_arrived(names)
            self._check_complete()

        await receive.receive_slices(self._weights.targets(), on_landed)

    def _check_complete(self) -> None:
        self._model.adapters.check_complete()
        if self._weights.has_arrived or not self._model.adapters.has_staged:
            self._weights.check_complete()

    def _check_version(self, receive: WeightReceiver, version: int) -> None:
        if receive.version not in (None, version):
            raise WeightUpdateError(f"version {receive.version} arrived instead")

    def install(self, engine: Engine, version: int) -> None:
        """Swap in the version that was staged."""
        has_moved = False
        adapters = self._model.adapters
        has_base = self._weights.has_arrived or not adapters.has_staged
        if self._weights.has_arrived:
            has_moved = self._weights.swap(keeps_staged=self._keeps_staged)
            self._model.note_new_weights()
        changed = adapters.swap(version, has_base=has_base)
        if has_base:
            engine.set_version(version, has_moved=has_moved)
        else:
            engine.set_adapters(version, changed)

    def fall_asleep(self, engine: Engine, level: int) -> None:
        """Free the cache; at level 1 move the weights from a GPU to the host, at level 2 free them."""
        engine.is_asleep = True
        engine.drop_cache()
        self._weights.release_staging()
        if level == 2:
            self._may_hold_weights = False
            engine.has_weights = False
            self._weights.release()
            self._model.note_new_weights()
        if self._model.device.type == "cuda":
            if level == 1:
                self._weights.offload()
            torch.cuda.empty_cache()  # another process cannot use what torch's allocator keeps

    def wake_up(self, engine: Engine, tags: Sequence[str]) -> None:
        """Let an update bring weights, and steps begin."""
        # Memory is allocated when it is first needed: weights by the next update, the cache by the next step.
        if "weights" in tags:
            self._may_hold_weights = True
            if self._weights.reload():
                self._model.note_new_weights()
        if "kv_cache" in tags:
            engine.is_asleep = False

    def close(self) -> None:
        """Free the weights."""
        self._weights.release()
        if self._model.memory is not None:
            self._model.memory.memory.close()
