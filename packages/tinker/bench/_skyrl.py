"""skyrl-tx 0.3, the peer of `rl-bench tinker`, in environments of its own: it wants an older transformers and SDK.

    uv venv skyrl && uv pip install --no-config --python skyrl/bin/python 'skyrl-tx[tinker,jax]==0.3.0'
    uv venv sdk && uv pip install --no-config --python sdk/bin/python tinker==0.8.0 torch numpy
    RL_BENCH_SKYRL=skyrl/bin/python RL_BENCH_TINKER_SDK=sdk/bin/python uv run rl-bench tinker

Its server takes no SDK of today: 0.38 asks for an endpoint that it does not have.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_S = 300.0
CLIENT = """
import json, sys, time
import numpy as np, tinker
from tinker import types
url, model, rank, rows, rounds = json.load(open(sys.argv[1]))
def datum(row):
    inputs = {"target_tokens": np.array(row[1:]), "weights": np.ones(len(row) - 1, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(list(row[:-1])), loss_fn_inputs=inputs)
data = [datum(row) for row in rows]
service = tinker.ServiceClient(base_url=url, api_key="tml-bench")
client = service.create_lora_training_client(base_model=model, rank=rank, seed=1)
seconds = []
for _ in range(rounds + 1):
    start = time.perf_counter()
    client.forward_backward(data, "cross_entropy").result()
    seconds.append(time.perf_counter() - start)
print("SECONDS", json.dumps(seconds[1:]), flush=True)
"""


def forward_backward_seconds(model: str, rows: Sequence[Sequence[int]], rank: int, rounds: int) -> list[float]:
    """Seconds of `forward_backward` over all rows, without the first, which compiles."""
    python, sdk = os.environ["RL_BENCH_SKYRL"], os.environ["RL_BENCH_TINKER_SDK"]
    folder = Path(f"{model}-skyrl")
    _write_older_format(Path(model), folder)
    with _server(python, folder) as url:
        given = folder / "given.json"
        given.write_text(json.dumps([url, str(folder), rank, [list(row) for row in rows], rounds]))
        done = subprocess.run(
            [sdk, "-c", CLIENT, given], stdout=subprocess.PIPE, text=True, check=True, timeout=1800, env=_plain()
        )
    return json.loads(done.stdout.partition("SECONDS ")[2])


def _write_older_format(model: Path, folder: Path) -> None:
    """The model's folder as transformers 4 reads it."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "torch_dtype": config["dtype"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@contextmanager
def _server(python: str, model: Path) -> Iterator[str]:
    """Its server, with a `uv` that runs its engine in the same environment."""
    shim = model / "bin" / "uv"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\nexec {python} "$@"\n')
    shim.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        python, "-m", "tx.tinker.api", "--base-model", str(model), "--port", str(port),
        "--database-url", f"sqlite:///{model}/t.db", "--checkpoints-base", f"{model}/checkpoints",
        "--backend-config", json.dumps({"max_lora_adapters": 2, "max_lora_rank": 8}),
    ]  # fmt: skip
    environment = _plain() | {"PATH": f"{shim.parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    with (model / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5)
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"skyrl-tx did not start: {(model / 'log').read_text()[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _plain() -> dict[str, str]:
    """The environment without this one's Python settings, and without the hub."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {"HF_HUB_OFFLINE": "1"}
