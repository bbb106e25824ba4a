"""Operations on models: each is accepted as a future, which the client then polls."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from rl_tinker.errors import GoneError, QuotaError, RequestError, UnsupportedError
from rl_tinker.http.app import Reply
from rl_tinker.service import api
from rl_tinker.types import AdapterSpec, Kind, Model, Operation
from rl_tinker.wire.rows import check_ranges, decode_forward_backward, number_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_tinker.http.app import Call, Handler
    from rl_tinker.types import Session

POLL_S = 20.0
"""Seconds that a poll of a future waits; clients give up on a poll after 45."""
_GIB = 2**30


async def create_model(call: Call) -> Any:
    """Add a LoRA adapter to the base model, or a copy of all its weights, as a new training run."""
    request = call.json(api.CreateModel)
    session = call.service.store.session(call.tenant, request.session_id)
    call.check_base(request.base_model)
    _check_optimizer(request.optimizer_config)
    adapter = _adapter(call, request.lora_config)
    return await _create(call, session, request.model_seq_id, adapter, Kind.CREATE, request.user_metadata)


def _adapter(call: Call, lora: api.Lora | None) -> AdapterSpec | None:
    """Adapter of a new model; None: all weights, which no configuration or rank 0 asks for."""
    is_tied, is_full = call.service.is_tied, lora is None or lora.rank == 0
    _check_kind(call, is_full=is_full)
    if lora is None or is_full:
        return None
    if not 1 <= lora.rank <= call.service.max_rank:
        raise RequestError(f"lora_config.rank={lora.rank} must be from 1 to max_rank={call.service.max_rank}")
    train_unembed = lora.train_unembed and not is_tied
    if not (lora.train_attn or lora.train_mlp or train_unembed):
        tied = "; the output layer of this model is its embedding" if is_tied else ""
        raise RequestError(f"lora_config adapts nothing; set train_attn or train_mlp{tied}")
    return AdapterSpec(
        rank=lora.rank,
        seed=random.SystemRandom().randrange(2**31) if lora.seed is None else lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=train_unembed,
    )


def _check_kind(call: Call, *, is_full: bool) -> None:
    if is_full and not call.service.is_full:
        raise UnsupportedError(
            "this server trains LoRA adapters: give a lora_config with a rank of 1 or more, or start it with "
            "training=full"
        )
    if call.service.is_full and not is_full:
        raise UnsupportedError("this server was started with training=full: give rank=0, which means all weights")


def _check_optimizer(given: api.Optimizer | None) -> None:
    if given is not None and given.type != "adamw":
        raise UnsupportedError(f"optimizer_config.type={given.type!r} is not available here; available: 'adamw'")


async def _create(
    call: Call, session: Session, number: int, adapter: AdapterSpec | None, kind: Kind, metadata: dict[str, Any] | None
) -> Any:
    models = call.service.store.models
    model_id, now = f"{session.id}:train:{number}", time.time()
    live = [each for each in models.values() if not each.is_unloaded]
    own = [each for each in live if each.tenant == call.tenant.name]
    if call.service.is_full and len(own) < len(live):
        raise QuotaError("another tenant trains all weights of this server; try again once its sessions have ended")
    if model_id not in models and len(own) >= call.tenant.max_models:
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
    return await _submit(call, models.get(model_id, model), 0, kind, model)


async def get_info(call: Call) -> Any:
    """Base model, tokenizer and adapter of a training run."""
    model, name = call.service.store.model(call.tenant, call.text("model_id")), call.service.model_name
    return {
        "type": "get_info",
        "model_id": model.id,
        "model_name": name,
        "is_lora": model.adapter is not None,
        "lora_rank": model.rank,
        "model_data": {"model_name": name, "tokenizer_id": call.service.model_folder, "arch": "transformer"},
    }


async def forward_backward(call: Call) -> Any:
    """Queue a forward pass, or a forward and backward pass."""
    request = await asyncio.to_thread(decode_forward_backward, call.body)
    check_ranges(request, vocab_size=call.service.vocab_size, max_len=call.service.max_len)
    model = call.service.store.model(call.tenant, request.model_id)
    kind = Kind.FORWARD if request.forward_only else Kind.FORWARD_BACKWARD
    return await _submit(call, model, request.seq_id, kind, tokens=request.num_tokens)


async def optim_step(call: Call) -> Any:
    """Queue an optimizer step."""
    request = call.json(api.OptimStep)
    if request.optimizer_params is not None:
        raise UnsupportedError("optimizer_params: this server has Adam alone; give AdamParams")
    model = call.service.store.model(call.tenant, request.model_id)
    return await _submit(call, model, request.seq_id, Kind.OPTIM_STEP)


async def save(kind: Kind, call: Call) -> Any:
    """Queue a checkpoint: of weights and optimizer, of weights to sample from, or in peft's format to download."""
    request, store, tenant = call.json(api.Save), call.service.store, call.tenant
    if request.kind == "inflight":
        raise UnsupportedError("kind='inflight' is not available here; sampling clients are snapshots")
    if request.age_encryption_recipients:
        raise UnsupportedError("age_encryption_recipients: encrypted exports are not available here")
    if request.path is not None:
        api.check_name(request.path)
    elif kind == Kind.SAVE_EXTERNAL:
        raise RequestError("save_weights_external needs a path, the name of the checkpoint")
    if f"{request.model_id}:{request.seq_id}" not in store.operations:  # else it is a retry
        if kind == Kind.SAVE_FOR_SAMPLER and request.path is None:
            call.check_samplers()
        used = sum(each.size_bytes for each in store.checkpoints.values() if each.tenant == tenant.name)
        if used >= tenant.max_checkpoint_gib * _GIB:
            raise RequestError(
                f"{tenant.name} has {used / _GIB:.1f} GiB of checkpoints, and its quota is "
                f"{tenant.max_checkpoint_gib} GiB; delete some"
            )
    return await _submit(call, store.model(tenant, request.model_id), request.seq_id, kind)


