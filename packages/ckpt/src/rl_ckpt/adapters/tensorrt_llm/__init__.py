"""TensorRT-LLM takes weights from rl-ckpt: `python -m rl_ckpt.adapters.tensorrt_llm MODEL` in its environment.

Its own `/update_weights` brings what to take to `extension.RlCkptExtension`, which runs in every worker: see
`update_message`. Written from the sources of TensorRT-LLM 1.2 to 1.4, and never run with it.
"""

from __future__ import annotations

import json
from typing import Any

EXTENSION = "rl_ckpt.adapters.tensorrt_llm.extension.RlCkptExtension"
"""Value of its argument `ray_worker_extension_cls`."""
MESSAGE = "rl_ckpt"
"""Key of a message to the extension, where TensorRT-LLM itself has the id of a GPU."""
KEY_VARIABLE = "RL_CKPT_CONTROL_KEY"
"""Environment variable of the server with the key that requests which change it are signed with."""
AUTH_HEADER = "x-trtllm-rl-control-auth"
"""Header of TensorRT-LLM 1.3 on: `sha256=` and the HMAC-SHA256 of the body, in hexadecimal."""


def update_message(**fields: Any) -> dict[str, Any]:
    """Body of POST `/update_weights`: the keyword arguments of `extension.Receiver.answer`.

    Without any, it asks whether the extension is there. The answer has status 200 in any case but a server without it:
    failures are reported in files: of several workers, the server would wait for the others of one that fails.
    """
    return {"weights": {MESSAGE: json.dumps(fields)}}
