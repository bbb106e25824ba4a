"""Writes checkpoints, at once or in a thread while training goes on."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rl_engine import _checkpoint
from rl_engine.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rl_engine._checkpoint import Manifest
    from rl_engine._distributed import World


class CheckpointWriter:
    """One save at a time. Every rank calls it in the same order."""

    def __init__(self, world: World, *, is_async: bool, timeout_s: float) -> None:
        """Join the ranks. Collective where `is_async`: the thread has a process group of its own."""
        self._world, self._is_async, self._timeout_s = world, is_async, timeout_s
        if is_async and world.size > 1:
            group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self._world = replace(world, group=group, device=torch.device("cpu"))
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}
        self._thread: Thread | None = None
        self._target: str = ""
        self._failure: Exception | None = None

    def save(self, path: str | Path, tensors: Mapping[str, Tensor], manifest: Manifest) -> None:
        """Write a checkpoint; see `_checkpoint.save`.

        Raises:
            CheckpointError: the save before failed.
        """
        self.wait()
        if not self._is_async:
            _checkpoint.save(path, tensors, manifest, self._world)
            return
        staged = {name: self._copy(tensor) for name, tensor in tensors.items()}
        self._target = str(path)
        self._thread = Thread(target=self._write, args=(path, staged, manifest), name="rl-engine checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            CheckpointError: the save failed, or has not ended within the deadline.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(self._timeout_s)
        if thread.is_alive():
            self._thread = thread
            raise CheckpointError(
                f"Checkpoint {self._target} is still being written after {self._timeout_s:.0f} s. "
                "Look at the file system, or raise timeout_s."
            )
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(
                f"Checkpoint {self._target} was not written ({failure}); the one before it, if any, is as it was."
            ) from failure

    def _write(self, path: str | Path, tensors: Mapping[str, Tensor], manifest: Manifest) -> None:
        try:
            _checkpoint.save(path, tensors, manifest, self._world)
        except Exception as failure:  # noqa: BLE001 - raised by wait()
            self._failure = failure

    def _copy(self, tensor: Tensor) -> Tensor:
        """On the CPU, so that the next step may change the original; a shard stays a shard."""
        if not isinstance(tensor, DTensor):
            return tensor.detach().to("cpu", copy=True)
        mesh = tensor.device_mesh
        if mesh.device_type != "cpu" and mesh not in self._meshes:
            self._meshes[mesh] = DeviceMesh("cpu", mesh.mesh.cpu(), mesh_dim_names=mesh.mesh_dim_names)
        return DTensor.from_local(
            tensor.to_local().detach().to("cpu", copy=True),
            self._meshes.get(mesh, mesh),
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
