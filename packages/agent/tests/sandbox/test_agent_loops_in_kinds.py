"""The loops `harness` and `swe`, and Harbor tasks, in a sandbox of every kind."""

import asyncio
import json
import subprocess

import pytest

from rl_agent import RowError, create_loop
from rl_agent.testing import FakeGenerator, FakeTokenizer

pytestmark = pytest.mark.process

TOKENIZER = FakeTokenizer()
HARNESS = """
import json, os, urllib.request
with open(os.environ["RL_ROW"]) as file:
    assert json.load(file)["prompt"][-1]["content"] == os.environ["RL_TASK"]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": os.environ["RL_TASK"]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request, timeout=60) as response:
    said = json.loads(response.read())["choices"][0]["message"]["content"]
with open("answer.txt", "w") as file:
    file.write(said)
"""
PROMPT = [{"role": "user", "content": "say 5"}]


def says(*turns):
    turns = iter(turns)
    return FakeGenerator(lambda _: [*TOKENIZER.encode(next(turns)), 1], weight_version=3)


def played(with_kind, name, server, row, **options):
    async def use(sandbox):
        loop = create_loop(name, server, TOKENIZER, sandbox={"memory_bytes": 1 << 28, **sandbox}, **options)
        try:
            await loop.prompt(row)
            return await loop.run({"max_new_tokens": 512}, row)
        finally:
            await loop.close()

    return with_kind(use, is_made=False)


def test_a_harness_reaches_its_model_and_is_verified(with_kind):
    """The verifier reads the files that it left, wherever they were."""
    seen = []

    def verify(row, folder, outputs):
        seen.append({path.name: path.read_text() for path in folder.iterdir()})
        return float(seen[-1]["answer.txt"] == "5")

    row = {"prompt": PROMPT, "files": {"work.py": HARNESS, "notes/x": ""}, "command": "rm -r notes; python3 work.py"}
    server = says("5")
    (output,) = played(with_kind, "harness", server, row, verifier=verify)
    assert output.extra_fields["harness"] == {"exit_status": 0, "output": ""}
    assert (output.reward, seen) == (1.0, [{"work.py": HARNESS, "answer.txt": "5"}])
    pairs = [*zip(output.completion_token_ids, output.loss_mask, strict=True)]
    assert [i for i, m in pairs if m] == [i for answer in server.outputs for i in answer.token_ids]


def test_commands_and_tests_of_the_shell_loop(with_kind):
    call = json.dumps({"name": "bash", "arguments": {"command": "pwd; sed -i s/4/5/ answer.txt; rm check.sh"}})
    tests = {"command": "bash check.sh", "files": {"check.sh": "grep -q 5 answer.txt"}}
    row = {"prompt": PROMPT, "files": {"answer.txt": "4\n", "check.sh": "exit 0"}, "tests": tests}
    output = played(with_kind, "swe", says(f"<tool_call>{call}</tool_call>", "done"), row)
    assert "/workspace" in TOKENIZER.decode(output.completion_token_ids)
    assert (output.reward, output.extra_fields["tests"]["exit_status"]) == (1.0, 0)
    assert played(with_kind, "swe", says("done"), row).reward == 0.0


def in_podman(use, *, is_made):
    """As `with_kind`, with images of the rows."""
    assert not is_made
    return asyncio.run(use({"kind": "podman"}))


DOCKERFILE = (
    "FROM localhost/rl-agent-test:1\nWORKDIR /app\nRUN echo 3 > /app/secret && mkdir -p /opt/made\nCOPY data .\n"
)


@pytest.fixture
def task(tmp_path):
    files = {
        "task.toml": 'version = "1.0"\n[environment]\ncpus = 1\nmemory_mb = 128\n',
        "instruction.md": "add one",
        "environment/Dockerfile": DOCKERFILE,
        "environment/data": "d",
        "tests/test.sh": 'mkdir -p /logs/verifier; [ -d /opt/made ] && [ "$(cat /app/answer)" = 4d ] && r=1 || r=0\n'
        "echo $r > /logs/verifier/reward.txt\n",
    }
    for path, text in files.items():
        (tmp_path / "task" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / path).write_text(text)
    return tmp_path / "task"


@pytest.mark.integration
def test_podman_builds_the_image_of_a_harbor_task(task, podman_image):
    call = json.dumps({"name": "bash", "arguments": {"command": "echo $(( $(cat secret) + 1 ))$(cat data) > answer"}})

    def play(*turns):
        return played(in_podman, "swe", says(*turns), {"prompt": PROMPT, "harbor": str(task)})

    assert play(f"<tool_call>{call}</tool_call>", "done").reward == 1.0
    assert play("done").reward == 0.0
    names = ["podman", "images", "-q", "rl-agent-harbor"]
    for image in subprocess.run(names, capture_output=True, text=True, check=True).stdout.split():
        subprocess.run(["podman", "rmi", "-f", image], capture_output=True, check=True)
    (task / "environment/Dockerfile").write_text("FROM localhost/not-there:9\nWORKDIR /app\n")
    with pytest.raises(RowError, match="podman cannot build .*not-there"):
        play("done")


@pytest.mark.integration
def test_a_missing_image_is_refused_before_a_rollout(podman_image):
    row = {"prompt": PROMPT, "image": "localhost/not-there:9", "tests": {"command": "true"}}
    with pytest.raises(RowError, match="podman has no image 'localhost/not-there:9' on this machine; podman pull"):
        played(in_podman, "swe", says("done"), row)
