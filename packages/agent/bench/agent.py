"""What an agent loop costs beyond the server's own time: per turn, and with thousands of sessions on one event loop."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import sys
import time
import tracemalloc
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from rl_agent import AgentRunner, create_loop
from rl_agent.proxy import RecordingProxy
from rl_agent.testing import FakeTokenizer
from rl_bench import Role, Run
from rl_rollout.types import FinishReason, GenerateRequest, TokenChunk, TokenOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

NUM_PROMPT_CHARS = 200
NUM_TOKENS = 256


class Server:
    """A server in memory that takes a known time."""

    def __init__(self, delay_s: float = 0.0) -> None:
        generator = random.Random(0)
        self._delay_s = delay_s
        self._ids = [tuple(generator.randrange(35, 125) for _ in range(NUM_TOKENS)) for _ in range(64)]
        self._turn = itertools.count()
        self._logprobs = tuple(-generator.random() for _ in range(NUM_TOKENS))

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=self._ids[next(self._turn) % 64],
            logprobs=self._logprobs,
            weight_versions=(0,) * NUM_TOKENS,
            finish_reason=FinishReason.LENGTH,
        )


def make_rows(count: int) -> list[dict]:
    generator = random.Random(1)
    text = ["".join(chr(generator.randrange(35, 125)) for _ in range(NUM_PROMPT_CHARS)) for _ in range(64)]
    return [{"prompt": [{"role": "user", "content": text[i % 64]}]} for i in range(count)]


def main(run: Run) -> None:
    num_sessions = 200 if run.quick else 2000
    delay_s = 0.1 if run.quick else 1.0
    run.parameters(
        num_prompt_tokens=NUM_PROMPT_CHARS, num_tokens=NUM_TOKENS, num_sessions=num_sessions, server_delay_s=delay_s
    )
    with asyncio.Runner() as runner:
        per_turn(run, runner)
        tool_turns(run, runner)
        proxy_requests(run, runner)
        proxy_streams(run, runner, num_streams=100 if run.quick else 1000)
        many_sessions(run, runner, num_sessions, delay_s)


def timed(runner: asyncio.Runner, work: Callable[[], Coroutine], num_turns: int) -> float:
    """Milliseconds per turn."""
    start = time.perf_counter()
    runner.run(work())
    return (time.perf_counter() - start) / num_turns * 1e3


def per_turn(run: Run, runner: asyncio.Runner) -> None:
    """One turn at a time against a server that takes no time: what is left is the loop's own."""
    num_turns, server, tokenizer = 200, Server(), FakeTokenizer()
    rows, loop = make_rows(num_turns), create_loop("single_turn", server, tokenizer)
    agents = AgentRunner(lambda _: loop, max_concurrent=1)

    async def bare() -> None:
        for row in rows:
            ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)
            answer = await server.generate(GenerateRequest(request_id="0", prompt_token_ids=tuple(ids)))
            tokenizer.decode(answer.token_ids)

    async def with_loop() -> None:
        for row in rows:
            await loop.run({}, row)

    async def with_runner() -> None:
        async for _ in agents.run(rows, {}):
            pass

    works = {"bare": bare, "single_turn": with_loop, "AgentRunner": with_runner}
    samples = run.collect({name: partial(timed, runner, work, num_turns) for name, work in works.items()})
    for name in ("single_turn", "AgentRunner"):
        beyond = [ours - bare for ours, bare in zip(samples[name], samples["bare"], strict=True)]
        note = "beyond server, template and decode"
        run.record("overhead per turn", name, beyond, unit="ms", goal="<= 0.5 ms", note=note)


class Calling(Server):
    """A server that calls a tool in every turn but the last."""

    def __init__(self, num_turns: int) -> None:
        super().__init__()
        call = '<tool_call>{"name": "echo", "arguments": {"text": "ok"}}</tool_call>'
        self._num_turns = num_turns
        self._call = (*FakeTokenizer().encode(f"{'x' * (NUM_TOKENS - len(call) - 1)}{call}"), 1)

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        is_last = int(request.request_id.rpartition("-")[2]) == self._num_turns - 1
        ids = (*self._ids[0][:-1], 1) if is_last else self._call
        return TokenOutput(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=self._logprobs,
            weight_versions=(0,) * NUM_TOKENS,
            finish_reason=FinishReason.STOP,
        )


async def echo(text: str) -> str:
    """Say it again."""
    return text


