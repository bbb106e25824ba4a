"""The prompt that is measured before the start is the prompt that is sent, for every installed agent loop."""

import asyncio
import base64
import importlib
import io
import json
import re
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
from PIL import Image
from rich.console import Console

from rl_agent.base import Policy
from rl_agent.registry import create_tokenizer
from rl_agent.testing import FakeGenerator
from rl_agent.types import ToolResult
from rl_rollout.testing import write_tiny_model, write_tiny_vl_model
from rl_trainer.config import Config, load_config
from rl_trainer.config.schema import AgentSection, RolloutSection, TeacherSection
from rl_trainer.rewards import Score
from rl_trainer.run import run
from rl_trainer.workers.agent import PromptMeter, create_runner
from rl_trainer.workers.columns import TEACHER_PROMPT, to_columns

CONTEXT = "The answer is {ground_truth}."


def png(width, height):
    file = io.BytesIO()
    Image.new("RGB", (width, height), (9, 9, 9)).save(file, "png")
    return file.getvalue()


URL = f"data:image/png;base64,{base64.b64encode(png(32, 16)).decode()}"
ASKED = [{"role": "user", "content": "what is seen?"}]
SHOWN = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is seen?"}]}]


def lookup(name: str) -> str:
    """Look a name up in a list that is long enough to matter."""
    return name


class Room:
    def reset(self, *, seed):
        return "a room with a long table, four chairs and a lamp", {}

    def step(self, action):
        return "", 1.0, True, False, {}


class Page:
    """A browser that shows one page and a picture of it."""

    async def open(self, session_id, url, html):
        return ToolResult(text="page: Shop\nelements: none", images=(png(48, 32),))

    async def preview(self, url, html):
        return await self.open("", url, html)

    async def evaluate(self, session_id, check):
        return True

    async def leave(self, session_id):
        return

    async def close(self):
        return


def gui_loop(monkeypatch):
    """The class of the loop, whose browser is `Page`; without Playwright the loop is imported with a stand-in."""
    if importlib.util.find_spec("playwright") is None:
        stub = SimpleNamespace(Error=type("Error", (Exception,), {}), async_playwright=None)
        monkeypatch.setitem(sys.modules, "playwright", SimpleNamespace(async_api=stub))
        monkeypatch.setitem(sys.modules, "playwright.async_api", stub)
    gui = importlib.import_module("rl_agent.loops.gui")
    monkeypatch.delitem(sys.modules, "rl_agent.loops.gui")
    monkeypatch.setattr(gui, "Browser", lambda **_: Page())
    monkeypatch.setitem(sys.modules, "rl_agent.loops.gui", gui)


