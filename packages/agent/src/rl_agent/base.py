"""Interface of agent loops: a dataset row in, trainable tokens out."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rl_agent.errors import LoopError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from rl_agent.types import AgentLoopOutput, Tokenizer
    from rl_rollout.types import GenerateRequest, TokenChunk, TokenOutput


class Generator(Protocol):
    """Generator of tokens: a rollout server, its client, or a router over many."""

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Generate a completion: token ids in, token ids out."""
        ...


@runtime_checkable
class StreamingGenerator(Protocol):
    """Generator that also streams, as rl-rollout's servers and router do."""

    def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the chunks of a completion; leaving early ends the generation."""
        ...


class AgentLoop(ABC):
    """Agent loop: turns one dataset row into one trajectory, or several.

    The invariant: what the model emitted is never re-tokenised; context is only ever appended to. One instance runs
    many rows at the same time on one event loop, so `run` keeps its state in local variables.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check that `run` can be called with sampling parameters and a row.

        Raises:
            LoopError: it cannot.
        """
        super().__init_subclass__(**kwargs)
        try:
            inspect.signature(cls.run).bind(None, {}, {})
        except TypeError as error:
            raise LoopError(
                f"{cls.__qualname__}.run{inspect.signature(cls.run)} cannot be called: {error}; a loop's method is "
                "run(self, sampling_params, row), where row is the dataset row as one mapping"
            ) from error

    def __init__(self, server: Generator, tokenizer: Tokenizer) -> None:
        self.server = server
        self.tokenizer = tokenizer

    @abstractmethod
    async def run(
        self, sampling_params: dict[str, Any], row: Mapping[str, Any]
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run one dataset row.

        Args:
            sampling_params: Fields of `rl_rollout.types.SamplingParams`, for every request.
            row: The dataset row: `prompt` (chat messages) and whatever else it carries.

        Returns:
            Valid trajectories: those that `validate_output` accepts.

        Raises:
            RowError: the row lacks a field that this loop needs; raised before anything is generated.
            FailureError: the rollout ends as the failure that it carries, for example where a generation gave no token.
            Exception: errors of the server, unchanged; likewise a cancellation.
        """

    async def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]] | None:
        """Token ids of the prompt that `run` starts with, and its images: what limits on prompts are compared with.

        The default, None, is the row's `prompt` under the chat template. A loop that adds something (tools, an
        observation) overrides it.

        Raises:
            RowError, FailureError: as `run`.
        """
        del row
        return None

    async def close(self) -> None:
        """Free what the loop holds: processes, connections. The default holds nothing."""
        return
