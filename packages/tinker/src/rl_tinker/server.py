"""The server: its parts put together, started and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from rl_csrc import hold_lock
from rl_engine.registry import check as check_engine
from rl_engine.registry import describe_model, model_folder
from rl_engine.types import EngineConfig, OptimizerConfig, Precision
from rl_rollout.registry import LOOPBACK_HOSTS
from rl_tinker.errors import ConfigError
from rl_tinker.http import checkpoints, page, sampling, sessions, training
from rl_tinker.http.app import Application, Service
from rl_tinker.ranks.group import ElasticGroup
from rl_tinker.service.replicas import Replicas, check_replicas
from rl_tinker.service.samplers import Samplers
from rl_tinker.service.scheduler import Scheduler
from rl_tinker.service.stop_strings import Stops
from rl_tinker.service.store import Store
from rl_tinker.service.tenants import Tenants

if TYPE_CHECKING:
    from typing import Self

    from rl_tinker.base import TrainingGroup
    from rl_tinker.types import ServeConfig

HOUSEKEEPING_S = 10.0
"""Seconds between two looks for what has expired."""

_log = logging.getLogger(__name__)


class TinkerServer:
    """Server of the Tinker API. An async context manager: entering it starts the server, leaving it stops it.

    Args:
        config: Its configuration.
        group: Training processes; by default those of rl-engine.
        replicas: Sampling servers; by default those of rl-rollout.

    Raises:
        ConfigError: a setting cannot be used.
        rl_engine.errors.EngineError: the base model, or the backend, cannot be used.
    """

    def __init__(
        self, config: ServeConfig, *, group: TrainingGroup | None = None, replicas: Replicas | None = None
    ) -> None:
        check_config(config)
        self.config = config
        self.folder = Path(config.output_dir).absolute()
        base = model_folder(config.model_path)
        facts = describe_model(base).config
        max_len = min(config.max_model_len, int(facts.get("max_position_embeddings", config.max_model_len)))
        self._closing = contextlib.AsyncExitStack()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._closing.enter_context(hold_lock(self.folder / "lock", f"output_dir={config.output_dir}"))
        self.store = Store(self.folder)
        self._closing.callback(self.store.close)
        self._group = group or ElasticGroup(config, base)
        self._replicas = replicas or Replicas(config, base, self.store.checkpoints_folder)
        self._scheduler = Scheduler(self.store, self._group, max_adapters=config.max_models)
        self._samplers = Samplers(self.store, self._replicas, Stops(Path(base)), max_len=max_len)
        service = Service(
            store=self.store,
            scheduler=self._scheduler,
            samplers=self._samplers,
            tenants=Tenants(Path(config.keys) if config.keys else None),
            model_name=config.model_name or config.model_path,
            model_folder=base,
            vocab_size=int(facts["vocab_size"]),
            is_tied=bool(facts.get("tie_word_embeddings", False)),
            max_len=max_len,
            max_rank=config.max_rank,
            is_full=config.is_full,
        )
        routes = [*sessions.ROUTES, *training.ROUTES, *sampling.ROUTES, *checkpoints.ROUTES]
        self._app = Application(service, routes, [*checkpoints.OPEN_ROUTES, *page.OPEN_ROUTES])
        self.url = ""
        """Base URL, once it has started."""

    async def start(self) -> str:
        """Start everything; returns the base URL. The port is bound last: a client that reaches it can train.

        Raises:
            RanksLostError: the training processes cannot be started.
            rl_rollout.errors.RolloutError: a sampling server cannot be started.
            ConfigError: the port cannot be bound, or the folder has runs of the other kind of training.
        """
        other = [
            each.id
            for each in self.store.models.values()
            if not each.is_unloaded and (each.adapter is None) != self.config.is_full
        ]
        if other:
            raise ConfigError(
                f"training={self.config.training}: output_dir={self.config.output_dir} has runs of the other kind, "
                f"such as {other[0]}; give another output_dir"
            )
        self._closing.push_async_callback(self._group.stop)
        self._closing.push_async_callback(self._replicas.stop)
        await asyncio.gather(self._group.start(), self._replicas.start())
        self._scheduler.start()
        self._closing.push_async_callback(self._scheduler.stop)
        self._closing.push_async_callback(self._samplers.stop)
        housekeeping = asyncio.create_task(self._keep_house(), name="rl-tinker-housekeeping")
        self._closing.callback(housekeeping.cancel)
        self._closing.push_async_callback(self._app.stop)
        host = self.config.host
        try:
            port = await self._app.start(host, self.config.port)
        except OSError as error:
            raise ConfigError(f"port {self.config.port} of {host} cannot be bound: {error.strerror}") from error
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return self.url

    async def stop(self) -> None:
        """Stop everything; what was accepted is run by the next server on the same folder. Idempotent."""
        await self._closing.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _keep_house(self) -> None:
        """Drop what has expired, free the models of silent sessions, and notice operations that cannot run."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            try:
                for session_id in await self.store.expire():
                    self._scheduler.unload(session_id)
                self._scheduler.check_gaps()
                self._samplers.expire()
            except Exception:  # noqa: BLE001 - logged, and the server goes on
                _log.exception("housekeeping failed; it is tried again")


def check_config(config: ServeConfig) -> None:
    """Check the settings, before anything starts.

    Raises:
        ConfigError: one is out of range, or the interface is open without keys.
        rl_engine.errors.EngineError: the engine rejects the model, the backend or the number of ranks.
    """
    if config.host not in LOOPBACK_HOSTS and not config.keys:
        raise ConfigError(f"host={config.host} is reachable from outside; give keys=FILE, or use 127.0.0.1")
    for name in ("ranks", "max_adapters", "max_rank", "server_replicas", "server_tp"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name.replace('server_', 'server.')}={getattr(config, name)} must be 1 or more")
    if config.max_rank > 512:
        raise ConfigError(f"max_rank={config.max_rank} must be at most 512, the largest rank that servers take")
    if config.training not in ("lora", "full"):
        raise ConfigError(f"training={config.training!r} must be lora or full")
    if config.dtype not in tuple(Precision):
        raise ConfigError(f"dtype={config.dtype!r} must be one of {', '.join(Precision)}")
    if config.max_model_len < 2 or config.timeout_s <= 0 or not 0 <= config.port < 2**16:
        raise ConfigError("max_model_len must be 2 or more, timeout_s above 0, and port from 0 to 65535")
    optimizer = OptimizerConfig() if config.is_full else None
    engine = EngineConfig(model_path=model_folder(config.model_path), optimizer=optimizer)
    check_engine(config.backend, engine, config.ranks)
    check_replicas(config, engine.model_path)
