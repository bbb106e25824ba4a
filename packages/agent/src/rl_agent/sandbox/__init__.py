"""Sandbox: runs code that a policy wrote, with limits, and isolated from this machine."""

from rl_agent.sandbox.limits import SandboxLimits
from rl_agent.sandbox.pool import Grader
from rl_agent.sandbox.worker import CodeResult, SandboxReport, Worker

__all__ = ["CodeResult", "Grader", "SandboxLimits", "SandboxReport", "Worker"]
