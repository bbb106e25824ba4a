"""The embedded server in a process of its own, through the HTTP client."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import fields
from functools import reduce
from pathlib import Path

import pytest

from rl_bench.waiting import until, until_async
from rl_rollout import (
    GenerateRequest,
    ModelFolderError,
    Router,
    SamplingParams,
    ServerConfig,
    ServerLostError,
    ServerParallel,
    ServerStartError,
    TokenOutput,
    connect_server,
    create_server,
    launch_server,
)
from rl_rollout.cli import main, parse
from rl_rollout.http.http_server import API_TOKEN_VARIABLE, serve_command
from rl_rollout.testing import Served, ServerConformance, load_weights, write_tiny_model

TOKEN = "a-secret"
START_S = 240.0
"""Deadline of everything: a busy machine takes long to import what a server needs."""


@pytest.fixture(scope="module")
def served(long_folder, new_trainer):
    with asyncio.Runner() as runner:
        trainer = new_trainer(START_S)
        config = config_of(long_folder, api_token=TOKEN)
        server = launch_server("embedded", config)
        runner.run(server.start())
        yield Served(
            server=server,
            run=runner.run,
            model_path=str(long_folder),
            max_model_len=4096,
            update=trainer.update,
            api_token=TOKEN,
        )
        runner.run(server.stop())
        runner.run(trainer.close())


@pytest.mark.process
@pytest.mark.contract
class TestLaunched(ServerConformance):
    def test_the_token_is_not_on_the_command_line(self, served):
        pid = served.run(served.server.start()).pid
        assert TOKEN not in Path(f"/proc/{pid}/cmdline").read_text()

    test_stop_ends_it = ServerConformance.test_stop_ends_it


@pytest.mark.parametrize("token", [None, TOKEN])
def test_its_token_is_from_its_configuration_not_the_process(long_folder, monkeypatch, token):
    monkeypatch.setenv(API_TOKEN_VARIABLE, "of this process")
    environment = launch(long_folder, api_token=token).process.environment
    monkeypatch.setenv(API_TOKEN_VARIABLE, environment[API_TOKEN_VARIABLE])
    assert parse([str(long_folder)])[2].api_token == token


def test_the_command_line_says_all_of_a_configuration():
    told = {
        "host": "::1",
        "port": 1,
        "device": "cpu",
        "dtype": "float16",
        "quantization": "int8",
        "options": {"tool_parser": "hermes", "n": [1]},
    }
    told |= {"parallel": ServerParallel(tp=2, pp=3, dp=4, ep=8), "model_path": "a folder"}
    default = ServerConfig(model_path="")
    for field in fields(ServerConfig):
        if field.name not in (*told, "api_token"):
            told[field.name] = getattr(default, field.name) + 7
    config = ServerConfig(**told)
    assert parse(serve_command("vllm", config)[3:]) == ("generate", "vllm", config, True)


def config_of(folder, **fields):
    return ServerConfig(model_path=str(folder), num_threads=1, timeout_s=START_S, **fields)


def launch(folder, **fields):
    return launch_server("embedded", config_of(folder, **fields))


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def request(request_id="r", **params):
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(request_id=request_id, prompt_token_ids=(5, 6), sampling_params=SamplingParams(**params))


def test_a_folder_that_is_none_is_told_before_anything_starts(tmp_path):
    with pytest.raises(ModelFolderError, match="does not exist"):
        launch(tmp_path / "missing")


@pytest.mark.slow
def test_a_server_that_dies_at_start_shows_its_last_lines(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    server = launch(tmp_path)
    with pytest.raises(ServerStartError, match=r"(?s)ended with code 2; its last lines:.*no-such-model"):
        asyncio.run(server.start())


@pytest.mark.process
def test_a_server_that_is_not_ready_in_time_is_ended(qwen3_folder):
    async def scenario():
        server = launch_server("embedded", ServerConfig(model_path=str(qwen3_folder), timeout_s=0.3))
        with pytest.raises(ServerStartError, match=r"was not ready within 0\.3 s"):
            await server.start()
        return server

    server = asyncio.run(scenario())
    assert server.process.returncode is not None


@pytest.mark.promise("`launch_server`'s process ends when its parent does")
@pytest.mark.process
def test_it_ends_when_its_parent_is_killed(qwen3_folder):
    code = f"""
