"""Command line `rl-serve MODEL`: serve a model folder."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import faulthandler
import gc
import json
import os
import select
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from rl_rollout.errors import ConfigError, RolloutError
from rl_rollout.http.http_server import API_TOKEN_VARIABLE, READY
from rl_rollout.registry import create_server
from rl_rollout.types import ServerConfig, ServerParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_rollout.reward_server import ScoreServer


FLAGS = {
    "host": "interface to bind",
    "port": "0 picks a free one",
    "max_model_len": "prompt plus completion, tokens",
    "max_num_seqs": "requests decoded at once",
    "seed": "seed of requests that bring none",
    "timeout_s": "seconds that requests without a deadline may generate",
    "queue_timeout_s": "seconds that requests may wait for their turn",
    "max_body_bytes": "largest body of an HTTP request",
    "max_completions": "completions that one HTTP request may ask for",
    "max_stops": "stop strings, or stop ids, of one request",
    "max_top_logprobs": "alternatives per token",
    "num_threads": "CPU threads; 0 lets the backend choose",
    "device": "auto, cpu or cuda",
    "dtype": "auto, float32, bfloat16, float16",
    "quantization": "format of weights after each update: none, int8 (embedded, vllm), fp8 or fp8_block (vllm)",
    "kv_cache_bytes": "most memory of keys and values; 0 chooses",
}
"""Help texts of the flags, which are fields of `ServerConfig` of the same name."""


def parse(argv: Sequence[str] | None) -> tuple[str, str, ServerConfig, bool]:
    """Parse the command line: task, backend, configuration, and whether to end with standard input."""
    default = ServerConfig(model_path="")
    parser = argparse.ArgumentParser(
        prog="rl-serve",
        description="Serve a model: token ids in and out at /generate, OpenAI-compatible at /v1.",
        epilog=f"A bearer token is read from the environment variable {API_TOKEN_VARIABLE}.",
    )
    parser.add_argument("model_path", metavar="MODEL", help="a Hugging Face model folder")
    parser.add_argument("--backend", default="embedded", help="which engine serves it (default: %(default)s)")
    parser.add_argument(
        "--task",
        choices=("generate", "score"),
        default="generate",
        help="score: a reward model's scores at /pooling; no --backend (default: %(default)s)",
    )
    for name, what in FLAGS.items():
        given = 8000 if name == "port" else getattr(default, name)
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(given), default=given, help=f"{what} (default: %(default)s)")
    parser.add_argument(
        "--parallel",
        type=parse_parallel,
        default=default.parallel,
        metavar="tp=2,pp=1,dp=1,ep=1",
        help="layout over GPUs, for the backends vllm and sglang (default: one)",
    )
    parser.add_argument(
        "--option", dest="options", action="append", default=[], metavar="NAME=JSON", help="a setting of the backend"
    )
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input is closed")
    found = vars(parser.parse_args(argv))
    task, backend, exits_with_stdin = (found.pop(name) for name in ("task", "backend", "exit_with_stdin"))
    if task == "score" and backend != "embedded":
        raise ConfigError(f"--backend {backend} does nothing with --task score; leave it out")
    found["options"] = dict(map(parse_option, found["options"]))
    return task, backend, ServerConfig(api_token=os.environ.get(API_TOKEN_VARIABLE) or None, **found), exits_with_stdin


def parse_parallel(text: str) -> ServerParallel:
    """Parse `tp=2,pp=2`, with any of the fields of `ServerParallel`."""
    known = {field.name for field in dataclasses.fields(ServerParallel)}
    pairs = [part.partition("=") for part in text.split(",") if part]
    sizes = {name: size for name, _, size in pairs}
    if not sizes.keys() <= known or not all(size.isdecimal() for size in sizes.values()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form tp=2,pp=1,dp=1,ep=1")
    return ServerParallel(**{name: int(size) for name, size in sizes.items()})


def parse_option(option: str) -> tuple[str, Any]:
    """Parse `NAME=JSON`, or `NAME=TEXT` if the value is not JSON.

    Raises:
        ConfigError: there is no `=`.
    """
    name, sign, text = option.partition("=")
    if not sign:
        raise ConfigError(f"--option {option!r} must be NAME=VALUE")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


async def serve(task: str, backend: str, config: ServerConfig, *, exits_with_stdin: bool) -> None:
    """Serve until SIGINT, SIGTERM, or the end of standard input."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    server = _scorer(config) if task == "score" else create_server(backend, config)
    if exits_with_stdin:
        watch_parent(lambda: loop.call_soon_threadsafe(over.set))
    starting = asyncio.ensure_future(server.start())
    ending = asyncio.ensure_future(over.wait())
    await asyncio.wait((starting, ending), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        os._exit(1)  # a thread is loading the model, and cannot be interrupted
    try:
        address = starting.result()
        gc.collect()
        gc.freeze()  # so that collections do not traverse torch's objects, which live as long as the process
        print(READY + json.dumps({"url": address.url, "model": address.model, "pid": address.pid}), flush=True)
        await ending
    finally:
        ending.cancel()
        await server.stop()


def _scorer(config: ServerConfig) -> ScoreServer:
    from rl_rollout.reward_server import ScoreServer  # it imports torch

    return ScoreServer(config)


def watch_parent(on_gone: Callable[[], object], *, check_s: float = 1.0) -> None:
    """Call `on_gone` when standard input ends, or when the parent process changes.

    The launcher holds the other end of standard input open while it lives. The second check is for a launcher that
    forked: its child holds the pipe too, and may outlive it.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            is_readable, _, _ = select.select([sys.stdin], [], [], check_s)
            if is_readable and not os.read(sys.stdin.fileno(), 4096):
                break
        on_gone()

    threading.Thread(target=watch, name="rl-serve-parent", daemon=True).start()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `rl-serve`. Returns 2, with one sentence on standard error, for errors that the caller can fix.

    SIGUSR2 writes the stacks of all threads to standard error, even while the interpreter is stuck.
    """
    if sys.__stderr__ is not None:  # sys.stderr may have been replaced by an object without a file descriptor
        faulthandler.register(signal.SIGUSR2, file=sys.__stderr__)
    try:
        task, backend, config, exits_with_stdin = parse(argv)
        asyncio.run(serve(task, backend, config, exits_with_stdin=exits_with_stdin))
    except RolloutError as error:
        print(f"rl-serve: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
