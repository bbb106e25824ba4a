"""Command line: chat with a policy or run a row (`play`), record agents (`proxy`), serve sandboxes (`sandbox`)."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_agent.chat_template import TurnTemplate, load_tokenizer
from rl_agent.errors import AgentError
from rl_agent.proxy import RecordingProxy
from rl_agent.registry import create_loop, create_sandboxes
from rl_agent.sandbox.backends.http import TOKEN
from rl_agent.sandbox.server import SandboxServer
from rl_agent.session import Session
from rl_agent.types import AgentLoopOutput, SandboxLimits
from rl_agent.validation import validate_output
from rl_rollout import connect_server
from rl_rollout.errors import RolloutError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_agent.base import Generator
    from rl_agent.sandbox.base import SandboxKind
    from rl_agent.types import Tokenizer


_TOKEN = "RL_AGENT_API_TOKEN"  # a command line can be read by every user of the machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="rl-agent", description="Agent loops that produce trainable tokens.")
    commands = parser.add_subparsers(required=True, metavar="play|proxy|sandbox")
    play = commands.add_parser("play", help="talk to a policy in the terminal and see tokens, masks and rewards")
    proxy = commands.add_parser("proxy", help=f"serve OpenAI's and Anthropic's APIs; {_TOKEN} is its token")
    for each, run in ((play, _play), (proxy, _proxy)):
        each.set_defaults(run=run)
        each.add_argument("--server", required=True, help="URL of a rollout server, for example of rl-serve")
        each.add_argument("--model", required=True, help="model folder, for its tokenizer and chat template")
        each.add_argument("--sampling", default='{"max_new_tokens": 256}', help="sampling parameters as JSON")
    play.add_argument("--row", help="a dataset row as JSON: run it through the loop instead of chatting")
    play.add_argument("--loop", default="single_turn", help="the row's agent loop")
    play.add_argument("--options", default="{}", help="the loop's options as JSON")
    proxy.add_argument("--host", default="127.0.0.1", help="interface to bind")
    proxy.add_argument("--port", type=int, default=0, help="port; 0 picks a free one")
    proxy.add_argument("--parser", default="hermes", help="tool-call parser of the model")
    proxy.add_argument("--strict", action="store_true", help="refuse requests with fields that are not known")
    proxy.add_argument("--expiry-s", type=float, default=3600.0, help="seconds after which an idle session is dropped")
    sandbox = commands.add_parser("sandbox", help=f"serve sandboxes of this machine; {TOKEN} is its token")
    sandbox.set_defaults(run=_sandbox)
    sandbox.add_argument("--host", default="127.0.0.1", help="interface to bind")
    sandbox.add_argument("--port", type=int, default=0, help="port; 0 picks a free one")
    sandbox.add_argument("--sandbox", default="process", help="kind of sandbox: process, bubblewrap or podman")
    sandbox.add_argument("--limits", default="{}", help="largest limits of a sandbox as JSON: fields of SandboxLimits")
    sandbox.add_argument("--max-running", type=int, default=8, help="commands at the same time; more wait")
    sandbox.add_argument("--expiry-s", type=float, default=3600.0, help="seconds after which an idle sandbox is ended")
    given = parser.parse_args(arguments)
    try:
        return asyncio.run(given.run(given))
    except (AgentError, RolloutError, ValueError, TypeError, OSError) as error:
        print(f"rl-agent: {error}", file=sys.stderr)
        return 1


async def _play(given: argparse.Namespace) -> int:
    server = connect_server(given.server, api_token=os.environ.get("RL_ROLLOUT_API_TOKEN"))
    params: dict[str, Any] = json.loads(given.sampling)
    try:
        await server.start()
        tokenizer = load_tokenizer(given.model, takes_videos=server.capabilities.takes_videos)
        if given.row is None:
            await _chat(server, tokenizer, params)
            return 0
        loop = create_loop(given.loop, server, tokenizer, **json.loads(given.options))
        made = await loop.run(params, json.loads(given.row))
        for output in [made] if isinstance(made, AgentLoopOutput) else made:
            validate_output(output)
            print("\n".join(describe(output, tokenizer)))
        await loop.close()
    finally:
        await server.stop()
    return 0


async def _proxy(given: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    server = connect_server(given.server, api_token=os.environ.get("RL_ROLLOUT_API_TOKEN"))
    await server.start()
    proxy = RecordingProxy(
        server,
        load_tokenizer(given.model, takes_videos=server.capabilities.takes_videos),
        parser=given.parser,
        sampling_params=json.loads(given.sampling),
        host=given.host,
        port=given.port,
        api_token=os.environ.get(_TOKEN),
        strict=given.strict,
        expiry_s=given.expiry_s,
    )
    try:
        await _serve(proxy)
    finally:
        await server.stop()
    return 0


async def _sandbox(given: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    limits = replace(_MOST, **json.loads(given.limits))

    def make(*, limits: SandboxLimits, network: str) -> SandboxKind:
        options = {"kind": given.sandbox, "network": network}
        return create_sandboxes(options, limits=limits, max_running=given.max_running)

    server = SandboxServer(
        make, limits=limits, token=os.environ.get(TOKEN, ""), host=given.host, port=given.port, expiry_s=given.expiry_s
    )
    await _serve(server)
    return 0


_MOST = SandboxLimits(
    timeout_s=3600.0,
    memory_bytes=1 << 33,
    num_processes=4096,
    output_bytes=1 << 24,
    file_bytes=1 << 30,
    scratch_bytes=1 << 30,
)
"""Largest limits of a served sandbox, unless others are given."""


async def _serve(served: RecordingProxy | SandboxServer) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        print(f"serving {await served.start()}", flush=True)
        await ended.wait()
    finally:
        await served.stop()


async def _chat(server: Generator, tokenizer: Tokenizer, params: dict[str, Any]) -> None:
    """Chat: every line of standard input is a user's turn; the trajectory is printed at the end."""
    template, session = TurnTemplate(tokenizer), None
    print("one line per turn; an empty line ends the conversation")
    while line := (await asyncio.to_thread(sys.stdin.readline)).rstrip("\n"):
        message = {"role": "user", "content": line}
        if session is None:
            session = Session(server, tokenizer, template.prompt([message]), params, template=template)
        else:
            session.append([message])
        await session.generate()
        print(session.last_marked_text)
    if session is not None:
        print("\n".join(describe(session.finish(), tokenizer)))


