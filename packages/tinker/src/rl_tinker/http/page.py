"""Page at `/`: runs with their loss curves, tenants, the queue and the throughput."""

from __future__ import annotations

import time
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rl_tinker.http.app import Call
    from rl_tinker.service.samplers import Samplers
    from rl_tinker.service.scheduler import Scheduler
    from rl_tinker.service.store import Store

MAX_POINTS = 400
MAX_RUNS = 100


class PageRoutes:
    """The page, and the numbers that it shows: those of the tenant whose key it has, and of the server as a whole.

    Args:
        store: Records.
        scheduler: Queue of operations.
        samplers: Samples in progress.
        model_name: Name of the base model.
    """

    def __init__(self, store: Store, scheduler: Scheduler, samplers: Samplers, *, model_name: str) -> None:
        self._store, self._scheduler, self._samplers, self._model_name = store, scheduler, samplers, model_name
        self._started = time.time()

    def routes(self) -> list[tuple[str, str, Callable[[Call], Awaitable[Any]]]]:
        """Method, path and handler of each route."""
        return [("GET", "/page", self.numbers)]

    def open_routes(self) -> list[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]]:
        """Routes without a key: the page itself, which asks for one."""
        return [("GET", "/", self.page)]

    async def page(self, request: web.Request) -> web.Response:
        """The page; scripts and styles are its own, and nothing is loaded from elsewhere."""
        del request
        text = files("rl_tinker.http").joinpath("page.html").read_text()
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": policy})

    async def numbers(self, call: Call) -> Any:
        """Numbers of the page."""
        own = [each for each in self._store.models.values() if each.tenant == call.tenant.name]
        newest = sorted(own, key=lambda each: -each.created)[:MAX_RUNS]
        tenants = {each.tenant for each in self._store.models.values() if not each.is_unloaded}
        return {
            "model": self._model_name,
            "tenant": call.tenant.name,
            "uptime_s": time.time() - self._started,
            "tenants": len(tenants | {call.tenant.name}),
            "queue": self._scheduler.num_waiting,
            "own_queue": self._store.pending[call.tenant.name],
            "samples": self._samplers.num_pending,
            "tokens_trained": self._scheduler.tokens_served,
            "tokens_sampled": self._samplers.tokens_sampled,
            "quota": {"models": call.tenant.max_models, "pending": call.tenant.max_pending},
            "runs": [self._run(each) for each in newest],
        }

    def _run(self, model: Any) -> dict[str, Any]:
        by_step: dict[int, list[float]] = {}
        for step, _, loss, tokens in self._store.journal.curve(model.id):
            total = by_step.setdefault(step, [0.0, 0.0])
            total[0] += loss
            total[1] += tokens
        points = [(step, loss / max(tokens, 1)) for step, (loss, tokens) in by_step.items()]
        return {
            "id": model.id,
            "step": model.step,
            "rank": None if model.adapter is None else model.adapter.rank,
            "is_active": not model.is_unloaded,
            "seen": model.last_request,
            "curve": points[:: max(1, len(points) // MAX_POINTS)],
            "checkpoints": sum(each.model == model.id for each in self._store.checkpoints.values()),
        }
