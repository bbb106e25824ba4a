"""Training runs and checkpoints: lists, deletion, publication, expiry, download."""

from __future__ import annotations

import hmac
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import msgspec
from aiohttp import web

from rl_tinker.errors import NotFoundError
from rl_tinker.http.app import Reply
from rl_tinker.service import api

if TYPE_CHECKING:
    from rl_tinker.http.app import Call, Handler, Service
    from rl_tinker.types import Checkpoint, Model

URL_S = 3600.0
"""Seconds that a download URL is valid."""


async def list_runs(call: Call) -> Any:
    """Training runs of the tenant, the newest first."""
    models = call.service.store.models
    page, cursor = call.page({name: model for name, model in models.items() if model.state})
    return {"training_runs": [_run(call.service, each) for each in page], "cursor": cursor}


async def get_run(call: Call) -> Any:
    """One training run."""
    return _run(call.service, call.service.store.model(call.tenant, call.path["run"]))


def _run(service: Service, model: Model) -> dict[str, Any]:
    last = {each.kind: _shown(each) for each in service.store.checkpoints_of(model)}
    metadata = model.user_metadata
    return {
        "training_run_id": model.id,
        "base_model": service.model_name,
        "model_owner": model.tenant,
        "is_lora": model.adapter is not None,
        "lora_rank": model.rank,
        "corrupted": False,
        "last_request_time": _iso(model.last_request),
        "last_checkpoint": last.get("training"),
        "last_sampler_checkpoint": last.get("sampler"),
        "user_metadata": None if metadata is None else {name: str(value) for name, value in metadata.items()},
    }


async def list_of_run(call: Call) -> Any:
    """Checkpoints of a training run, the oldest first."""
    store = call.service.store
    return {"checkpoints": [_shown(each) for each in store.checkpoints_of(store.model(call.tenant, call.path["run"]))]}


async def list_all(call: Call) -> Any:
    """Checkpoints of the tenant, the newest first."""
    page, cursor = call.page(call.service.store.checkpoints)
    return {"checkpoints": [_shown(each) for each in page], "cursor": cursor}


async def info(call: Call) -> Any:
    """Shape of the adapter in a checkpoint."""
    adapter = call.service.store.checkpoint(call.tenant, call.text("tinker_path")).adapter
    shape = {} if adapter is None else msgspec.structs.asdict(adapter)
    shape = {"lora_rank" if name == "rank" else name: value for name, value in shape.items() if name != "seed"}
    return {"base_model": call.service.model_name, "is_lora": adapter is not None, **shape}


def _named(call: Call, *, own: bool) -> Checkpoint:
    path = f"tinker://{call.path['run']}/{call.path['name']}"
    return call.service.store.checkpoint(call.tenant, path, own=own)


async def delete(call: Call) -> Any:
    """Delete a checkpoint."""
    await call.service.store.remove_checkpoints([_named(call, own=True)])
    return Reply(status=204)


async def publish(call: Call) -> Any:
    """Let every tenant read a checkpoint."""
    return await _change(call, is_public=True)


async def unpublish(call: Call) -> Any:
    """Let its own tenant alone read a checkpoint."""
    return await _change(call, is_public=False)


async def set_ttl(call: Call) -> Any:
    """Set or remove the time at which a checkpoint expires."""
    return await _change(call, expires=api.expiry(call.json(api.Ttl).ttl_seconds))


async def _change(call: Call, **changes: Any) -> Reply:
    await call.service.store.put(msgspec.structs.replace(_named(call, own=True), **changes))
    return Reply(status=204)


async def urls(call: Call) -> Any:
    """Signed URL of every file of a checkpoint."""
    checkpoint, expires = _named(call, own=False), int(time.time() + URL_S)
    folder = call.service.store.checkpoints_folder / checkpoint.folder
    found: dict[str, str] = {}
    for file in sorted(each.name for each in folder.iterdir() if each.is_file()):
        signature = _signature(call.service, folder.name, file, expires)
        query = urlencode({"expires": expires, "signature": signature})
        found[file] = f"{call.origin}/files/{folder.name}/{quote(file)}?{query}"
    return {"urls": found, "expires": _iso(expires)}


def _signature(service: Service, folder: str, file: str, expires: int) -> str:
    return hmac.digest(service.secret, f"{folder}/{file}/{expires}".encode(), "sha256").hex()


async def download(service: Service, request: web.Request) -> web.StreamResponse:
    """File of a signed URL."""
    folder, file = request.match_info["folder"], request.match_info["file"]
    expires = request.query.get("expires", "")
    given = request.query.get("signature", "").encode()
    is_valid = expires.isdecimal() and int(expires) > time.time()
    if not is_valid or not hmac.compare_digest(given, _signature(service, folder, file, int(expires)).encode()):
        raise NotFoundError("the download URL has expired, or is not one of this server")
    path = service.store.checkpoints_folder / folder / file
    if not path.is_file():
        raise NotFoundError(f"there is no file {Path(file).name!r} any more")
    return web.FileResponse(path)


def _shown(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.name,
        "checkpoint_type": checkpoint.kind,
        "time": _iso(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.is_public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires is None else _iso(checkpoint.expires),
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


_ONE = "/training_runs/{run}/checkpoints/{name:[^/]+/[^/]+}"
ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", "/training_runs", list_runs),
    ("GET", "/training_runs/{run}", get_run),
    ("GET", "/training_runs/{run}/checkpoints", list_of_run),
    ("GET", "/checkpoints", list_all),
    ("POST", "/weights_info", info),
    ("DELETE", _ONE, delete),
    ("POST", f"{_ONE}/publish", publish),
    ("DELETE", f"{_ONE}/publish", unpublish),
    ("PUT", f"{_ONE}/ttl", set_ttl),
    ("GET", f"{_ONE}/external_weights_urls", urls),
]
OPEN_ROUTES = [("GET", "/files/{folder}/{file}", download)]
"""Routes whose URL is the permission."""
