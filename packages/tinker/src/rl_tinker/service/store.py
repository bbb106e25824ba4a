"""Records in memory, backed by the journal, and the folders that they name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from rl_tinker import journal as db
from rl_tinker.durable import sync_folder
from rl_tinker.errors import GoneError, NotFoundError
from rl_tinker.service.api import EPHEMERAL
from rl_tinker.types import Checkpoint, Kind, Model, Sampler, Session, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from rl_tinker.service.tenants import Tenant
    from rl_tinker.types import Operation

R = TypeVar("R", Session, Model, Sampler)
RESULT_S = 3600.0
"""Seconds that the result of an operation stays available."""
SESSION_S = 3600.0
"""Seconds without a heartbeat after which a session ends. Clients send one every 10 seconds."""
ENDED_S = 30 * 86400.0
"""Seconds that records of an ended session stay, and longer where a run of it has a checkpoint."""


class Store:
    """Sessions, models, samplers, checkpoints and operations of a server.

    Raises:
        JournalError: the journal cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self.journal = db.Journal(folder / "journal.sqlite")
        self.models_folder, self.checkpoints_folder = folder / "models", folder / "checkpoints"
        self.sessions = self.journal.records(Session)
        self.models = self.journal.records(Model)
        self.samplers = self.journal.records(Sampler)
        self.checkpoints = self.journal.records(Checkpoint)
        self._records: dict[type[db.Record], dict[str, Any]] = {
            Session: self.sessions, Model: self.models, Sampler: self.samplers, Checkpoint: self.checkpoints
        }  # fmt: skip
        self.operations: dict[str, Operation] = {each.id: each for each in self.journal.operations()}
        self.pending = Counter(each.tenant for each in self.operations.values() if each.status == Status.PENDING)
        """Number of each tenant's operations that wait or run."""
        self.body_bytes: Counter[str] = Counter()
        """Bytes of each tenant's requests that may still be needed."""
        for each in self.operations.values():
            self.body_bytes[each.tenant] += len(each.body)
        self._changed: dict[str, asyncio.Event] = {}
        self._remove_orphans()

    def close(self) -> None:
        """Close the journal. Idempotent."""
        self.journal.close()

    def _remove_orphans(self) -> None:
        """Remove folders that no record names: the server ended before it committed them, or before it removed them."""
        known = {each.state for each in self.models.values()}
        stored = {each.folder for each in self.checkpoints.values()}
        for folder, names in ((self.models_folder, known), (self.checkpoints_folder, stored)):
            folder.mkdir(parents=True, exist_ok=True)
            for each in folder.iterdir():
                if each.name not in names:
                    shutil.rmtree(each)

    async def put(self, *records: db.Record) -> None:
        """Write records to the journal, and make them visible."""
        await self.journal.write(*map(db.put, records))
        self.apply(records)

    def apply(self, records: Iterable[db.Record]) -> None:
        """Make committed records visible."""
        for record in records:
            self._records[type(record)][record.id] = record

    async def _delete(self, records: Iterable[db.Record], *more: db.Statement) -> None:
        """Delete records from the journal, run further statements with that, and forget them here."""
        await self.journal.write(*map(db.delete, records), *more)
        for each in records:
            self._records[type(each)].pop(each.id, None)

    # Folders

    def link_checkpoint(self, state: str, *, with_optimizer: bool) -> tuple[str, int]:
        """Make a checkpoint's folder from a durable state, which never changes, by hard links.

        Returns:
            Its name, and its size in bytes.
        """
        name, size = new_name(), 0
        target = self.checkpoints_folder / name
        target.mkdir()
        for file in sorted((self.models_folder / state).rglob("*")):
            inner = target / file.relative_to(self.models_folder / state)
            if file.is_dir():
                inner.mkdir(exist_ok=True)
            elif with_optimizer or not is_optimizer_file(file.name):
                os.link(file, inner)
                size += file.stat().st_size
        sync_folder(target)
        sync_folder(self.checkpoints_folder)
        return name, size

    def sync_checkpoint(self, folder: str) -> int:
        """Make a checkpoint's folder, which training processes wrote, durable; returns its size in bytes."""
        target = self.checkpoints_folder / folder
        sync_folder(target)
        sync_folder(self.checkpoints_folder)
        return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())

    async def remove_state(self, name: str) -> None:
        """Remove the folder of a state that no record names any more."""
        if name:
            await asyncio.to_thread(shutil.rmtree, self.models_folder / name, True)

    async def remove_checkpoints(self, found: Iterable[Checkpoint]) -> None:
        """Delete checkpoints: the records first, then the folders."""
        found = list(found)
        await self._delete(found)
        await self.remove_folders(found)

    async def remove_ephemeral(self, model: Model) -> None:
        """Delete the checkpoints without a name of a model whose session, and with it their only users, has ended."""
        prefix = f"sampler_weights/{EPHEMERAL}"
        found = [each for each in self.checkpoints_of(model) if each.name.startswith(prefix) and not each.is_public]
        await self.remove_checkpoints(found)

    async def remove_folders(self, found: Iterable[Checkpoint]) -> None:
        """Remove the folders of checkpoints that no record names any more."""
        for each in found:
            await asyncio.to_thread(shutil.rmtree, self.checkpoints_folder / each.folder, True)

    # Records of a tenant

    def session(self, tenant: Tenant, session_id: str) -> Session:
        """Live session of a tenant.

        Raises:
            NotFoundError: the tenant has no such session.
            GoneError: it has ended.
        """
        found = _owned(self.sessions, tenant, session_id, "session")
        if found.finished:
            raise GoneError(f"session {session_id} has ended ({found.finished}); create a new ServiceClient")
        return found

    def model(self, tenant: Tenant, model_id: str) -> Model:
        """Model of a tenant, or NotFoundError."""
        return _owned(self.models, tenant, model_id, "training run")

    def sampler(self, tenant: Tenant, sampler_id: str) -> Sampler:
        """Sampling session of a tenant, or NotFoundError."""
        return _owned(self.samplers, tenant, sampler_id, "sampling session")

    def checkpoint(self, tenant: Tenant, path: str, *, own: bool = False) -> Checkpoint:
        """Checkpoint that a tenant may read: its own, or a published one.

        Raises:
            NotFoundError: there is none, or it belongs to somebody else.
        """
        found = self.checkpoints.get(path)
        if found is None or (found.tenant != tenant.name and (own or not found.is_public)):
            raise NotFoundError(f"there is no checkpoint {path!r}; it may have expired")
        return found

    def checkpoints_of(self, model: Model) -> list[Checkpoint]:
        """Checkpoints of a model, the oldest first."""
        found = [each for each in self.checkpoints.values() if each.model == model.id]
        return sorted(found, key=lambda each: each.created)

    def gradient_of(self, model: Model) -> list[Operation]:
        """Operations whose gradients the next optimizer step of a model adds up, in order."""
        found = [
            each
            for each in self.operations.values()
            if each.model == model.id
            and each.kind == Kind.FORWARD_BACKWARD
            and each.status == Status.DONE
            and each.body
        ]
        return sorted(found, key=lambda each: each.seq)

    def forget_gradient(self, model: Model) -> None:
        """Drop the requests of a gradient that is not needed again."""
        for each in self.gradient_of(model):
            self.body_bytes[each.tenant] -= len(each.body)
            each.body = b""

    # Futures

    async def wait_for(self, operation: Operation, timeout_s: float) -> bool:
        """Wait until an operation has ended; returns whether it has."""
        if operation.status == Status.PENDING:
            event = self._changed.setdefault(operation.id, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), timeout_s)
        return self.operations[operation.id].status != Status.PENDING

    def add(self, operation: Operation) -> None:
        """Add an operation that the journal has."""
        self.operations[operation.id] = operation
        self.pending[operation.tenant] += 1
        self.body_bytes[operation.tenant] += len(operation.body)

    def end(self, operation: Operation) -> None:
        """Replace an operation by its committed outcome, and wake those who wait for it."""
        self.body_bytes[operation.tenant] += len(operation.body) - len(self.operations[operation.id].body)
        self.operations[operation.id] = operation
        self.pending[operation.tenant] -= 1
        if (event := self._changed.pop(operation.id, None)) is not None:
            event.set()

    async def expire(self) -> list[str]:
        """Drop old results and expired checkpoints, and end silent sessions; returns the ids of these sessions."""
        now = time.time()
        old = [
            each
            for each in self.operations.values()
            if each.status != Status.PENDING and now - each.finished > RESULT_S and not each.body
        ]
        silent = [each for each in self.sessions.values() if not each.finished and now - each.seen > SESSION_S]
        for session in silent:
            session.finished = f"no heartbeat for {SESSION_S:.0f} s"
        await self.journal.write(*map(db.forget_operation, old), *map(db.put, silent))
        for operation in old:
            del self.operations[operation.id]
        await self._forget_ended(now - ENDED_S)
        expired = [each for each in self.checkpoints.values() if each.expires is not None and each.expires < now]
        if expired:
            await self.remove_checkpoints(expired)
        return [each.id for each in silent]

    async def _forget_ended(self, before: float) -> None:
        """Delete the records of sessions that ended before a time, unless a run of theirs has a checkpoint."""
        kept = {self.models[each.model].session for each in self.checkpoints.values() if each.model in self.models}
        ended = {each.id for each in self.sessions.values() if each.finished and each.seen < before} - kept
        if not ended:
            return
        models = [each for each in self.models.values() if each.session in ended]
        samplers = [each for each in self.samplers.values() if each.session in ended]
        records = [*models, *samplers, *(self.sessions[each] for each in ended)]
        await self._delete(records, *(db.forget_curve(each.id) for each in models))


def new_name() -> str:
    """Name of a new folder for the state of a model, or for a checkpoint."""
    return uuid.uuid4().hex


def _owned(records: Mapping[str, R], tenant: Tenant, name: str, what: str) -> R:
    found = records.get(name)
    if found is None or found.tenant != tenant.name:
        raise NotFoundError(f"there is no {what} {name!r}")
    return found


def is_optimizer_file(name: str) -> bool:
    """Whether a file of a state holds the optimizer's part, or its manifest, which a sampler does not need."""
    return "optim" in name or name == "manifest.json"
