"""Planning before anything starts: batch plan, memory, GPUs, simulator, and refusals of what cannot work."""
