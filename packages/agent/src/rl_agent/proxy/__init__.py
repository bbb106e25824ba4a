"""Recording proxy: an OpenAI-compatible endpoint that records an agent framework's requests as trainable tokens."""

from rl_agent.proxy.server import RecordingProxy

__all__ = ["RecordingProxy"]
