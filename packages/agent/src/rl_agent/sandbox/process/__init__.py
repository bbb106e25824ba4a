"""What runs in the processes of the sandbox. Started by path: it imports the standard library alone."""
