"""Tasks in Harbor's published format: played with a shell or a harness, and scored by their own tests."""

import asyncio
import json
from pathlib import Path

import pytest

from rl_agent import Failure, PluginError, RowError, create_loop
from rl_agent.environments.harbor import HarborTask, read_reward
from rl_agent.errors import FailureError
from rl_agent.registry import create_environments, loop_of_environments
from rl_agent.testing import FakeGenerator, FakeTokenizer

TOKENIZER = FakeTokenizer()
TOML = """version = "1.0"

[metadata]
author_name = "me"
difficulty = "easy"
tags = ["trivial"]

[verifier]
timeout_sec = 60.0

[agent]
timeout_sec = 60.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
storage_mb = 64
"""
TASKS = {
    "hello": {
        "instruction.md": "Write Hello, world! to /app/hello.txt",
        "environment/Dockerfile": "FROM ubuntu:24.04\n\n# the agent works here\nWORKDIR /app\n",
        "tests/test.sh": '#!/bin/bash\nif [ "$(cat /app/hello.txt)" = "Hello, world!" ]; then\n'
        "  echo 1 > /logs/verifier/reward.txt\nelse\n  echo 0 > /logs/verifier/reward.txt\nfi\n",
        "solution/solve.sh": "#!/bin/bash\necho 'Hello, world!' > /app/hello.txt\n",
    },
    "fix": {
        "instruction.md": "Make add() add.",
        "environment/Dockerfile": "FROM python:3.13-slim\nENV ROUNDS=3 NAME='a b'\nWORKDIR /srv/work\nCOPY src/ lib/\n"
        'COPY notes.txt .\nCMD ["bash"]\n',
        "environment/src/adder.py": "def add(a, b):\n    return a - b\n",
        "environment/notes.txt": "it subtracts",
        "tests/test.sh": "cd /srv/work/lib && python3 /tests/check.py",
        "tests/check.py": "import json, os, sys\nsys.path.insert(0, '.')\nimport adder\n"
        "right = sum(adder.add(i, 2) == i + 2 for i in range(int(os.environ['ROUNDS'])))\n"
        "json.dump({'reward': right / 3, 'num_right': right}, open('/logs/verifier/reward.json', 'w'))\n",
        "solution/solve.sh": 'test "$NAME" = "a b" && grep -q subtracts notes.txt && sed -i s/-/+/ lib/adder.py\n',
    },
    "count": {
        "instruction.md": "Count the lines of data.csv into /data/count",
        "environment/Dockerfile": "FROM debian:bookworm\nWORKDIR /data\nCOPY . .\nENV LANG C.UTF-8\n",
        "environment/data.csv": "a\nb\nc\n",
        "tests/test.sh": "set -e\n[ $(cat count) = 3 ] && r=0.75 || r=0\necho $r > /logs/verifier/reward.txt",
        "solution/solve.sh": "grep -c . data.csv > count",
    },
}


def write_tasks(folder, tasks=TASKS, **more):
    for name, files in {**tasks, **more}.items():
        for path, text in {"task.toml": TOML, **files}.items():
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_text(text)
    return folder


def played(row, *commands, loop="swe", **options):
    def reply(request):
        step = TOKENIZER.decode(request.prompt_token_ids).count("<|im_start|>tool")
        if step >= len(commands):
            return [*TOKENIZER.encode("done"), 1]
        call = {"name": "bash", "arguments": {"command": commands[step]}}
        return [*TOKENIZER.encode(f"<tool_call>{json.dumps(call)}</tool_call>"), 1]

    async def main():
        made = create_loop(loop, FakeGenerator(reply), TOKENIZER, **options)
        row_ = {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
        try:
            await made.prompt(row_)
            return await made.run({"max_new_tokens": 4096}, row_)
        finally:
            await made.close()

    return asyncio.run(main())


def rows_of(folder):
    train, held_out = create_environments(f"harbor:{folder}").rows(seed=1, num_train=100, num_eval=100)
    return {Path(row["harbor"]).name: row for row in [*train, *held_out]}


def test_rows_are_the_tasks_and_the_last_are_held_out(tmp_path):
    source = create_environments(f"harbor:{write_tasks(tmp_path)}")
    assert loop_of_environments(f"harbor:{tmp_path}") == "swe"
    train, held_out = source.rows(seed=1, num_train=100, num_eval=100)
    assert [Path(row["harbor"]).name for row in train] == ["count", "fix"]
    assert [row["prompt"] for row in held_out] == ["Write Hello, world! to /app/hello.txt"]


@pytest.mark.process
@pytest.mark.promise("Harbor tasks in the published format are played unchanged")
@pytest.mark.parametrize(("name", "best"), [("hello", 1.0), ("fix", 1.0), ("count", 0.75)])
def test_a_task_is_scored_by_its_own_tests(name, best, tmp_path):
    row = rows_of(write_tasks(tmp_path))[name]
    assert played(row).reward == 0.0
    solved = played(row, TASKS[name]["solution/solve.sh"])
    assert solved.reward == best
    if name == "fix":
        assert solved.metrics["reward/num_right"] == 3.0
    peeking = played(row, "ls /tests /logs; ls /solution")
    assert "test.sh" not in TOKENIZER.decode(peeking.completion_token_ids)


@pytest.mark.process
def test_a_harness_plays_a_task(tmp_path):
    ask = (
        "import json, os, urllib.request as u; r = u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', "
        "json.dumps({'messages': [{'role': 'user', 'content': os.environ['RL_TASK']}]}).encode(), {'Authorization': "
        "'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}); u.urlopen(r).read()"
    )
    command = f'python3 -c "{ask}" && ' + TASKS["hello"]["solution/solve.sh"].splitlines()[-1]
    (output,) = played(rows_of(write_tasks(tmp_path))["hello"], loop="harness", command=command)
    assert (output.reward, output.extra_fields["harness"]["exit_status"]) == (1.0, 0)


@pytest.mark.process
def test_tests_that_write_no_reward_are_a_failure(tmp_path):
    row = rows_of(write_tasks(tmp_path, mute={**TASKS["hello"], "tests/test.sh": "echo sorry; exit 4"}))["mute"]
    with pytest.raises(
        FailureError, match="wrote neither /logs/verifier/reward.json nor .*exit status is 4.*sorry"
    ) as raised:
        played(row)
    assert isinstance(raised.value.failure, Failure)
    assert not raised.value.failure.is_retryable


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("RUN apt-get update && apt-get install -y curl", "RUN apt-get update"),
        ("FROM ghcr.io/x/y:1", "FROM ghcr.io/x/y:1"),
        ("COPY --from=build /a /b", "COPY --from=build"),
        ("COPY notes /etc/notes", "COPY notes /etc/notes"),
        ("USER nobody", "USER nobody"),
    ],
)
def test_an_image_that_needs_docker_is_refused_by_name(line, said, tmp_path):
    task = {**TASKS["hello"], "environment/Dockerfile": f"FROM ubuntu:24.04\nWORKDIR /app\n{line}\n"}
    row = rows_of(write_tasks(tmp_path, needy=task))["needy"]
    with pytest.raises(RowError, match=f"task needy: its image cannot be made without Docker.*{said}.*sandbox: podman"):
        played(row)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"task.toml": "version = "}, "task odd: task.toml cannot be read"),
        ({"task.toml": TOML + "gpus = 1\n"}, "task odd asks for gpus"),
        ({"environment/docker-compose.yaml": ""}, "task odd has a docker-compose.yaml"),
    ],
)
def test_a_task_that_is_not_supported_is_named(files, sentence, tmp_path):
    source = create_environments(f"harbor:{write_tasks(tmp_path, odd={**TASKS['hello'], **files})}")
    with pytest.raises(PluginError, match=sentence):
        source.rows(seed=1, num_train=9, num_eval=9)


