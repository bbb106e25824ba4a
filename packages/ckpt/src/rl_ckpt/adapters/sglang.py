"""SGLang takes weights from rl-ckpt, by `load_weights` as a custom weight loader.

Start the server with `--custom-weight-loader rl_ckpt.adapters.sglang.load_weights`, and give the same path as
`load_format` of `update_weights_from_tensor`. What is sent by that call is no weight, but which session to take them
from: `session_tensors` makes it. Every tensor-parallel rank is a receiver of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

import rl_ckpt
from rl_ckpt.adapters._bindings import Held, LoadRecorder
from rl_ckpt.adapters._installing import Installer
from rl_ckpt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

TIMEOUT_S = 120.0
"""Longest wait for the sender: SGLang's scheduler stands still meanwhile."""
_sessions: dict[int, tuple[str, Installer]] = {}
"""By the id of a model, which its installer keeps alive: the session that it is in."""


def session_tensors(url: str, version: int) -> list[tuple[str, Tensor]]:
    """What to send with `update_weights_from_tensor`: the session's URL as a name, and the version that must come."""
    return [(url, torch.tensor([version]))]


def load_weights(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Take the version that `session_tensors` names into the model. Called by SGLang.

    The token of a `tcp` session is the variable RL_CKPT_TOKEN of the server. What the model holds of each tensor is
    read back and attested before the commit; it must be stored as it was sent, not quantized.

    Raises:
        rl_ckpt.CkptError: the sync failed. The model holds the weights before or, if this was the first sync and the
            model was touched, raises whenever it is called, until a later one succeeds.
    """
    if len(named_tensors) != 1 or "://" not in named_tensors[0][0]:
        raise UsageError(
            f"this loader takes weights over a session; it was given {len(named_tensors)} tensors, and not what "
            "rl_ckpt.adapters.sglang.session_tensors(url, version) returns"
        )
    url, version = named_tensors[0]
    joined, installer = _sessions.get(id(model)) or ("", _installer_of(model))
    if joined != url:
        installer.attach(rl_ckpt.connect(url, role="receive", timeout_s=TIMEOUT_S))
        _sessions[id(model)] = (url, installer)
    installer.take(int(version))


def _installer_of(model: nn.Module) -> Installer:
    return Installer(model, load=lambda weights: _load(model, weights), restore=_restore)


def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    loader: Any = model
    recorder = LoadRecorder(model, weights)
    with recorder, torch.no_grad():
        loader.load_weights(iter(weights.items()))
    return Held(model, weights, recorder.bindings)


def _restore() -> NoReturn:
    raise UsageError("what the model was started with is not kept")
