"""`agent.loop=harness`: a run trains an agent in a sandbox, goes on after its end, and leaves nothing behind."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from rl_rollout.router import Router
from rl_rollout.testing import write_tiny_model
from rl_trainer.config import load_config
from rl_trainer.errors import InputError
from rl_trainer.planning.prepare import prepare
from rl_trainer.run import run
from rl_trainer.workers import agent as agent_worker

pytestmark = pytest.mark.process

HARNESS = '''
import os

import openai


def edit(path, text):
    """The tool of this harness."""
    with open(path, "a") as file:
        file.write(text)


def work(row):
    """Writes what the model says into a file, twice, in one conversation."""
    client = openai.OpenAI(max_retries=0)
    messages = [{"role": "user", "content": os.environ["RL_TASK"]}]
    for _ in range(2):
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        edit("answer.txt", said)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
'''
VERIFIER = '''
def share(row, folder, outputs):
    """How much of the file is letters."""
    text = (folder / "answer.txt").read_text()
    return {"letters": sum(c.isalpha() for c in text) / max(len(text), 1), "turns": 0.0 * len(outputs)}
'''
LOOP_DIES = """
import asyncio, sys
from rl_agent import create_loop
from rl_agent.testing import FakeGenerator, FakeTokenizer

async def main(entry, verifier, venv):
    server = FakeGenerator(delay_s=600)
    loop = create_loop("harness", server, FakeTokenizer(), entry=entry, verifier=verifier, venv=venv)
    running = asyncio.create_task(loop.run({}, {"prompt": [{"role": "user", "content": "x"}], "files": {}}))
    await server.started.wait()
    print(loop._proxy.port, flush=True)
    await running

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("harness") / "model")


@pytest.fixture
def settings(model, tmp_path):
    pytest.importorskip("openai", reason="needs the openai client")
    (tmp_path / "mine.py").write_text(HARNESS)
    (tmp_path / "checks.py").write_text(VERIFIER)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"write {i}"}],
            "data_source": "mine",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "files": {"answer.txt": ""},
        }
        for i in range(10)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"entry": f"{tmp_path}/mine.py:work", "verifier": f"{tmp_path}/checks.py:share", "venv": sys.prefix}
    return [
        "runtime=inline", "eval_every=0", "save_every=1", "timeout_s=240", f"data.path={tmp_path}/rows.jsonl",
        "data.format=rows", "data.options={}", "data.eval_size=2",
        "data.max_prompt_tokens=64", "rollout.max_new_tokens=8", "rollout.max_model_len=128",
        "batch.batch_size=2", "batch.mini_batch_size=2", "batch.group_size=2", f"model.path={model}",
        f"output_dir={tmp_path}/out", "reward.parts={letters: {kind: loop}}", "agent.loop=harness",
        f"agent.options={json.dumps(options)}",
    ]  # fmt: skip


def trained(settings, folder):
    summary = run(load_config("quickstart", settings), Console(quiet=True))
    return summary, [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


@pytest.mark.process
@pytest.mark.promise("A harness trains through rl-train: what is learned from is what the server emitted")
def test_a_harness_trains_and_a_run_resumes(settings, tmp_path, monkeypatch):
    emitted, learned = [], []
    generate, to_columns = Router.generate, agent_worker.to_columns

    async def noted(self, request):
        emitted.append((request, output := await generate(self, request)))
        return output

    def kept(groups, **given):
        learned.extend(output for _, group, _ in groups for output, _ in group)
        return to_columns(groups, **given)

    monkeypatch.setattr(Router, "generate", noted)
    monkeypatch.setattr(agent_worker, "to_columns", kept)
    summary, lines = trained([*settings, "steps=2"], tmp_path)
    assert (summary["steps"], summary["failed_rollouts"]) == (2, 0)
    assert all(0 <= line["metrics"]["reward/letters"] <= 1 for line in lines if line["step"])
    assert {output.num_turns for output in learned} == {2}
    by_session = {}
    for request, output in emitted:
        by_session.setdefault(request.session_id, []).append((request, output))
    turns = {
        tuple(i for _, output in pairs for i in output.token_ids): [output for _, output in pairs]
        for pairs in by_session.values()
    }
    for output in learned:
        where = [i for i, m in enumerate(output.loss_mask) if m]
        answers = turns[tuple(output.completion_token_ids[i] for i in where)]
        assert [output.rollout_logprobs[i] for i in where] == [x for each in answers for x in each.logprobs]
        assert [output.weight_versions[i] for i in where] == [v for each in answers for v in each.weight_versions]
    assert {v for output in learned for v in output.weight_versions} == {-1, 1, 2}
    checkpoint = tmp_path / "out/checkpoint-2"
    more = [f"output_dir={tmp_path}/on/out", f"resume_from={checkpoint}", "steps=3"]
    summary, lines = trained([*settings, *more], tmp_path / "on")
    assert [line["step"] for line in lines if "metrics" in line][-1] == 3


@pytest.mark.process
@pytest.mark.slow
def test_reward_rises_by_what_a_harness_leaves(settings, tmp_path):
    more = ["steps=12", "batch.group_size=8", "save_every=0"]
    more += ["engine.optimizer.lr=1.0e-2"]
    _, lines = trained([*settings, *more], tmp_path)
    rewards = [line["metrics"]["reward/letters"] for line in lines if line["step"]]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"entry": "nowhere.py:work"}, "nowhere.py:work': there is no file"),
        ({"command": "true", "verifier": "nowhere.py:share"}, "nowhere.py:share': there is no file"),
        ({"commands": "true"}, "agent.options.commands is not an option of agent.loop=harness"),
    ],
)
def test_a_harness_that_cannot_run_is_refused_at_the_plan(settings, options, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        prepare(load_config("quickstart", [*settings, f"agent.options={json.dumps(options)}"]))


@pytest.mark.process
def test_a_killed_worker_leaves_no_proxy_and_no_harness(settings, tmp_path):
    entry, verifier = f"{tmp_path}/mine.py:work", f"{tmp_path}/checks.py:share"
    command = [sys.executable, "-c", LOOP_DIES, entry, verifier, sys.prefix]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    deadline = time.monotonic() + 60

    def is_left():
        commands = [_command(folder) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
        listening = f":{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text()
        return listening or any(str(tmp_path) in each for each in commands)

    while is_left():
        assert time.monotonic() < deadline, "a proxy or a harness outlived its worker by a minute"
        time.sleep(0.1)


def _command(folder):
    try:
        return (folder / "cmdline").read_text()
    except OSError:
        return ""
