"""Clients that nobody here wrote, unchanged, in a sandbox whose only network is the proxy: `tools/clients.sh` has them.

The model is a random one whose logits are steered, so that it says what a client can act on: prompts, sampler, ids,
log-probs and versions are the real server's.
"""

import asyncio
import os
import re
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
from packages.agent.tests.support.clients import (
    MAX_MODEL_LEN,
    ROOT,
    VARIABLES,
    call,
    check_emitted,
    clients,
    model,
    shell,
    steer,
)

from rl_agent import create_loop, load_tokenizer, validate_output
from rl_rollout import ServerConfig, create_server
from rl_rollout.types import TokenOutput

__all__ = ["clients", "model", "steer"]
pytestmark = pytest.mark.integration

PROGRAMS = Path(__file__).with_name("client_programs.py")
MINI = "python -m minisweagent.run.mini -y --exit-immediately -m openai/policy -o /tmp/out.json"
CODEX = (
    "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m policy -c model_provider=rl"
    """ -c 'model_providers.rl={name="rl",base_url="'"$OPENAI_BASE_URL"'",env_key="OPENAI_API_KEY","""
    """wire_api="responses"}'"""
)
CLAUDE = "claude -p --model policy --permission-mode acceptEdits --allowedTools Bash --"


def tools(prompt, turn):
    ends = '"name": "final_answer"' in prompt
    replies = [
        call("read", path="answer.txt"),
        call("edit", path="answer.txt", text="5"),
        call("read", path="answer.txt"),
    ]
    return [*replies, call("final_answer", answer="done") if ends else "done"][min(turn, 3)]


def code(prompt, turn):
    del prompt
    lines = [
        'print(read("answer.txt"))',
        'edit("answer.txt", "5")',
        'print(read("answer.txt"))',
        'final_answer("done")',
    ]
    return f"I go on.\n<code>\n{lines[min(turn, 3)]}\n</code>"


def commands(prompt, turn):
    end = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if "COMPLETE_TASK_AND_SUBMIT" in prompt else None
    lines = ["cat answer.txt", "printf 5 > answer.txt", "cat answer.txt", end]
    line = lines[min(turn, 3)]
    return "done" if line is None else "I work. " + shell(prompt, line)


CLIENTS = {
    **{
        name: (f"python client_programs.py {name}", tools)
        for name in (
            *("openai_chat", "openai_responses", "anthropic", "litellm", "openai_agents", "pydantic_ai"),
            *("smolagents_tool", "langgraph"),
        )
    },
    "smolagents_code": ("python client_programs.py smolagents_code", code),
    "mini_swe_agent": (f'{MINI} -t "$RL_TASK"', commands),
    "codex": (f'{CODEX} "$RL_TASK" < /dev/null', commands),
    "claude_code": (f'{CLAUDE} "$RL_TASK" < /dev/null', commands),
}
PACKAGES = {
    "openai_chat": ("openai", "chat completions, streamed"),
    "openai_responses": ("openai", "responses, by `previous_response_id`"),
    "anthropic": ("anthropic", "messages, streamed; token counts"),
    "litellm": ("litellm", "chat completions"),
    "openai_agents": ("openai-agents", "responses"),
    "pydantic_ai": ("pydantic-ai-slim", "chat completions"),
    "smolagents_tool": ("smolagents", "chat completions: `ToolCallingAgent`"),
    "smolagents_code": ("smolagents", "chat completions: `CodeAgent`"),
    "langgraph": ("langgraph", "chat completions, by langchain-openai"),
    "mini_swe_agent": ("mini-swe-agent", "chat completions: the command `mini`"),
    "codex": ("@openai/codex", "responses: the command `codex exec`"),
    "claude_code": ("@anthropic-ai/claude-code", "messages: the command `claude -p`"),
}
PAGE = """# Clients

Agents and client libraries of others train through the [recording proxy](agents.md), unchanged but for
their base URL and API key. Each of these runs in the integration tier as `agent.loop=harness` runs it: in a sandbox
whose only network is the proxy, it calls its tools and edits a file. Ids, log-probs and weight versions of what is
recorded equal what the server emitted. Where a client rewrites its context, there are several trajectories.

The table is made by the tests: `tools/clients.sh FOLDER` installs the clients at these versions, and
`RL_CLIENTS=FOLDER RL_CLIENTS_PAGE=docs/guides/clients.md pytest -m integration
packages/agent/tests/proxy/test_agent_clients.py` writes the page. The model is a random one whose logits are steered,
so that tools are called, and its tokenizer learned from Python's standard library; turns and prompts are the clients'
own.

| client | version | speaks | turns | trajectories | longest first prompt, tokens |
|---|---|---|---|---|---|
"""


