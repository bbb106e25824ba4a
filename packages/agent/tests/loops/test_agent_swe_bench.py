"""Rows with SWE-bench's columns: a repository at a commit, a patch of tests, and the tests that have to pass."""

import asyncio
import json
import shutil
import subprocess
import sys

import pytest

from rl_agent import RowError, create_loop
from rl_agent.loops.workspace import check_row
from rl_agent.registry import create_sandboxes
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_agent.types import SandboxLimits

TOKENIZER = FakeTokenizer()
GIT = ("git", "-c", "user.name=me", "-c", "user.email=me@localhost", "-c", "commit.gpgsign=false")
OLD_TESTS = """import unittest, adder
class T(unittest.TestCase):
    def test_zero(self):
        assert adder.add(0, 0) == 0
"""
NEW_TEST = "    def test_add(self):\n        assert adder.add(2, 3) == 5\n"
FIX = "sed -i s/-/+/ adder.py"


def git(folder, *words):
    done = subprocess.run([*GIT, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def row(tmp_path):
    """A repository whose next commit, which nobody may see, has the solution and its tests."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "adder.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "test_adder.py").write_text(OLD_TESTS)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "base")
    base = git(folder, "rev-parse", "HEAD").strip()
    (folder / "test_adder.py").write_text(OLD_TESTS + NEW_TEST)
    patch = git(folder, "diff")
    (folder / "adder.py").write_text("def add(a, b):\n    return a + b\n")
    git(folder, "commit", "-qam", "the solution")
    return {
        "prompt": [{"role": "user", "content": "add should add"}],
        "repository": str(folder),
        "base_commit": base,
        "test_patch": patch,
        "FAIL_TO_PASS": json.dumps(["test_add (test_adder.T)"]),
        "PASS_TO_PASS": ["test_adder.T.test_zero"],
        "test_command": "python -m unittest -v",
    }


def run(row, *commands, **options):
    def reply(request):
        step = TOKENIZER.decode(request.prompt_token_ids).count("<|im_start|>tool")
        if step >= len(commands):
            return [*TOKENIZER.encode("done"), 1]
        call = {"name": "bash", "arguments": {"command": commands[step]}}
        return [*TOKENIZER.encode(f"<tool_call>{json.dumps(call)}</tool_call>"), 1]

    async def main():
        loop = create_loop("swe", FakeGenerator(reply), TOKENIZER, **options)
        try:
            return await loop.run({"max_new_tokens": 4096}, row)
        finally:
            await loop.close()

    return asyncio.run(main())


def shown(output):
    pairs = zip(output.completion_token_ids, output.loss_mask, strict=True)
    return TOKENIZER.decode([i for i, m in pairs if not m])


@pytest.mark.process
@pytest.mark.promise("A SWE-bench row earns 1 only where every test that it names passes")
def test_all_named_tests_have_to_pass(row):
    assert run(row).reward == 0.0
    fixed = run(row, "cat test_adder.py; git log --oneline --all | wc -l", FIX)
    assert fixed.reward == 1.0
    assert "test_add" not in shown(fixed), "the tests are not there while the agent works"
    assert "\n1<|im_end|>" in shown(fixed), "and neither is a later commit"
    assert "Ran 2 tests" in fixed.extra_fields["tests"]["output"]
    broken = run(row, "printf 'def add(a, b):\\n    return 5\\n' > adder.py")
    assert broken.reward == 0.0, "one that passed before fails"


@pytest.mark.process
@pytest.mark.parametrize(
    "trick",
    [
        "echo > test_adder.py",
        "rm test_adder.py; ln -s /dev/null test_adder.py",
        "rm -rf .git test_adder.py; mkdir test_adder.py",
        "sed -i 's/^class/@unittest.skip(1)\\nclass/' test_adder.py",
    ],
)
def test_a_model_that_touches_named_tests_gains_nothing(row, trick):
    assert run(row, trick).reward == 0.0
    assert run(row, trick, FIX).reward == 1.0


@pytest.mark.process
def test_a_skipped_test_has_not_passed(row):
    skip = "printf 'import unittest\\ndef add(a, b):\\n    raise unittest.SkipTest(1)\\n' > adder.py"
    output = run(row, skip)
    assert (output.reward, output.extra_fields["tests"]["exit_status"]) == (0.0, 0)


@pytest.mark.process
def test_pytest_is_the_command_where_there_is_none(row):
    row = {**row, "test_command": None, "FAIL_TO_PASS": ["test_adder.py::T::test_add"], "PASS_TO_PASS": "[]"}
    assert run(row, FIX, venv=sys.prefix).reward == 1.0
    assert run(row, venv=sys.prefix).reward == 0.0


@pytest.mark.process
def test_an_archive_is_a_repository_too(row, tmp_path):
    for kind in ("gztar", "zip"):
        packed = shutil.make_archive(str(tmp_path / "packed"), kind, tmp_path, "repository")
        assert run({**row, "repository": packed}, FIX).reward == 1.0


@pytest.mark.process
def test_many_tests_are_run_in_several_commands(row):
    names = ["test_adder.T.test_zero"] * 6000
    output = run({**row, "PASS_TO_PASS": names}, FIX)
    assert (output.reward, output.extra_fields["tests"]["exit_status"]) == (1.0, 0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"FAIL_TO_PASS": "nothing"}, "field 'FAIL_TO_PASS' of the row is no JSON"),
        ({"FAIL_TO_PASS": [3]}, "field 'FAIL_TO_PASS' of the row is .* needs a list of names"),
        ({"FAIL_TO_PASS": [], "PASS_TO_PASS": []}, "name no test"),
        ({"test_command": 3}, "field 'test_command' of the row is 3"),
        ({"repository": "/nowhere"}, "field 'repository' of the row is '/nowhere'"),
        ({"image": ["x"]}, "field 'image' of the row is"),
        ({"image": "sweb.eval:1"}, "field 'image' of the row: sandbox process has no image 'sweb.eval:1'"),
    ],
)
def test_a_row_that_cannot_be_run_is_refused_by_field(change, sentence):
    row = {"FAIL_TO_PASS": ["t"], "PASS_TO_PASS": [], **change}

    async def main():
        await check_row(row, create_sandboxes("process", limits=SandboxLimits(), max_running=1))

    with pytest.raises(RowError, match=sentence):
        asyncio.run(main())


@pytest.mark.process
@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"base_commit": "0123abc"}, "has no commit '0123abc'"), ({"test_patch": "--- a/x\n+++ b/x\n"}, "does not apply")],
)
def test_a_commit_or_patch_that_is_not_there_is_refused(row, change, sentence):
    with pytest.raises(RowError, match=sentence):
        run({**row, **change})
