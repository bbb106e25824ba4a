"""vLLM takes weights from rl-ckpt: `vllm serve MODEL --weight-transfer-config '{"backend": "rl_ckpt"}'`.

vLLM finds `register` under its entry-point group `vllm.general_plugins` and calls it in each of its processes.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# vLLM is never in the environment that this is checked in.
from __future__ import annotations

import importlib.util

BACKEND = "rl_ckpt"


def register() -> None:
    """Make the backend known to vLLM. Called by vLLM; may be called more than once."""
    if importlib.util.find_spec("vllm.distributed.weight_transfer") is None:
        return  # a vLLM that has no such backends: it knows no --weight-transfer-config either
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rl_ckpt.adapters.vllm.engine", "RlCkptWeightTransferEngine"
        )
