"""What a backend with shared slots gives to the two halves of the protocol."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rl_ckpt.errors import AddressError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rl_ckpt._link import Link
    from rl_ckpt._wire import Session
    from rl_ckpt.types import SessionConfig


_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def checked_name(config: SessionConfig) -> str:
    """The name of a session that lives on one machine.

    Raises:
        AddressError: it has other characters than letters, digits, dot, dash and underscore, or more than 64.
    """
    if not _NAME.fullmatch(config.name):
        raise AddressError(
            f"the name in {config.address!r} is {config.name!r}; allowed are 1 to 64 of A-Z a-z 0-9 . _ -"
        )
    return config.name


class SendTransport(ABC):
    """The sender's side: a name to be found under, and a ring of slots."""

    address: str
    """URL under which it is found."""

    @abstractmethod
    def open(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Take the name and allocate the ring: `num_slots` writable CPU tensors, uint8 [bucket_bytes].

        Raises:
            AddressError: another sender has the name.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Becomes readable when a receiver dials."""

    @abstractmethod
    def accept(self) -> Link | None:
        """The next receiver that dialled, without waiting."""

    @abstractmethod
    def descriptors(self) -> Sequence[int]:
        """File descriptors that go with the `Session` message."""

    @abstractmethod
    def close(self) -> None:
        """Give the name and the ring back. Idempotent."""


class ReceiveTransport(ABC):
    """A receiver's side: how to reach the sender, and how to see its ring."""

    @abstractmethod
    def dial(self) -> Link | None:
        """Connect without waiting; None while there is no sender of this name.

        Raises:
            AddressError: who answers under the name is not to be trusted.
        """

    @abstractmethod
    def map_slots(self, session: Session, link: Link) -> list[Tensor]:
        """The sender's slots, uint8 [bucket_bytes] each. Takes the descriptors it needs out of `link`.

        Raises:
            ProtocolError: what came with the session is not a ring of this size.
        """

    def release(self) -> None:  # noqa: B027  # most transports have nothing to do here
        """Let go of the slots; the connection they came with is closed. Idempotent."""

    def refresh(self, slot: int) -> bool:
        """Undo what this process itself has written to a slot; False if that cannot hide what the sender wrote."""
        del slot
        return False
