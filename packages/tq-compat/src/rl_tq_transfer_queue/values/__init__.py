"""Values of samples: the columns that hold them, what describes them, and their bytes on a wire or in a file."""
