"""Coding tasks through rl-train: rows with SWE-bench's columns, Harbor's folders, and a sandbox that is not there."""

import json
import subprocess

import pytest
from rich.console import Console

from rl_rollout.testing import write_tiny_model
from rl_trainer.config import load_config
from rl_trainer.errors import InputError
from rl_trainer.planning.prepare import prepare
from rl_trainer.run import run

pytestmark = pytest.mark.process

GIT = ("git", "-c", "user.name=me", "-c", "user.email=me@localhost")
PATCH = """--- /dev/null
+++ b/test_{name}.py
@@ -0,0 +1,4 @@
+import unittest, {name}
+class T(unittest.TestCase):
+    def test(self):
+        self.assertEqual({name}.f(), 1)
"""
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    "{% endfor %}<eos>{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)
SEQUENCE = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("sandboxes") / "model", max_position_embeddings=1024)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def rows(tmp_path):
    """Three repositories made on the spot, and the file of their rows."""
    rows = []
    for number, name in enumerate(("one", "two", "three", "four")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.py").write_text(f"def f():\n    return {number % 2}\n")
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
            subprocess.run([*GIT, *words], cwd=folder, check=True)
        commit = subprocess.run([*GIT, "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
        rows.append(
            {
                "instance_id": f"me__{name}-1",
                "problem_statement": f"f of {name} should be 1",
                "repository": str(folder),
                "base_commit": commit.stdout.strip(),
                "test_patch": PATCH.format(name=name),
                "FAIL_TO_PASS": json.dumps([f"test (test_{name}.T)"]),
                "PASS_TO_PASS": "[]",
                "test_command": "python -m unittest",
            }
        )

    def write(**change):
        path = tmp_path / "rows.jsonl"
        made = [{**row, **(change if index == 2 else {})} for index, row in enumerate(rows)]
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
        return path

    return write


def settings(model, folder, *more):
    return [
        "runtime=inline", "steps=2", "eval_every=0", "save_every=0", "timeout_s=240", "data.eval_size=1",
        f"data.max_prompt_tokens={SEQUENCE}", "rollout.max_new_tokens=8", f"rollout.max_model_len={SEQUENCE * 2}",
        "batch.batch_size=2", "batch.mini_batch_size=2", "batch.group_size=2", f"model.path={model}",
        f"output_dir={folder}/out", *more,
    ]  # fmt: skip


def swe(path, options="{max_turns: 2}"):
    return [
        f"data.path={path}", "data.format=rows", "data.options={columns: {prompt: problem_statement}}",
        "agent.loop=swe", f"agent.options={options}", "reward.parts={tests: {kind: loop}}",
    ]  # fmt: skip


def test_rows_of_swe_bench_train(model, rows, tmp_path):
    summary = run(load_config("quickstart", settings(model, tmp_path, *swe(rows()))), Console(quiet=True))
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert (summary["steps"], summary["failed_rollouts"]) == (2, 0)
    means = [line["metrics"]["reward/tests"] for line in lines if line["step"]]
    assert all(mean in (0.0, 0.5, 1.0) for mean in means), "half of the repositories pass as they are"


def test_a_missing_image_is_refused_by_file_and_row(model, rows, tmp_path):
    config = load_config("quickstart", settings(model, tmp_path, *swe(rows(image="sweb.eval:three"))))
    with pytest.raises(InputError, match=r"(?s)rows.jsonl.*3.*field 'image' of the row: .*'sweb.eval:three'"):
        prepare(config)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("{sandbox: podman}", "sandbox=podman needs the program podman: apt-get install podman"),
        ("{sandbox: bubblewrap}", "sandbox=bubblewrap needs the program bwrap"),
        ("{sandbox: {kind: http, url: 'http://127.0.0.1:9'}}", "does not answer"),
        ("{sandbox: docker}", "no sandbox 'docker' is installed"),
    ],
)
def test_a_sandbox_that_cannot_start_is_an_error_of_the_plan(options, sentence, model, rows, tmp_path, monkeypatch):
    config = load_config("quickstart", settings(model, tmp_path, *swe(rows(), options)))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=sentence):
        prepare(config)


def test_the_plan_says_what_holds_in_a_sandbox(model, rows, tmp_path):
    facts = dict(prepare(load_config("quickstart", settings(model, tmp_path, *swe(rows())))).facts)
    assert "code is shut off from" in facts["sandbox"]


def test_harbor_tasks_train(model, tmp_path):
    for number in range(4):
        task = tmp_path / f"tasks/t{number}"
        for path, text in {
            "task.toml": 'version = "1.0"\n',
            "instruction.md": f"do {number}",
            "environment/Dockerfile": "FROM debian:bookworm\nWORKDIR /app\n",
            "tests/test.sh": f"mkdir -p /logs/verifier; echo 0.{number} > /logs/verifier/reward.txt\n",
        }.items():
            (task / path).parent.mkdir(parents=True, exist_ok=True)
            (task / path).write_text(text)
    config = load_config("quickstart", settings(model, tmp_path, f"agent.environment=harbor:{tmp_path}/tasks"))
    assert config.agent.loop == "swe"
    summary = run(config, Console(quiet=True))
    assert (summary["steps"], summary["failed_rollouts"]) == (2, 0)
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["metrics"]["reward/environment"] <= 0.2 for line in lines if line["step"])
