"""The serving process: the host of a queue, and its connections."""