ROWS = {
    "single_turn": ({}, {"prompt": SHOWN, "images": [URL]}),
    "tool": ({"tools": [lookup]}, {"prompt": SHOWN, "images": [URL]}),
    "gym": ({"environments": {"room": Room}}, {"system": "play", "prompt": ASKED}),
    "reasoning_gym": ({}, {"task": "basic_arithmetic", "index": 2, "system": "reason", "prompt": ASKED}),
    "swe": ({}, {"prompt": ASKED, "files": {"a.py": ""}, "tests": {"command": "true"}}),
    "gui": ({"has_screenshots": True}, {"prompt": SHOWN, "images": [URL], "html": "<p>", "check": "1"}),
    "self_play": (
        {"environment": "rl_agent.recipes.kuhn:Kuhn"},
        {"seat": "first", "environment_args": {"deal": "KQ"}, "prompt": ASKED},
    ),
}
"""Options and a row of each loop; the rows of those that take images have one."""
FOREIGN = {"harness", "verifiers", "actions"}
"""Loops with tests of their own in the agent: prompts are written by programs of others, or answered with numbers."""
LOOPS = sorted(
    entry.name
    for entry in entry_points(group="rl_agent.loops")
    if entry.value.startswith("rl_agent.") and entry.name not in FOREIGN
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_vl_model(tmp_path_factory.mktemp("measured") / "model")


def measured_and_sent(folder, loop, *, teacher=None, **columns):
    """Tokens by the meter, and tokens of the columns that the engine learns from."""
    options, row = ROWS[loop]
    row = {"data_source": "mine", "reward_model": {"ground_truth": "a lamp"}, **(columns or row)}
    tokenizer = create_tokenizer(str(folder))
    server = FakeGenerator(lambda _: [*tokenizer.encode("seen", add_special_tokens=False), tokenizer.eos_token_id])
    config = Config(rollout=RolloutSection(max_new_tokens=8), teacher=teacher, runtime="inline")
    meter = PromptMeter(tokenizer, config, str(folder))

    async def main():
        runner = create_runner(AgentSection(loop=loop, options=options), {"": Policy(server, tokenizer)})
        (prompt,) = await runner.prompts([row])
        results = [result async for result in runner.run([row], {"max_new_tokens": 8})]
        await runner.close()
        return meter.length(row, prompt), results[0].outputs

    length, outputs = asyncio.run(main())
    assert isinstance(outputs, tuple), outputs
    output = replace(outputs[0], extra_fields={**outputs[0].extra_fields, "rollout_index": 0})
    sample = meter.with_teacher_prompt((output, Score(reward=1.0)), row)
    columns, _ = to_columns([(0, [sample], None)], reader=meter.reader)
    sent = [len(columns[name].unbind()[0]) for name in ("prompt_token_ids", TEACHER_PROMPT) if name in columns]
    return length, sent, columns


@pytest.mark.process
@pytest.mark.parametrize("loop", LOOPS)
def test_the_measured_prompt_is_sent_by_every_loop(folder, loop, monkeypatch):
    """A loop that is added has to be given a row here; images are counted as the tokens that they take."""
    assert loop in ROWS, f"add options and a row of agent loop {loop!r}"
    if loop == "gui":
        gui_loop(monkeypatch)
    length, sent, columns = measured_and_sent(folder, loop)
    assert sent == [length]
    num_images = {"single_turn": 1, "tool": 1, "gui": 2}.get(loop, 0)
    grids = columns["image_grid_thw"].values.values()
    assert len(grids) == num_images
    assert [int(grid.prod()) // 4 for grid in grids] == [8, 12][:num_images], "tokens of an image"


def test_the_teachers_prompt_is_measured_with_its_context(folder):
    given = {"prompt": ASKED}
    length, sent, _ = measured_and_sent(
        folder, "single_turn", teacher=TeacherSection(path="t", context=CONTEXT), **given
    )
    shorter, _, _ = measured_and_sent(folder, "single_turn", **given)
    assert length == max(sent) == sent[1] > sent[0] == shorter


SOMETIMES = '''
import itertools

from rl_agent.loops.gym import GymLoop

OPENED = itertools.count(1)


class Room:
    """Opens with a short text, and at every fifth time with one that no server takes, but for held-out rows."""

    def reset(self, *, seed):
        return ("1 + 1 = " * 40 if seed and next(OPENED) % 5 == 0 else "1 + 1 = "), {}

    def step(self, action):
        return "", float(len(action) % 2), True, False, {}


class Loop(GymLoop):
    def __init__(self, server, tokenizer):
        super().__init__(server, tokenizer, environments={"room": Room})
'''


@pytest.mark.process
def test_an_opening_that_is_too_long_is_a_counted_failure(tmp_path):
    """Rows that open so when they are measured are left out; of others the record has file and number."""
    for name, seeds in (("train", range(1, 25)), ("test", [0, 0])):
        rows = [{"prompt": "play", "answer": "2", "seed": seed} for seed in seeds]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rooms.py").write_text(SOMETIMES)
    model = write_tiny_model(tmp_path / "model")
    settings = [
        "runtime=inline", "steps=2", "eval_every=0", "save_every=0", "timeout_s=120", "data.format=rows",
        "data.options={}", f"data.path={tmp_path}", "data.eval_size=2", "data.max_prompt_tokens=32",
        "rollout.max_new_tokens=8", "rollout.max_model_len=64", "batch.batch_size=8", "batch.mini_batch_size=8",
        "batch.group_size=2", "reward.parts={room: {kind: loop}}", f"agent.loop={tmp_path / 'rooms.py'}:Loop",
        f"model.path={model}", f"output_dir={tmp_path / 'out'}",
    ]  # fmt: skip
    summary = run(load_config("quickstart", settings), Console(quiet=True))
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line["failures"]]
    assert (summary["steps"], summary["rows_too_long"] > 0) == (2, True)
    assert failed, "at every fifth opening"
    assert all(re.match(r"\S+train.jsonl, row \d+: .*64", line["last_failure"]) for line in failed), failed
    assert {kind for line in failed for kind in line["failures"]} == {"generation"}
