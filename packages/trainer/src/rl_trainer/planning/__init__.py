"""Known before anything starts: the batch plan, memory, GPUs, and what in a configuration cannot work."""