def describe(output: AgentLoopOutput, tokenizer: Tokenizer) -> Iterator[str]:
    """Lines that show a trajectory: each span of tokens with its author, and the rewards."""
    yield f"prompt, {len(output.prompt_token_ids)} tokens: {_shown(tokenizer, output.prompt_token_ids)}"
    places = range(len(output.loss_mask))
    for is_model, run in itertools.groupby(places, key=lambda i: output.loss_mask[i] == 1):
        indices = list(run)
        text = _shown(tokenizer, [output.completion_token_ids[i] for i in indices])
        if not is_model:
            yield f"context, {len(indices)} tokens, not trained: {text}"
            continue
        mean = sum(output.rollout_logprobs[i] for i in indices) / len(indices)
        versions = sorted({output.weight_versions[i] for i in indices})
        yield f"model, {len(indices)} tokens, mean log-prob {mean:.3f}, weight versions {versions}: {text}"
    turns = f", per turn {list(output.turn_rewards)}" if output.turn_rewards else ""
    reward = "none (the trainer grades it)" if output.reward is None else f"{output.reward:g}"
    yield f"reward: {reward}{turns}; turns: {output.num_turns}; finish reason: {output.finish_reason}"
    extra = json.dumps(dict(output.extra_fields), default=str)
    yield f"metrics: {json.dumps(dict(output.metrics))}; extra fields: {extra}"


def _shown(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return repr(tokenizer.decode(ids, skip_special_tokens=False))


if __name__ == "__main__":
    sys.exit(main())
