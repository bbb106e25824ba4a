"""Operations on models: what each kind does to the training processes and to the model's durable state."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from rl_tinker import journal as db
from rl_tinker.errors import CommandError, RequestError
from rl_tinker.service import api
from rl_tinker.service.store import new_name
from rl_tinker.types import Checkpoint, Command, Kind, Sampler, Verb
from rl_tinker.wire.protobuf import message

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rl_tinker.base import TrainingGroup
    from rl_tinker.service.store import Store
    from rl_tinker.types import Answer, Model, Operation

PROTOBUF = "application/x-protobuf"
_KINDS = {Kind.SAVE: "training", Kind.SAVE_FOR_SAMPLER: "sampler", Kind.SAVE_EXTERNAL: "external"}
"""Kind of the checkpoint that an operation makes."""


def failure(error: str, *, is_user: bool) -> dict[str, Any]:
    """Outcome of an operation that failed."""
    return {"error": error, "category": "user" if is_user else "server"}


def success(**result: Any) -> dict[str, Any]:
    """Outcome with a JSON result."""
    return {"result": msgspec.json.encode(result)}


class ModelOperations:
    """Operations on models, and the set of models that the training processes hold.

    An outcome is a mapping: `result` (with `content_type`), or `error` and `category`; `state` and `steps`, changes of
    the model; `drops_gradient`; `records` and `statements`, to commit with it.
    """

    def __init__(self, store: Store, group: TrainingGroup, *, max_adapters: int) -> None:
        self._store, self._group, self._max_adapters = store, group, max_adapters
        self._resident: OrderedDict[str, None] = OrderedDict()
        """Models in the memory of the processes, the one used last at the end."""
        self._incarnation = -1

    def forget(self, model_id: str) -> None:
        """Have a model restored before its next operation."""
        self._resident.pop(model_id, None)

    def forget_all(self) -> None:
        """Have every model restored before its next operation."""
        self._resident.clear()

    async def passes(self, batch: Sequence[Operation]) -> list[dict[str, Any]]:
        """Run forward (and backward) passes of several models together; returns an outcome for each."""
        requests = [(each.model, each.body) for each in batch]
        command = Command(verb=Verb.FORWARD, requests=requests, backward=batch[0].kind == Kind.FORWARD_BACKWARD)
        try:
            await self._bring([self._store.models[each.model] for each in batch])
            answer = await self._group.call(command)
        except CommandError as error:
            if len(batch) == 1:
                return [failure(str(error), is_user=True)]
            return [outcome for each in batch for outcome in await self.passes([each])]
        return [
            failure(error, is_user=True) if error else self._passed(each, result)
            for each, error, result in zip(batch, answer.errors, answer.results, strict=True)
        ]

    def _passed(self, operation: Operation, result: bytes) -> dict[str, Any]:
        statements: list[db.Statement] = []
        if operation.kind == Kind.FORWARD_BACKWARD:
            metrics = dict(message("ForwardBackwardOutput").FromString(result).metrics)
            step = self._store.models[operation.model].step
            loss = metrics.get("loss:sum", 0.0)
            statements.append(db.add_point(operation.model, step, time.time(), loss, operation.tokens))
        return {"result": result, "content_type": PROTOBUF, "statements": statements}

    async def run(self, operation: Operation) -> dict[str, Any]:
        """Run an operation that is no pass; returns its outcome."""
        model = self._store.models[operation.model]
        try:
            if operation.kind not in (Kind.CREATE, Kind.LOAD):
                _check_usable(model)
            match operation.kind:
                case Kind.CREATE:
                    return await self._create(model)
                case Kind.LOAD:
                    return await self._load(model, msgspec.json.decode(operation.body, type=api.LoadWeights))
                case Kind.REJECTED:
                    return failure(operation.body.decode(), is_user=True)
                case Kind.OPTIM_STEP:
                    return await self._optim_step(model, msgspec.json.decode(operation.body, type=api.OptimStep))
                case _:
                    return await self._save(operation, model, msgspec.json.decode(operation.body, type=api.Save))
        except (CommandError, RequestError) as error:
            return failure(str(error), is_user=True)

    async def _call(self, verb: Verb, model: Model, state: str | Path = "", **more: Any) -> Answer:
        """Run a command on a model; a relative `state` is the name of one of its states."""
        folder = str(self._store.models_folder / state)  # unchanged, if it is absolute
        return await self._group.call(Command(verb=verb, model=model.id, adapter=model.adapter, folder=folder, **more))

    async def _create(self, model: Model) -> dict[str, Any]:
        await self._make_room([model])
        state = new_name()
        await self._call(Verb.CREATE, model, state)
        self._resident[model.id] = None
        return success(model_id=model.id, type="create_model") | {"state": state}

    async def _load(self, model: Model, request: api.LoadWeights) -> dict[str, Any]:
        checkpoint = self._store.checkpoints.get(request.path)
        if checkpoint is None or (checkpoint.tenant != model.tenant and not checkpoint.is_public):
            raise RequestError(f"there is no checkpoint {request.path!r}; it may have expired")
        if checkpoint.kind != "training":
            raise RequestError(f"{request.path} was not saved by save_state; load one that was")
        if _shape(checkpoint) != _shape(model):
            raise RequestError(f"{request.path} has {_shape(checkpoint)}, and {model.id} has {_shape(model)}")
        await self._make_room([model])
        if model.id in self._resident:  # a fresh adapter: the old one's gradient goes
            await self._call(Verb.DROP, model)
            self.forget(model.id)
        source = self._store.checkpoints_folder / checkpoint.folder
        await self._call(Verb.RESTORE, model, source, optimizer=request.optimizer)
        state = new_name()
        await self._call(Verb.SAVE, model, state)
        self._resident[model.id] = None
        loaded = success(path=request.path, model_id=model.id, type="load_weights")
        return loaded | {"state": state, "drops_gradient": True}

    async def _optim_step(self, model: Model, request: api.OptimStep) -> dict[str, Any]:
        await self._bring([model])
        state = new_name()
        try:
            answer = await self._call(Verb.OPTIM_STEP, model, state, adam=request.adam_params)
        except CommandError as error:  # no finite gradient, or no room on disk; memory may be ahead of the state
            await self._call(Verb.DROP, model)
            self.forget(model.id)
            return failure(str(error), is_user=True) | {"drops_gradient": True}
        return success(metrics=answer.metrics) | {"state": state, "steps": 1, "drops_gradient": True}

    async def _save(self, operation: Operation, model: Model, request: api.Save) -> dict[str, Any]:
        """Checkpoint under the name of the request; only `save_state` asks whether that may replace another."""
        kind = _KINDS[operation.kind]
        if kind == "sampler":
            path = api.sampler_path(model.id, request, operation.seq)
        else:
            folder = "weights" if kind == "training" else "external_weights"
            path = f"tinker://{model.id}/{folder}/{api.check_name(request.path or f'step-{model.step}')}"
        if kind == "training" and path in self._store.checkpoints and not request.overwrite:
            raise RequestError(f"{path} exists; save it under another name, or with overwrite")
        checkpoint = await self._checkpoint(model, path, kind, request.ttl_seconds, request.user_metadata)
        if kind != "sampler" or request.path is not None:
            size = {"size_bytes": checkpoint.size_bytes} if kind == "external" else {}
            return success(path=path, type=operation.kind, **size) | {"records": [checkpoint]}
        sampler = Sampler(
            id=f"{model.session}:sample:{request.sampling_session_seq_id}",
            session=model.session,
            tenant=model.tenant,
            checkpoint=path,
        )
        result = success(sampling_session_id=sampler.id, type=operation.kind)
        return result | {"records": [checkpoint, sampler]}

    async def _checkpoint(
        self, model: Model, path: str, kind: str, ttl_s: int | None, metadata: dict[str, Any] | None
    ) -> Checkpoint:
        """Checkpoint of the durable state, which is what the processes hold."""
        expires = api.expiry(ttl_s)
        if model.adapter is None and kind != "training":
            await self._bring([model])
            folder = new_name()
            await self._call(Verb.EXPORT, model, self._store.checkpoints_folder / folder)
            size = self._store.sync_checkpoint(folder)
        else:
            folder, size = self._store.link_checkpoint(model.state, with_optimizer=kind == "training")
        return Checkpoint(
            path=path,
            model=model.id,
            tenant=model.tenant,
            kind=kind,
            folder=folder,
            created=time.time(),
            adapter=model.adapter,
            step=model.step,
            size_bytes=size,
            expires=expires,
            user_metadata=metadata,
        )

    async def _bring(self, models: Sequence[Model]) -> None:
        """Restore those models that the processes do not hold."""
        for model in models:
            _check_usable(model)
        await self._make_room(models)
        for model in models:
            if model.id not in self._resident:
                await self._call(Verb.RESTORE, model, model.state)
                for operation in self._store.gradient_of(model):
                    again = Command(verb=Verb.FORWARD, requests=[(model.id, operation.body)], backward=True)
                    await self._group.call(again)
                self._resident[model.id] = None
            self._resident.move_to_end(model.id)

    async def _make_room(self, models: Sequence[Model]) -> None:
        """Drop the models that were used least recently; one with a gradient computes it again when it comes back."""
        if self._group.incarnation != self._incarnation:
            self._resident.clear()
            self._incarnation = self._group.incarnation
        wanted = {each.id for each in models}
        for model_id in list(self._resident):
            known = self._store.models.get(model_id)
            excess = len(self._resident.keys() | wanted) - self._max_adapters
            if model_id not in wanted and (excess > 0 or known is None or known.is_unloaded):
                await self._group.call(Command(verb=Verb.DROP, model=model_id))
                self.forget(model_id)


def _check_usable(model: Model) -> None:
    if model.is_unloaded:
        raise CommandError("the session of the model has ended")
    if not model.state:
        raise CommandError(f"{model.id} has no weights, since its creation failed; create another model")


def _shape(owner: Model | Checkpoint) -> str:
    adapter = owner.adapter
    if adapter is None:
        return "all weights"
    named = {"attn": adapter.train_attn, "mlp": adapter.train_mlp, "unembed": adapter.train_unembed}
    return f"an adapter of rank {adapter.rank} on {', '.join(name for name, is_on in named.items() if is_on)}"
