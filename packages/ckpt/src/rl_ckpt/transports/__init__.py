"""Data planes: how the payload of a sync gets from a sender to its receivers."""
