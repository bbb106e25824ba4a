"""Real OpenEnv and verifiers, each in an environment of its own next to this one's packages: played, and trained on."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

TASKSET = '''
import verifiers.v1 as vf


class Data(vf.TaskData):
    letter: str


class Task(vf.Task[Data]):
    @vf.stop
    async def once(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=0.5)
    async def letters(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").count(self.data.letter))

    @vf.reward(weight=1.0)
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply or "") / 100


class Letters(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(prompt=f"write {each}", system_prompt="be short", letter=each), self.config.task)
                for each in "abcdefghijklmnopqrstuvwxyz"]


class Config(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    second: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class Duel(vf.Env[Config]):
    """Two agents write, and the longer text wins; the second does not learn."""

    async def setup(self, agents):
        agents.second.trainable = False

    async def run(self, task, agents):
        await agents.first.run(task)
        await agents.second.run(task)


__all__ = [%s]
'''
TOOLSET = '''
import verifiers.v1 as vf


class Store(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "store"

    @vf.tool
    def price(self, item: str) -> str:
        """Look up a price."""
        return {"pear": "7"}.get(item, "unknown")


if __name__ == "__main__":
    Store.run()
'''
SHOP = """
import verifiers.v1 as vf
from shop.store import Store


class TaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Task(vf.Task[vf.TaskData, vf.State, TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Store(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float("7" in (trace.last_reply or ""))


class Config(vf.TasksetConfig):
    task: TaskConfig = TaskConfig()


class Shop(vf.Taskset[Task, Config]):
    def load(self):
        return [Task(vf.TaskData(prompt="What is a pear?"), self.config.task) for _ in range(4)]


__all__ = ["Shop"]
"""
CHAT = {"agent": {"harness": {"id": "null"}}}
PLAY = """
import asyncio, json, sys
from rl_agent import validate_output
from rl_agent.registry import create_loop, loop_of_environments
from rl_agent.testing import FakeGenerator, FakeTokenizer

T = FakeTokenizer()
name, arguments, rows, replies = json.loads(sys.argv[1])


def reply(request):
    text = T.decode(request.prompt_token_ids)[-300:]
    return [*T.encode(next(said for mark, said in replies.items() if mark in text)), 1]


async def main():
    options = {"environment": name, "environment_args": arguments}
    server = FakeGenerator(reply)
    loop = create_loop(loop_of_environments(name), server, T, **options)
    runs = await asyncio.gather(*(loop.run({"max_new_tokens": 256, "seed": 5}, row) for row in rows))
    await loop.close()
    outputs = [each for run in runs for each in (run if isinstance(run, list) else [run])]
    for each in outputs:
        validate_output(each)
    print(json.dumps([request.sampling_params.seed for request in server.requests]))
    print(json.dumps([[e.reward, e.num_turns, e.turn_rewards, dict(e.metrics), dict(e.extra_fields),
                       T.decode(e.prompt_token_ids) + T.decode(e.completion_token_ids)] for e in outputs]))


asyncio.run(main())
"""


def environment(folder, *packages):
    """Interpreter of a new environment with these packages, which come before those of this one."""
    python = folder / "bin" / "python"
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(folder)], check=True, timeout=120)
    subprocess.run(
        ["uv", "pip", "install", "-q", "-p", str(python), *packages], check=True, timeout=600, cwd=folder.parent
    )
    site = next((folder / "lib").glob("python*/site-packages"))
    here = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (site / "zz_workspace.pth").write_text(here)
    return python


@pytest.fixture(scope="module")
def openenv(tmp_path_factory):
    """OpenEnv, and a folder with the package that its own `init` writes, unmodified."""
    folder = tmp_path_factory.mktemp("openenv")
    python = environment(folder / "environment", "openenv==0.10.0")
    subprocess.run([str(python.parent / "openenv"), "init", "word_env"], check=True, timeout=120, cwd=folder)
    return python, folder


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifiers")
    python = environment(folder / "environment", "verifiers==0.4.0")
    for name, files in {
        "letters": {"__init__.py": TASKSET % '"Letters"'},
        "duel": {"__init__.py": TASKSET % '"Letters", "Duel"'},
        "shop": {"__init__.py": SHOP, "store.py": TOOLSET},
    }.items():
        (folder / name).mkdir()
        for file, text in files.items():
            (folder / name / file).write_text(text)
    return python, folder


def run(environment, *command):
    python, folder = environment
    done = subprocess.run(
        [str(python), *command],
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def played(environment, name, arguments, rows, replies):
    return json.loads(run(environment, "-c", PLAY, json.dumps([name, arguments, rows, replies])).splitlines()[-1])


def trained(environment, name, model, *settings):
    out = environment[1] / f"out-{name.replace(':', '-')}"
    command = [
        "-m", "rl_trainer.cli", "quickstart", f"agent.environment={name}", f"model.path={model}", f"output_dir={out}",
        "runtime=inline", "steps=2", "eval_every=2", "data.eval_size=2", "data.max_prompt_tokens=800",
        "rollout.max_new_tokens=24", "rollout.max_model_len=2048", "batch.batch_size=2", "batch.mini_batch_size=2",
        "batch.group_size=2", "reward.overlong_buffer=0", *settings,
    ]  # fmt: skip
    run(environment, *command)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from rl_rollout.testing import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model") / "model", max_position_embeddings=4096)


def test_rollouts_wait_for_a_server_of_one_session(openenv):
    found = played(openenv, "openenv:word_env", {}, [{"seed": seed} for seed in range(4)], {"": "hello"})
    assert len(found) == 4
    for reward, num_turns, turn_rewards, _, fields, text in found:
        assert (num_turns, turn_rewards[0], fields["end"]) == (16, 0.5, "max_turns")
        assert reward == pytest.approx(8.0)
        assert "Answer with the text of your action: Message to echo back." in text
        assert "echoed_message: hello\nmessage_length: 5" in text


def test_openenv_trains(openenv, model):
    lines = trained(openenv, "openenv:word_env", model, "agent.options={max_turns: 3}")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(not line["failures"] for line in lines[1:])


def test_verifiers_plays_and_scores(verifiers):
    rows = [{"index": 0}, {"index": 1}]
    found = played(verifiers, "verifiers:letters", CHAT, rows, {"": "abba" * 5})
    for reward, num_turns, _, metrics, fields, text in found:
        assert (num_turns, fields["agent"]) == (1, "agent")
        assert (metrics["reward/letters"], metrics["reward/length"]) == (5.0, 0.2)
        assert reward == pytest.approx(5.2)
        assert "be short" in text


def test_verifiers_tools_are_one_trajectory(verifiers):
    call = '<tool_call>{"name": "store_price", "arguments": {"item": "pear"}}</tool_call>'
    replies = {"|>tool": "it is 7", "pear?": call}
    [[reward, num_turns, _, _, _, text]] = played(verifiers, "verifiers:shop", CHAT, [{"index": 0}], replies)
    assert (reward, num_turns) == (1.0, 2)
    assert text.index(call) < text.index("it is 7")


def test_an_agent_that_does_not_learn_gives_nothing(verifiers):
    found = played(verifiers, "verifiers:duel", None, [{"index": 0}], {"": "a"})
    assert [each[4]["agent"] for each in found] == ["first"]


def test_agents_of_an_episode_draw_by_different_seeds(verifiers):
    asked = json.dumps(["verifiers:duel", None, [{"index": 0}], {"": "a"}])
    seeds = json.loads(run(verifiers, "-c", PLAY, asked).splitlines()[-2])
    assert seeds[0] == 5
    assert len(set(seeds)) == len(seeds) == 2


def test_verifiers_trains(verifiers, model):
    options = f"agent.options={json.dumps({'environment_args': CHAT})}"
    lines = trained(verifiers, "verifiers:letters", model, options)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(not line["failures"] for line in lines[1:])
    assert all(line["reward"] > 0 for line in lines[1:])
    assert all("reward/length" in line["metrics"] for line in lines[1:])


def test_what_verifiers_cannot_make_is_refused_at_the_plan(verifiers, model):
    python, folder = verifiers
    command = [str(python), "-m", "rl_trainer.cli", "quickstart", f"model.path={model}", "--dry-run"]
    for name, said in (("nothing_here", "taskset 'nothing_here' not found"), ("shop", "not authenticated with prime")):
        done = subprocess.run(
            [*command, f"agent.environment=verifiers:{name}"],
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True, text=True, timeout=200, check=False, cwd=Path(folder),
        )  # fmt: skip
        assert done.returncode != 0
        assert said in done.stderr + done.stdout
        assert "Traceback" not in done.stderr
