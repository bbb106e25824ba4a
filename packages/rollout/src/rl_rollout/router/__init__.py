"""Router over many replicas: placement, and requests that go on where a replica was lost."""

from rl_rollout.router.router import Router

__all__ = ["Router"]
