"""What happens when vLLM dies, cannot be started, or fails half way."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rollout_servers import (
    FAKES,
    START_S,
    fake_vllm_config,
    real_model,
    real_vllm,
    real_vllm_config,
    request,
)

from rl_bench.waiting import until, until_async
from rl_rollout import (
    ConfigError,
    ModelFolderError,
    ServerConfig,
    ServerLostError,
    ServerParallel,
    ServerStartError,
    WeightUpdateError,
    connect_server,
    create_server,
    process,
)
from rl_rollout.testing import load_weights


@pytest.mark.process
def test_a_server_that_dies_at_start_shows_its_last_lines(qwen3_folder):
    server = create_server("vllm", fake_vllm_config(qwen3_folder, "--no-such-argument"))
    with pytest.raises(ServerStartError, match=r"(?s)vllm .* ended with code 2; .*--no-such-argument"):
        asyncio.run(server.start())


def test_a_port_in_use_is_told_before_anything_starts(qwen3_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = create_server("vllm", fake_vllm_config(qwen3_folder, port=port))
        with pytest.raises(ServerStartError, match=f"port {port} of 127.0.0.1 cannot be bound"):
            asyncio.run(server.start())
    assert server.process.pid == 0


@pytest.mark.process
def test_a_command_that_is_none(qwen3_folder):
    server = create_server("vllm", fake_vllm_config(qwen3_folder, command=["/no/such/python"]))
    with pytest.raises(ServerStartError, match="/no/such/python"):
        asyncio.run(server.start())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"options": {"comand": "python"}}, "did you mean 'command'"),
        ({"options": {"command": 3}}, "list of words"),
        ({"options": {"env": "A=1"}}, "object of names and values"),
        ({"options": {"adapters": ["one"]}}, "object of names and folders"),
        ({"options": {"adapters": {"tiny-qwen3": "here"}}}, "is the name of the model"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"options": {"args": "--tensor-parallel-size 2"}}, "args have --tensor-parallel-size, .* set parallel tp"),
        ({"options": {"args": "--tensor_parallel_size=2"}}, "args have --tensor_parallel_size=2, .* set parallel tp"),
        ({"options": {"args": "--enable-expert-parallel"}}, "set parallel ep"),
        ({"parallel": ServerParallel(tp=2, dp=2, ep=2)}, "ep=2: vLLM shares the experts out over all tp x dp = 4"),
        ({"parallel": ServerParallel(tp=2, ep=3)}, "ep a divisor of tp x dp"),
        (
            {"options": {"args": "--enable-return-routed-experts", "env": {"VLLM_USE_V2_MODEL_RUNNER": 0}}},
            "--enable-return-routed-experts and VLLM_USE_V2_MODEL_RUNNER='0' .* leave one of them out",
        ),
        (
            {"kv_cache_bytes": 2**20, "options": {"env": {"VLLM_CPU_KVCACHE_SPACE": 1}}},
            "kv_cache_bytes=1048576 and VLLM_CPU_KVCACHE_SPACE='1' .* leave one of them out",
        ),
        (
            {"num_threads": 1, "options": {"env": {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}}},
            "num_threads=1 and VLLM_CPU_OMP_THREADS_BIND='0-1' .* leave one of them out",
        ),
    ],
)
def test_bad_settings_are_told_before_anything_starts(qwen3_folder, fields, told):
    with pytest.raises(ConfigError, match=told):
        create_server("vllm", ServerConfig(model_path=str(qwen3_folder), **fields))


def test_every_replica_rank_is_a_receiver_with_its_layout(qwen3_folder):
    layout = ServerParallel(tp=2, pp=2, dp=2, ep=4)
    server = create_server("vllm", ServerConfig(model_path=str(qwen3_folder), parallel=layout))
    assert server.capabilities.num_receivers == 8
    assert not server.capabilities.attests_weights, "each worker has some of the tensors"
    command = " ".join(server.process.command)
    told = "--tensor-parallel-size 2 --pipeline-parallel-size 2 --data-parallel-size 2 --enable-expert-parallel"
    assert told in command
    alone = create_server("vllm", ServerConfig(model_path=str(qwen3_folder)))
    assert alone.capabilities.num_receivers == 1
    assert alone.capabilities.attests_weights
    assert "parallel" not in " ".join(alone.process.command)


def test_a_backend_of_one_device_refuses_a_layout_of_several(qwen3_folder):
    config = ServerConfig(model_path=str(qwen3_folder), parallel=ServerParallel(tp=2))
    with pytest.raises(ConfigError, match="computes on one device; take backend vllm"):
        create_server("embedded", config)


def test_a_folder_that_is_none_is_told_before_anything_starts(tmp_path):
    with pytest.raises(ModelFolderError, match="config.json"):
        create_server("vllm", fake_vllm_config(tmp_path / "missing"))


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.process
def test_a_killed_server_is_reported_and_leaves_nothing(qwen3_folder):
    async def scenario():
        server = create_server("vllm", fake_vllm_config(qwen3_folder))
        client = connect_server((await server.start()).url)
        await client.check_health()
        (child,) = children(server.process.pid)
        await server.pause("keep")
        await server.resume()
        os.kill(int(child), signal.SIGSTOP)  # so that the request is still in flight when it is killed
        task = asyncio.create_task(server.generate(request(max_new_tokens=200)))
        await asyncio.sleep(0.05)
        os.kill(int(child), signal.SIGKILL)
        with pytest.raises(ServerLostError, match="ended with code 137"):
            await task
        with pytest.raises(ServerLostError):
            await server.generate(request())
        with pytest.raises(ServerLostError, match="ended with code 137"):
            await client.check_health()
        await client.stop()
        await server.stop()
        return child, Path(server._folder)

    child, folder = asyncio.run(scenario())
    assert not Path(f"/proc/{child}").exists()
    assert not folder.exists()


class Told:
    """A request to a server that tells its tokens as they come, and when it has told some."""

    def __init__(self, server, asked):
        self.tokens, self.has_begun = 0, asyncio.Event()
        self.task = asyncio.create_task(server.generate(asked, self.add))

    def add(self, chunk):
        self.tokens += len(chunk.token_ids)
        if self.tokens > 40:
            self.has_begun.set()


@pytest.mark.promise("What a killed third-party server has told of a request is kept")
@pytest.mark.process
def test_what_a_killed_server_has_told_of_a_request_is_kept(long_folder):
    """Also by a client that reaches it over HTTP, which a router resumes from."""

    async def scenario():
        server = create_server("vllm", fake_vllm_config(long_folder))
        client = connect_server((await server.start()).url)
        (child,) = children(server.process.pid)
        told = Told(server, request("told", max_new_tokens=4000))
        far = asyncio.create_task(client.generate(request("far", max_new_tokens=4000)))
        await told.has_begun.wait()
        await until_async(lambda: client.received.get("far"))
        os.kill(int(child), signal.SIGKILL)
        with pytest.raises(ServerLostError, match="ended with code 137") as lost:
            await told.task
        with pytest.raises(ServerLostError, match="ended with code 137") as far_lost:
            await far
        await client.stop()
        await server.stop()
        whole = create_server("embedded", ServerConfig(model_path=str(long_folder), num_threads=1, dtype="float32"))
        await whole.start()
        expected = await whole.generate(request("whole", max_new_tokens=400))
        await whole.stop()
        return told.tokens, lost.value.partial, far_lost.value.partial, expected

    tokens, partial, far, expected = asyncio.run(scenario())
    assert len(partial.token_ids) == tokens > 40
    assert len(far.token_ids) > 0
    for each in (partial, far):
        count = min(len(each.token_ids), 400)
        assert each.token_ids[:count] == expected.token_ids[:count]
        assert each.logprobs[:count] == pytest.approx(expected.logprobs[:count], abs=1e-4)
        assert set(each.weight_versions) == {0}


@pytest.mark.promise("A killed worker of vLLM is noticed within seconds")
@pytest.mark.integration
@real_vllm
def test_a_killed_worker_of_a_real_server_keeps_its_tokens(tmp_path):
    """Its death is noticed at once, and the tokens generated so far are returned."""

    async def scenario():
        config = real_vllm_config(real_model(tmp_path), max_model_len=8192, parallel=ServerParallel(tp=2))
        server = create_server("vllm", config)
        await server.start()
        workers = process.titled(server.process.pid, "VLLM::Worker_TP1")
        told = Told(server, request(max_new_tokens=8000))
        await told.has_begun.wait()
        (worker,) = workers
        killed_at = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(ServerLostError, match=rf"its process VLLM::Worker_TP1 .*\(pid {worker}\) had died") as lost:
            await told.task
        noticed_s = time.monotonic() - killed_at
        left = process.titled(server.process.pid, "VLLM::")
        await server.stop()
        return noticed_s, told.tokens, lost.value.partial, left

    noticed_s, tokens, partial, left = asyncio.run(scenario())
    assert len(partial.token_ids) == tokens > 40
    assert noticed_s < 5
    assert not left, "processes were left behind"


@pytest.mark.promise("A third-party server that is stopped is found")
@pytest.mark.process
def test_a_stopped_server_fails_its_health_check_and_may_resume(qwen3_folder, monkeypatch):
    monkeypatch.setattr(process, "STOPPED_S", 1.0)

    async def scenario():
        server = create_server("vllm", fake_vllm_config(qwen3_folder))
        client = connect_server((await server.start()).url)
        child = int(children(server.process.pid)[0])
        os.kill(child, signal.SIGSTOP)
        await client.check_health()  # stopped a moment ago: it may go on
        os.kill(child, signal.SIGCONT)
        await asyncio.sleep(1.2)
        await client.check_health()
        os.kill(child, signal.SIGSTOP)

        async def healthy_for_10_s():
            for _ in range(100):
                await client.check_health()
                await asyncio.sleep(0.1)

        with pytest.raises(ServerLostError, match=rf"process {child} \(python.*\) of .* is stopped since [12] s"):
            await healthy_for_10_s()
        await client.stop()
        await server.stop()
        return child

    child = asyncio.run(scenario())
    assert not Path(f"/proc/{child}").exists(), "a stopped server was left behind"


@pytest.mark.slow
def test_it_ends_with_the_process_that_started_it(qwen3_folder):
    code = f"""
