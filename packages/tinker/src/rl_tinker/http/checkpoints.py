"""Training runs and checkpoints: lists, deletion, publication, expiry, download."""

from __future__ import annotations

import hmac
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import msgspec
from aiohttp import web

from rl_tinker import journal as db
from rl_tinker.errors import NotFoundError
from rl_tinker.http.app import Reply
from rl_tinker.service import api

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rl_tinker.http.app import Call
    from rl_tinker.service.store import Store
    from rl_tinker.types import Checkpoint, Model

URL_S = 3600.0
"""Seconds that a download URL is valid."""
_MAX_PAGE = 500


class Ttl(msgspec.Struct, kw_only=True):
    """Time to live of a checkpoint; None: it does not expire."""

    ttl_seconds: int | None = None


class CheckpointRoutes:
    """Routes about training runs and checkpoints.

    Args:
        store: Records.
        model_name: Name of the base model.
    """

    def __init__(self, store: Store, *, model_name: str) -> None:
        self._store, self._model_name = store, model_name
        self._secret = secrets.token_bytes(32)
        """Signs download URLs, which end with this process."""

    def routes(self) -> list[tuple[str, str, Callable[[Call], Awaitable[Any]]]]:
        """Method, path and handler of each route."""
        one = "/training_runs/{run}/checkpoints/{name:[^/]+/[^/]+}"
        return [
            ("GET", "/training_runs", self.list_runs),
            ("GET", "/training_runs/{run}", self.get_run),
            ("GET", "/training_runs/{run}/checkpoints", self.list_of_run),
            ("GET", "/checkpoints", self.list),
            ("POST", "/weights_info", self.info),
            ("DELETE", one, self.delete),
            ("POST", f"{one}/publish", self.publish),
            ("DELETE", f"{one}/publish", self.unpublish),
            ("PUT", f"{one}/ttl", self.set_ttl),
            ("GET", f"{one}/external_weights_urls", self.urls),
        ]

    def open_routes(self) -> list[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]]:
        """Routes whose URL is the permission."""
        return [("GET", "/files/{folder}/{file}", self.download)]

    async def list_runs(self, call: Call) -> Any:
        """Training runs of the tenant, the newest first."""
        own = [each for each in self._store.models.values() if each.tenant == call.tenant.name and each.state]
        page, cursor = _page(call, sorted(own, key=lambda each: -each.created))
        return {"training_runs": [self._run(each) for each in page], "cursor": cursor}

    async def get_run(self, call: Call) -> Any:
        """One training run."""
        return self._run(self._store.model(call.tenant, call.path["run"]))

    def _run(self, model: Model) -> dict[str, Any]:
        last: dict[str, Checkpoint] = {}
        for each in sorted(self._store.checkpoints.values(), key=lambda each: each.created):
            if each.model == model.id:
                last[each.kind] = each
        metadata = model.user_metadata
        return {
            "training_run_id": model.id,
            "base_model": self._model_name,
            "model_owner": model.tenant,
            "is_lora": model.adapter is not None,
            "lora_rank": None if model.adapter is None else model.adapter.rank,
            "corrupted": False,
            "last_request_time": _iso(model.last_request),
            "last_checkpoint": _shown(last["training"]) if "training" in last else None,
            "last_sampler_checkpoint": _shown(last["sampler"]) if "sampler" in last else None,
            "user_metadata": None if metadata is None else {name: str(value) for name, value in metadata.items()},
        }

    async def list_of_run(self, call: Call) -> Any:
        """Checkpoints of a training run, the oldest first."""
        model = self._store.model(call.tenant, call.path["run"])
        found = [each for each in self._store.checkpoints.values() if each.model == model.id]
        return {"checkpoints": [_shown(each) for each in sorted(found, key=lambda each: each.created)]}

    async def list(self, call: Call) -> Any:
        """Checkpoints of the tenant, the newest first."""
        own = [each for each in self._store.checkpoints.values() if each.tenant == call.tenant.name]
        page, cursor = _page(call, sorted(own, key=lambda each: -each.created))
        return {"checkpoints": [_shown(each) for each in page], "cursor": cursor}

    async def info(self, call: Call) -> Any:
        """Shape of the adapter in a checkpoint."""
        found = self._store.checkpoint(call.tenant, call.json(api.WeightsInfo).tinker_path)
        adapter = found.adapter
        shape = {} if adapter is None else {
            "lora_rank": adapter.rank,
            "train_attn": adapter.train_attn,
            "train_mlp": adapter.train_mlp,
            "train_unembed": adapter.train_unembed,
        }  # fmt: skip
        return {"base_model": self._model_name, "is_lora": adapter is not None, **shape}

    def _own(self, call: Call) -> Checkpoint:
        path = f"tinker://{call.path['run']}/{call.path['name']}"
        return self._store.checkpoint(call.tenant, path, own=True)

    async def delete(self, call: Call) -> Any:
        """Delete a checkpoint."""
        await self._store.remove_checkpoints([self._own(call)])
        return Reply(status=204)

    async def publish(self, call: Call) -> Any:
        """Let every tenant read a checkpoint."""
        return await self._change(self._own(call), is_public=True)

    async def unpublish(self, call: Call) -> Any:
        """Let its own tenant alone read a checkpoint."""
        return await self._change(self._own(call), is_public=False)

    async def set_ttl(self, call: Call) -> Any:
        """Set or remove the time at which a checkpoint expires."""
        return await self._change(self._own(call), expires=api.expiry(call.json(Ttl).ttl_seconds))

    async def _change(self, checkpoint: Checkpoint, **changes: Any) -> Reply:
        changed = msgspec.structs.replace(checkpoint, **changes)
        await self._store.journal.write(db.put(changed))
        self._store.apply([changed])
        return Reply(status=204)

    # Downloads

    async def urls(self, call: Call) -> Any:
        """Signed URL of every file of a checkpoint."""
        checkpoint = self._store.checkpoint(call.tenant, f"tinker://{call.path['run']}/{call.path['name']}")
        expires = time.time() + URL_S
        files = sorted(each.name for each in self._store.checkpoint_folder(checkpoint).iterdir() if each.is_file())
        urls = {file: f"{call.origin}{self._signed(checkpoint.folder, file, int(expires))}" for file in files}
        return {"urls": urls, "expires": _iso(expires)}

    def _signed(self, folder: str, file: str, expires: int) -> str:
        query = urlencode({"expires": expires, "signature": self._signature(folder, file, expires)})
        return f"/files/{folder}/{quote(file)}?{query}"

    def _signature(self, folder: str, file: str, expires: int) -> str:
        return hmac.digest(self._secret, f"{folder}/{file}/{expires}".encode(), "sha256").hex()

    async def download(self, request: web.Request) -> web.StreamResponse:
        """File of a signed URL."""
        folder, file = request.match_info["folder"], request.match_info["file"]
        expires = request.query.get("expires", "")
        given = request.query.get("signature", "").encode()
        is_valid = expires.isdecimal() and int(expires) > time.time()
        if not is_valid or not hmac.compare_digest(given, self._signature(folder, file, int(expires)).encode()):
            raise NotFoundError("the download URL has expired, or is not one of this server")
        path = self._store.checkpoints_folder / folder / file
        if not path.is_file():
            raise NotFoundError(f"there is no file {Path(file).name!r} any more")
        return web.FileResponse(path)


def _page(call: Call, found: Sequence[Any]) -> tuple[Sequence[Any], dict[str, int]]:
    offset, limit = call.number("offset", 0), min(call.number("limit", 20), _MAX_PAGE)
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


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
