# The native half as Python sees it. Arguments are checked by the Python that calls it.
from collections.abc import Callable, Sequence
from typing import Any

import torch

compiler: str
num_frame_dtypes: int

def isa() -> int: ...
def set_isa(level: int) -> int: ...
def digest(data: Any) -> int: ...
def digest_sum(data: Any, offset: int) -> int: ...
def digest_finish(total: int, nbytes: int) -> int: ...
def encode_delta(
    fresh: torch.Tensor,
    base: torch.Tensor,
    item_nbytes: int,
    table: torch.Tensor,
    gaps: torch.Tensor,
    values: torch.Tensor,
) -> tuple[int, int] | None: ...
def advance_delta(
    fresh: torch.Tensor,
    base: torch.Tensor,
    item_nbytes: int,
    leaf_nbytes: int,
    first: int,
    digests: list[int],
    out: torch.Tensor,
    alignment: int,
    enough: int,
    max_fraction: float,
) -> list[tuple[int, int, int, int]]: ...
def apply_delta(
    target: torch.Tensor,
    item_nbytes: int,
    table: torch.Tensor,
    gaps: torch.Tensor,
    values: torch.Tensor,
    digest: bool,
) -> int | None: ...
def move_leaves(
    bucket: Any,
    pieces: list[tuple[torch.Tensor, int, int, int]],
    nbytes: int,
    leaf_nbytes: int,
    packing: bool,
) -> list[list[int]]: ...
def memory_view(data: Any) -> memoryview: ...
def advise_huge_pages(tensor: torch.Tensor) -> bool: ...
def row_offsets(rows: list[torch.Tensor]) -> torch.Tensor | None: ...
def ends(offsets: torch.Tensor) -> tuple[int, int]: ...
def cut(
    offsets: torch.Tensor, first: int, count: int, known: list[torch.Tensor]
) -> tuple[int, int, int, torch.Tensor]: ...
def join(pieces: list[torch.Tensor], out: Any) -> bool: ...
def begin_joins(joins: list[tuple[Sequence[torch.Tensor], Any]]) -> Joining | None: ...
def join_slices(sources: list[Any], slices: list[tuple[int, int, int]], width: int, out: Any) -> int: ...
def balanced_order(lengths: list[int], num_parts: int) -> list[int]: ...

class Joining:
    def finish(self) -> None: ...

class EncodedFrame:
    def __init__(self, mapping: dict[str, Any], normalise: Callable[[str, object], object], tag: int) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def header(self) -> bytes: ...
    def buffers(self) -> list[memoryview]: ...
    def checksum(self) -> None: ...
    def write_into(self, out: Any, checksum: bool, num_threads: int) -> None: ...
    def write_fd(self, fd: int, timeout_s: float) -> int: ...

class DecodedFrame:
    def __init__(self, buffer: Any, verify: bool) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: str) -> bool: ...
    def names(self) -> list[str]: ...
    def values(self) -> dict[str, Any]: ...
    def get(self, name: str) -> Any: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def tag(self) -> int: ...
    @property
    def has_digest(self) -> bool: ...

def send_now(socket: int, data: Any) -> int: ...
def receive_now(socket: int) -> bytes: ...

class Pipeline:
    """Jobs in order on one thread, with a ring of slots (uint8 [N] each, or None for those on a device)."""

    def __init__(self, slots: list[torch.Tensor | None], leaf_nbytes: int, waker: int) -> None: ...
    def pack(
        self, bucket: int, content: Any, offset: int, slot_offset: int, nbytes: int, is_copied: bool, is_digested: bool
    ) -> int:
        """Put a job: copy a run of bytes into the bucket's slot, which it waits for. Returns the number of jobs put."""

    def unpack(self, slot: torch.Tensor, stream: int, used_nbytes: int, pieces: list[tuple[Any, int, int, int]]) -> int:
        """Put a job: read a bucket from a blocking socket (-1: it is in the slot), copy and digest its pieces.

        A piece is (content or None, offset in it, offset in the slot, bytes).
        """

    def take(self, count: int) -> list[tuple[int, list[list[int]]]]:
        """Results of the next jobs that are done: (errno, -1 at a stream's end, or 0; leaf digests of each piece)."""

    def start(self) -> None:
        """Let the thread do all jobs that were put so far."""

    def help(self, count: int) -> bool:
        """Do jobs in this thread until `count` are done. False if the next one has no slot."""

    def num_done(self) -> int: ...
    def num_bytes(self) -> int:
        """Bytes moved or read so far: what a deadline looks at."""

    def busy_ns(self) -> int: ...
    def wake_at(self, seen: int, count: int) -> bool:
        """Wake once `count` jobs are done, or all that have a slot. True, and no wake, if that is so after `seen`."""

    def is_stalled(self) -> bool:
        """Whether no job is being done and none can begin: there is none, or it has no slot."""

    def slot_of(self, bucket: int) -> int: ...
    def assign(self, bucket: int) -> int:
        """Give a bucket a slot that the caller fills; -1: none is free."""

    def release(self, bucket: int) -> None: ...
    def use_slots(self, count: int) -> None:
        """Use only the first `count` slots."""

    def cancel(self) -> None:
        """Drop all jobs and results, free all slots; when it returns, no memory is touched any more."""

    def close(self) -> None: ...

class StreamWriter:
    """Writes to a blocking socket, which the caller owns, on a thread of its own.

    The pipeline `ahead` digests what is sent from its source not much further ahead than this writes.
    """

    def __init__(self, socket: int, waker: int, ahead: Pipeline | None = None) -> None: ...
    def put(self, runs: list[tuple[Any, int, int]]) -> None:
        """Queue runs of memory, or of a file by its descriptor: (memory, start, bytes). They must stay."""

    def is_idle(self) -> bool: ...
    def wake_when_idle(self) -> bool:
        """Whether the kernel has taken everything; if not, wake when it has."""

    def error(self) -> int: ...
    def system_ns(self) -> int:
        """CPU time of the thread inside system calls that take payload."""

    def thread_ns(self) -> int: ...
    def close(self) -> bool:
        """Shut the socket down and end the thread. False: it did not end in ten seconds."""

# The kernels (native/cpu) are called by address and typed where they are wrapped.
def __getattr__(name: str) -> Any: ...  # pyright: ignore[reportIncompleteStub]
