"""The process that runs code; started by its path, it imports nothing of this package."""
