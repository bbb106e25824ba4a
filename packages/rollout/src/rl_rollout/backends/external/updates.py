"""`Activity` and `Updates`: whether a third-party server may compute, and the installation of new weights."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rl_rollout.errors import RolloutError, ServerLostError, WeightUpdateError
from rl_rollout.types import TensorPart
from rl_rollout.validation import check_version

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from rl_rollout.backends.external.calls import EngineCalls
    from rl_rollout.backends.external.inflight import Requests
    from rl_rollout.backends.external.lifecycle import Lifecycle
    from rl_rollout.base import PauseMode

FILES_CHECK_S = 0.02
"""Seconds between two looks whether all slices of a sync have landed."""


class TornUpdateError(RolloutError):
    """Internal: an update failed after the model was changed."""


class Activity:
    """Whether a server may compute: not while it is paused, asleep, or without usable weights.

    Args:
        requests: Holds new requests while it may not.
        calls: Calls of the server.
    """

    def __init__(self, requests: Requests, calls: EngineCalls) -> None:
        self._requests, self._calls = requests, calls
        self.is_paused = self.is_asleep = False
        self.refusal = ""
        """Reason for which nothing is generated until an update succeeds; empty if there is none."""

    @property
    def is_halted(self) -> bool:
        """Whether nothing may be computed, requests in flight included."""
        return self.is_paused or self.is_asleep or bool(self.refusal)

    async def halt(self) -> None:
        """Pause computing for a change of the weights."""
        if not self.is_halted:
            await self._calls.post_pause("keep")

    async def proceed(self) -> None:
        """Resume computing, unless a pause, a sleep or missing weights forbid it."""
        if not self.is_halted:
            await self._calls.post_resume()
            self._requests.release()

    def refuse(self, why: str) -> None:
        """Generate nothing until an update succeeds."""
        self.refusal = why
        self._requests.hold()

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutServer.pause`."""
        self._requests.hold()
        self.is_paused = True
        if mode == "abort":
            await self._requests.abort()
        elif mode == "wait":
            await self._requests.drain()
        await self._calls.post_pause(mode)

    async def resume(self) -> None:
        """See `RolloutServer.resume`."""
        self.is_paused = False
        await self.proceed()

    async def sleep(self, level: int) -> None:
        """See `RolloutServer.sleep`."""
        self._requests.hold()
        self.is_asleep = True
        await self._calls.post_sleep(level)
        if level == 2:
            self.refuse("the weights were released by sleep(level=2); wake the server and update them")

    async def wake(self, tags: Sequence[str]) -> None:
        """See `RolloutServer.wake`."""
        if not self.is_asleep:
            return
        await self._calls.post_wake(tags)
        if "kv_cache" in tags:
            self.is_asleep = False
            await self.proceed()


class Updates:
    """Installation of weight versions at a server.

    Args:
        activity: Is halted while weights change.
        lifecycle: Says whether the server runs.
        calls: Calls of the server.
    """

    def __init__(self, activity: Activity, lifecycle: Lifecycle, calls: EngineCalls) -> None:
        self._activity, self._lifecycle, self._calls = activity, lifecycle, calls
        self.version = 0
        """Weight version that is served."""
        self.lock = asyncio.Lock()
        """Lock of changes of weights and memory."""

    async def install(self, address: str, version: int) -> None:
        """Install a version from a URL of rl-ckpt; computing is halted once the weights have landed, or to land them.

        Raises:
            WeightUpdateError: it was not installed; says which version serves, if any.
        """
        async with self.lock:
            self._lifecycle.require_running()
            is_lost = False
            try:
                check_version(version)
                if "://" not in address:
                    raise WeightUpdateError("the address is not a URL of rl-ckpt, e.g. shm://policy")
                await self._calls.post_slices(address)
                await self._activity.halt()
                await self._calls.post_update(address, version)
                self.version, self._activity.refusal = version, ""
            except ServerLostError:
                is_lost = True
                raise
            except TornUpdateError as error:
                self._activity.refuse(
                    f"version {version} was installed by half ({error}); an update must succeed first"
                )
                raise WeightUpdateError(f"{self._activity.refusal}; the server refuses until then") from error
            except RolloutError as error:
                who = self._activity.refusal or f"version {self.version} still serves"
                raise WeightUpdateError(
                    f"version {version} was not installed from {address!r}: {error}; {who}"
                ) from error
            finally:
                if not self._lifecycle.is_stopped and not is_lost:
                    await self._activity.proceed()

    async def layout(
        self, weights: Mapping[str, tuple[str, tuple[int, ...]]], num_receivers: int
    ) -> list[list[TensorPart]]:
        """Slices that each rank computes with, by a dry run of its engine's own loader."""
        from rl_ckpt import read_layouts, write_layout_request

        async with self.lock:
            self._lifecycle.require_running()
            with tempfile.TemporaryDirectory(prefix="rl-rollout-layout-") as folder:
                try:
                    await self._activity.halt()
                    await self._calls.post_layout(write_layout_request(Path(folder), weights))
                finally:
                    await self._activity.proceed()
                layouts = read_layouts(Path(folder), num_receivers)
        return [
            [TensorPart(name=each.name, shape=each.shape, offsets=each.offsets, sizes=each.sizes) for each in own]
            for own in layouts
        ]


async def wait_for_files(
    files: Sequence[Path], check_health: Callable[[], Awaitable[None]], *, timeout_s: float
) -> None:
    """Wait until the server's workers have made these files, which report that slices have landed.

    At the deadline it returns: the workers' own passes too, and the update says what did not come.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not all(file.exists() for file in files):
        await check_health()
        if asyncio.get_running_loop().time() > deadline:
            return
        await asyncio.sleep(FILES_CHECK_S)


def new_files(folder: str, what: str, count: int) -> list[Path]:
    """Files, one a rank, that the workers of a server are going to report by; earlier ones are removed."""
    files = [Path(folder, f"{what}-{rank}") for rank in range(count)]
    for file in files:
        file.unlink(missing_ok=True)
    return files
