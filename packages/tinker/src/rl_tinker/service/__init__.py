"""State and work of the server: tenants, records, the order of operations, checkpoints, sampling."""
