"""Page at `/`: runs with their loss curves, tenants, the queue and the throughput."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rl_tinker.journal import Journal
    from rl_tinker.service.samplers import Samplers
    from rl_tinker.service.scheduler import Scheduler
    from rl_tinker.service.store import Store
    from rl_tinker.service.tenants import Tenants
    from rl_tinker.types import Model

MAX_POINTS = 400
MAX_RUNS = 100


class PageRoutes:
    """The page, and the numbers that it shows: of the tenant whose key it has, or of all where keys are not checked.

    Args:
        store: Records.
        scheduler: Queue of operations.
        samplers: Samples in progress.
        tenants: Tenants by key.
        model_name: Name of the base model.
    """

    def __init__(
        self, store: Store, scheduler: Scheduler, samplers: Samplers, tenants: Tenants, *, model_name: str
    ) -> None:
        self._store, self._scheduler, self._samplers, self._model_name = store, scheduler, samplers, model_name
        self._tenants = tenants

    def open_routes(self) -> list[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]]:
        """Routes that check keys themselves: the page is open, and asks for one if its numbers need it."""
        return [("GET", "/", self.page), ("GET", "/page.json", self.numbers)]

    async def page(self, request: web.Request) -> web.Response:
        """The page; scripts and styles are its own, and nothing is loaded from elsewhere."""
        del request
        text = files("rl_tinker.http").joinpath("page.html").read_text()
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": policy})

    async def numbers(self, request: web.Request) -> web.Response:
        """Numbers of the page."""
        tenant = None if self._tenants.is_open else self._tenants.of(request.headers.get("X-API-Key", ""))
        shown = [each for each in self._store.models.values() if tenant is None or each.tenant == tenant.name]
        newest = sorted(shown, key=lambda each: -each.created)[:MAX_RUNS]
        numbers = {
            "model": self._model_name,
            "tenant": "" if tenant is None else tenant.name,
            "tenants": len({each.tenant for each in self._store.models.values() if not each.is_unloaded}),
            "queue": self._scheduler.num_waiting,
            "own_queue": None if tenant is None else self._store.pending[tenant.name],
            "max_pending": None if tenant is None else tenant.max_pending,
            "samples": self._samplers.num_pending,
            "tokens_trained": self._scheduler.tokens_served,
            "tokens_sampled": self._samplers.tokens_sampled,
            "runs": [self._run(each) for each in newest],
        }
        return web.json_response(numbers)

    def _run(self, model: Model) -> dict[str, Any]:
        points = curve_of(self._store.journal, model.id)
        return {
            "id": model.id,
            "tenant": model.tenant,
            "step": model.step,
            "rank": None if model.adapter is None else model.adapter.rank,
            "is_active": not model.is_unloaded,
            "seen": model.last_request,
            "curve": points[:: max(1, len(points) // MAX_POINTS)],
            "checkpoints": sum(each.model == model.id for each in self._store.checkpoints.values()),
        }


def curve_of(journal: Journal, model: str) -> list[tuple[int, float]]:
    """Loss per token of each step of a model; steps whose loss is not finite are gaps, since JSON has no NaN."""
    by_step: dict[int, list[float]] = {}
    for step, _, loss, tokens in journal.curve(model):
        total = by_step.setdefault(step, [0.0, 0.0])
        total[0] += math.nan if loss is None else loss  # SQLite stores a NaN as NULL
        total[1] += tokens
    return [(step, loss / max(tokens, 1)) for step, (loss, tokens) in by_step.items() if math.isfinite(loss)]
