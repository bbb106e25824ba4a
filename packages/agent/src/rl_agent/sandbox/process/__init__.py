"""Code of the sandbox's processes. Started by path: it imports the standard library alone."""