def tool_turns(run: Run, runner: asyncio.Runner) -> None:
    """Eight turns of a trajectory, seven with a call: everything but the server is counted, the template included."""
    num_turns = 8
    loop = create_loop("tool", Calling(num_turns), FakeTokenizer(), tools=[echo], max_turns=num_turns)
    rows = make_rows(25)

    async def work() -> None:
        for row in rows:
            output = await loop.run({"max_new_tokens": NUM_TOKENS}, row)
            assert output.num_turns == num_turns

    samples = run.collect({"tool": partial(timed, runner, work, len(rows) * num_turns)})
    note = "parser, tool, template, decode; 256 tokens a turn"
    run.record("overhead per turn", "tool", samples["tool"], unit="ms", goal="<= 0.5 ms", note=note)


def proxy_requests(run: Run, runner: asyncio.Runner) -> None:
    """One request at a time, and 512 sessions at once, against a bare web server that asks the same server in memory.

    Sessions go on for several rounds of all of them, and are finished: what a later round takes more is growth.
    """
    num_requests, num_sessions, num_rounds = 100, 512, 2 if run.quick else 6
    server = Server()
    proxy = RecordingProxy(server, FakeTokenizer())
    app = web.Application()
    answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * NUM_TOKENS}}]}

    async def bare(request: web.Request) -> web.StreamResponse:
        await request.json()
        await server.generate(GenerateRequest(request_id="0", prompt_token_ids=(1,)))
        return web.json_response(answer)

    app.router.add_post("/", bare)
    site = web.AppRunner(app, access_log=None)

    async def start() -> str:
        await site.setup()
        await web.TCPSite(site, "127.0.0.1", 0, backlog=4096).start()
        return f"http://127.0.0.1:{site.addresses[0][1]}/"

    urls = {"web server alone": runner.run(start()), "RecordingProxy": runner.run(proxy.start()) + "/chat/completions"}
    bodies = [{"model": "policy", "messages": row["prompt"]} for row in make_rows(num_sessions)]

    async def work(url: str, names: range, limit: int) -> list[float]:
        latencies: list[float] = []
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            gate = asyncio.Semaphore(limit)

            async def one(i: int) -> None:
                async with gate:
                    start = time.perf_counter()
                    async with session.post(url, json=bodies[i], headers={"Authorization": f"Bearer {i}"}) as response:
                        await response.read()
                    latencies.append((time.perf_counter() - start) * 1e3)
                proxy.finish(str(i))

            await asyncio.gather(*map(one, names))
        return sorted(latencies)

    def overhead(metric: str, names: range, limit: int, note: str) -> None:
        """Milliseconds per call beyond the bare server, of calls that share one processor."""
        works = {name: partial(lambda url: runner.run(work(url, names, limit)), url) for name, url in urls.items()}
        found = run.collect(works)
        share = {name: [sum(each) / len(each) / limit for each in samples] for name, samples in found.items()}
        beyond = [ours - alone for ours, alone in zip(share["RecordingProxy"], share["web server alone"], strict=True)]
        run.record(metric, "RecordingProxy", beyond, unit="ms", goal="<= 3 ms", note=note)

    note = "beyond a bare web server on the same server in memory, client included"
    overhead("proxy overhead", range(num_requests), 1, note)
    overhead("proxy overhead, 512 sessions", range(num_sessions), num_sessions, f"{note}; per call")
    gc.collect()
    tracemalloc.start()
    sizes: list[int] = []
    for _ in range(num_rounds):
        runner.run(work(urls["RecordingProxy"], range(num_sessions), num_sessions))
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    grown = (sizes[-1] - sizes[0]) / (num_rounds - 1) / num_sessions
    run.record("memory left per finished session", "RecordingProxy", [grown], unit="bytes", goal="<= 64 bytes")
    runner.run(site.cleanup())
    runner.run(proxy.stop())


