"""Sessions, capabilities, client settings, and the records of sessions and samplers."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from rl_tinker import journal as db
from rl_tinker.errors import GoneError, NotFoundError, QuotaError
from rl_tinker.http.app import Reply
from rl_tinker.service import api
from rl_tinker.types import Session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rl_tinker.http.app import Call
    from rl_tinker.service.scheduler import Scheduler
    from rl_tinker.service.store import Store

_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "parallel_fwdbwd_chunks": True,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
}
"""Settings that clients take from the server; others keep the SDK's defaults."""
_DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}
_MAX_PAGE = 500


class SessionRoutes:
    """Routes about sessions.

    Args:
        store: Records.
        scheduler: Queue of operations.
        model_name: Name of the base model.
        is_tied: Whether the base model's output layer is its embedding.
        max_len: Longest sequence, tokens.
    """

    def __init__(self, store: Store, scheduler: Scheduler, *, model_name: str, is_tied: bool, max_len: int) -> None:
        self._store, self._scheduler = store, scheduler
        self._model_name, self._is_tied, self._max_len = model_name, is_tied, max_len

    def routes(self) -> list[tuple[str, str, Callable[[Call], Awaitable[Any]]]]:
        """Method, path and handler of each route."""
        return [
            ("GET", "/healthz", self.health),
            ("GET", "/get_server_capabilities", self.capabilities),
            ("POST", "/client/config", self.client_config),
            ("POST", "/client/dynamic_config", self.dynamic_config),
            ("POST", "/telemetry", self.telemetry),
            ("POST", "/create_session", self.create),
            ("POST", "/session_heartbeat", self.heartbeat),
            ("POST", "/sessions/{session}/finish", self.finish),
            ("GET", "/sessions/{session}", self.get),
            ("GET", "/sessions", self.list),
            ("GET", "/samplers/{sampler}", self.sampler),
        ]

    async def health(self, call: Call) -> Any:
        """The server answers."""
        del call
        return {"status": "ok"}

    async def capabilities(self, call: Call) -> Any:
        """Base models that can be trained and sampled."""
        del call
        model = {
            "model_name": self._model_name,
            "max_context_length": self._max_len,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    async def client_config(self, call: Call) -> Any:
        """Settings that a client takes once."""
        del call
        return _CLIENT_CONFIG

    async def dynamic_config(self, call: Call) -> Any:
        """Settings that a client takes every few minutes."""
        del call
        return _DYNAMIC_CONFIG

    async def telemetry(self, call: Call) -> Any:
        """The SDK's telemetry, which is dropped: nothing of it is stored or sent on."""
        del call
        return {"status": "accepted"}

    async def create(self, call: Call) -> Any:
        """Create a session."""
        request = call.json(api.CreateSession)
        live = sum(each.tenant == call.tenant.name and not each.finished for each in self._store.sessions.values())
        if live >= call.tenant.max_pending:
            raise QuotaError(f"{call.tenant.name} has {live} sessions; its quota is {call.tenant.max_pending}")
        now = time.time()
        session = Session(
            id=uuid.uuid4().hex,
            tenant=call.tenant.name,
            created=now,
            seen=now,
            display_name=request.display_name,
            user_metadata=request.user_metadata,
        )
        await self._store.journal.write(db.put(session))
        self._store.apply([session])
        note = f"the output layer of {self._model_name} is its embedding: train_unembed has no effect"
        return {
            "session_id": session.id,
            "type": "create_session",
            "info_message": note if self._is_tied else None,
        }

    async def heartbeat(self, call: Call) -> Any:
        """Keep a session alive; in memory alone, since a server that starts anew gives every session its full time."""
        self._store.session(call.tenant, call.json(api.OfSession).session_id).seen = time.time()
        return {"type": "session_heartbeat"}

    async def finish(self, call: Call) -> Any:
        """End a session, and free its models."""
        try:
            session = self._store.session(call.tenant, call.path["session"])
        except GoneError:  # the first reason counts
            return Reply(status=204)
        session.finished = "its client finished it"
        await self._store.journal.write(db.put(session))
        self._scheduler.unload(session.id)
        return Reply(status=204)

    async def get(self, call: Call) -> Any:
        """Training runs and samplers of a session."""
        session = self._store.sessions.get(call.path["session"])
        if session is None or session.tenant != call.tenant.name:
            raise NotFoundError(f"there is no session {call.path['session']!r}")
        return {
            "training_run_ids": [each.id for each in self._store.models.values() if each.session == session.id],
            "sampler_ids": [each.id for each in self._store.samplers.values() if each.session == session.id],
            "user_metadata": session.user_metadata or None,
            "display_name": session.display_name,
        }

    def _own(self, call: Call) -> list[Session]:
        own = [each for each in self._store.sessions.values() if each.tenant == call.tenant.name]
        return sorted(own, key=lambda each: -each.created)

    async def list(self, call: Call) -> Any:
        """Ids of the tenant's sessions, the newest first."""
        offset, limit = call.number("offset", 0), min(call.number("limit", 20), _MAX_PAGE)
        return {"sessions": [each.id for each in self._own(call)[offset : offset + limit]]}

    async def sampler(self, call: Call) -> Any:
        """Checkpoint of a sampling session."""
        found = self._store.sampler(call.tenant, call.path["sampler"])
        return {"sampler_id": found.id, "base_model": self._model_name, "model_path": found.checkpoint or None}
