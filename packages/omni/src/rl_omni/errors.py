"""Errors of rl-omni; its engine and its server raise those of rl-engine and rl-rollout.

OmniError
└── PipelineError (ValueError)  pipeline folder that lacks something, or has a component that is not supported
"""


class OmniError(Exception):
    """Base class of the errors of rl-omni."""


class PipelineError(OmniError, ValueError):
    """Pipeline folder that cannot be used."""
