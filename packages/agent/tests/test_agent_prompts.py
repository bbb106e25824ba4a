"""The prompt that is measured is the prompt that a server gets, token for token, of every loop that is installed."""

import asyncio
import itertools
import shutil
from dataclasses import replace
from importlib.metadata import entry_points

import pytest
import torch

from rl_agent import AgentRunner, Failure, create_loop, tokenize_prompt, tokenize_prompts
from rl_agent.testing import FakeGenerator
from rl_rollout.types import FinishReason

ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "add should add"}]
SHOTS = [*ASK, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "and now?"}]


class Room:
    """Opens with a text that depends on its seed; without one it opens anew each time."""

    opened = itertools.count(1000)

    def __init__(self, size=1):
        self._size = size

    def reset(self, *, seed):
        return f"you see door {next(self.opened) if seed is None else seed} " * self._size, {}

    def step(self, action):
        return "the end", 1.0, True, False, {}


def lookup(city: str, limit: int = 3) -> str:
    """Look a city up."""
    return city


FILES = {"files": {"a.py": "a = 1\n"}, "tests": {"command": "true", "files": {"test_a.py": "\n"}}}
PAGE = {"html": "<title>Shop</title><p>Welcome", "check": "true"}
TOOLS = {"tools": [lookup, "calculator"]}
TASK = {"task": "basic_arithmetic", "index": 3, "task_args": {"seed": 7, "size": 10}}
CASES = {
    "single_turn": ("single_turn", {}, {"prompt": ASK}),
    "few shots": ("single_turn", {}, {"prompt": SHOTS}),
    "tool": ("tool", TOOLS, {"prompt": ASK}),
    "a row's tools": ("tool", TOOLS, {"prompt": SHOTS, "tools": ["calculator"]}),
    "template_kwargs": ("tool", {**TOOLS, "template_kwargs": {"mood": "cheerful"}}, {"prompt": ASK}),
    "gym": ("gym", {"environments": {"room": Room}}, {"seed": 7, "environment_args": {"size": 40}}),
    "gym with system": ("gym", {"environments": {"room": Room}}, {"seed": 7, "system": "you play a game"}),
    "reasoning_gym": ("reasoning_gym", {}, {**TASK, "system": "think"}),
    "swe": ("swe", {}, {"prompt": ASK, **FILES}),
    "gui": ("gui", {}, {"prompt": ASK, **PAGE}),
    "self_play": (
        *("self_play", {"environment": "rl_agent.recipes.kuhn:Kuhn"}),
        {"seat": "first", "environment_args": {"deal": "KQ"}},
    ),
}
FOREIGN = {"harness", "verifiers", "actions"}
"""Loops with tests of their own: prompts are written by programs of others, or answered with numbers."""
OURS = {point.name for point in entry_points(group="rl_agent.loops") if point.value.startswith("rl_agent.")} - FOREIGN


def test_every_loop_has_a_case():
    assert {loop for loop, _, _ in CASES.values()} == OURS


def marked(name):
    return pytest.param(name, marks=pytest.mark.process if name in ("swe", "gui") else ())


