"""What the original's recipes import from behind its public names."""