async def load_weights(call: Call) -> Any:
    """Queue a load of a checkpoint, onto a model or as a new one."""
    request, store = call.json(api.LoadWeights), call.service.store
    if request.weights_access_token is not None:
        raise UnsupportedError("weights_access_token: publish the checkpoint, which any tenant may then load")
    _check_optimizer(request.optimizer_config)
    if request.session_id is None or request.model_seq_id is None:
        if request.model_id is None or request.seq_id is None:
            raise RequestError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
        return await _submit(call, store.model(call.tenant, request.model_id), request.seq_id, Kind.LOAD)
    session = store.session(call.tenant, request.session_id)
    call.check_base(request.base_model)
    adapter = store.checkpoint(call.tenant, request.path).adapter
    _check_kind(call, is_full=adapter is None)
    return await _create(call, session, request.model_seq_id, adapter, Kind.LOAD, request.user_metadata)


async def _submit(call: Call, model: Model, seq: int, kind: Kind, *records: Model, tokens: int = 0) -> Any:
    """Accept an operation, and answer with its future."""
    store = call.service.store
    store.session(call.tenant, model.session)
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
    if operation.id not in store.operations:
        call.check_pending(num_bytes=len(call.body) if tokens else 0)
    accepted = await call.service.scheduler.submit(operation, *records)
    return {"request_id": accepted.id, "model_id": model.id}


async def _numbered(handler: Handler, read_number: Callable[[bytes], tuple[str, int]], call: Call) -> Any:
    """Answer a request about a model; one that is rejected uses up its number, for which later ones would wait."""
    try:
        return await handler(call)
    except RequestError as error:
        if error.status == RequestError.status:
            await _use_number(call, *read_number(call.body), str(error))
        raise


async def _use_number(call: Call, model_id: str, seq: int, error: str) -> None:
    model = call.service.store.models.get(model_id)
    if model is not None and model.tenant == call.tenant.name and seq >= max(model.next_seq, 1):
        await _submit(replace(call, body=error.encode()), model, seq, Kind.REJECTED)


def _number_in_json(body: bytes) -> tuple[str, int]:
    try:
        found = msgspec.json.decode(body, type=api.Numbered)
    except msgspec.DecodeError:
        return "", 0
    return found.model_id, found.seq_id


async def retrieve_future(call: Call) -> Any:
    """Result of an operation or a sample; 408, after a while, if it has not ended."""
    store, request_id = call.service.store, call.text("request_id")
    operation = store.operations.get(request_id)
    if operation is None or operation.tenant != call.tenant.name:
        return await _retrieve_sample(call, request_id)
    if not await store.wait_for(operation, POLL_S):
        return _try_again(request_id)
    ended = store.operations[request_id]
    return Reply(body=ended.result or store.journal.result(request_id), content_type=ended.content_type)


async def _retrieve_sample(call: Call, request_id: str) -> Any:
    task = call.service.samplers.task(call.tenant, request_id)
    if task is None:
        raise GoneError(f"there is no future {request_id!r}: it expired, or the server started again; send it again")
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


def _try_again(request_id: str) -> Reply:
    body = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    return Reply(body=msgspec.json.encode(body), status=408)


async def cancel_future(call: Call) -> Any:
    """Stop a sample, or an operation that has not begun."""
    request_id = call.text("request_id")
    operation = call.service.store.operations.get(request_id)
    if operation is not None and operation.tenant == call.tenant.name:
        call.service.scheduler.cancel(operation)
    elif (task := call.service.samplers.task(call.tenant, request_id)) is not None:
        task.cancel()
    return Reply(status=204)


ROUTES: list[tuple[str, str, Handler]] = [
    ("POST", "/create_model", create_model),
    ("POST", "/get_info", get_info),
    ("POST", "/forward", partial(_numbered, forward_backward, number_of)),
    ("POST", "/forward_backward", partial(_numbered, forward_backward, number_of)),
    ("POST", "/optim_step", partial(_numbered, optim_step, _number_in_json)),
    ("POST", "/save_weights", partial(_numbered, partial(save, Kind.SAVE), _number_in_json)),
    ("POST", "/save_weights_for_sampler", partial(_numbered, partial(save, Kind.SAVE_FOR_SAMPLER), _number_in_json)),
    ("POST", "/save_weights_external", partial(_numbered, partial(save, Kind.SAVE_EXTERNAL), _number_in_json)),
    ("POST", "/load_weights", partial(_numbered, load_weights, _number_in_json)),
    ("POST", "/retrieve_future", retrieve_future),
    ("POST", "/cancel_future", cancel_future),
]
