"""The clients of a served queue."""
