"""`RelayPipe`: connects a relay's receiver to its sender; verified bytes become available for sending at once.

One thread receives and notifies, another sends. Each waits for the other by a waker next to its own sockets.
`Forwarding` is one version on its way through a pipe.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING

from rl_ckpt.errors import DigestError, SyncAbortedError
from rl_csrc.ipc import Waker

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from rl_ckpt.receiver.unpacker import Unpacker
    from rl_ckpt.sender.sender import PreparedVersion, Sender
    from rl_ckpt.tensors.spec import TensorSpec
    from rl_ckpt.types import SyncReport


class RelayPipe:
    """Pipe of one version through a relay node."""

    def __init__(self, unpacker: Unpacker) -> None:
        self.news = Waker()
        """Wakes the sending thread when more bytes are verified."""
        self.outcome = Waker()
        """Wakes the receiving thread when the receivers below have voted or failed."""
        self.offer: PreparedVersion | None = None
        """Version that the receivers below voted for."""
        self._error: BaseException | None = None
        self._unpacker = unpacker
        self._progress: dict[TensorSpec, int] = {}
        """Verified bytes of each tensor."""
        self._order: list[TensorSpec] = []
        """Tensors in order of arrival."""
        self._num_whole = 0
        self._is_whole = False
        self._num_taken = 0
        self._aliases: dict[str, list[str]] = {}
        """Names of aliases (tied tensors), by the name of the original."""
        self.attests: bool | None = None
        """What is attested is read, by the node's receiver."""

    # ---- the receiving thread

    def landed(self) -> None:
        """Publish tensors verified since the last call.

        Raises:
            SyncAbortedError: the receivers below failed.
        """
        if self._error is not None:
            raise self._error
        unpacker = self._unpacker
        count = len(unpacker.digests) - self._num_whole
        whole = list(islice(reversed(unpacker.digests), count))
        self._num_whole += count
        verified: list[tuple[TensorSpec, int]] = []
        for spec in reversed(whole):
            if spec.alias_of is None:
                verified.append((spec, spec.num_bytes))
            else:  # before the original is published as complete
                self._aliases.setdefault(unpacker.specs[spec.alias_of].name, []).append(spec.name)
        if (progress := unpacker.progress()) is not None:
            verified.append(progress)
        for spec, num_bytes in verified:
            if spec not in self._progress:
                self._order.append(spec)
            self._progress[spec] = num_bytes
        self.news.wake()

    def end(self) -> None:
        """Note that all tensors are verified."""
        self._is_whole = True
        self.news.wake()

    def require_votes(self, digest: int) -> None:
        """Check the votes of the receivers below, after `outcome`.

        Raises:
            SyncAbortedError: they did not vote for the version.
            DigestError: what was sent to them differs from what was received.
        """
        if self._error is not None:
            raise self._error
        if self.offer is not None and self.offer.digest != digest:
            raise DigestError(
                f"version {self._unpacker.version} landed with digest {digest:#018x}, and its target tensors "
                f"have {self.offer.digest:#018x}: something else writes to them"
            )

    # ---- the sending thread

    def has_next(self) -> bool:
        """Whether the next tensor, or the end, is known."""
        return self._num_taken < len(self._order) or self._is_whole

    def take(self) -> tuple[TensorSpec, Tensor] | None:
        """Next tensor, of which some bytes are verified; None after the last."""
        if self._num_taken == len(self._order):
            return None
        spec = self._order[self._num_taken]
        self._num_taken += 1
        return spec, (self._unpacker.targets or {})[spec.name]

    def alias_of(self, name: str) -> Sequence[str]:
        """Names of the aliases of a complete tensor."""
        return self._aliases.get(name, ())

    def num_landed(self, spec: TensorSpec) -> int:
        """Number of verified bytes of a tensor, from its beginning."""
        return self._progress.get(spec, 0)

    # ---- the event loop

    def set_result(self, preparing: Future[PreparedVersion]) -> None:
        """Set the outcome of the receivers below; what was called off is no vote."""
        if preparing.cancelled():
            self._error = SyncAbortedError(f"version {self._unpacker.version} was called off to the receivers below")
        else:
            self._error = preparing.exception()
        if self._error is None:
            self.offer = preparing.result()
        self.outcome.wake()

    def close(self) -> None:
        """Close both wakers."""
        self.news.close()
        self.outcome.close()


class Forwarding:
    """Forwarding of one version: a sender passes on what a receiver is taking. Made on the event loop of both.

    Args:
        sender: To the receivers below.
        unpacker: Of the version that is arriving; its targets are what is sent on.
        num_peers: Receivers below, all of which must vote.
        on_votes: Called on the event loop when they have voted or failed.
    """

    def __init__(
        self, sender: Sender, unpacker: Unpacker, num_peers: int, on_votes: Callable[[], None] = lambda: None
    ) -> None:
        self.pipe = RelayPipe(unpacker)
        version = unpacker.version
        self._preparing = asyncio.ensure_future(sender.prepare_version(version, num_peers=num_peers, pipe=self.pipe))
        self._preparing.add_done_callback(self.pipe.set_result)
        self._preparing.add_done_callback(lambda _: on_votes())

    @property
    def has_votes(self) -> bool:
        """Whether the receivers below have voted or failed."""
        return self._preparing.done()

    async def commit(self) -> SyncReport:
        """Commit the version below, after the receiver's own commit."""
        return await asyncio.to_thread(self._preparing.result().commit)

    async def call_off(self, text: str) -> None:
        """Abort the version below, however far it has come, and say why."""
        self._preparing.cancel(text)
        await asyncio.wait([self._preparing])
        if not self._preparing.cancelled() and self._preparing.exception() is None:
            await asyncio.to_thread(self._preparing.result().abort, text)

    def close(self) -> None:
        """Close the pipe: nothing is received any more."""
        self.pipe.close()
