"""Operations on models: each is accepted as a future, which the client then polls."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import msgspec

from rl_tinker.errors import GoneError, NotFoundError, QuotaError, RequestError, UnsupportedError
from rl_tinker.http.app import Reply
from rl_tinker.service import api
from rl_tinker.types import AdapterSpec, Kind, Model, Operation
from rl_tinker.wire.rows import check_ranges, decode_forward_backward

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rl_tinker.http.app import Call
    from rl_tinker.service.samplers import Samplers
    from rl_tinker.service.scheduler import Scheduler
    from rl_tinker.service.store import Store
    from rl_tinker.service.tenants import Tenant
    from rl_tinker.types import Session

POLL_S = 20.0
"""Seconds that a poll of a future waits; clients give up on a poll after 45."""
MAX_RANK = 256
_GIB = 2**30


class TrainingRoutes:
    """Routes about models.

    Args:
        store: Records.
        scheduler: Queue of operations.
        samplers: Sampling, whose futures are polled at the same route.
        model_name: Name of the base model.
        tokenizer: Folder or id of its tokenizer.
        vocab_size: Token ids of the base model.
        is_tied: Whether its output layer is its embedding, which no adapter goes on.
        max_len: Longest row, tokens.
        is_full: Whether all weights are trained.
    """

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        samplers: Samplers,
        *,
        model_name: str,
        tokenizer: str,
        vocab_size: int,
        is_tied: bool,
        max_len: int,
        is_full: bool,
    ) -> None:
        self._store, self._scheduler, self._samplers = store, scheduler, samplers
        self._model_name, self._tokenizer = model_name, tokenizer
        self._vocab_size, self._is_tied, self._max_len = vocab_size, is_tied, max_len
        self._is_full = is_full

    def routes(self) -> list[tuple[str, str, Callable[[Call], Awaitable[Any]]]]:
        """Method, path and handler of each route."""
        return [
            ("POST", "/create_model", self.create_model),
            ("POST", "/get_info", self.get_info),
            ("POST", "/forward", self.forward_backward),
            ("POST", "/forward_backward", self.forward_backward),
            ("POST", "/optim_step", self.optim_step),
            ("POST", "/save_weights", self.save_weights),
            ("POST", "/save_weights_for_sampler", self.save_weights_for_sampler),
            ("POST", "/save_weights_external", self.save_weights_external),
            ("POST", "/load_weights", self.load_weights),
            ("POST", "/retrieve_future", self.retrieve_future),
            ("POST", "/cancel_future", self.cancel_future),
        ]

    async def create_model(self, call: Call) -> Any:
        """Add a LoRA adapter to the base model, or a copy of all its weights, as a new training run."""
        request = call.json(api.CreateModel)
        session = self._store.session(call.tenant, request.session_id)
        self._check_base(request.base_model)
        _check_optimizer(request.optimizer_config)
        adapter = self._adapter(request.lora_config)
        return await self._create(call, session, request.model_seq_id, adapter, Kind.CREATE, request.user_metadata)

    def _adapter(self, lora: api.Lora | None) -> AdapterSpec | None:
        """Adapter of a new model; None: all weights, which no configuration or rank 0 asks for."""
        if lora is None or lora.rank == 0:
            self._check_kind(is_full=True)
            return None
        self._check_kind(is_full=False)
        if not 1 <= lora.rank <= MAX_RANK:
            raise RequestError(f"lora_config.rank={lora.rank} must be from 1 to {MAX_RANK}")
        train_unembed = lora.train_unembed and not self._is_tied
        if not (lora.train_attn or lora.train_mlp or train_unembed):
            tied = "; the output layer of this model is its embedding" if self._is_tied else ""
            raise RequestError(f"lora_config adapts nothing; set train_attn or train_mlp{tied}")
        return AdapterSpec(
            rank=lora.rank,
            seed=random.SystemRandom().randrange(2**31) if lora.seed is None else lora.seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=train_unembed,
        )

    def _check_kind(self, *, is_full: bool) -> None:
        if is_full and not self._is_full:
            raise UnsupportedError(
                "this server trains LoRA adapters: give a lora_config with a rank of 1 or more, or start it with "
                "training=full"
            )
        if self._is_full and not is_full:
            raise UnsupportedError("this server was started with training=full: give rank=0, which means all weights")

    async def _create(
        self,
        call: Call,
        session: Session,
        number: int,
        adapter: AdapterSpec | None,
        kind: Kind,
        metadata: dict[str, Any] | None,
    ) -> Any:
        model_id, now = f"{session.id}:train:{number}", time.time()
        live = [each for each in self._store.models.values() if not each.is_unloaded]
        own = [each for each in live if each.tenant == call.tenant.name]
        if self._is_full and len(own) < len(live):
            raise QuotaError("another tenant trains all weights of this server; try again once its sessions have ended")
        if model_id not in self._store.models and len(own) >= call.tenant.max_models:
            raise QuotaError(
                f"{call.tenant.name} has max_models={call.tenant.max_models} models; finish sessions that you do not "
                "need, or wait until they end"
            )
        model = Model(
            id=model_id,
            session=session.id,
            tenant=call.tenant.name,
            created=now,
            last_request=now,
            adapter=adapter,
            user_metadata=metadata,
        )
        return await self._submit(call, self._store.models.get(model_id, model), 0, kind, model)

    async def get_info(self, call: Call) -> Any:
        """Base model, tokenizer and adapter of a training run."""
        model = self._store.model(call.tenant, call.json(api.OfModel).model_id)
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_name": self._model_name,
            "is_lora": model.adapter is not None,
            "lora_rank": None if model.adapter is None else model.adapter.rank,
            "model_data": {"model_name": self._model_name, "tokenizer_id": self._tokenizer, "arch": "transformer"},
        }

    async def forward_backward(self, call: Call) -> Any:
        """Queue a forward pass, or a forward and backward pass."""
        request = await asyncio.to_thread(decode_forward_backward, call.body)
        check_ranges(request, vocab_size=self._vocab_size, max_len=self._max_len)
        model = self._store.model(call.tenant, request.model_id)
        kind = Kind.FORWARD if request.forward_only else Kind.FORWARD_BACKWARD
        return await self._submit(call, model, request.seq_id, kind, tokens=request.num_tokens)

    async def optim_step(self, call: Call) -> Any:
        """Queue an optimizer step."""
        request = call.json(api.OptimStep)
        if request.optimizer_params is not None:
            raise UnsupportedError("optimizer_params: this server has Adam alone; give AdamParams")
        params = request.adam_params
        in_range = params.learning_rate >= 0 and 0 <= params.beta1 < 1 and 0 <= params.beta2 < 1 and params.eps > 0
        if not in_range or params.weight_decay < 0 or params.grad_clip_norm < 0:
            raise RequestError(f"{params}: rates and decays are 0 or more, betas below 1, and eps above 0")
        model = self._store.model(call.tenant, request.model_id)
        return await self._submit(call, model, request.seq_id, Kind.OPTIM_STEP)

    async def save_weights(self, call: Call) -> Any:
        """Queue a checkpoint of weights and optimizer."""
        return await self._save(call, Kind.SAVE)

    async def save_weights_for_sampler(self, call: Call) -> Any:
        """Queue a checkpoint of weights to sample from."""
        return await self._save(call, Kind.SAVE_FOR_SAMPLER)

    async def save_weights_external(self, call: Call) -> Any:
        """Queue a checkpoint in peft's format, to download."""
        return await self._save(call, Kind.SAVE_EXTERNAL)

    async def _save(self, call: Call, kind: Kind) -> Any:
        request = call.json(api.Save)
        if request.kind == "inflight":
            raise UnsupportedError("kind='inflight' is not available here; sampling clients are snapshots")
        if request.age_encryption_recipients:
            raise UnsupportedError("age_encryption_recipients: encrypted exports are not available here")
        if request.path is not None:
            api.check_name(request.path)
        elif kind == Kind.SAVE_EXTERNAL:
            raise RequestError("save_weights_external needs a path, the name of the checkpoint")
        api.expiry(request.ttl_seconds)
        used = sum(each.size_bytes for each in self._store.checkpoints.values() if each.tenant == call.tenant.name)
        if used >= call.tenant.max_checkpoint_gib * _GIB:
            raise RequestError(
                f"{call.tenant.name} has {used / _GIB:.1f} GiB of checkpoints, and its quota is "
                f"{call.tenant.max_checkpoint_gib} GiB; delete some"
            )
        return await self._submit(call, self._store.model(call.tenant, request.model_id), request.seq_id, kind)

    async def load_weights(self, call: Call) -> Any:
        """Queue a load of a checkpoint, onto a model or as a new one."""
        request = call.json(api.LoadWeights)
        if request.weights_access_token is not None:
            raise UnsupportedError("weights_access_token: publish the checkpoint, which any tenant may then load")
        if request.optimizer_config is not None:
            _check_optimizer(request.optimizer_config)
        if request.session_id is None or request.model_seq_id is None:
            if request.model_id is None or request.seq_id is None:
                raise RequestError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
            model = self._store.model(call.tenant, request.model_id)
            return await self._submit(call, model, request.seq_id, Kind.LOAD)
        session = self._store.session(call.tenant, request.session_id)
        if request.base_model is not None:
            self._check_base(request.base_model)
        checkpoint = self._store.checkpoint(call.tenant, request.path)
        self._check_kind(is_full=checkpoint.adapter is None)
        metadata = request.user_metadata
        return await self._create(call, session, request.model_seq_id, checkpoint.adapter, Kind.LOAD, metadata)

    def _check_base(self, name: str) -> None:
        if name != self._model_name:
            raise NotFoundError(f"base_model={name!r} is not served here; this server has {self._model_name!r}")

    async def _submit(
        self, call: Call, model: Model, seq: int, kind: Kind, *records: Model, tokens: int = 0
    ) -> dict[str, Any]:
        """Accept an operation, and answer with its future."""
        self._store.session(call.tenant, model.session)
        operation = Operation(
            id=f"{model.id}:{seq}",
            model=model.id,
            tenant=call.tenant.name,
            seq=seq,
            kind=kind,
            body=call.body,
            created=time.time(),
            tokens=tokens,
        )
        if seq < 0 or (seq == 0) != bool(records):
            raise RequestError(f"seq_id={seq}: operations of a model are numbered from 1")
        if operation.id not in self._store.operations:
            check_pending(self._store, self._samplers, call.tenant, num_bytes=len(call.body) if tokens else 0)
        accepted = await self._scheduler.submit(operation, *records)
        return {"request_id": accepted.id, "model_id": model.id}

    # Futures

    async def retrieve_future(self, call: Call) -> Any:
        """Result of an operation or a sample; 408, after a while, if it has not ended."""
        request_id = call.json(api.RetrieveFuture).request_id
        operation = self._store.operations.get(request_id)
        if operation is None or operation.tenant != call.tenant.name:
            return await self._retrieve_sample(call, request_id)
        if not await self._store.wait_for(operation, POLL_S):
            return _try_again(request_id)
        ended = self._store.operations[request_id]
        return Reply(body=ended.result or self._store.journal.result(request_id), content_type=ended.content_type)

    async def _retrieve_sample(self, call: Call, request_id: str) -> Any:
        task = self._samplers.task(call.tenant, request_id)
        if task is None:
            raise GoneError(
                f"there is no future {request_id!r}: it expired, or the server started again; send it again"
            )
        if not (await asyncio.wait([task], timeout=POLL_S))[0]:
            return _try_again(request_id)
        if task.cancelled():
            return {"error": "cancelled", "category": "user"}
        error = task.exception()
        if error is None:
            return Reply(body=task.result(), content_type="application/x-protobuf")
        if isinstance(error, RequestError):
            return {"error": str(error), "category": "user"}
        raise GoneError(f"the sampling servers could not answer: {error}; send it again")

    async def cancel_future(self, call: Call) -> Any:
        """Stop a sample, or an operation that has not begun."""
        request_id = call.json(api.RetrieveFuture).request_id
        operation = self._store.operations.get(request_id)
        if operation is not None and operation.tenant == call.tenant.name:
            self._scheduler.cancel(operation)
        elif (task := self._samplers.task(call.tenant, request_id)) is not None:
            task.cancel()
        return Reply(status=204)


