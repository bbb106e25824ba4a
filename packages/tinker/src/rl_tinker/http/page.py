"""Page at `/`: runs with their loss curves, tenants, the queue and the throughput."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from rl_tinker.http.app import Service
    from rl_tinker.service.store import Store
    from rl_tinker.types import Model

MAX_POINTS = 400
MAX_RUNS = 100


async def page(service: Service, request: web.Request) -> web.Response:
    """The page; scripts and styles are its own, and nothing is loaded from elsewhere."""
    del service, request
    text = files("rl_tinker.http").joinpath("page.html").read_text()
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
    return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": policy})


async def numbers(service: Service, request: web.Request) -> web.Response:
    """Numbers of the page: of the tenant whose key it has, or of all where keys are not checked."""
    store, tenants = service.store, service.tenants
    tenant = None if tenants.is_open else tenants.of(request.headers.get("X-API-Key", ""))
    shown = [each for each in store.models.values() if tenant is None or each.tenant == tenant.name]
    newest = sorted(shown, key=lambda each: -each.created)[:MAX_RUNS]
    return web.json_response(
        {
            "model": service.model_name,
            "tenant": "" if tenant is None else tenant.name,
            "tenants": len({each.tenant for each in store.models.values() if not each.is_unloaded}),
            "queue": service.scheduler.num_waiting,
            "own_queue": None if tenant is None else store.pending[tenant.name],
            "max_pending": None if tenant is None else tenant.max_pending,
            "samples": service.samplers.num_pending,
            "tokens_trained": service.scheduler.tokens_served,
            "tokens_sampled": service.samplers.tokens_sampled,
            "runs": [_run(store, each) for each in newest],
        }
    )


OPEN_ROUTES = [("GET", "/", page), ("GET", "/page.json", numbers)]
"""Routes that check keys themselves: the page is open, and asks for one if its numbers need it."""


def _run(store: Store, model: Model) -> dict[str, Any]:
    points = store.journal.curve(model.id)
    return {
        "id": model.id,
        "tenant": model.tenant,
        "step": model.step,
        "rank": model.rank,
        "is_active": not model.is_unloaded,
        "seen": model.last_request,
        "curve": points[:: max(1, len(points) // MAX_POINTS)],
        "checkpoints": sum(each.model == model.id for each in store.checkpoints.values()),
    }