def test_a_task_without_tests_and_a_folder_without_one(tmp_path):
    with pytest.raises(PluginError, match="no folder of it has a task.toml"):
        create_environments(f"harbor:{tmp_path}")
    write_tasks(tmp_path, {"bare": {"instruction.md": "x"}})
    with pytest.raises(PluginError, match="task bare of .* has no tests/test.sh"):
        create_environments(f"harbor:{tmp_path}").rows(seed=1, num_train=9, num_eval=9)


def test_more_memory_than_the_sandbox_has_is_refused(tmp_path):
    row = rows_of(write_tasks(tmp_path, big={**TASKS["hello"], "task.toml": TOML.replace("2048", "8192")}))["big"]
    with pytest.raises(RowError, match="task big wants memory_mb=8192, and a sandbox has 4096"):
        played(row)


@pytest.mark.parametrize(
    ("old", "new", "said", "sandbox"),
    [
        ("cpus = 1", "cpus = 4096", r"task big: it wants cpus=4096, and this machine has \d+", "process"),
        ("storage_mb = 64", "storage_mb = 9_000_000_000", "wants storage_mb=9000000000, and .* are free in", "process"),
        (*("storage_mb = 64", "storage_mb = 65"), "folder_bytes is 67108864", {"folder_bytes": 64 << 20}),
        (*("cpus = 1", 'cpus = "all"'), "task big has cpus='all'; a number is needed", "process"),
        (*("storage_mb = 64", "storage_mb = -1"), "task big has storage_mb=-1; a number is needed", "process"),
    ],
)
def test_processors_and_room_that_are_not_there_are_refused(old, new, said, sandbox, tmp_path):
    """Before anything runs: the prompt of the row is asked first."""
    row = rows_of(write_tasks(tmp_path, big={**TASKS["hello"], "task.toml": TOML.replace(old, new)}))["big"]
    loop = create_loop("swe", FakeGenerator(lambda _: [1]), TOKENIZER, sandbox=sandbox)
    with pytest.raises(RowError, match=said):
        asyncio.run(loop.prompt(row))


def test_rewards_are_read_as_harbor_does():
    assert read_reward({"txt": " 0.5\n", "json": '{"reward": 1, "style": 0.2}'}) == {"reward": 1.0, "style": 0.2}
    assert read_reward({"json": '{"accuracy": 0.25}'}) == {"reward": 0.25}
    assert read_reward({"txt": "1"}) == {"reward": 1.0}
    for texts in ({}, {"txt": "good"}, {"json": '{"a": 1, "b": 2}'}, {"txt": "nan"}):
        with pytest.raises(ValueError, match="wrote|could not convert"):
            read_reward(texts)


def test_variables_of_tests_come_from_this_process(tmp_path, monkeypatch):
    toml = TOML.replace(
        "[agent]", '[verifier.env]\nKEY = "${MY_KEY}"\nLEVEL = "${MY_LEVEL:-3}"\nPLAIN = "x"\n\n[agent]'
    )
    folder = write_tasks(tmp_path, {"hello": {**TASKS["hello"], "task.toml": toml}}) / "hello"
    with pytest.raises(RowError, match="its tests need the variable MY_KEY"):
        _ = HarborTask.read(folder).verifier_variables
    monkeypatch.setenv("MY_KEY", "k")
    assert HarborTask.read(folder).verifier_variables == {"KEY": "k", "LEVEL": "3", "PLAIN": "x"}