def _try_again(request_id: str) -> Reply:
    body = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    return Reply(body=msgspec.json.encode(body), status=408)


def _check_optimizer(given: api.Optimizer) -> None:
    if given.type != "adamw":
        raise UnsupportedError(f"optimizer_config.type={given.type!r} is not available here; available: 'adamw'")


def check_pending(store: Store, samplers: Samplers, tenant: Tenant, *, count: int = 1, num_bytes: int = 0) -> None:
    """Check the quotas of requests that wait or run, before `count` more with `num_bytes` are accepted.

    Raises:
        QuotaError: one is reached; a request that is larger than a quota is accepted alone, and one without rows
            whatever waits, as the optim_step that makes room.
    """
    pending = store.pending[tenant.name] + samplers.pending_of(tenant)
    if pending and pending + count > tenant.max_pending:
        raise QuotaError(
            f"{tenant.name} has {pending} requests and sequences that wait or run; its quota is {tenant.max_pending}"
        )
    held = store.body_bytes[tenant.name]
    if held and num_bytes and held + num_bytes > tenant.max_pending_mib * 2**20:
        raise QuotaError(
            f"{tenant.name} has {held / 2**20:.1f} MiB of requests that wait or run, or whose gradient no optim_step "
            f"has used; its quota is {tenant.max_pending_mib} MiB"
        )