@pytest.mark.process
@pytest.mark.parametrize("family", ["qwen", "plain"])
@pytest.mark.parametrize("name", [*map(marked, CASES)])
def test_the_server_gets_the_prompt_that_was_measured(make_tokenizer, name, family):
    kind, options, row = CASES[name]
    if kind == "reasoning_gym":
        pytest.importorskip("reasoning_gym", reason="needs the extra rl-agent[reasoning_gym]")
    if kind == "gui":
        pytest.importorskip("playwright", reason="uv sync --group frameworks")
        if shutil.which("chromium") is None:
            pytest.skip("there is no chromium on the path")
    tokenizer = make_tokenizer(family)
    if "template_kwargs" in options:
        tokenizer.chat_template = "{{ mood or '' }}" + tokenizer.chat_template
    server = FakeGenerator(lambda _: [*tokenizer.encode("ok", add_special_tokens=False), tokenizer.eos_token_id])

    async def main():
        runner = AgentRunner(lambda _: create_loop(kind, server, tokenizer, **options))
        try:
            return await runner.prompts([row]), [each async for each in runner.run([row], {"max_new_tokens": 16})]
        finally:
            await runner.close()

    ((measured, images),), (result,) = asyncio.run(main())
    assert not isinstance(result.outputs, Failure), result.outputs
    assert (measured, images) == (tuple(server.requests[0].prompt_token_ids), ())
    said = tokenizer.decode(measured)
    shown = {"gym": ["door 7"], "gym with system": ["you play a game", "door 7"], "reasoning_gym": ["think"]}
    shown["self_play"] = ["Your card: K"]
    assert all(text in said for text in shown.get(name, ["be brief", "add should add"]))
    if kind in ("tool", "swe", "gui") and family == "qwen":
        assert '"parameters"' in said
    assert ("cheerful" in said) is (name == "template_kwargs")


class Seen(Room):
    """Shows a picture, and is played by numbers."""

    def reset(self, *, seed):
        image = {"type": "image", "image": "data:image/png;base64,AA=="}
        return [image, {"type": "text", "text": f"reach door {seed}"}], {}


class Actor(FakeGenerator):
    """Answers with an action in place of tokens."""

    async def generate(self, request):
        output = await super().generate(request)
        columns = {"action": torch.zeros(1, 2), "actions": torch.zeros(1, 1, 2)}
        return replace(output, token_ids=(), finish_reason=FinishReason.STOP, columns=columns)


def test_an_actor_gets_the_prompt_that_was_measured(make_tokenizer):
    tokenizer = make_tokenizer("plain")
    server, row = Actor(lambda _: [tokenizer.eos_token_id]), {"seed": 7}

    async def main():
        runner = AgentRunner(lambda _: create_loop("actions", server, tokenizer, environments={"seen": Seen}))
        try:
            return await runner.prompts([row]), [each async for each in runner.run([row], {})]
        finally:
            await runner.close()

    ((measured, images),), (result,) = asyncio.run(main())
    assert not isinstance(result.outputs, Failure), result.outputs
    assert (measured, images) == (tuple(server.requests[0].prompt_token_ids), ())
    assert "reach door 7" in tokenizer.decode(measured)
    assert len(server.requests[0].images) == 1


def test_an_environment_without_a_seed_may_open_anew(make_tokenizer):
    """Its prompt cannot be known; the rollout has the one that it opened with."""
    tokenizer = make_tokenizer("plain")
    server = FakeGenerator(lambda _: [*tokenizer.encode("ok"), tokenizer.eos_token_id])

    async def main():
        runner = AgentRunner(lambda _: create_loop("gym", server, tokenizer, environments={"room": Room}))
        return await runner.prompts([{}]), await runner.prompts([{}]), [each async for each in runner.run([{}], {})]

    first, second, (result,) = asyncio.run(main())
    assert first != second
    assert result.outputs[0].prompt_token_ids == tuple(server.requests[0].prompt_token_ids)


_EACH = "{{% for message in messages %}}{{{{ message.role }}}}={}<|im_end|>{{% endfor %}}assistant="
_PARTS = "{% for part in message.content if part is mapping %}{{ part.text }}{% endfor %}"


@pytest.mark.parametrize("written", ["{{ message.content }}", "{{ message.content + '' }}", _PARTS])
def test_contents_as_text_and_as_parts_are_one_prompt(make_tokenizer, written):
    tokenizer = make_tokenizer("qwen", _EACH.format(written))
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in SHOTS]
    want = "".join(f"{message['role']}={message['content']}<|im_end|>" for message in SHOTS) + "assistant="
    rows = [{"prompt": SHOTS}, {"prompt": parts}]
    for prompts in ([tokenize_prompt(tokenizer, row) for row in rows], tokenize_prompts(tokenizer, rows)):
        assert [tokenizer.decode(ids) for ids, _ in prompts] == [want, want]
