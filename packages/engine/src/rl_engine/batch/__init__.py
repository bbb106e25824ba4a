"""Rows of a batch: checked, balanced over ranks, cut into micro-batches, packed without padding."""
