"""The sending end of a session."""
