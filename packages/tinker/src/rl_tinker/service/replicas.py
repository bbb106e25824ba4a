"""Sampling servers: started by rl-rollout, started again when they end, with the adapters in use sent by rl-ckpt."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import OrderedDict
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from rl_ckpt.errors import CkptError
from rl_ckpt.registry import connect
from rl_rollout.errors import RolloutError
from rl_rollout.registry import check_options, create_receiver, create_router, launch_server, load_backend
from rl_rollout.types import ServerConfig, ServerParallel
from rl_tinker.errors import ConfigError, QuotaError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from torch import Tensor

    from rl_ckpt.base import WeightSender
    from rl_rollout.base import ReceiverSession, RolloutServer, ServerGroup
    from rl_rollout.types import GenerateRequest, TokenChunk, TokenOutput
    from rl_tinker.types import Checkpoint, ServeConfig


def check_replicas(config: ServeConfig, model_folder: str) -> None:
    """Check that the sampling servers can be configured, before anything starts.

    Raises:
        ConfigError: the backend is unknown, takes no adapters while it runs, or lacks an option.
    """
    for name in ("max_adapters", "max_rank"):
        if name in config.server_options:
            raise ConfigError(f"server.options.{name} follows from {name}; give {name}=N")
    try:
        if not config.is_full:
            check_options({"max_adapters": 1}, load_backend(config.server_backend).OPTIONS, config.server_backend)
        _replica(config, model_folder)
    except RolloutError as error:
        raise ConfigError(
            f"server.backend={config.server_backend}, server.tp={config.server_tp}: {error}. Sampling needs a server "
            "that adds adapters while it runs, as embedded and vllm do."
        ) from error


def _replica(config: ServeConfig, model_folder: str) -> RolloutServer:
    room = {} if config.is_full else {"max_adapters": config.max_adapters, "max_rank": config.max_rank}
    known = load_backend(config.server_backend).OPTIONS
    found = ServerConfig(
        model_path=model_folder,
        max_model_len=config.max_model_len,
        timeout_s=config.timeout_s,
        dtype=config.dtype,
        parallel=ServerParallel(tp=config.server_tp),
        options={name: value for name, value in room.items() if name in known} | config.server_options,
    )
    return launch_server(config.server_backend, found)


class Replicas:
    """Sampling servers behind one router."""

    def __init__(self, config: ServeConfig, model_folder: str, checkpoints_folder: Path) -> None:
        self._config, self._model_folder, self._folder = config, model_folder, checkpoints_folder
        self._router: ServerGroup | None = None
        self._sender: WeightSender | None = None
        self._receiver: ReceiverSession | None = None
        self._version = 0
        self._loaded: OrderedDict[str, None] = OrderedDict()
        """Adapters in the servers, named after the folders of their checkpoints, the one used last at the end."""
        self._users: dict[str, int] = {}
        self._lock = asyncio.Lock()
        self._weights: str | None = ""
        """Folder of the checkpoint whose weights the servers have, where all of them are trained; empty: the base
        model's; None: not known, since a transfer failed."""
        self._num_users = 0
        """Samples that use these weights."""
        self._is_unused = asyncio.Event()
        self._is_unused.set()
        self._generation = 0

    async def start(self) -> None:
        """Start the servers.

        Raises:
            RolloutError: one cannot be started.
        """
        config = self._config
        router = create_router([_replica(config, self._model_folder) for _ in range(config.server_replicas)])
        await router.start()
        address = f"shm://rl-tinker-{os.getpid()}-{self._generation}"
        self._sender = connect(address, role="send", timeout_s=self._config.timeout_s)
        await self._sender.prepare()
        self._receiver = create_receiver(self._sender.address, timeout_s=self._config.timeout_s)
        self._router, self._version = router, 0
        self._loaded.clear()
        self._weights = ""
        self._generation += 1

    async def stop(self) -> None:
        """End the servers. Idempotent."""
        router, self._router = self._router, None
        sender, self._sender = self._sender, None
        receiver, self._receiver = self._receiver, None
        for each in (receiver, sender):
            if each is not None:
                await each.close()
        if router is not None:
            await router.stop()

    async def recover(self) -> None:
        """Start the servers again unless all of them answer."""
        generation = self._generation
        async with self._lock:
            if generation != self._generation:
                return  # another caller did
            if self._router is not None and len(self._router.servers) == self._config.server_replicas:
                with suppress(RolloutError):
                    await asyncio.gather(*(each.check_health() for each in self._router.servers))
                    return
            await self.stop()
            await self.start()

    def _running(self) -> ServerGroup:
        if self._router is None:
            raise RolloutError("the sampling servers are being started")
        return self._router

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """See `RolloutServer.generate`."""
        return await self._running().generate(request)

    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `RolloutServer.generate_stream`."""
        return self._running().generate_stream(request)

    @asynccontextmanager
    async def adapter(self, checkpoint: Checkpoint | None) -> AsyncGenerator[str | None]:
        """Name of a checkpoint's adapter in the servers, which stays there inside; None for the base model.

        Where all weights are trained, the servers have those of the checkpoint inside.
        """
        if self._config.is_full:
            async with self._whole("" if checkpoint is None else checkpoint.folder):
                yield None
            return
        if checkpoint is None:
            yield None
            return
        folder = checkpoint.folder
        self._users[folder] = self._users.get(folder, 0) + 1
        try:
            async with self._lock:
                if folder not in self._loaded:
                    await self._load(folder)
                self._loaded.move_to_end(folder)
            yield folder
        finally:
            self._users[folder] -= 1
            if not self._users[folder]:
                del self._users[folder]

    @asynccontextmanager
    async def _whole(self, folder: str) -> AsyncGenerator[None]:
        """Have all servers use the weights of a folder, once no sample uses others; first come, first served."""
        async with self._lock:
            if self._weights != folder:
                await self._is_unused.wait()
                self._weights = None
                source = self._folder / folder if folder else Path(self._model_folder)
                await self._send(await asyncio.to_thread(whole_tensors, source))
                self._weights = folder
            self._num_users += 1
            self._is_unused.clear()
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._is_unused.set()

    async def _load(self, folder: str) -> None:
        """Send an adapter to all servers, in the room of the ones that were used least recently."""
        tensors = await asyncio.to_thread(adapter_tensors, self._folder / folder)
        weights = {f"adapters.{folder}.{name}": tensor for name, tensor in tensors.items()}
        excess = len(self._loaded) + 1 - self._config.max_adapters
        idle = [each for each in self._loaded if each not in self._users][: max(excess, 0)]
        if len(idle) < excess:
            raise QuotaError(
                f"max_adapters={self._config.max_adapters} adapters are sampled at the same time; send it again later"
            )
        weights |= {f"adapters.{each}.removed": torch.zeros(1) for each in idle}
        await self._send(weights)
        for each in idle:
            del self._loaded[each]
        self._loaded[folder] = None

    async def _send(self, weights: dict[str, Tensor]) -> None:
        """Send tensors to all servers, which attest them before the new version serves."""
        assert self._sender is not None, "it is opened with the servers"
        assert self._receiver is not None, "it is opened with the servers"
        router = self._running()
        self._version += 1
        sending = asyncio.create_task(
            self._sender.send_weights(
                weights.items(), version=self._version, num_peers=len(router.servers) * self._config.server_tp
            )
        )
        try:
            await router.update_weights(self._receiver, self._version)
            await sending
        except CkptError as error:
            raise RolloutError(str(error)) from error
        finally:
            sending.cancel()  # a sender whose receivers have ended would wait for them to its deadline
            await asyncio.gather(sending, return_exceptions=True)


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model folder."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """Tensors of an adapter in peft's format, by name, with its scaling."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return load_file(folder / "adapter_model.safetensors") | {"scaling": torch.tensor(scaling)}