import asyncio
from rl_rollout import ServerConfig, launch_server
async def main():
    server = launch_server("embedded", ServerConfig(model_path={str(qwen3_folder)!r}, timeout_s={START_S}))
    address = await server.start()
    print(address.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    until(lambda: not is_alive(pid))


@pytest.mark.slow
def test_a_replica_that_is_killed_is_gone_on_from_where_it_was(long_folder):
    """What had come of its requests is kept; the replica in this process generates the rest."""

    async def scenario():
        servers = [launch(long_folder), create_server("embedded", config_of(long_folder))]
        router = Router(servers)
        await router.start()
        try:
            whole = await generate(router)
            address = await servers[0].start()
            other = connect_server(address)
            asked, real = [], servers[1].generate
            servers[1].generate = lambda request: asked.append(request) or real(request)
            tasks = asyncio.create_task(generate(router))
            await until_async(lambda: len(servers[0].received) >= 4)
            os.kill(address.pid, signal.SIGKILL)
            again = await tasks
            with pytest.raises(ServerLostError):
                await other.generate(request())
            await other.stop()
            return whole, again, [str(error) for error in router.lost], asked
        finally:
            await router.stop()

    async def generate(router):
        requests = [request(f"r{i}", max_new_tokens=1000) for i in range(10)]
        streams = [collected(each, router.generate_stream(each)) for each in requests[8:]]
        return await asyncio.gather(*map(router.generate, requests[:8]), *streams)

    async def collected(request, stream):
        chunks = [chunk async for chunk in stream]
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        return reduce(TokenOutput.extended, chunks, TokenOutput.empty(request))

    whole, again, lost, asked = asyncio.run(scenario())
    assert [output.token_ids for output in again] == [output.token_ids for output in whole]
    assert [output.finish_reason for output in again] == [output.finish_reason for output in whole]
    assert all(len(output.logprobs) == len(output.weight_versions) == 1000 for output in again)
    assert len(lost) == 1
    assert "ended with code -9" in lost[0]
    resumed = [len(each.prompt_token_ids) - 2 for each in asked[4:]]
    assert len(resumed) == 4
    assert all(count > 0 and count % 32 == 0 for count in resumed)  # told every 32 tokens


@pytest.mark.slow
def test_sleep_gives_memory_back_to_the_machine(tmp_path, new_trainer):
    """What the kernel says of the server's process, before and after: 92 MiB of weights."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    folder = write_tiny_model(tmp_path / "model", **sizes)
    num_bytes = sum(tensor.nbytes for tensor in load_weights(folder).values())

    def resident(pid):
        fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        return 1024 * int(fields["VmRSS"].split()[0])

    async def scenario():
        server, trainer = launch(folder), new_trainer(START_S)
        address = await server.start()
        try:
            whole = await server.generate(request())
            awake = resident(address.pid)
            await server.sleep(2)
            asleep = resident(address.pid)
            await server.wake()
            await trainer.update_server(server, load_weights(folder), 1)
            return whole.token_ids, awake - asleep, (await server.generate(request())).token_ids
        finally:
            await server.stop()
            await trainer.close()

    before, freed, after = asyncio.run(scenario())
    assert freed > 0.9 * num_bytes
    assert after == before


def test_rl_serve_tells_bad_input_in_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "missing"), "--port", "0"]) == 2
    assert main([str(tmp_path), "--backend", "nope"]) == 2
    missing, nope = capsys.readouterr().err.splitlines()
    assert "does not exist" in missing
    assert "installed here: " in nope
