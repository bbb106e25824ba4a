"""`file:///folder`: versions as safetensors files with a manifest written last, for late joiners and object stores.

The sender publishes a version whether anybody reads it or not; a receiver takes the newest that it does not have, and
waits for one. There are no votes and no receipts. `?keep=N` keeps the last N versions (2 if not given). `?chain=N`
writes a whole version only every N versions, and in between differences from the version before; a receiver takes those
that it lacks, one that joins the whole version as well. `file+s3://bucket/prefix` is the same in an object store, by
fsspec.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import safetensors
import safetensors.torch
import torch

from rl_ckpt.backends.file import chain
from rl_ckpt.backends.file.folder import Entry, Folder, Manifest, ObjectStore
from rl_ckpt.base import WeightReceiver
from rl_ckpt.errors import AddressError, AttestationError, DigestError, PeerTimeoutError, TensorError, UsageError
from rl_ckpt.protocol.call_worker import Worker
from rl_ckpt.protocol.channel import Deadline, wait_for
from rl_ckpt.receiver.staging import Staging
from rl_ckpt.sender.runner import SourceSender
from rl_ckpt.tensors.aliasing import AliasCheck
from rl_ckpt.tensors.delta import BaseCopy
from rl_ckpt.tensors.digest import combine, leaves_of, model_digest, tree_digest
from rl_ckpt.tensors.source import Clock, Source, checked_version
from rl_ckpt.tensors.spec import TensorSpec, as_bytes, require_memory, spec_of
from rl_ckpt.types import Capability, Metadata, ReceiverState, Role, SyncReport

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from rl_ckpt.types import SessionConfig

FILE_BYTES = 1 << 30
"""A file is closed when it has so much; the sender holds one file's tensors in memory."""
KEPT_BYTES = 1 << 20
"""Size from which a registered tensor is written in place: a file has few that are so large."""
LOOK_AGAIN_S = 0.05
MAX_VERSION = 10**20 - 1
UNSUPPORTED = frozenset({torch.complex32, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
"""Dtypes that have a code in rl-ckpt's format and none in that of safetensors."""


class Backend:
    """Ends of a session through a folder."""

    options: ClassVar[Mapping[str, str]] = {
        "keep": "versions that stay in the folder, 2 if not given",
        "chain": "every how many versions one is written whole, and not as the difference from the one before; 1",
    }
    has_filesystems: ClassVar[bool] = True
    """`file+PROTOCOL://` is for it too."""
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    """Capabilities: none, as a folder does not know who reads it, nor what they hold; what is read from it stays."""

    def open_session(self, config: SessionConfig) -> FileSender | FileReceiver:
        """Return one end.

        Raises:
            AddressError: the path is not absolute, or an option is not allowed.
        """
        protocol = config.address.partition("://")[0].partition("+")[2]
        if not protocol and not config.name.startswith("/"):
            raise AddressError(f"the path in {config.address!r} is {config.name!r}; write file:///folder, absolute")
        if config.token is not None:
            raise AddressError(f"{config.address} takes no token: the permissions of the folder count")
        keep, length = _count_of(config, "keep", "2", "to keep"), _count_of(config, "chain", "1", "of a chain")
        folder = ObjectStore(protocol, config.name) if protocol else Folder(Path(config.name))
        return FileSender(config, folder, keep, length) if config.role is Role.SEND else FileReceiver(config, folder)


def _count_of(config: SessionConfig, name: str, default: str, what: str) -> int:
    text = config.option(name, default)
    if not (text.isdecimal() and int(text) >= 1):
        raise AddressError(f"{name} is {text!r} in {config.address!r}; give the number of versions {what}, from 1")
    return int(text)


def _metadata(config: SessionConfig) -> Metadata:
    return Metadata(
        address=config.address,
        peer=f"{'sender' if config.role is Role.SEND else 'receiver'} pid {os.getpid()}",
        bucket_bytes=config.bucket_bytes,
    )


class FileSender(SourceSender):
    """Sending end: publishes versions, whether anybody reads them or not."""

    def __init__(self, config: SessionConfig, folder: Folder, keep: int, chain_length: int) -> None:
        super().__init__(config)
        self._folder = folder
        self._keep = keep
        self._chain_length = chain_length
        self._copy = BaseCopy() if chain_length > 1 else None
        """Copy of the version published last, where the next may be a difference from it."""
        self._num_differences = 0
        """Published since the last whole version."""
        self._is_open = False

    async def prepare(self) -> Metadata:
        """Become the writer of the folder. Idempotent."""
        await self._worker.run(self._open)
        return _metadata(self._config)

    async def connect(self, num_peers: int = 1) -> None:
        """Refused: the two ends never meet. A closed end, or a forked child's, says that first."""
        await self._worker.run(lambda: self._require(num_peers))

    def _require(self, num_peers: int | None) -> None:
        """Refuse numbers of receivers: a folder knows no readers."""
        if num_peers is not None:
            raise UsageError(
                f"num_peers is {num_peers}, and {self.address} has no votes: a folder does not know its readers. "
                "Leave num_peers out, and do not wait for them"
            )

    def _open(self) -> None:
        if not self._is_open:
            self._folder.lock()
            self._is_open = True

    def _release(self) -> None:
        self._folder.unlock()

    def _run(self, source: Source, version: int, clock: Clock) -> SyncReport:
        """Publish a version."""
        written: list[str] = []
        try:
            self._open()
            version = checked_version(version, max(self._folder.versions(), default=-1), MAX_VERSION)
            report = self._write(source, version, clock, written)
        except BaseException:
            self._folder.remove_files(written)
            raise
        self._version, self._digest = version, report.digest
        return report

    def _write(self, source: Source, version: int, clock: Clock, written: list[str]) -> SyncReport:
        is_whole = self._num_differences + 1 >= self._chain_length
        base = None if self._copy is None else self._copy.open()
        base = None if is_whole else base
        digests: dict[TensorSpec, int] = {}
        entries: list[Entry] = []
        num_deltas = num_wire_bytes = 0
        batch: dict[str, Tensor] = {}
        names: set[str] = set()
        stored: dict[str, Entry] = {}
        for name, tensor in source:
            self._worker.canceller.check()
            spec = spec_of(name, tensor)
            if spec.name in names or spec.dtype in UNSUPPORTED:
                what = "twice" if spec.name in names else f"as {spec.dtype}, which safetensors cannot hold"
                raise TensorError(f"the source yielded {name!r} {what}")
            names.add(name)
            if name in source.alias_of:
                first = stored[source.alias_of[name]]
                entries.append(replace(first, name=name))
                digests[spec] = int(first.digest, 16)
                continue
            is_difference = base is not None and self._copy is not None and self._copy.can_advance(spec)
            with clock("pack_s"):
                if is_difference and self._copy is not None:
                    batch[name], digests[spec] = chain.encode(self._copy.advance(spec, as_bytes(_plain(tensor))))
                    num_deltas += 1
                else:
                    batch[name] = _kept(tensor, batch) if source.registered is not None else _copied(tensor)
            if not is_difference:
                with clock("verify_s"):
                    leaves = leaves_of(as_bytes(batch[name]))
                    digests[spec] = combine(leaves)
                    if self._copy is not None:
                        self._copy.replace(spec, as_bytes(batch[name]))
                        self._copy.note(spec, leaves)
            num_wire_bytes += batch[name].nbytes
            file = self._folder.file_name(version, len(written))
            digest = f"{digests[spec]:016x}"
            entries.append(Entry(name=name, file=file, digest=digest, stored_as=name, is_difference=is_difference))
            if name in source.aliases:
                stored[name] = entries[-1]
            if sum(held.nbytes for held in batch.values()) >= FILE_BYTES:
                self._flush(file, batch, source.aliases, written, clock)
        if not names:
            raise TensorError("the source yielded no tensor; an iterator that was drained before yields none")
        if batch:
            self._flush(self._folder.file_name(version, len(written)), batch, source.aliases, written, clock)
        source.require_unchanged()  # large ones were written from where they are
        digest = model_digest(digests.items())
        with clock("wire_s"):
            manifest = Manifest(version=version, digest=f"{digest:016x}", tensors=tuple(entries), base=base)
            self._folder.publish(manifest)
            if self._copy is not None:
                self._copy.commit(version)
            self._num_differences = 0 if base is None else self._num_differences + 1
            self._folder.prune(self._keep)
        num_bytes = sum(spec.num_bytes for spec in digests)
        return SyncReport(
            version=version,
            digest=digest,
            num_tensors=len(digests),
            num_bytes=num_bytes,
            num_wire_bytes=num_wire_bytes,
            num_deltas=num_deltas,
            export_s=clock.export_s,
            pack_s=clock.pack_s,
            wire_s=clock.wire_s,
            verify_s=clock.verify_s,
            wall_s=time.perf_counter() - clock.started,
        )

    def _flush(
        self,
        file: str,
        batch: dict[str, Tensor],
        aliases: Mapping[str, Sequence[str]],
        written: list[str],
        clock: Clock,
    ) -> None:
        """Write a file. Its metadata says which names are missing, as those of `safetensors.torch.save_model` do."""
        written.append(file)
        alias = {name: first for first in batch for name in aliases.get(first, ())}
        with clock("wire_s"):
            self._folder.put(file, lambda path: safetensors.torch.save_file(batch, path, alias))
        batch.clear()


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()


def _kept(tensor: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The tensor itself where it can be written from where it is, and shares no memory with others of its file."""
    plain = tensor.detach()
    is_plain = plain.device.type == "cpu" and plain.is_contiguous() and not (plain.is_conj() or plain.is_neg())
    if not is_plain or plain.nbytes < KEPT_BYTES:
        return _copied(tensor)
    storage = plain.untyped_storage().data_ptr()
    is_alone = all(storage != other.untyped_storage().data_ptr() for other in batch.values())
    return plain if is_alone else _copied(tensor)


class FileReceiver(WeightReceiver):
    """Receiving end: takes the newest version that it does not have."""

    def __init__(self, config: SessionConfig, folder: Folder) -> None:
        self.address = config.address
        self._config = config
        self._folder = folder
        self._worker = Worker(f"the receiver of {config.address}")
        self._state = ReceiverState.IDLE
        self._version: int | None = None
        self._taking: int | None = None
        self._digest: int | None = None
        self._held: Callable[[], Mapping[str, Tensor] | None] | None = None
        self._alias_check = AliasCheck()
        self._staging = Staging()
        self._copy: dict[str, Tensor] = {}
        """Copy of the version taken last, where differences may be from it."""

    @property
    def version(self) -> int | None:
        """Version that was taken last, or that is being taken."""
        return self._taking if self._state is ReceiverState.PREPARING and self._taking is not None else self._version

    @property
    def digest(self) -> int | None:
        """Its tree digest."""
        return self._digest

    @property
    def state(self) -> ReceiverState:
        """State of this end."""
        return self._state

    async def prepare(self) -> Metadata:
        """Prepare: there is nothing to allocate."""
        return _metadata(self._config)

    async def connect(self, num_peers: int = 1) -> None:
        """Connect: the two ends never meet. A closed end, or a forked child's, says so."""
        await self._worker.run(lambda: None)

    async def close(self) -> None:
        """Let go of the folder. Idempotent."""
        await asyncio.to_thread(self._worker.close, self._folder.unlock, self._config.timeout_s)

    def attest_with(self, held: Callable[[], Mapping[str, Tensor] | None] | None) -> None:
        """Look into the engine before a version counts as taken. See `WeightReceiver`."""
        self._held = held

    async def receive_into(self, targets: Mapping[str, Tensor], *, strict: bool = True, staged: bool = False) -> int:
        """Write tensors where they belong, or have them change places when all are verified. See `WeightReceiver`."""
        for name, target in targets.items():
            require_memory(name, target)
        into = self._staging.open(targets) if staged else targets

        def finish(landed: Mapping[TensorSpec, int]) -> None:
            names = dict.fromkeys(spec.name for spec in landed)
            if strict and (missing := [name for name in targets if name not in names]):
                raise TensorError(f"{len(missing)} tensors did not come, {missing[0]!r} the first")
            if staged:
                self._staging.install(names)
            self._alias_check.require_equal(targets, landed.items())

        async with aclosing(self._receive(finish, is_staged=staged)) as tensors:
            async for name, tensor in tensors:
                target = into.get(name)
                if target is None or (target.dtype, target.shape) != (tensor.dtype, tensor.shape):
                    raise TensorError(f"{name!r} came as {tensor.dtype} {list(tensor.shape)}; the target is {target!r}")
                target.detach().copy_(tensor)
        if self._version is None:
            raise UsageError("the sync ended without a version")
        return self._version

    async def receive_weights(self, *, clone: bool = False) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield the tensors of the newest version above the one that was taken last, each verified."""
        async with aclosing(self._receive(lambda _: None, is_staged=False)) as tensors:
            async for item in tensors:
                yield item

    async def _receive(
        self, finish: Callable[[Mapping[TensorSpec, int]], None], *, is_staged: bool
    ) -> AsyncGenerator[tuple[str, Tensor]]:
        """Receive one version; `finish` is called once all is verified, before the engine is looked into."""
        items = await self._worker.run(lambda: self._start(finish))
        is_touched, before = False, self._state
        self._state = ReceiverState.PREPARING
        try:
            while (item := await self._worker.run(lambda: next(items, None))) is not None:
                is_touched = True
                yield item
        finally:
            if self._state is ReceiverState.PREPARING:
                is_mixed = is_touched and not (is_staged and self._put_back())
                self._state = ReceiverState.POISONED if is_mixed else before
            self._staging.clear()

    def _put_back(self) -> bool:
        """Undo what was installed and not committed. False if that failed: the tensors may be mixed."""
        try:
            self._staging.undo()
        except Exception:  # noqa: BLE001  # the error that ended the sync is the one to raise; the state tells of this one
            return False
        return True

    def _start(self, finish: Callable[[Mapping[TensorSpec, int]], None]) -> Iterator[tuple[str, Tensor]]:
        """Wait for a version, and open its files, so that they stay if they are removed."""
        deadline = Deadline(self._config.timeout_s)
        last = -1 if self._version is None else self._version
        while True:
            version = max(self._folder.versions(), default=-1)
            if version > last:
                try:
                    versions = self._folder.chain(version, self._version if self._copy else None)
                    names = dict.fromkeys(name for manifest in versions for name in manifest.files)
                    files = {name: self._folder.open(name) for name in names}
                except FileNotFoundError:
                    continue  # a newer one has taken its place
                self._taking = version
                return self._take(versions, files, finish)
            wait_for(self._worker.canceller, Deadline(min(LOOK_AGAIN_S, deadline.remaining_s())))
            if not deadline.remaining_s():
                raise PeerTimeoutError(
                    f"no version above {last} appeared in {self._folder.path} within {deadline.timeout_s:g} s"
                )

    def _take(
        self,
        versions: Sequence[Manifest],
        files: dict[str, safetensors.safe_open],
        finish: Callable[[Mapping[TensorSpec, int]], None],
    ) -> Iterator[tuple[str, Tensor]]:
        def read(entry: Entry) -> Tensor:
            return cast("Tensor", files[entry.file].get_tensor(entry.stored_as))

        manifest, digests, copy = versions[0], dict[TensorSpec, int](), self._copy
        self._copy = {}  # it is changed from here on
        for entry in manifest.tensors:
            tensor, digest = chain.read_tensor(entry, versions, read, copy.get(entry.stored_as))
            if f"{digest:016x}" != entry.digest:
                raise DigestError(
                    f"{entry.name!r} in {self._folder.path}/{entry.file} has digest {digest:016x}; the manifest of "
                    f"version {manifest.version} says {entry.digest}. It is not handed out"
                )
            if manifest.base is not None:
                copy[entry.stored_as] = tensor
            digests[spec_of(entry.name, tensor)] = digest
            yield entry.name, tensor
        found = model_digest(digests.items())
        if f"{found:016x}" != manifest.digest:
            raise DigestError(
                f"version {manifest.version} has digest {found:016x}; its manifest says {manifest.digest}"
            )
        finish(digests)
        self._attest({spec.name for spec in digests}, found)
        self._version, self._digest, self._state = manifest.version, found, ReceiverState.COMMITTED
        self._copy = copy if manifest.base is not None else {}

    def _attest(self, names: set[str], digest: int) -> None:
        engine = None if self._held is None else self._held()
        if engine is None:
            return
        bound = [name for name in engine if name in names]
        held = tree_digest((name, engine[name]) for name in bound)
        if held != digest:
            raise AttestationError(
                f"{len(names)} tensors with digest {digest:#018x} were read; the engine holds {len(bound)} of them, "
                f"with digest {held:#018x}: its loader lost or changed some"
            )
