"""What a LoRA adapter in peft's format may be, whoever serves it. Knows its configuration, and none of its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_rollout.errors import ModelFolderError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLAIN = {
    "bias": "none",
    "use_dora": False,
    "use_qalora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "alora_invocation_tokens": None,
}
"""Settings of peft that are served at this value alone."""
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""`init_lora_weights` under which an adapter is one of the base model as it lies on disk. Others (`pissa`, `olora`)
train beside a base of their own; peft writes `true` where it converts such an adapter to the base on disk."""


def check_plain(adapter: str, config: Mapping[str, Any], *, is_scaled_by_root: bool = True) -> None:
    """Refuse what would be served as another model than peft's.

    Args:
        adapter: Its name.
        config: Peft's.
        is_scaled_by_root: Whether the engine knows `use_rslora`.

    Raises:
        ModelFolderError: says which setting, and what is served.
    """
    if config.get("peft_type") != "LORA":
        raise ModelFolderError(f"adapter {adapter!r} is of type {config.get('peft_type')!r}; LORA is served")
    for name, served in (_PLAIN if is_scaled_by_root else {**_PLAIN, "use_rslora": False}).items():
        if (config.get(name) or served) != served:
            raise ModelFolderError(f"adapter {adapter!r} has {name}={config[name]!r}; {served!r} is served")
    init = config.get("init_lora_weights", True)
    if init not in _KEEPS_BASE:
        raise ModelFolderError(
            f"adapter {adapter!r} has init_lora_weights={init!r}, which changed the base model that it was trained "
            "beside; save it with peft's path_initial_model_for_weight_conversion"
        )
