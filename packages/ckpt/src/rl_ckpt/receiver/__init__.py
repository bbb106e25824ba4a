"""The receiving end of a session."""
