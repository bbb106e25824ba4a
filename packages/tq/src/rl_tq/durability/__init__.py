"""What outlives a process: the journal and snapshots."""
