"""Interface of agent loops: a dataset row in, trainable tokens out."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rl_agent.errors import LoopError
from rl_agent.types import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from rl_agent.types import (
        AgentLoopOutput,
        CodeResult,
        Failure,
        GroupResult,
        OnFailure,
        RolloutResult,
        SandboxReport,
    )
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


@dataclass(frozen=True, slots=True)
class Policy:
    """Policy that acts in an environment: its servers, and the tokenizer of its model."""

    server: Generator
    tokenizer: Tokenizer


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

    policies: Mapping[str, Policy] = MappingProxyType({})
    """Policies by name, where there are several; `server` and `tokenizer` are those of the default one."""

    def __init__(self, server: Generator, tokenizer: Tokenizer) -> None:
        self.server = server
        self.tokenizer = tokenizer

    def policy(self, name: str = "") -> Policy:
        """Policy of this name; by default the one of `server`. Its trajectories have the name as `policy`.

        Raises:
            LoopError: there is none of this name.
        """
        if not name:
            return Policy(self.server, self.tokenizer)
        if name not in self.policies:
            there = f"there are {', '.join(self.policies)}" if self.policies else "there is one, which has no name"
            raise LoopError(f"the agent loop asks for policy {name!r}, and {there}")
        return self.policies[name]

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


class PromptTokenizer(Tokenizer, Protocol):
    """Tokenizer of a model folder, whose rendered chat templates are cached; other attributes are the tokenizer's."""

    def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids of a row's `prompt` under the chat template, and its images as data URLs, in order.

        Raises:
            TemplateError, RowError: the template or the row cannot be used.
        """
        ...


class RolloutRunner(ABC):
    """Runner of rollouts: runs rows in groups, concurrently on one event loop; see `rl_agent.registry.create_runner`.

    A rollout that fails ends as a `Failure`, never as a reward of zero, while the others go on. An error of the set-up
    is raised from the iteration, and what still runs is cancelled.
    """

    @abstractmethod
    def run_groups(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampling_params: Mapping[str, Any],
        *,
        group_size: int,
        on_failure: OnFailure | str = ...,
        max_refills: int = 2,
        min_group_size: int = 2,
        grade: Callable[[RolloutResult], Awaitable[RolloutResult]] | None = None,
        complete: Callable[[GroupResult], Awaitable[GroupResult]] | None = None,
        positions: Sequence[int] | None = None,
    ) -> AsyncGenerator[GroupResult, None]:
        """Run a batch by groups; yields each as its last rollout ends. Failed rollouts contribute no trajectory.

        Args:
            rows: Dataset rows.
            sampling_params: Fields of `rl_rollout.types.SamplingParams`. A `seed` among them seeds the batch: every
                rollout gets its own, derived from it and the row's position in the batch.
            group_size: Rollouts per row.
            on_failure: `refill`, `drop` or `mask`; see `OnFailure`.
            max_refills: Places of one group that another rollout may take, with `refill`.
            min_group_size: Rollouts that have to be left, with `mask`; a baseline needs two.
            grade: Gives the rewards of a rollout that ended well, or the `Failure` to give them; that counts as the
                rollout's own.
            complete: Called with each group that has rollouts; its answer is yielded. It may compare them.
            positions: Position of each row in the batch, where these are a part of one, so that seeds do not depend on
                how it is divided. None: as given.

        Raises:
            LoopError: a row's loop is not installed; raised before anything starts.
            ValueError: a size is not positive, or there is not one position per row.
        """

    @abstractmethod
    async def prompts(
        self, rows: Sequence[Mapping[str, Any]]
    ) -> list[tuple[tuple[int, ...], tuple[str, ...]] | Failure]:
        """Prompts that the rows' loops start with: token ids and images, or why there is none.

        Raises:
            LoopError, TemplateError, TokenizerError: a loop or the tokenizer cannot be used.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the loops."""


class CodeGrader(ABC):
    """Grader of code that a policy wrote: each run in a fresh process, with hard limits, shut off where possible.

    `rl_agent.registry.create_grader` makes one. One event loop; runs are concurrent up to its number of workers.
    """

    @abstractmethod
    async def check(self) -> SandboxReport | str:
        """Report which limits and isolation hold, by starting a subprocess, or a sandbox.

        Raises:
            SandboxError: none can be started, or code cannot be shut off as `needs` asks.
        """

    @abstractmethod
    async def run(self, code: str, stdin: str = "", *, timeout_s: float | None = None) -> CodeResult:
        """Run code in a fresh process. Its deadline counts from its start, and not while it waits for a subprocess.

        Raises:
            FailureError: too many runs wait (kind `grader`, retryable): nothing was said about the code.
            SandboxError: no subprocess can be started, or network is not denied and has to be.
        """

    @abstractmethod
    async def judge(self, code: str, test: str, *, timeout_s: float | None = None) -> CodeResult:
        """Run assertions about a solution, each of the two in its own process.

        The test's process decides. Names that the test does not define are the code's: calls go to the other process,
        and plain values come back, of exactly the builtin types. So code cannot read what is expected, and cannot
        change how it is compared. What it holds in classes of its own stays there, and equals no plain value.

        Returns:
            `ok` where the test came to its end; else what it raised, with the output of the code.

        Raises:
            FailureError, SandboxError: as of `run`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Kill the processes."""
