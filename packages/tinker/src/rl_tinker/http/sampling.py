"""Sampling sessions and samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_tinker import journal as db
from rl_tinker.errors import NotFoundError, RequestError, UnsupportedError
from rl_tinker.http.training import check_pending
from rl_tinker.service import api
from rl_tinker.types import Sampler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rl_tinker.http.app import Call
    from rl_tinker.service.samplers import Samplers
    from rl_tinker.service.store import Store

MAX_SAMPLES = 1024
MAX_TOP_K = 64


class SamplingRoutes:
    """Routes about sampling.

    Args:
        store: Records.
        samplers: Sampling servers.
        model_name: Name of the base model.
        vocab_size: Token ids of the base model.
    """

    def __init__(self, store: Store, samplers: Samplers, *, model_name: str, vocab_size: int) -> None:
        self._store, self._samplers = store, samplers
        self._model_name, self._vocab_size = model_name, vocab_size

    def routes(self) -> list[tuple[str, str, Callable[[Call], Awaitable[Any]]]]:
        """Method, path and handler of each route."""
        return [
            ("POST", "/create_sampling_session", self.create),
            ("POST", "/join_sampling_session", self.join),
            ("POST", "/asample", self.sample),
        ]

    async def create(self, call: Call) -> Any:
        """Create a sampling session, on a checkpoint or the base model."""
        request = call.json(api.CreateSampler)
        session = self._store.session(call.tenant, request.session_id)
        sampler = Sampler(
            id=f"{session.id}:sample:{request.sampling_session_seq_id}",
            session=session.id,
            tenant=call.tenant.name,
            checkpoint=self._checked(call, request.model_path, request.base_model),
        )
        await self._store.journal.write(db.put(sampler))
        self._store.apply([sampler])
        return {"sampling_session_id": sampler.id, "type": "create_sampling_session"}

    def _checked(self, call: Call, model_path: str | None, base_model: str | None) -> str:
        if base_model is not None and base_model != self._model_name:
            raise NotFoundError(f"base_model={base_model!r} is not served here; this server has {self._model_name!r}")
        if model_path is not None:
            return self._store.checkpoint(call.tenant, model_path).path
        if base_model is None:
            raise RequestError("give model_path, or base_model")
        return ""

    async def join(self, call: Call) -> Any:
        """Number for a further client of a sampling session, which keeps the ids of its requests apart."""
        sampler = self._store.sampler(call.tenant, call.json(api.OfSampler).sampling_session_id)
        session = self._store.session(call.tenant, sampler.session)
        session.num_clients += 1
        await self._store.journal.write(db.put(session))
        return {"client_counter": session.num_clients, "type": "join_sampling_session"}

    async def sample(self, call: Call) -> Any:
        """Start to sample; the answer is a future."""
        request = call.json(api.Sample)
        self._check(request)
        if request.sampling_session_id is not None:
            sampler = self._store.sampler(call.tenant, request.sampling_session_id)
            self._store.session(call.tenant, sampler.session)
            request_id = f"{sampler.id}:{request.seq_id or 0}"
        else:
            checkpoint = self._checked(call, request.model_path, request.base_model)
            sampler = Sampler(id="", session="", tenant=call.tenant.name, checkpoint=checkpoint)
            request_id = self._samplers.new_id()
        if self._samplers.task(call.tenant, request_id) is None:
            check_pending(self._store, self._samplers, call.tenant, count=request.num_samples)
            self._samplers.begin(call.tenant, sampler, request, request_id)
        ids = [f"{request_id}:{index}" for index in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def _check(self, request: api.Sample) -> None:
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
            if getattr(request, name):
                raise UnsupportedError(f"{name} is not available here; leave it out")
        for name, most in (("topk_prompt_logprobs", MAX_TOP_K), ("topk_sample_logprobs", MAX_TOP_K)):
            if not 0 <= getattr(request, name) <= most:
                raise RequestError(f"{name}={getattr(request, name)} must be from 0 to {most}")
        if not 1 <= request.num_samples <= MAX_SAMPLES:
            raise RequestError(f"num_samples={request.num_samples} must be from 1 to {MAX_SAMPLES}")
        if wrong := [each.type for each in request.prompt.chunks if each.type != "encoded_text"]:
            raise UnsupportedError(f"a prompt chunk of type {wrong[0]!r} is not available here; give encoded text")
        tokens = [token for each in request.prompt.chunks for token in each.tokens]
        if not tokens:
            raise RequestError("the prompt has no tokens")
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise RequestError(f"the prompt has a token id outside the vocabulary of {self._vocab_size}")
        last = request.prompt_logprobs_last_n
        if last is not None and not (request.prompt_logprobs and 1 <= last < len(tokens)):
            raise RequestError(
                f"prompt_logprobs_last_n={last} needs prompt_logprobs, and must be from 1 to {len(tokens) - 1}"
            )
