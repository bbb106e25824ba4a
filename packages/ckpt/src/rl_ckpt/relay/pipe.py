"""What lands at a relay, as the source of the session below it: each byte as soon as it has been verified.

One thread receives and tells, another sends and asks. Each waits for the other by a waker beside its own sockets.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from rl_ckpt.errors import DigestError
from rl_csrc.ipc import Waker

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Sequence

    from torch import Tensor

    from rl_ckpt.receiver.unpacker import Unpacker
    from rl_ckpt.sender.sender import PreparedVersion
    from rl_ckpt.tensors.spec import TensorSpec


class RelayPipe:
    """One version on its way through a node."""

    def __init__(self, unpacker: Unpacker) -> None:
        self.news = Waker()
        """Wakes the sending thread when more has arrived."""
        self.outcome = Waker()
        """Wakes the receiving thread when the receivers below have voted, or have failed to."""
        self.offer: PreparedVersion | None = None
        """What those below have voted for."""
        self._error: BaseException | None = None
        self._unpacker = unpacker
        self._progress: dict[TensorSpec, int] = {}
        """Of each tensor the bytes that are in place."""
        self._order: list[TensorSpec] = []
        """In which they came."""
        self._num_whole = 0
        self._is_whole = False
        self._num_taken = 0
        self._aliases: dict[str, list[str]] = {}
        """Names of tensors that have the elements of another, under the name of that."""

    # ---- the receiving thread

    def landed(self) -> None:
        """More may have landed.

        Raises:
            SyncAbortedError: those below do not take the version.
        """
        if self._error is not None:
            raise self._error
        unpacker = self._unpacker
        count = len(unpacker.digests) - self._num_whole
        whole = list(islice(reversed(unpacker.digests), count))
        self._num_whole += count
        told: list[tuple[TensorSpec, int]] = []
        for spec in reversed(whole):
            if spec.alias_of is None:
                told.append((spec, spec.num_bytes))
            else:  # before it can be seen that the other one is whole
                self._aliases.setdefault(unpacker.specs[spec.alias_of].name, []).append(spec.name)
        if (progress := unpacker.progress()) is not None:
            told.append(progress)
        for spec, num_bytes in told:
            if spec not in self._progress:
                self._order.append(spec)
            self._progress[spec] = num_bytes
        self.news.wake()

    def end(self) -> None:
        """All has landed."""
        self._is_whole = True
        self.news.wake()

    def require_votes(self, digest: int) -> None:
        """Look at what those below have voted for, when the outcome is there.

        Raises:
            SyncAbortedError: they have not.
            DigestError: what was sent to them is not what landed.
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
        """Whether it is known which tensor is the next, or that there is none."""
        return self._num_taken < len(self._order) or self._is_whole

    def take(self) -> tuple[TensorSpec, Tensor] | None:
        """The next tensor, of which some bytes are in place, or None after the last."""
        if self._num_taken == len(self._order):
            return None
        spec = self._order[self._num_taken]
        self._num_taken += 1
        return spec, (self._unpacker.targets or {})[spec.name]

    def alias_of(self, name: str) -> Sequence[str]:
        """The other names of a tensor, once it is whole."""
        return self._aliases.get(name, ())

    def num_landed(self, spec: TensorSpec) -> int:
        """How many bytes of a tensor are in place, from its beginning."""
        return self._progress.get(spec, 0)

    # ---- the event loop

    def set_result(self, preparing: Future[PreparedVersion]) -> None:
        """Take the outcome of those below."""
        if preparing.cancelled():
            return
        self._error = preparing.exception()
        if self._error is None:
            self.offer = preparing.result()
        self.outcome.wake()

    def close(self) -> None:
        """Free both wakers."""
        self.news.close()
        self.outcome.close()
