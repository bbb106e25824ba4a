"""An OpenAI-compatible endpoint that records what any agent framework does with it, as trainable tokens."""

from rl_agent.proxy.server import RecordingProxy

__all__ = ["RecordingProxy"]