class Streaming(Server):
    """Gives every stream two tokens per second, each stream at moments of its own, and notes when."""

    num_tokens = 4

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, list[float]] = {}

    async def times(self, name: str) -> AsyncGenerator[int, None]:
        noted = self.given[name] = []
        start = time.monotonic() + 0.5 + random.Random(name).random() / 2
        for i in range(self.num_tokens):
            await asyncio.sleep(start + i / 2 - time.monotonic())
            noted.append(time.monotonic())
            yield i

    async def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        async for i in self.times(request.session_id or ""):
            reason = FinishReason.LENGTH if i == self.num_tokens - 1 else None
            yield TokenChunk(token_ids=(100,), logprobs=(-1.0,), weight_versions=(0,), finish_reason=reason)

    async def bare(self, request: web.Request) -> web.StreamResponse:
        """The same events as the proxy's, written by nothing but the web server."""
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = {"id": "chatcmpl-" + "0" * 32, "created": 0, "model": "policy", "object": "chat.completion.chunk"}
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
        async for _ in self.times(request.headers["Authorization"].removeprefix("Bearer ")):
            await response.write(f"data: {json.dumps({**event, 'choices': [choice]})}\n\n".encode())
        await response.write_eof()
        return response


def proxy_streams(run: Run, runner: asyncio.Runner, *, num_streams: int) -> None:
    """From the moment that a server has a token to the moment that a client in another process has read it."""
    server = Streaming()
    proxy = RecordingProxy(server, FakeTokenizer())
    proxied = runner.run(proxy.start()) + "/chat/completions"
    app = web.Application()
    app.router.add_post("/", server.bare)
    bare = web.AppRunner(app, access_log=None)

    async def start() -> str:
        await bare.setup()
        await web.TCPSite(bare, "127.0.0.1", 0, backlog=4096).start()
        return f"http://127.0.0.1:{bare.addresses[0][1]}/"

    async def delays(url: str) -> list[float]:
        server.given.clear()
        client = Path(__file__).with_name("_streams.py")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(client), url, str(num_streams)), stdout=asyncio.subprocess.PIPE
        )
        arrivals = json.loads((await process.communicate())[0])
        for i in range(num_streams):
            proxy.finish(str(i))
        pairs = [zip(server.given[str(i)], arrivals[i], strict=True) for i in range(num_streams)]
        return sorted((arrived - given) * 1e3 for pair in pairs for given, arrived in pair)

    urls = {"web server alone": runner.run(start()), "RecordingProxy": proxied}
    found = run.collect({n: partial(lambda url: runner.run(delays(url)), u) for n, u in urls.items()})
    for quantile in (0.5, 0.99):
        at = {name: [each[int(len(each) * quantile)] for each in samples] for name, samples in found.items()}
        metric = f"token to client p{quantile * 100:g}, {num_streams} streams"
        run.record(metric, "web server alone", at["web server alone"], unit="ms", role=Role.LIMIT)
        run.record(metric, "RecordingProxy", at["RecordingProxy"], unit="ms")
        beyond = [ours - limit for ours, limit in zip(at["RecordingProxy"], at["web server alone"], strict=True)]
        metric = f"proxy overhead p{quantile * 100:g}, {num_streams} streams"
        note = "two tokens per stream and second; beyond a bare web server"
        run.record(metric, "RecordingProxy", beyond, unit="ms", goal="<= 2 ms", note=note)
    runner.run(bare.cleanup())
    runner.run(proxy.stop())


def many_sessions(run: Run, runner: asyncio.Runner, num_sessions: int, delay_s: float) -> None:
    """All sessions at once against a server that takes a fixed time: how much later does each one end?"""
    server, tokenizer = Server(delay_s), FakeTokenizer()
    agents = AgentRunner(lambda name: create_loop(name, server, tokenizer), max_concurrent=num_sessions)

    async def ours(count: int) -> list[float]:
        return sorted([result.wall_s * 1e3 async for result in agents.run(make_rows(count), {})])

    async def alone(count: int) -> list[float]:
        async def one() -> float:
            start = time.perf_counter()
            await server.generate(GenerateRequest(request_id="0", prompt_token_ids=(1,)))
            return (time.perf_counter() - start) * 1e3

        return sorted(await asyncio.gather(*(one() for _ in range(count))))

    for count in (1, num_sessions):
        works = {"server alone": partial(alone, count), "rl-agent": partial(ours, count)}
        samples = run.collect({name: partial(lambda work: runner.run(work()), work) for name, work in works.items()})
        for quantile in (0.5, 0.99):
            for name, latencies in samples.items():
                figures = [latency[int(count * quantile)] for latency in latencies]
                role = Role.OURS if name == "rl-agent" else Role.LIMIT
                run.record(f"latency p{quantile * 100:g}, {count} sessions", name, figures, unit="ms", role=role)
