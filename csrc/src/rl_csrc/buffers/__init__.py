"""Buffers that carry tensors between processes: frames, buckets, deltas, digests and rows of ragged columns."""

from rl_csrc.buffers import bucket, delta, digest, frames, rows

__all__ = ["bucket", "delta", "digest", "frames", "rows"]
