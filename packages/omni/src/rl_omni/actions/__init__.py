"""Policies that see a picture, read an instruction and act by numbers (vision-language-action models)."""

from rl_omni.actions.heads import ActionHead, BinsHead, FlowHead
from rl_omni.actions.policy import ActionPolicy, load_policy, save_policy, write_policy

__all__ = ["ActionHead", "ActionPolicy", "BinsHead", "FlowHead", "load_policy", "save_policy", "write_policy"]
