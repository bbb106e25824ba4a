"""Serve a model by TensorRT-LLM so that it takes weights: `python -m rl_ckpt.adapters.tensorrt_llm MODEL`.

`trtllm-serve` has the engine that does not take any. This is TensorRT-LLM's own HTTP server over its asynchronous
engine, whose workers get our extension; arguments are named as those of `trtllm-serve`.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# TensorRT-LLM is never in the environment that this is checked in.
from __future__ import annotations

import argparse
import asyncio
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_ckpt.adapters.tensorrt_llm import EXTENSION, KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

VARIABLES = {
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",  # what is loaded in other threads is not seen
    "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",  # the trainer's, if it runs one, has given its GPUs away
}
"""Environment variables of TensorRT-LLM that are set unless they are."""
SPREADING = ("pipeline_parallel_size", "context_parallel_size", "moe_expert_parallel_size")
"""Settings with which no worker has a part of every tensor, so that none could attest all."""


def main(words: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m rl_ckpt.adapters.tensorrt_llm", allow_abbrev=False)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--host", default="localhost", help="address to listen on (localhost)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (8000)")
    parser.add_argument("--backend", choices=["pytorch"], default="pytorch", help="the one that loads weights")
    parser.add_argument("--max_seq_len", type=int, help="longest prompt and output, tokens")
    parser.add_argument("--max_batch_size", type=int, help="most requests at once")
    parser.add_argument("--tp_size", type=int, default=1, help="tensor-parallel ranks (1)")
    parser.add_argument("--extra_llm_api_options", type=Path, help="YAML file of further arguments of its LLM class")
    parser.add_argument("--sleeps", action="store_true", help="answer /release_memory and /resume_memory")
    arguments = parser.parse_args(words)
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    asyncio.run(serve(arguments))


async def serve(arguments: argparse.Namespace) -> None:
    """Start engine and server, and serve.

    Raises:
        SystemExit: this TensorRT-LLM takes no weights, or a setting cannot be; in one sentence.
    """
    try:
        from tensorrt_llm import AsyncLLM
        from tensorrt_llm.serve import OpenAIServer
    except ImportError as error:
        raise SystemExit(
            f"the asynchronous engine of TensorRT-LLM cannot be imported ({error}): weights are taken by TensorRT-LLM "
            "1.2 and later, with Ray; install both in this environment, or serve the weights on disk by trtllm-serve"
        ) from error
    settings = settings_of(arguments)
    control: dict[str, Any] = {}
    if "enable_rl_control_endpoints" in inspect.signature(OpenAIServer.__init__).parameters:
        if not (key := os.environ.get(KEY_VARIABLE)):
            raise SystemExit(f"set the variable {KEY_VARIABLE} to a secret, with which updates of weights are signed")
        control = {"enable_rl_control_endpoints": True, "rl_control_api_key": key}
    engine = AsyncLLM(**settings)
    await engine.setup_async()
    server = OpenAIServer(
        engine, arguments.model, tool_parser=None, server_role=None, metadata_server_cfg=None, **control
    )
    await server(arguments.host, arguments.port)


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of TensorRT-LLM's LLM class.

    Raises:
        SystemExit: the file sets what arguments set, or would leave tensors whole on some workers alone.
    """
    settings = {
        "model": arguments.model,
        "backend": arguments.backend,
        "tensor_parallel_size": arguments.tp_size,
        "max_seq_len": arguments.max_seq_len,
        "max_batch_size": arguments.max_batch_size,
        "ray_worker_extension_cls": EXTENSION,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    if arguments.sleeps:
        settings |= _sleeping()
    if (file := arguments.extra_llm_api_options) is not None:
        import yaml  # TensorRT-LLM has it

        more: dict[str, Any] = yaml.safe_load(file.read_text()) or {}
        if clash := sorted(more.keys() & {*settings, *SPREADING}):
            raise SystemExit(
                f"{file} sets {', '.join(clash)}, which arguments set or which would spread whole tensors over the "
                "workers; leave it out"
            )
        settings |= more
    return settings


def _sleeping() -> dict[str, Any]:
    """Setting that lets this version release memory."""
    from tensorrt_llm import llmapi

    return {"sleep_config": llmapi.SleepConfig()} if hasattr(llmapi, "SleepConfig") else {"enable_sleep": True}


if __name__ == "__main__":
    main()
