"""How a receiver reaches a sender, whichever there is, and asks it for the next sync."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rl_ckpt._line import Line
from rl_ckpt.protocol.channel import Deadline, wait_for
from rl_ckpt.protocol.messages import NO_VERSION, AbortReason, Begin, Ready
from rl_ckpt.errors import DigestError, PeerLostError, PeerTimeoutError, ProtocolError

if TYPE_CHECKING:
    from rl_ckpt.protocol.channel import Waker
    from rl_ckpt.transports.base import ReceiveTransport
    from rl_ckpt.types import SessionConfig

DIAL_AGAIN_S = 0.02
_REASONS: dict[type[BaseException], AbortReason] = {
    DigestError: AbortReason.DIGEST,
    ProtocolError: AbortReason.PROTOCOL,
    PeerTimeoutError: AbortReason.TIMEOUT,
}


def reason_of(error: BaseException) -> AbortReason:
    """What a sender is told of an error."""
    return _REASONS.get(type(error), AbortReason.FAILED)


class Caller:
    """Owns the connection to the sender, one after the other."""

    def __init__(self, config: SessionConfig, transport: ReceiveTransport, waker: Waker) -> None:
        self.line: Line | None = None
        """The connection, while there is one."""
        self._config = config
        self._transport = transport
        self._waker = waker

    def connect(self) -> None:
        """Wait until there is a sender.

        Raises:
            PeerTimeoutError: none came before the deadline.
        """
        self._dial(Deadline(self._config.timeout_s))

    def ask(self, ready: Ready) -> tuple[Line, Begin]:
        """Ask for the next sync, and wait until it begins. `opened` of the message is filled in.

        Raises:
            CkptError: it did not; the connection is closed.
        """
        deadline = Deadline(self._config.timeout_s)
        while True:
            try:
                line = self._dial(deadline)
                return line, self._ask(line, ready, deadline)
            except PeerLostError as error:
                self.hang_up()  # it died before this sync began: wait for its successor
                if not self._pause(deadline):
                    raise PeerTimeoutError(f"{error}, and none began a sync within {deadline.timeout_s:g} s") from error
            except BaseException as error:
                self.leave(reason_of(error), str(error) or repr(error))
                self.hang_up()
                raise

    def leave(self, reason: AbortReason, text: str) -> None:
        """Tell the sender, if it can still hear it, and hang up if it cannot or if the two are out of step."""
        if self.line is not None and not self.line.leave(reason, text):
            self.hang_up()

    def hang_up(self) -> None:
        """Close the connection. Idempotent."""
        if self.line is not None:
            self.line.close()
            self.line = None
            self._transport.release()

    def _dial(self, deadline: Deadline) -> Line:
        """The connection, a new one if there is none."""
        address = self._config.address
        while self.line is None:
            link = self._transport.dial()
            if link is not None:
                self.line = Line(link, self._transport, self._waker, address, timeout_s=self._config.timeout_s)
                self.line.greet(deadline)
            elif not self._pause(deadline):
                raise PeerTimeoutError(f"no sender came to {address} within {deadline.timeout_s:g} s")
        return self.line

    def _pause(self, deadline: Deadline) -> bool:
        """Wait a moment before dialling again. False when the deadline has passed."""
        wait_for(self._waker, Deadline(min(DIAL_AGAIN_S, deadline.remaining_s())))
        return deadline.remaining_s() > 0

    def _ask(self, line: Line, ready: Ready, deadline: Deadline) -> Begin:
        inlet = line.inlet or line.join(deadline)
        line.inbox.clear()  # what is left of a sync that was given up
        line.sync += 1
        try:
            inlet.open(line.sync, self._config.timeout_s)
        except OSError as error:
            raise PeerLostError(f"{line.peer} took no connection for payload: {error}") from error
        line.post(replace(ready, opened=inlet.opened), deadline)
        message = line.next(deadline, "began no sync")
        if isinstance(message, Begin) and message.base in {ready.held, NO_VERSION}:
            return message
        raise ProtocolError(f"{line.peer} sent {message} where a sync should begin; version {ready.held} is held here")
