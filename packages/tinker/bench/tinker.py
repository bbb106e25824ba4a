"""rl-tinker: what the server costs over the same work in process, what many tenants cost, and sampling through it."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from packages.tinker.bench._skyrl import forward_backward_seconds

from rl_bench import Role, Run, missing
from rl_engine.registry import create_loss, create_worker
from rl_engine.types import EngineConfig, LoraConfig, Precision, TrainingRow
from rl_rollout.registry import launch_server
from rl_rollout.types import GenerateRequest, SamplingParams, ServerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RANK, NUM_ROWS, NUM_TENANTS = 8, 64, 8


def main(run: Run) -> None:
    """Measure on a random model of some ten million parameters."""
    if (reason := missing("tinker")) is not None:
        run.record("forward_backward, one tenant", "rl-tinker", [], unit="ms", note=reason)
        return
    length, prompts, tokens = (32, 8, 16) if run.quick else (128, 32, 64)
    run.parameters(rows=NUM_ROWS, tokens_per_row=length, rank=RANK, prompts=prompts, sampled_tokens=tokens)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = _model(folder / "model", run)
        url = stack.enter_context(_server(model, folder / "out"))
        rows = np.random.default_rng(0).integers(3, 40, (NUM_ROWS, length + 1)).tolist()
        clients = stack.enter_context(_clients(url, NUM_TENANTS))
        _train(run, model, clients, rows)
        _sample(run, model, clients[0], rows[:prompts], tokens)
        samples: list[float] = []
        if "RL_BENCH_SKYRL" in os.environ:
            samples = [1e3 * each for each in forward_backward_seconds(model, rows, RANK, 3)]
        note = "" if samples else "RL_BENCH_SKYRL is not set; see packages/tinker/bench/_skyrl.py"
        run.record("forward_backward, one tenant", "skyrl-tx 0.3", samples, unit="ms", role=Role.PEER, note=note)


def _model(folder: Path, run: Run) -> str:
    from rl_rollout.testing import write_tiny_model

    sizes = {"hidden_size": 128, "num_hidden_layers": 2} if run.quick else {"hidden_size": 512, "num_hidden_layers": 6}
    sizes |= {"intermediate_size": 3 * sizes["hidden_size"], "head_dim": 64, "max_position_embeddings": 512}
    return str(write_tiny_model(folder, num_attention_heads=8, num_key_value_heads=4, **sizes))


@contextmanager
def _server(model: str, output: Path) -> Iterator[str]:
    """A server in a thread; its training and sampling processes are its own."""
    from rl_tinker.server import TinkerServer
    from rl_tinker.types import ServeConfig

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def wait_for(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(600)

    server = TinkerServer(
        ServeConfig(model_path=model, model_name="base", output_dir=str(output), port=0, dtype="float32")
    )
    try:
        yield wait_for(server.start())
    finally:
        wait_for(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@contextmanager
def _clients(url: str, count: int) -> Iterator[list[Any]]:
    import tinker

    with ExitStack() as stack:
        services = [
            stack.enter_context(tinker.ServiceClient(base_url=url, api_key=f"tml-{index}")) for index in range(count)
        ]
        yield [each.create_lora_training_client(base_model="base", rank=RANK, seed=1).result() for each in services]


def _datum(row: Sequence[int]) -> Any:
    from tinker import types

    inputs = {"target_tokens": np.array(row[1:]), "weights": np.ones(len(row) - 1, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(list(row[:-1])), loss_fn_inputs=inputs)


def _train(run: Run, model: str, clients: list[Any], rows: list[list[int]]) -> None:
    data = [_datum(row) for row in rows]

    def one() -> None:
        clients[0].forward_backward(data, "cross_entropy").result()

    share = NUM_ROWS // NUM_TENANTS

    def many() -> None:
        futures = [
            client.forward_backward(data[index * share : (index + 1) * share], "cross_entropy")
            for index, client in enumerate(clients)
        ]
        for future in futures:
            future.result()

    with _in_process(model, rows) as alone:
        metric = "forward_backward, one tenant"
        run.compare(metric, {"rl-tinker": one}, limit={"in process": alone}, unit="ms", goal=">= 0.9 of limit")
    metric = f"forward_backward, {NUM_TENANTS} tenants x {share} rows"
    run.compare(metric, {"rl-tinker": many}, limit={"one tenant": one}, unit="ms", goal=">= 0.8 of limit")


@contextmanager
def _in_process(model: str, rows: list[list[int]]) -> Iterator[Callable[[], None]]:
    config = EngineConfig(model_path=model, optimizer=None, precision=Precision.FLOAT32)
    with create_worker(config) as worker:
        modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        worker.add_adapter("a", LoraConfig(rank=RANK, alpha=32.0, target_modules=modules), 1)
        batch = [
            TrainingRow(
                adapter="a", token_ids=row[:-1], target_token_ids=row[1:], inputs={"weights": [1.0] * (len(row) - 1)}
            )
            for row in rows
        ]
        losses = {"a": create_loss("cross_entropy")}
        yield lambda: worker.forward_backward_rows(batch, losses)


def _sample(run: Run, model: str, client: Any, prompts: list[list[int]], tokens: int) -> None:
    from tinker import types

    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=tokens, seed=1, stop=[])

    def served() -> None:
        for future in [sampler.sample(types.ModelInput.from_ints(row), 1, params) for row in prompts]:
            future.result()

    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        options = {"max_adapters": 1, "adapters": {"a": _adapter(model, folder)}}
        server = launch_server("embedded", ServerConfig(model_path=model, dtype="float32", options=options))
        runner.run(server.start())

        async def generate() -> None:
            sampling = SamplingParams(max_new_tokens=tokens, seed=1, ignore_eos=True)
            requests = [
                GenerateRequest(
                    request_id=f"{os.urandom(6).hex()}", prompt_token_ids=tuple(row), sampling_params=sampling,
                    adapter="a",
                )
                for row in prompts
            ]  # fmt: skip
            await asyncio.gather(*map(server.generate, requests))

        run.compare(
            f"sample, {len(prompts)} prompts x {tokens} tokens", {"rl-tinker": served},
            limit={"bare server": lambda: runner.run(generate())}, unit="ms", goal=">= 0.9 of limit",
        )  # fmt: skip
        runner.run(server.stop())


def _adapter(model: str, folder: str) -> str:
    """A new adapter in peft's format, of the shape that the server has."""
    config = EngineConfig(model_path=model, optimizer=None, precision=Precision.FLOAT32)
    with create_worker(config) as worker:
        modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        worker.add_adapter("a", LoraConfig(rank=RANK, alpha=32.0, target_modules=modules), 1)
        worker.save_state(f"{folder}/a", "a")
    return f"{folder}/a"