@pytest.fixture(scope="session")
def page():
    """Rows of the page that lists the clients; with RL_CLIENTS_PAGE it is written at the end."""
    rows = {}
    yield rows
    if target := os.environ.get("RL_CLIENTS_PAGE"):
        pins = dict(
            re.findall(r"'?(@?[\w/-]+)(?:\[[\w,]+\])?[=@]=?(\d[\d.]+)", (ROOT / "tools/clients.sh").read_text())
        )
        lines = [
            f"| {PACKAGES[name][0]} | {pins[PACKAGES[name][0]]} | {PACKAGES[name][1]} | {rows[name]} |"
            for name in CLIENTS
            if name in rows
        ]
        Path(target).write_text(PAGE + "\n".join(lines) + "\n")


@dataclass
class Steered:
    """A rollout server whose model prefers the tokens of what it is to say, and what it emitted."""

    server: object
    tokenizer: object
    reply: object
    emitted: list
    wanted: dict
    first: int | None = None

    def _begin(self, request):
        prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        count = len(re.findall(r"\n<tool_response>\n|Observation:", prompt))  # some system prompts have examples
        self.first = count if self.first is None else min(self.first, count)
        text = self.reply(prompt, count - self.first)
        begun = next((n for n in range(len(text), 0, -1) if prompt.endswith(text[:n])), 0)
        ids = self.tokenizer.encode(text[begun:], add_special_tokens=False)
        self.wanted[request.request_id] = [*ids, self.tokenizer.eos_token_id]

    async def generate(self, request):
        self._begin(request)
        output = await self.server.generate(request)
        self.emitted.append(output)
        return output

    async def generate_stream(self, request):
        self._begin(request)
        chunks = []
        try:
            async with aclosing(self.server.generate_stream(request)) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    yield chunk
        finally:  # also where a stop string ends it
            self.emitted.append(TokenOutput.joined(request.request_id, chunks))


def ended(row, folder, outputs):
    del row, outputs
    return float((folder / "answer.txt").read_text().strip() == "5")


@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_a_client_is_recorded_as_its_server_emitted(name, clients, model, steer, page):
    command, reply = CLIENTS[name]
    tokenizer = load_tokenizer(model)

    async def main():
        config = ServerConfig(model_path=model, max_model_len=MAX_MODEL_LEN, num_threads=2, timeout_s=600)
        server = create_server("embedded", config)
        await server.start()
        steered = Steered(server, tokenizer, reply, [], steer)
        path = f"export PATH={clients}/node/node_modules/.bin:$PATH; {VARIABLES}\n"
        loop = create_loop(
            *("harness", steered, tokenizer),
            command=path + command,
            verifier=ended,
            venv=str(clients),
            harness_timeout_s=300.0,
            memory_bytes=1 << 40,
        )
        row = {
            "prompt": [{"role": "user", "content": "Change the answer to 5."}],
            "files": {"answer.txt": "4", PROGRAMS.name: PROGRAMS.read_text()},
        }
        try:
            return await loop.run({"temperature": 1.0, "max_new_tokens": 512}, row), steered.emitted
        finally:
            await loop.close()
            await server.stop()

    outputs, emitted = asyncio.run(main())
    for output in outputs:
        validate_output(output)
        check_emitted(output, emitted)
    assert sum(output.num_turns for output in outputs) >= 4, [output.num_turns for output in outputs]
    assert {output.reward for output in outputs} == {1.0}, outputs[0].extra_fields["harness"]
    longest = max(len(output.prompt_token_ids) for output in outputs)
    page[name] = f"{sum(output.num_turns for output in outputs)} | {len(outputs)} | {longest}"
