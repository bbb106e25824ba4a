"""Relays: receivers that send on what they take, while it arrives."""
