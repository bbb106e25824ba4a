"""Memory: shared segments and files, an arena over them, and a pool of used blocks."""
