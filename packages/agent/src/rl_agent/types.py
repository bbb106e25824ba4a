"""Data types: messages, tool calls, failures, trajectories and results of rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeVar, cast

T = TypeVar("T")

Message = Mapping[str, Any]
"""Chat message: `role` and `content`."""
RoutedToken = tuple[tuple[int, ...], ...]
"""Expert ids of one token, [MoE layers][experts per token]; empty where the server returned none."""


def readable(text: str) -> str:
    """Text with its lone surrogates replaced by U+FFFD."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def well_formed(value: T) -> T:
    r"""Replace lone surrogates, which no tokenizer and no wire format takes, by U+FFFD; nested containers included.

    JSON can spell them (`"\ud800"`), and text that was cut inside a UTF-16 pair holds them.
    """
    found: Any = value
    if isinstance(found, str):
        found = readable(found)
    elif isinstance(found, Mapping):
        given = cast("Mapping[Any, Any]", found)
        found = {well_formed(name): well_formed(each) for name, each in given.items()}
    elif type(found) in (list, tuple):
        found = type(found)(well_formed(each) for each in found)
    return cast("T", found)


LARGEST_REWARD = 1e15
"""Largest absolute reward: its square, summed over a batch, fits float32."""


class Tokenizer(Protocol):
    """Tokenizer interface of the loops; Hugging Face tokenizers have it."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of `token_ids`."""
        ...

    def apply_chat_template(self, conversation: Sequence[Message], **kwargs: Any) -> Any:
        """Render a conversation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """Tool call that the model wrote."""

    name: str
    """Name of the tool; empty where the call names none."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by parameter name."""
    error: str = ""
    """Error of a malformed call, a sentence for the model; empty where it is well formed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """Parsed turn of the model."""

    content: str
    """Text outside of calls and reasoning."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls in order, malformed ones included."""
    reasoning: str = ""
    """Reasoning text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Result of a tool that has images."""

    text: str = ""
    """Text for the model."""
    images: tuple[str | bytes, ...] = ()
    """Encoded images, shown before the text: data URLs, or bytes of PNG, JPEG, GIF or WebP files."""


class FailureKind(StrEnum):
    """Kind of a failure: the part that failed."""

    GENERATION = "generation"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    GRADER = "grader"
    LOOP = "loop"
    TRANSPORT = "transport"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Failure of a rollout: a value, not an exception, and never a reward of zero."""

    kind: FailureKind
    """Kind of the failure."""
    stage: str
    """Stage of the loop in which it happened."""
    message: str
    """Message of the error."""
    is_retryable: bool
    """Whether another attempt could succeed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", readable(self.message))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoopOutput:
    """Trajectory: a prompt of P tokens, and a completion of C tokens by the model, tools and environments."""

    prompt_token_ids: tuple[int, ...]
    """P prompt ids."""
    completion_token_ids: tuple[int, ...]
    """C ids: everything after the prompt. Empty where the model generates no tokens (`columns`)."""
    loss_mask: tuple[int, ...]
    """C flags: 1 = the model wrote it."""
    rollout_logprobs: tuple[float, ...]
    """C log-probs of the sampler; 0 where loss_mask is 0."""
    weight_versions: tuple[int, ...]
    """C weight versions; -1 where loss_mask is 0."""
    finish_reason: str
    """Finish reason of the last generation: stop, length, abort or timeout."""
    text: str = ""
    """Text of the model's last turn, for rewards and logs; it is never re-tokenised."""
    reward: float | None = None
    """Reward of the whole trajectory, if the loop or its environment gives one."""
    turn_rewards: tuple[float, ...] = ()
    """Reward of each turn of the model, if there are any."""
    num_turns: int = 1
    """Number of generations by the model."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Durations (`_s`) and counts."""
    routed_experts: tuple[RoutedToken, ...] = ()
    """Routed experts of all tokens but the last, P + C - 1 entries, from the generation that first fed each token.
    Empty unless the requests asked for them (`GenerateRequest.returns_routed_experts`)."""
    images: tuple[str, ...] = ()
    """Data URLs of the images in prompt and completion, unchanged, in the order of their placeholders."""
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    """Further data of the loop that travels with the sample."""
    policy: str = ""
    """Name of the policy that generated it, of several; empty: the default one."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    """Tensors by name that are generated in place of tokens, such as latents: columns of the queue, their first axis of
    any length. Mask, log-probs and versions then have an entry for each of C steps, and a log-prob is that of a
    density, which may be positive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """Result of one rollout: trajectories, or a failure."""

    row_index: int
    """Index of the row in the batch; the rollouts of one row form its group."""
    rollout_index: int
    """Index of the rollout in its group, 0 to group_size - 1."""
    outputs: tuple[AgentLoopOutput, ...] | Failure
    """Valid trajectories, at least one; or the failure."""
    num_attempts: int
    """Number of attempts."""
    wall_s: float
    """Seconds from the first start to the end, retries included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """Result of one row's group."""

    row_index: int
    """Index of the row in the batch."""
    rollouts: tuple[tuple[AgentLoopOutput, ...], ...]
    """Trajectories of each successful rollout, in order; empty where the group is dropped."""
    failures: tuple[Failure, ...]
    """Failed rollouts, those included that were replaced."""

    @property
    def is_dropped(self) -> bool:
        """Whether the group has no trajectories."""
        return not self.rollouts

    @property
    def num_failures(self) -> dict[FailureKind, int]:
        """Number of failed rollouts by kind."""
        return dict(Counter(failure.kind for failure in self.failures))


