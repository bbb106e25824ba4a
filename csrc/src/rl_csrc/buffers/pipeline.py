"""Bucket pipeline and stream writer: threads that pack, verify, unpack and send outside Python's lock.

Python plans what goes where and says what is done to peers; the bytes are moved by one thread of the pipeline, in
order, into or out of a ring of slots, with the digests of their leaves, and by one thread for each stream. A thread
ends a `poll` of Python's by the descriptor `waker`, only when it was asked to. Methods are described in `_cpu.pyi`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_csrc.native import cpu

if TYPE_CHECKING:
    from rl_csrc._cpu import Pipeline, StreamWriter  # pyright: ignore[reportMissingModuleSource]  # it is compiled
else:
    Pipeline, StreamWriter = cpu.Pipeline, cpu.StreamWriter

__all__ = ["Pipeline", "StreamWriter"]