import asyncio, os
from pathlib import Path
from rl_rollout import ServerConfig, create_server
async def main():
    config = ServerConfig(model_path={str(qwen3_folder)!r}, dtype="float32", options={{"command": {FAKES["vllm"]!r}}})
    server = create_server("vllm", config)
    await server.start()
    guard = server.process.pid
    print(guard, *Path(f"/proc/{{guard}}/task/{{guard}}/children").read_text().split(), flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=START_S).stdout
    pids = told.split()
    assert len(pids) == 2
    until(lambda: not (any(Path(f"/proc/{pid}").exists() for pid in pids)))


@pytest.mark.process
def test_a_half_installed_update_makes_the_server_refuse(qwen3_folder, new_trainer):
    """vLLM has the new weights and does not say so: no token may come of them until an update succeeds."""

    async def scenario():
        server, trainer = create_server("vllm", fake_vllm_config(qwen3_folder, "--fail-finish", "1")), new_trainer(60)
        weights = load_weights(qwen3_folder)
        await server.start()
        try:
            with pytest.raises(WeightUpdateError, match="installed by half.*finish was told to fail.*refuses"):
                await trainer.update_server(server, weights, 1)
            with pytest.raises(WeightUpdateError, match="must succeed first"):
                await server.generate(request())
            await trainer.update_server(server, weights, 2)
            return await server.generate(request())
        finally:
            await server.stop()
            await trainer.close()

    assert asyncio.run(scenario()).weight_versions == (2,) * 8
