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
    from rl_tinker.http.app import Call, Handler

_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "parallel_fwdbwd_chunks": True,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
}
"""Settings that clients take from the server once; others keep the SDK's defaults."""
_DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}
"""Settings that they take every few minutes."""


def _always(answer: dict[str, Any]) -> Handler:
    async def handle(_: Call) -> Any:
        return answer

    return handle


async def capabilities(call: Call) -> Any:
    """Base models that can be trained and sampled."""
    name, max_len = call.service.model_name, call.service.max_len
    model = {"model_name": name, "max_context_length": max_len, "trainable": True, "sampleable": True}
    return {"supported_models": [model]}


async def create(call: Call) -> Any:
    """Create a session."""
    request, store = call.json(api.CreateSession), call.service.store
    live = sum(each.tenant == call.tenant.name and not each.finished for each in store.sessions.values())
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
    await store.put(session)
    note = f"the output layer of {call.service.model_name} is its embedding: train_unembed has no effect"
    info = note if call.service.is_tied else None
    return {"session_id": session.id, "type": "create_session", "info_message": info}


async def heartbeat(call: Call) -> Any:
    """Keep a session alive; in memory alone, since a server that starts anew gives every session its full time."""
    call.service.store.session(call.tenant, call.text("session_id")).seen = time.time()
    return {"type": "session_heartbeat"}


async def finish(call: Call) -> Any:
    """End a session, and free its models."""
    try:
        session = call.service.store.session(call.tenant, call.path["session"])
    except GoneError:  # the first reason counts
        return Reply(status=204)
    session.finished = "its client finished it"
    await call.service.store.journal.write(db.put(session))
    call.service.scheduler.unload(session.id)
    return Reply(status=204)


async def get(call: Call) -> Any:
    """Training runs and samplers of a session."""
    store, session = call.service.store, call.service.store.sessions.get(call.path["session"])
    if session is None or session.tenant != call.tenant.name:
        raise NotFoundError(f"there is no session {call.path['session']!r}")
    return {
        "training_run_ids": [each.id for each in store.models.values() if each.session == session.id],
        "sampler_ids": [each.id for each in store.samplers.values() if each.session == session.id],
        "user_metadata": session.user_metadata or None,
        "display_name": session.display_name,
    }


async def listed(call: Call) -> Any:
    """Ids of the tenant's sessions, the newest first."""
    return {"sessions": [each.id for each in call.page(call.service.store.sessions)[0]]}


async def sampler(call: Call) -> Any:
    """Checkpoint of a sampling session."""
    found = call.service.store.sampler(call.tenant, call.path["sampler"])
    return {"sampler_id": found.id, "base_model": call.service.model_name, "model_path": found.checkpoint or None}


ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", "/healthz", _always({"status": "ok"})),
    ("GET", "/get_server_capabilities", capabilities),
    ("POST", "/client/config", _always(_CLIENT_CONFIG)),
    ("POST", "/client/dynamic_config", _always(_DYNAMIC_CONFIG)),
    ("POST", "/telemetry", _always({"status": "accepted"})),  # nothing of it is stored or sent on
    ("POST", "/create_session", create),
    ("POST", "/session_heartbeat", heartbeat),
    ("POST", "/sessions/{session}/finish", finish),
    ("GET", "/sessions/{session}", get),
    ("GET", "/sessions", listed),
    ("GET", "/samplers/{sampler}", sampler),
]
