# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUntypedClassDecorator=false
# verl is never in the environment that this is checked in.
"""verl moves weights with rl-ckpt: `checkpoint_engine.backend=rl_ckpt`, and this module as its `custom_backend_module`.

Rank 0 of the actor sends; every worker of every rollout replica is a receiver. The session is opened once and kept from
step to step, while verl calls `prepare` and `init_process_group` in every one.
"""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

import rl_ckpt
from rl_ckpt.errors import UsageError, VersionError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable

    from torch import Tensor

T = TypeVar("T")


@CheckpointEngineRegistry.register("rl_ckpt")
class RlCkptCheckpointEngine(CheckpointEngine):
    """Checkpoint engine of one verl worker. Options are those of `checkpoint_engine.engine_kwargs.rl_ckpt`.

    Args:
        bucket_size: Size of a bucket, bytes; verl's `update_weights_bucket_megabytes`. Rounded down to 256.
        is_master: Whether this is rank 0 of the actor, which sends.
        url: URL of the session; None is a free TCP port of the master's node. `shm://name` on one machine.
        timeout_s: Longest wait for a peer, seconds.
        token: Token of a session over TCP; None makes one, which goes to the others with verl's own messages.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        url: str | None = None,
        timeout_s: float = 600.0,
        token: str | None = None,
    ) -> None:
        self._bucket_bytes = max(256, bucket_size // 256 * 256)
        self._is_master = is_master
        self._url = url
        self._timeout_s = timeout_s
        self._token = token
        self._session: Any | None = None
        self._joined: tuple[str, str | None] | None = None
        self._num_receivers = 0

    def prepare(self) -> dict[str, Any]:
        """Open the sending end; what the others must know of it. Nothing at any other worker."""
        if not self._is_master:
            return {}
        if self._session is None:
            url = self._url or f"tcp://{_node_address()}:0"
            if url.startswith(("tcp:", "nixl:")) and self._token is None:
                self._token = secrets.token_hex(16)
            self._session = rl_ckpt.connect(
                url, role="send", timeout_s=self._timeout_s, bucket_bytes=self._bucket_bytes, token=self._token
            )
            _wait(self._session.prepare())
        return {"url": self._session.address, "token": self._token}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Every rank gets the session and its number of receivers."""
        fields = {"url": metadata[0]["url"], "token": metadata[0]["token"], "num_receivers": rollout_world_size}
        actor, rollout = (
            {name: [value] * size for name, value in fields.items()}
            for size in (actor_wg_world_size, rollout_world_size)
        )
        return (
            actor | {"is_receiver": [False] * actor_wg_world_size},
            rollout | {"is_receiver": [True] * rollout_world_size},
        )

    def init_process_group(self, *, url: str, token: str | None, num_receivers: int, is_receiver: bool) -> None:
        """Join the session, unless this end is in it already."""
        self._num_receivers = num_receivers
        if not is_receiver or self._joined == (url, token):
            return
        if self._session is not None:
            _wait(self._session.close())
        self._session = rl_ckpt.connect(url, role="receive", timeout_s=self._timeout_s, token=token)
        self._joined = (url, token)

    def finalize(self) -> None:
        """Finalize a step: the session serves the next one as well."""

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send to all receivers from the master; elsewhere take part in the collectives of the export."""
        if not self._is_master:
            await asyncio.to_thread(_drain, weights)
            return {}
        session = self._require_session()
        version = global_steps if global_steps is not None else (-1 if session.version is None else session.version) + 1
        report = await session.send_weights(weights, version=version, num_peers=self._num_receivers)
        if len(report.receipts) != self._num_receivers:
            raise UsageError(f"{', '.join(report.lost)} voted for version {version} and then fell silent")
        names = ("wall_s", "export_s", "pack_s", "wire_s", "verify_s")
        return {f"rl_ckpt/{name}": getattr(report, name) for name in names} | {"rl_ckpt/gb_per_s": report.gb_per_s}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield tensors to keep, on the worker's accelerator if it has one, as verl's rollouts collect them."""
        session = self._require_session()
        device = torch.accelerator.current_accelerator(check_available=True)  # a build for CUDA names one anyway
        async for name, tensor in session.receive_weights():
            if global_steps not in {None, session.version}:
                raise VersionError(f"version {session.version} came in step {global_steps}")
            yield name, tensor.clone() if device is None else tensor.to(device)

    def _require_session(self) -> Any:
        if self._session is None:
            raise UsageError("no session is open: verl calls prepare and init_process_group before weights move")
        return self._session


def _drain(weights: Iterable[tuple[str, Tensor]]) -> None:
    for _ in weights:
        pass


def _node_address() -> str:
    import ray

    return ray.util.get_node_ip_address()


def _wait(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where this thread runs an event loop, as it does in an actor of Ray."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
