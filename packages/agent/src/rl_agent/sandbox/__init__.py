"""Sandbox: runs code that a policy wrote, with limits, and isolated from this machine."""

from rl_agent.sandbox.pool import Grader
from rl_agent.sandbox.worker import Worker

__all__ = ["Grader", "Worker"]
