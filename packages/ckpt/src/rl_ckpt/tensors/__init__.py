"""Tensors as named bytes: specifications, digests, buckets, differences. No sockets, no peers."""
