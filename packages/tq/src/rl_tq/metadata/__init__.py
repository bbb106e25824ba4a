"""The bookkeeping of a queue: pure, without I/O, threads or tensors."""
