"""Taking a sync into an engine so that nothing it serves is ever mixed.

A sync lands in host memory, where it is verified, while the engine is not touched. When all of it is there, the
engine's own loader installs it, and what the engine then holds is attested, before the sender commits. What fails
before that leaves the engine as it was; what fails later is undone with the weights before.

The weights before are kept in host memory where whole tensors come. Where slices come, they are read out of the engine
layer by layer as new ones take their place, so that host memory has room for the slices of one version and of one
layer more. A relay, which still sends on what is installed, needs room for two versions until the sync has ended.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import rl_ckpt
from rl_ckpt.adapters.layout import DryLoad, answer_request, compact, write_answer
from rl_ckpt.adapters.load_recorder import Held
from rl_ckpt.errors import TensorError, UsageError, VersionError
from rl_ckpt.receiver.staging import Staging
from rl_ckpt.sharded import ShardedReceiver
from rl_ckpt.types import Addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from rl_ckpt.adapters.engine_lora import HeldAdapters
    from rl_ckpt.types import ShardSpec


class Load(Protocol):
    """An engine's loader."""

    def __call__(self, weights: Mapping[str, Tensor], owner: str | None = None) -> Held | HeldAdapters | None:
        """Install these weights, CPU tensors by name; returns what the engine then holds of them, None if not known.

        Args:
            weights: All of the model's, or those of `owner`. A part of each, where slices come: the rest was never
                written to.
            owner: Name of the module that they are all weights of.
        """
        ...


