"""A thousand requests at once, through router, client and HTTP: each is answered or refused, and nothing is left."""

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import pytest

from rl_rollout import (
    GenerateRequest,
    OverloadedError,
    Router,
    SamplingParams,
    ServerConfig,
    connect_server,
    create_server,
)

pytestmark = pytest.mark.process

NUM_REQUESTS, NUM_IN_FLIGHT, NUM_WAITING = 1000, 96, 800


def request(index):
    params = SamplingParams(max_new_tokens=1 + index % 3, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=str(index), prompt_token_ids=(5 + index % 40, 6), sampling_params=params)


def num_open(tasks_before):
    """Sockets of this process, and tasks that were not there before."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this listing
            found += str(entry.readlink()).startswith("socket:")
    return found, len(asyncio.all_tasks() - tasks_before)


def test_each_is_answered_or_refused_and_nothing_is_left(qwen3_folder):
    async def scenario():
        server = create_server("embedded", ServerConfig(model_path=str(qwen3_folder), num_threads=1))
        address = await server.start()
        tasks = asyncio.all_tasks()
        before = num_open(tasks)
        router = Router([connect_server(address.url)], max_in_flight=NUM_IN_FLIGHT, max_waiting=NUM_WAITING)
        await router.start()
        outputs = await asyncio.gather(*map(router.generate, map(request, range(NUM_REQUESTS))), return_exceptions=True)
        again = await router.generate(request(0))
        at_rest = server.status()
        await router.stop()
        for _ in range(3000):  # the server closes its ends of the connections when it reads that they are over
            if num_open(tasks) == before:
                break
            await asyncio.sleep(0.02)
        assert num_open(tasks) == before
        await server.stop()
        return outputs, again, at_rest

    outputs, again, at_rest = asyncio.run(scenario())
    kinds = Counter(type(output).__name__ for output in outputs)
    num_refused = NUM_REQUESTS - NUM_IN_FLIGHT - NUM_WAITING
    assert kinds == {"TokenOutput": NUM_REQUESTS - num_refused, "OverloadedError": num_refused}
    for index, output in enumerate(outputs):
        if not isinstance(output, OverloadedError):
            assert (output.request_id, len(output.token_ids)) == (str(index), 1 + index % 3)
    assert again.token_ids == outputs[0].token_ids
    assert (at_rest["num_running"], at_rest["num_waiting"]) == (0, 0)
