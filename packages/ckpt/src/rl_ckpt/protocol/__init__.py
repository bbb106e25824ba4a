"""The control protocol of WIRE.md: messages, the channel that carries them, and the thread that waits for them."""
