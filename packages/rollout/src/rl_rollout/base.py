"""Interface of a rollout server: one replica of a served model, token ids in and token ids out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, Protocol

from rl_rollout.types import Capabilities, StoppedRequests, TokenChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from torch import Tensor

    from rl_rollout.types import GenerateRequest, ServerAddress, TensorPart, TokenOutput

PauseMode = Literal["abort", "wait", "keep"]


class WeightReceiver(Protocol):
    """Source of new weights, such as rl-ckpt's receiving engine.

    A server in another process cannot be handed an object: its client passes `address` on, and that process opens its
    own receiver.
    """

    address: str
    """URL of the weight-transfer session."""

    @property
    def version(self) -> int | None:
        """Weight version that landed last or is landing."""
        ...

    def receive_weights(self) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and full tensors; ends normally only if the sync was committed."""
        ...


class ReceiverSession(WeightReceiver, Protocol):
    """Weight receiver of a session that its owner closes, such as that of `rl_rollout.registry.create_receiver`."""

    async def close(self) -> None:
        """Leave the session; the next `receive_weights` opens it again. Idempotent."""
        ...


class RolloutServer(ABC):
    """Rollout server: one replica of a served model.

    Life cycle: `start`, then any number of concurrent `generate` calls, `update_weights` between or during them,
    `stop`. A replica serves one weight version at a time, reports it for every token, and never serves a half-installed
    one: after a failed update it either serves the old version or refuses with `WeightUpdateError` until an update
    succeeds.

    All methods are called from one event loop. Servers also answer an OpenAI-compatible HTTP endpoint at their address.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the server; of one in another process, known after `start`."""
        return Capabilities()

    @abstractmethod
    async def start(self) -> ServerAddress:
        """Load the model and bind the HTTP endpoint; returns its address. Idempotent.

        Raises:
            ServerStartError: the server died, or did not answer before the deadline; has its last lines of output.
            ModelFolderError: the model cannot be served.
        """

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Generate until stop, length or abort. Cancelling the call, or its deadline, ends the request.

        Raises:
            RequestError: empty or too long prompt, an id outside the vocabulary, a sampling field out of range, or a
                `request_id` that is in flight already. Nothing else is affected.
            UnsupportedError: the request asks for something that `capabilities` excludes.
            GenerationError: the logits are not finite.
            WeightUpdateError: the server has no complete weights.
            RequestTimeoutError: no token was generated within `timeout_s`.
            ServerLostError: the server was stopped, or has died.
        """

    async def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the tokens of `generate` in chunks; the last chunk has the finish reason.

        Leaving the iterator early ends the request. This default waits for the whole output and yields one chunk.

        Raises:
            RequestError: the request asks for extra outputs, which chunks do not carry.
        """
        request.check_streamable()
        output = await self.generate(request)
        yield TokenChunk(
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            weight_versions=output.weight_versions,
            finish_reason=output.finish_reason,
        )

    async def check_health(self) -> None:  # noqa: B027  a model in this process needs no check
        """Check that the server, and the process that computes, are alive.

        Raises:
            ServerLostError: they are not.
        """

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (None: all). Their `generate` calls return the tokens so far, with reason `abort`.

        Ids that are not in flight are ignored.
        """

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Pause decoding. New requests wait for `resume`.

        Requests in flight, queued ones included: mode `abort` ends them, `wait` lets them finish, `keep` freezes them.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Resume decoding after `pause`."""

    async def weight_layout(self, weights: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[list[TensorPart]] | None:
        """Slices that each weight receiver computes with, so that a sender can plan to send those alone.

        Asked before the first update with slices. None: one receiver takes every tensor whole.

        Args:
            weights: Dtype (`bfloat16`) and shape of every tensor that updates will bring, by Hugging Face name.
        """
        del weights
        return None

    @abstractmethod
    async def update_weights(self, receive: WeightReceiver, version: int) -> None:
        """Install weight version `version`, and drop the KV cache of the old one.

        Requests in flight continue under the new weights. The caller need not pause the replica.

        Raises:
            WeightUpdateError: the version was not installed; says whether the old one still serves.
        """

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Free memory so that a colocated engine can train.

        Level 1 frees the KV cache and moves weights from the GPU to host memory, from where `wake` brings them back;
        2 frees the weights as well.

        Requests in flight wait for `wake`, and lose nothing.

        Raises:
            UnsupportedError: `capabilities` excludes the level.
        """

    @abstractmethod
    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Wake from sleep. After level 2 the replica refuses requests until `update_weights`."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop the server: end requests, close the endpoint, free all memory. Idempotent."""


class ServerGroup(RolloutServer):
    """Replicas behind the interface of one, which may join and leave while they serve.

    `generate` runs on one of them, and continues on another if that one is lost or removed. Other calls reach all.
    """

    stopped: StoppedRequests
    """Requests that `hold` has stopped, to be continued in another process."""

    @property
    @abstractmethod
    def servers(self) -> tuple[RolloutServer, ...]:
        """Replicas in use, without those that were lost or wait for weights."""

    @abstractmethod
    async def add(self, server: RolloutServer, receive: WeightReceiver | None = None) -> None:
        """Start a replica, and use it once it holds the weights that the others serve.

        Args:
            server: The new replica.
            receive: Receiver of the current weights, from a sender that resends them (rl-ckpt's `resend_current`).
                None: the replica takes part in the next `update_weights`, and `add` returns after that.

        Raises:
            WeightUpdateError: it did not get the weights; it is stopped and not used.
        """

    @abstractmethod
    async def remove(self, server: RolloutServer) -> None:
        """Remove and stop a replica. Its requests in flight continue on others, from the tokens that they have.

        Raises:
            ConfigError: the replica is not in use, or is the last one.
        """

    @abstractmethod
    async def hold(self) -> None:
        """Stop the requests of this group at the replicas, and start none until `release`.

        Their `generate` calls stay open. Replicas that cannot abort finish what they have.
        """

    @abstractmethod
    async def release(self) -> None:
        """Undo `hold`: every request continues from the tokens that it has, under the weights that serve then."""


class HttpEndpoint(ABC):
    """HTTP endpoint of a server in this process, on its event loop; see `rl_rollout.registry.create_endpoint`."""

    @abstractmethod
    async def start(self) -> str:
        """Bind the port; returns the base URL.

        Raises:
            ServerStartError: the port is taken, or the interface cannot be bound.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Close the port and the weight-transfer sessions. Idempotent."""


class Subprocess(ABC):
    """Child process under supervision: it and its descendants end with this process, and its last lines are retained.

    No event loop is needed. Any thread may call.
    """

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id; 0 before the start."""

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""

    @abstractmethod
    def start(self) -> None:
        """Start the process.

        Raises:
            ServerStartError: there is no such command, or the process was started before.
        """

    @abstractmethod
    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; returns the exit code, or None if the process has not ended within the time."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process and its descendants. Idempotent."""

    @abstractmethod
    def with_output(self, what: str) -> str:
        """Message `what`, followed by the first errors and the last lines of output."""
