"""Training processes: the group that the server starts, and the program of each rank."""
