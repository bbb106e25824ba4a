"""The command line: a chat and a row against a server in memory, and what it refuses."""

import io
import sys
from types import SimpleNamespace

import pytest

from rl_agent import cli
from rl_agent.testing import FakeGenerator, FakeTokenizer

TOKENIZER = FakeTokenizer()
SERVER = ("--server", "http://127.0.0.1:1", "--model", "m", "--sampling", '{"max_new_tokens": 9}')


class Server(FakeGenerator):
    """Server in memory; `log` says how it was connected to, and what was called."""

    capabilities = SimpleNamespace(takes_videos=False)

    def __init__(self, *given):
        super().__init__(lambda _: [*TOKENIZER.encode("well"), 1], weight_version=3)
        self.log = [*given]

    async def start(self):
        self.log.append("started")

    async def stop(self):
        self.log.append("stopped")


@pytest.fixture(autouse=True)
def connected(monkeypatch):
    """Servers that were connected to."""
    servers = []

    def connect(url, *, api_token):
        servers.append(Server(url, api_token))
        return servers[-1]

    monkeypatch.setattr(cli, "connect_server", connect)
    monkeypatch.setattr(cli, "load_tokenizer", lambda model, **_: TOKENIZER)
    monkeypatch.setenv("RL_ROLLOUT_API_TOKEN", "secret")
    return servers


def test_a_chat_shows_who_wrote_which_tokens(connected, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n2\n\n3\n"))
    assert cli.main(["play", *SERVER]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:3] == ["one line per turn; an empty line ends the conversation", "well", "well"]
    assert shown[3].startswith("prompt, 20 tokens: '<|im_start|>user\\n1<|im_end|>")
    model, context, again, summary, extra = shown[4:]
    assert model == "model, 5 tokens, mean log-prob -0.047, weight versions [3]: 'well<|im_end|>'"
    assert context.startswith("context, 21 tokens, not trained: '\\n<|im_start|>user\\n2<|im_end|>")
    assert again == model
    assert summary == "reward: none (the trainer grades it); turns: 2; finish reason: stop"
    assert extra.startswith('metrics: {"generate_s": ')
    assert connected[0].log == ["http://127.0.0.1:1", "secret", "started", "stopped"]


def test_a_row_goes_through_its_loop(capsys):
    row = '{"prompt": [{"role": "user", "content": "1 + 2 = ?"}]}'
    assert cli.main(["play", *SERVER, "--row", row, "--loop", "tool", "--options", '{"tools": ["calculator"]}']) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "calculator" in shown[0]
    assert "reward: none (the trainer grades it); turns: 1; finish reason: stop" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["play", *SERVER, "--row", "{}"], "rl-agent: field 'prompt' of the row is None"),
        (["play", *SERVER, "--row", "{"], "rl-agent: Expecting property name"),
        (["play", *SERVER, "--row", "{}", "--loop", "none"], "rl-agent: no agent loop 'none' is installed"),
        (["sandbox", "--limits", '{"memory": 1}'], "unexpected keyword argument 'memory'"),
        (["sandbox"], "rl-agent: the sandbox server needs a token"),
    ],
)
def test_what_cannot_be_is_a_sentence(arguments, said, capsys, monkeypatch):
    monkeypatch.delenv("RL_AGENT_SANDBOX_TOKEN", raising=False)
    assert cli.main(arguments) == 1
    assert said in capsys.readouterr().err
