"""Interface of a rollout server: one replica of a served model, token ids in and token ids out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, Protocol

from rl_rollout.types import Capabilities, TokenChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from torch import Tensor

    from rl_rollout.types import GenerateRequest, ServerAddress, TokenOutput

PauseMode = Literal["abort", "wait", "keep"]


class WeightReceiver(Protocol):
    """Source of new weights; rl-ckpt's receiving engine is one.

    A server in another process cannot be handed an object, so its client passes `address` on and that process opens
    its own receiver.
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


class RolloutServer(ABC):
    """One replica of a served model.

    Life: `start`, then any number of `generate` calls at once, `update_weights` between or during them, `stop`. A
    replica serves one weight version at a time, tells it for every token, and never serves a half-installed one:
    after a failed update it either serves the old version or refuses with `WeightUpdateError` until an update
    succeeds.

    Called from one event loop. Servers also answer an OpenAI-compatible HTTP endpoint at their address.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the server. Of one in another process, known from `start` on."""
        return Capabilities()

    @abstractmethod
    async def start(self) -> ServerAddress:
        """Load the model, bind the endpoint, and return where it answers. Idempotent.

        Raises:
            ServerStartError: it died or did not answer before the deadline; carries its last lines.
            ModelFolderError: the model cannot be served.
        """

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Generate until stop, length or abort. A call that is cancelled or late ends its request.

        Raises:
            RequestError: empty or too long prompt, an id outside the vocabulary, a sampling field out of range, or a
                `request_id` that is in flight already. Nothing else is affected.
            UnsupportedError: it asks for what `capabilities` excludes, or for what cannot be honoured.
            GenerationError: the logits are not finite; no token is made up.
            WeightUpdateError: there are no whole weights to generate with.
            RequestTimeoutError: not done within `timeout_s`.
            ServerLostError: it was stopped, or has died.
        """

    async def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """`generate`, told in pieces: the tokens as they come, the last of them together with the reason.

        Leaving early ends the request. This default waits for the whole output and tells it in one piece.

        Raises:
            RequestError: it asks for something beside the tokens; chunks have no room for that.
        """
        request.check_streamable()
        output = await self.generate(request)
        yield TokenChunk(
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            weight_versions=output.weight_versions,
            finish_reason=output.finish_reason,
        )

    async def check_health(self) -> None:  # noqa: B027  a model in this process has nothing to look at
        """See that it is there, and the process that computes.

        Raises:
            ServerLostError: it is not. A model in this process always is.
        """

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (all when None). Their `generate` calls return what they have, with reason `abort`.

        Ids that are not in flight have ended already.
        """

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding. New requests wait for `resume`.

        Requests in flight, queued ones included: `abort` ends them, `wait` lets them finish, `keep` freezes them.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Decode again."""

    @abstractmethod
    async def update_weights(self, receive: WeightReceiver, version: int) -> None:
        """Install `version` and drop cached keys and values of the old one.

        Requests in flight go on under the new weights. The replica need not be paused by the caller.

        Raises:
            WeightUpdateError: says whether the old version still serves.
        """

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Give memory back so that a colocated engine can train: 1 frees the KV cache, 2 the weights as well.

        Requests in flight wait for `wake`, and lose nothing.

        Raises:
            UnsupportedError: `capabilities` excludes the level.
        """

    @abstractmethod
    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take it again. After level 2 the replica refuses until `update_weights`."""

    @abstractmethod
    async def stop(self) -> None:
        """End requests, close the endpoint, free everything. Idempotent."""
