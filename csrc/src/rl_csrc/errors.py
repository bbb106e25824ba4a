"""Errors of the kernels and buffers.

RlCsrcError
├── ArgumentError     (ValueError)       a tensor or option that an op cannot take: shape, dtype, stride, device, range
├── LabelError        (IndexError)       a label outside the vocabulary that is not `ignore_index`
├── FrameError        (ValueError)       bytes that are not a whole frame, or values that a frame cannot hold
├── DeltaError        (ValueError)       a delta that does not fit the tensor it is applied to
├── DeadlineError     (TimeoutError)     a peer did not answer in time; it may still be alive
├── PeerDiedError     (ConnectionError)  a peer's process ended, or it closed the connection in the middle of something
└── FolderInUseError  (RuntimeError)     another process writes to the folder; says which
"""

from __future__ import annotations


class RlCsrcError(Exception):
    """Base class of rl-csrc's errors."""


class ArgumentError(RlCsrcError, ValueError):
    """An argument that an op does not accept. The message names the argument, the value seen and the values allowed."""


class LabelError(RlCsrcError, IndexError):
    """A label outside the vocabulary that is not `ignore_index`."""


class FrameError(RlCsrcError, ValueError):
    """Bytes that are not a whole frame, or values that a frame cannot hold. The message says which entry and why."""


class DeltaError(RlCsrcError, ValueError):
    """A delta that does not fit the tensor it is applied to, or that was damaged. The tensor was not touched."""


class DeadlineError(RlCsrcError, TimeoutError):
    """A peer did not answer in time. The message names the peer; it may still be alive."""


class PeerDiedError(RlCsrcError, ConnectionError):
    """A peer's process ended, or it closed the connection in the middle of something. The message names it."""


class FolderInUseError(RlCsrcError, RuntimeError):
    """Another process writes to the folder. The message names the process, its host and since when."""