class Installer:
    """Installs what comes over a session in one engine, and over the next session after it.

    Args:
        model: The engine's. Where what was there before cannot be installed again, its `forward` raises, and its
            parameters are NaN for those that replay a CUDA graph instead, until a later sync has brought all that the
            failed one may have changed. What no sync brings, because checkpoints do not have it, is then as it was.
        load: Of the engine.
        restore: Undoes what the last load did where loading the version before writes nothing. Called before that is
            loaded again, if names came that it does not have; all that there is to do while there is none before.
    """

    def __init__(self, model: nn.Module, *, load: Load, restore: Callable[[], None]) -> None:
        self._receiver: rl_ckpt.WeightReceiver | ShardedReceiver | None = None
        self._parts: dict[str, ShardSpec] = {}
        """What this rank takes of each tensor, where slices come."""
        self._rooms: dict[str, Tensor] = {}
        """The tensors that these are parts of, with no memory behind the rest: dtype, shape and strides."""
        self._load = load
        self._restore = restore
        self._model = model
        self._forward: Callable[..., object] | None = None
        """Of the model, while that refuses."""
        self._hidden: dict[str, Tensor] = {}
        """On the CPU, the parameters of a model that refuses, whose own are NaN."""
        self._suspects: set[str] = set()
        """Names that a failed sync may have left something of in the model; it must not serve before they come."""
        self._staging = Staging()
        self._landing: _IncomingSlices | None = None
        """The sync that has begun and was not taken yet, where slices come."""
        self._held: Held | None = None
        """Where the engine has the slices of the committed version, of which host memory has no copy."""
        self._replaced: dict[str, dict[str, Tensor]] = {}
        """By owner, what the sync under way has replaced of that version."""
        self._free: dict[tuple[object, ...], list[Tensor]] = {}
        """By layout, memory of slices that are installed: what is replaced next is read into it."""
        self._is_touched = False
        self._is_fresh = True
        self._is_partial = False

    def attach(self, receiver: rl_ckpt.WeightReceiver | ShardedReceiver) -> None:
        """Take from this receiving end from now on; nothing else may use it. The one before is closed.

        Its first sync brings all weights; later ones all of them again, or a part where the caller of `take` says so.
        """
        self.detach()
        self._is_fresh = True
        if not isinstance(receiver, ShardedReceiver):
            receiver.attest_with(self._install)
        self._receiver = receiver

    def join(self, url: str, rank: int, *, timeout_s: float, token: str | None = None) -> None:
        """Attach to a session by its URL, or to those of this rank of the server in `Addresses.to_json()`.

        Raises:
            UsageError: slices are to come, and this rank was not asked for its layout.
        """
        addresses = Addresses.from_json(url)
        if addresses is None:
            self.attach(rl_ckpt.connect(url, role="receive", timeout_s=timeout_s, token=token))
        elif not self._parts:
            raise UsageError(f"slices would come from {url}, and no plan was made for rank {rank}: ask for its layout")
        else:
            self.attach(ShardedReceiver(addresses.of(rank), timeout_s=timeout_s, token=token))

    def report_layout(self, url: str, rank: int, load_dry: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Answer a request of `rl_ckpt.adapters.layout`, and be ready for slices of such tensors.

        Args:
            url: Of the request.
            rank: Of the server.
            load_dry: Calls the engine's loader on these tensors, which have no contents; it is not to change the model.
        """
        given, answer = answer_request(url, rank)
        with DryLoad(self._model, given) as dry:
            load_dry(given)
        self._parts = dry.parts()
        rooms = {name: compact(part, given[name].dtype) for name, part in self._parts.items()}
        with DryLoad(self._model, rooms) as again:
            try:
                load_dry(rooms)
            except RuntimeError:  # of torch, for want of a contiguous tensor
                rooms = given
        self._rooms = {
            name: compact(part, given[name].dtype, "meta")
            if rooms is not given and again.copied(name) == dry.copied(name)
            else given[name].to("meta")
            for name, part in self._parts.items()
        }
        write_answer(answer, self._parts.values())

    def detach(self) -> None:
        """Leave the session. What was installed, and what to go back to, stays."""
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.call_off("the session was left")
        if self._receiver is not None:
            asyncio.run(self._receiver.close())
            self._receiver = None
        if landing is not None:
            landing.wait()
            self._staging.clear()

    def take(self, version: int | None = None, *, is_partial: bool = False) -> None:
        """Take one sync, from its first byte to the commit.

        Args:
            version: The one that must come; None takes any.
            is_partial: What does not come stays as it is. Otherwise a sync that leaves out a tensor is refused, for
                weights of two versions would be served as one.

        Raises:
            rl_ckpt.CkptError: it failed; the engine holds the weights before, or refuses (a note then says so).
        """
        self._is_partial = is_partial
        receiver = self._receiver
        if receiver is None:
            raise UsageError("no session is open to take weights from")
        try:
            if isinstance(receiver, ShardedReceiver):
                self._take_slices(receiver, version)
            else:
                for name, tensor in receiver.recv():
                    self._require_version(receiver, version)
                    self._staging.put(name, tensor)
        except BaseException as error:
            touched = set(self._staging.incoming) if self._is_touched else set[str]()
            self._staging.clear()
            if touched:
                self._go_back(touched, error)
            self._replaced = {}
            raise
        if self._held is None:
            self._staging.commit(is_whole=self._is_fresh)
        else:
            self._held.forget_given()
            self._staging.clear()
            self._staging.current, self._replaced = {}, {}
        self._is_touched = self._is_fresh = False
        if self._forward is not None:
            self._model.forward = self._forward
            self._forward = None
            self._suspects = set()

    def forget(self) -> None:
        """Keep no copy of what is installed, since the loader has its own: the next sync is as a session's first."""
        self._staging, self._is_fresh = Staging(), True

    def _require_version(self, receiver: rl_ckpt.WeightReceiver | ShardedReceiver, version: int | None) -> None:
        if version not in {None, receiver.version}:
            raise VersionError(f"version {receiver.version} came, and {version} was asked for")

    def begin(self, done_file: Path | None = None) -> None:
        """Let the next sync land from now on, in another thread, while the engine goes on; `take` installs it.

        Whole tensors land in `take`.

        Args:
            done_file: File that is made when all has landed and was verified, or the sync has failed: `take` will not
                wait.
        """
        if isinstance(self._receiver, ShardedReceiver):
            if self._landing is None:
                targets = {name: self._staging.room(name, like) for name, like in self._rooms.items()}
                parts = {name: part.of(targets[name]) for name, part in self._parts.items()}
                self._landing = _IncomingSlices(self._receiver, parts, self._parts)
            self._landing.touch_when_landed(done_file)
        elif done_file is not None:
            done_file.touch()

    def _take_slices(self, receiver: ShardedReceiver, version: int | None) -> None:
        """This thread, which has the engine's device and settings, installs what another one lands."""
        self.begin()
        landing, self._landing = self._landing, None
        assert landing is not None, "it has begun"

        def install() -> bool:
            self._require_version(receiver, version)
            return self._install_slices(reuses=not receiver.sends_on)

        landing.finish(install)

    def _install_slices(self, *, reuses: bool) -> bool:
        """Install what has landed; returns whether the engine was seen to hold it.

        What was there before takes its place in host memory, layer by layer, if it is known.

        Args:
            reuses: Whether memory of slices that are installed may be overwritten before the sync has ended.
        """
        if self._held is not None and self._forward is None:
            for owner, names in self._held.owners().items():
                self._replaced[owner] = {name: self._held.read(name, self._take_room(name)) for name in names}
                self._is_touched = True
                if (held := self._load({name: self._staging.incoming[name] for name in names}, owner)) is not None:
                    held.require_all()
                for name in names if reuses else ():
                    self._free.setdefault(_place_of(self._rooms[name]), []).append(self._staging.incoming[name])
                self._staging.incoming |= self._replaced[owner]
            return True
        if (held := self._install()) is None:
            return False
        held.require_all()
        self._held = held if isinstance(held, Held) else None
        return True

    def _take_room(self, name: str) -> Tensor | None:
        """Memory for a tensor that is replaced: fresh pages cost more than the copy into them."""
        free = self._free.get(_place_of(self._rooms[name]))
        return free.pop() if free else None

    def _install(self) -> Held | HeldAdapters | None:
        """Called by the receiver when everything has landed and was verified, before it votes."""
        if self._held is not None:  # slices came until now
            self._staging.current = {name: self._held.read(name) for name in self._held}
            self._held = None
        for name, tensor in self._staging.incoming.items():
            held = self._staging.current.get(name, tensor)
            if held.shape != tensor.shape:  # a loader may pad a shorter one with what was there before
                raise TensorError(f"{name!r} came as {list(tensor.shape)}; the engine's is {list(held.shape)}")
        missing = self._staging.current.keys() - self._staging.incoming.keys()
        if missing and not self._is_fresh and not self._is_partial:
            raise TensorError(
                f"{len(missing)} of the {len(self._staging.current)} tensors that the engine holds did not come, "
                f"{min(missing)!r} the first; send all of them, or ask for a partial sync"
            )
        weights = self._staging.incoming if self._is_fresh else self._staging.merged()
        if left := self._suspects - weights.keys():
            raise TensorError(
                f"a failed sync may have left something of {len(left)} tensors in the engine that did not come now, "
                f"{min(left)!r} the first; send them too, or start the engine anew"
            )
        self._is_touched = True
        self._uncover()
        return self._load(weights)

    def _go_back(self, touched: set[str], error: BaseException) -> None:
        before = self._staging.current
        suspects = touched
        try:
            if self._replaced:
                for owner, weights in self._replaced.items():
                    if (held := self._load(weights, owner)) is not None:
                        held.require_all()
            else:
                self._held = None
                if not touched <= before.keys():
                    self._restore()
                suspects = set(before)
                if before and (held := self._load(before)) is not None:
                    held.require_all()
        except Exception as another:  # noqa: BLE001  # whatever it is, the engine is mixed, and the first error is raised
            error.add_note(f"the weights before could not be loaded again, so the engine must not serve: {another}")
            self._suspects |= suspects
            self._held = None
            self._refuse(error)
        else:
            if self._forward is not None:  # of what failed earlier there may still be something left
                self._refuse(error)
        self._is_touched = False

    def _refuse(self, error: BaseException) -> None:
        text = f"the weights of this engine are mixed since a failed sync ({error}); send a whole version"

        def refuse(*_: object, **__: object) -> NoReturn:
            raise UsageError(text)

        if self._forward is None:
            self._forward = self._model.forward
        self._model.forward = refuse  # no hook: engines call `forward` itself, too
        for name, parameter in self._model.named_parameters():
            if parameter.is_floating_point():
                self._hidden[name] = parameter.detach().to("cpu", copy=True)
                parameter.detach().fill_(float("nan"))

    def _uncover(self) -> None:
        """Put back what `_refuse` has made NaN, for a load to be made on top of it."""
        for name, parameter in self._model.named_parameters():
            if name in self._hidden:
                parameter.detach().copy_(self._hidden[name])
        self._hidden = {}


def _place_of(like: Tensor) -> tuple[object, ...]:
    return like.dtype, like.shape, like.stride()


class _IncomingSlices:
    """Slices of one sync on their way into host memory, in another thread, which waits until they are installed."""

    def __init__(
        self, receiver: ShardedReceiver, targets: Mapping[str, Tensor], parts: Mapping[str, ShardSpec]
    ) -> None:
        self._landed, self._installed = Future[None](), Future[bool]()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="slices")

        def on_landed(_: object) -> bool:
            self._landed.set_result(None)
            return self._installed.result()

        self._receiving = self._pool.submit(
            lambda: asyncio.run(receiver.receive_into(targets, parts, on_landed=on_landed))
        )

    def touch_when_landed(self, done_file: Path | None) -> None:
        """Make a file when all has landed, or nothing more will."""

        def touch(_: object) -> None:
            if done_file is not None and done_file.parent.exists():
                done_file.touch()

        either: list[Future[Any]] = [self._landed, self._receiving]
        for future in either:
            future.add_done_callback(touch)

    def finish(self, install: Callable[[], bool]) -> None:
        """Wait until all has landed, install it, and wait for the commit."""
        either: list[Future[Any]] = [self._landed, self._receiving]
        try:
            wait(either, return_when=FIRST_COMPLETED)
            self._installed.set_result(self._landed.done() and install())
        except BaseException as error:  # noqa: BLE001 - the receiver raises it
            self._installed.set_exception(error)
        try:
            self._receiving.result()
        finally:
            self._pool.shutdown()

    def call_off(self, why: str) -> None:
        """Vote against it, as soon as it has landed."""
        self._installed.set_exception(UsageError(why))

    def wait(self) -> None:
        """Wait for the thread to end, whatever with."""
        wait([self._receiving])
        self._pool.shutdown()