class OnFailure(StrEnum):
    """Policy for a group of which a rollout has failed, all its attempts included."""

    REFILL = "refill"
    """Run another rollout of the same row instead, with a new seed; after a limit, as `drop`."""
    DROP = "drop"
    """Drop the group: it has no trajectories, and its remaining rollouts are not started."""
    MASK = "mask"
    """Keep the group without it, if enough rollouts are left; else as `drop`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one run of code, all its processes together."""

    timeout_s: float = 10.0
    """Wall-clock seconds."""
    memory_bytes: int = 1 << 30
    """Memory of all processes, with shared memory and files in memory; and address space of each, the
    interpreter's own included."""
    num_processes: int = 64
    """Most processes and threads at a time; without control groups, most processes."""
    output_bytes: int = 1 << 16
    """Most bytes of output that are returned."""
    file_bytes: int = 1 << 24
    """Largest file that may be written, output included, bytes; more is an error in the code."""
    scratch_bytes: int = 1 << 26
    """Most bytes of all files in `/tmp` together, if code has its own."""
    folder_bytes: int | None = None
    """Most bytes of all files in the working folder of a sandbox, and of those in each further folder, which are in
    memory then and count as such; None: no limit but that of each file."""


CodeStatus = Literal["ok", "error", "timeout", "memory", "output", "died"]
"""Status of a run of code. `output`: it wrote too much; `died`: its process was killed or ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeResult:
    """Result of a run of code."""

    kind: CodeStatus
    """Status of the run."""
    output: str
    """Standard output and error, cut at the limit."""
    error: str
    """Traceback without the sandbox's own frames; empty after a success."""
    num_output_bytes: int
    """Bytes of output in all."""
    wall_s: float
    """Seconds that it ran; for a cached result, those of the first run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxReport:
    """Limits and isolation that hold on this machine."""

    isolation: frozenset[str]
    """Isolation in force, of `network`, `processes` and `files`."""
    memory: Literal["cgroup2", "cgroup1", "watcher"]
    """Enforcer of the memory limit: the kernel, at once, or a watcher, within about 50 ms."""
    processes: Literal["cgroup2", "cgroup1", "rlimit", "watcher"]
    """Enforcer of the limit of processes."""
    has_filter: bool
    """Whether system calls that reach into other processes are refused (seccomp)."""
    landlock: int
    """Version of the kernel's Landlock, which refuses all files but the system's, whatever is mounted; 0 without."""

    def __str__(self) -> str:
        """Summary in one line, for the start of a run."""
        off = ", ".join(sorted(self.isolation)) or "nothing"
        missing = ", ".join(sorted({"network", "processes", "files"} - self.isolation))
        filtered = "refused" if self.has_filter else "NOT refused"
        landlock = f"Landlock {self.landlock}" if self.landlock else "mounts alone: this kernel has no Landlock"
        return (
            f"code is shut off from {off}{f' and NOT from {missing}' if missing else ''}; memory of all its processes "
            f"is held by {self.memory}, their number by {self.processes}; system calls into other processes are "
            f"{filtered}; files are bounded by {landlock}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Command line of Python that a launch script would run."""

    words: tuple[str, ...]
    """Program, and its arguments."""
    folder: str
    """Working folder."""
    module: str
    """Module that it runs, in dotted form where it is a file."""
    options: tuple[str, ...]
    """Options of the program itself, such as those of torchrun."""
    arguments: tuple[str, ...]
    """Arguments of the module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """What a launch script would run."""

    launches: tuple[Launch, ...]
    """In the order in which they would start."""
    unknown: Mapping[str, str]
    """Command by the number N of its marker: `@unknownN@` in a word is what that command, which was not run, prints."""
    assumed: tuple[str, ...]
    """Answers that depend on the machine, such as that a module cannot be imported."""
    complaints: tuple[str, ...]
    """What bash complained about, such as a file to source that does not exist."""
