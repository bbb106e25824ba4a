"""Clients that nobody here wrote, unchanged, in a sandbox whose only network is the proxy: `tools/clients.sh` has them.

The model is a random one whose logits are steered, so that it says what a client can act on: prompts, sampler, ids,
log-probs and versions are the real server's.
"""

import asyncio
import json
import os
import re
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_agent import create_loop, load_tokenizer, validate_output
from rl_rollout import ServerConfig, create_server
from rl_rollout.types import TokenOutput

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[4]
PROGRAMS = Path(__file__).with_name("client_programs.py")
MAX_MODEL_LEN = 1 << 16
MINI = "python -m minisweagent.run.mini -y --exit-immediately -m openai/policy -o /tmp/out.json"
CODEX = (
    "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m policy -c model_provider=rl"
    """ -c 'model_providers.rl={name="rl",base_url="'"$OPENAI_BASE_URL"'",env_key="OPENAI_API_KEY","""
    """wire_api="responses"}'"""
)
CLAUDE = "claude -p --model policy --permission-mode acceptEdits --allowedTools Bash --"


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shell(prompt, command):
    """A call of whichever shell tool the client offers."""
    for name, arguments in (
        ("exec_command", {"cmd": command}),
        ("shell_command", {"command": command}),
        ("shell", {"command": ["bash", "-lc", command]}),
        ("Bash", {"command": command, "description": "work"}),
        ("bash", {"command": command}),
    ):
        if f'"name": "{name}"' in prompt:
            return call(name, **arguments)
    return "done"


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
so that tools are called; turns and prompts are the clients' own.

| client | version | speaks | turns | trajectories | longest first prompt, tokens |
|---|---|---|---|---|---|
"""
VARIABLES = (
    "export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors MSWEA_GLOBAL_CONFIG_DIR=/tmp/mini"
    " LITELLM_LOCAL_MODEL_COST_MAP=True CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_ATTRIBUTION_HEADER=0"
)


@pytest.fixture(scope="session")
def clients():
    folder = Path(os.environ.get("RL_CLIENTS") or ROOT / ".clients").resolve()
    if not (folder / "node/node_modules/.bin/claude").exists():
        pytest.fail(f"there are no clients in {folder}: tools/clients.sh FOLDER, and RL_CLIENTS=FOLDER")
    return folder


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


@pytest.fixture(scope="session")
def model(tmp_path_factory, make_tokenizer):
    """A random model of 64k positions, with a byte-level tokenizer that learned from this repository."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("clients") / "model"
    specials = ["<|im_start|>", "<|im_end|>"]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=6000, special_tokens=specials, initial_alphabet=alphabet)
    core.train([str(path) for path in sorted(ROOT.glob("packages/agent/**/*.md"))], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=specials[1])
    tokenizer.chat_template = make_tokenizer("qwen").chat_template
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


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


@pytest.fixture
def steer(monkeypatch):
    """Logits of the embedded server, plus a bias to the token that each of its requests is to say next."""
    from rl_rollout.backends.embedded.model import model_runner
    from rl_rollout.backends.embedded.step_runner import StepRunner

    wanted, draw = {}, StepRunner._draw

    def steered(self, drawn, rows, logits):
        logits = logits.clone()
        for at, row in enumerate(drawn.tolist()):
            sequence = self._scheduler.running[row]
            place = int(self._table.lengths_host[row]) - len(sequence.prompt)
            logits[at, wanted[sequence.request.request_id][place]] += 30.0
        return draw(self, drawn, rows, logits)

    monkeypatch.setattr(model_runner, "fuse", lambda *_, **__: None)  # the fused decoder draws by itself
    monkeypatch.setattr(StepRunner, "_draw", steered)
    return wanted


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


def check_emitted(output, emitted):
    """Check that the trained tokens are emitted answers, one after another; a stop string may cut one short."""
    columns = [output.completion_token_ids, output.rollout_logprobs, output.weight_versions]
    trained = [row for row, m in zip(zip(*columns, strict=True), output.loss_mask, strict=True) if m]
    answers = [[*zip(each.token_ids, each.logprobs, each.weight_versions, strict=True)] for each in emitted]
    while trained:
        shared = [
            next((i for i, (a, b) in enumerate(zip(trained, each, strict=False)) if a != b), len(each))
            for each in answers
        ]
        size = min(max(shared), len(trained))
        assert size, f"token {trained[0]} was not emitted here"
        trained = trained[size:]
