"""Which sequences run in the next step, and which blocks of the KV cache they have."""
