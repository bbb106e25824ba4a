"""Columns: what a caller's data is encoded as, where an extent has it, and batches gathered from extents."""
