"""Sampling sessions and samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_tinker import journal as db
from rl_tinker.errors import RequestError, UnsupportedError
from rl_tinker.service import api
from rl_tinker.types import Sampler

if TYPE_CHECKING:
    from rl_tinker.http.app import Call, Handler


async def create(call: Call) -> Any:
    """Create a sampling session, on a checkpoint or the base model."""
    request, store = call.json(api.CreateSampler), call.service.store
    session = store.session(call.tenant, request.session_id)
    sampler = Sampler(
        id=f"{session.id}:sample:{request.sampling_session_seq_id}",
        session=session.id,
        tenant=call.tenant.name,
        checkpoint=_checkpoint(call, request),
    )
    if sampler.id not in store.samplers:
        call.check_samplers()
    await store.put(sampler)
    return {"sampling_session_id": sampler.id, "type": "create_sampling_session"}


def _checkpoint(call: Call, request: api.CreateSampler | api.Sample) -> str:
    """Path of the checkpoint that a request asks for; empty for the base model."""
    call.check_base(request.base_model)
    if request.model_path is not None:
        return call.service.store.checkpoint(call.tenant, request.model_path).path
    if request.base_model is None:
        raise RequestError("give model_path, or base_model")
    return ""


async def join(call: Call) -> Any:
    """Number for a further client of a sampling session, which keeps the ids of its requests apart."""
    store = call.service.store
    sampler = store.sampler(call.tenant, call.text("sampling_session_id"))
    session = store.session(call.tenant, sampler.session)
    session.num_clients += 1
    await store.journal.write(db.put(session))
    return {"client_counter": session.num_clients, "type": "join_sampling_session"}


async def sample(call: Call) -> Any:
    """Start to sample; the answer is a future."""
    request, store, samplers = call.json(api.Sample), call.service.store, call.service.samplers
    _check(request, call.service.vocab_size)
    if request.sampling_session_id is not None:
        sampler = store.sampler(call.tenant, request.sampling_session_id)
        store.session(call.tenant, sampler.session)
        request_id = f"{sampler.id}:{request.seq_id or 0}"
    else:
        sampler = Sampler(id="", session="", tenant=call.tenant.name, checkpoint=_checkpoint(call, request))
        request_id = samplers.new_id()
    if samplers.task(call.tenant, request_id) is None:
        call.check_pending(count=request.num_samples)
        samplers.begin(call.tenant, sampler, request, request_id)
    ids = [f"{request_id}:{index}" for index in range(request.num_samples)]
    return {"request_id": request_id, "sample_sequence_ids": ids}


def _check(request: api.Sample, vocab_size: int) -> None:
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if getattr(request, name):
            raise UnsupportedError(f"{name} is not available here; leave it out")
    if wrong := [each.type for each in request.prompt.chunks if each.type != "encoded_text"]:
        raise UnsupportedError(f"a prompt chunk of type {wrong[0]!r} is not available here; give encoded text")
    tokens = request.prompt.tokens
    if not tokens:
        raise RequestError("the prompt has no tokens")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise RequestError(f"the prompt has a token id outside the vocabulary of {vocab_size}")
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 1 <= last < len(tokens)):
        raise RequestError(
            f"prompt_logprobs_last_n={last} needs prompt_logprobs, and must be from 1 to {len(tokens) - 1}"
        )


ROUTES: list[tuple[str, str, Handler]] = [
    ("POST", "/create_sampling_session", create),
    ("POST", "/join_sampling_session", join),
    ("POST", "/asample", sample),
]
