"""The coding agent: real shell commands in real working copies, and real tests."""

import asyncio
import json
import tempfile

import pytest

from rl_agent import AgentRunner, Failure, RowError, create_loop
from rl_agent.sandbox import worker as workers
from rl_agent.testing import AgentLoopConformance, FakeGenerator, FakeTokenizer

TOKENIZER = FakeTokenizer()
TEST = "import unittest, adder\nclass T(unittest.TestCase):\n    def test(self):\n        assert adder.add(2, 3) == 5\n"
ROW = {
    "prompt": [{"role": "user", "content": "add should add"}],
    "files": {"adder.py": "def add(a, b):\n    return a - b\n"},
    "tests": {"command": "python -m unittest -q", "files": {"test_adder.py": TEST}},
}


def says(*turns):
    """A model that writes these turns, a command each but the last."""

    def reply(request):
        step = TOKENIZER.decode(request.prompt_token_ids).count("<|im_start|>tool")
        text = turns[step] if step < len(turns) else "done"
        if not text.startswith("$ "):
            return [*TOKENIZER.encode(text), 1]
        call = {"name": "bash", "arguments": {"command": text[2:]}}
        return [*TOKENIZER.encode(f"<tool_call>{json.dumps(call)}</tool_call>"), 1]

    return FakeGenerator(reply)


def run(*turns, row=ROW, **options):
    async def main():
        loop = create_loop("swe", says(*turns), TOKENIZER, **options)
        try:
            return await loop.run({"max_new_tokens": 4096}, row)
        finally:
            await loop.close()

    return asyncio.run(main())


def answers(output):
    pairs = zip(output.completion_token_ids, output.loss_mask, strict=True)
    context = TOKENIZER.decode([i for i, m in pairs if not m])
    return [part.partition("<|im_end|>")[0] for part in context.split("<|im_start|>tool\n")[1:]]


@pytest.mark.process
def test_a_change_that_makes_the_tests_pass_earns_one():
    output = run(
        "$ ls && cat adder.py", "$ sed -i s/-/+/ adder.py", "$ python -c 'import adder; print(adder.add(2, 2))'"
    )
    assert answers(output) == ["adder.py\ndef add(a, b):\n    return a - b", "", "4"]
    assert (output.reward, output.num_turns, output.extra_fields["end"]) == (1.0, 4, "answer")
    assert output.extra_fields["tests"]["exit_status"] == 0
    assert output.metrics["num_tool_calls"] == 3.0


@pytest.mark.process
def test_no_change_earns_nothing_and_test_output_is_kept():
    output = run("It is fine as it is.")
    assert output.reward == 0.0
    assert output.extra_fields["tests"]["exit_status"] == 1
    assert "FAILED (failures=1)" in output.extra_fields["tests"]["output"]


@pytest.mark.process
def test_a_repository_is_copied_and_stays_as_it_is(tmp_path):
    (tmp_path / "adder.py").write_text(ROW["files"]["adder.py"])
    (tmp_path / "sub").mkdir()
    row = {**ROW, "files": None, "repository": str(tmp_path)}
    assert run("$ sed -i s/-/+/ adder.py; rmdir sub", row=row).reward == 1.0
    assert (tmp_path / "adder.py").read_text() == ROW["files"]["adder.py"]
    assert (tmp_path / "sub").is_dir()


@pytest.mark.promise("A model that touches the tests gains nothing")
@pytest.mark.process
@pytest.mark.parametrize(
    "trick",
    [
        "echo > test_adder.py",
        "rm -f test_adder.py; mkdir test_adder.py",
        "ln -s /dev/null test_adder.py",
    ],
)
def test_a_model_that_touches_the_tests_gains_nothing(trick):
    assert run(f"$ {trick}").reward == 0.0
    assert run(f"$ {trick}", "$ sed -i s/-/+/ adder.py").reward == 1.0


@pytest.mark.process
def test_failing_hanging_and_flooding_commands_are_reported(monkeypatch):
    run_code = workers.Worker.run

    async def run_with_deadline(worker, code, stdin, timeout_s, *, is_fresh):  # a short one for what hangs alone
        limit = 2.0 if "sleep 100" in code else timeout_s
        return await run_code(worker, code, stdin, limit, is_fresh=is_fresh)

    monkeypatch.setattr(workers.Worker, "run", run_with_deadline)
    turns = ["$ echo mine > note; exit 3", "$ sleep 100", "$ cat note", "$ yes"]
    output = run(*turns, command_timeout_s=60.0, max_tool_tokens=100)
    failed, hung, note, flooded = answers(output)
    assert failed == "[exit status 3]"
    assert hung == "error: no end within 2 s"
    assert note == "mine"
    assert len(flooded) < 200
    assert "[cut:" in flooded or flooded.startswith("error:")


@pytest.mark.process
def test_hanging_tests_are_a_verdict_and_broken_ones_a_failure():
    output = run("$ echo 'while True: pass' > adder.py", test_timeout_s=1.0)
    assert (output.reward, output.extra_fields["tests"]["exit_status"]) == (0.0, None)

    async def main():
        row = {**ROW, "tests": {"command": "no-such-command"}}
        agents = AgentRunner(lambda _: create_loop("swe", says("done"), TOKENIZER), default_loop="swe")
        (result,) = [result async for result in agents.run([row], {"max_new_tokens": 64})]
        await agents.close()
        return result.outputs

    failure = asyncio.run(main())
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.stage, failure.is_retryable) == ("grader", "tests", False)
    assert "no-such-command: command not found" in failure.message


@pytest.mark.process
def test_work_does_not_leave_the_copy(tmp_path, monkeypatch):
    """What a command starts ends with it, and no folder is left."""
    secret, folder = tmp_path / "secret", tmp_path / "copies"
    secret.write_text("x")
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    output = run(f"$ cat {secret}; pwd; (setsid sleep 0.5; echo late > late) & true", "$ sleep 1; ls")
    first, second = answers(output)
    assert not list(folder.iterdir())
    if "/workspace" not in first:
        pytest.skip("the kernel does not let this user make namespaces; nothing is claimed then")
    assert "No such file" in first
    assert second == "adder.py"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tests": None}, "field 'tests' of the row is None"),
        ({"tests": {"command": "true", "files": {"../x": ""}}}, "outside of the working copy"),
        ({"files": {"/x": ""}}, "outside of the working copy"),
        ({"files": None}, "needs one of 'repository', a folder, and 'files'"),
        ({"repository": "/nowhere"}, "needs one of"),
        ({"files": None, "repository": "/nowhere"}, "'/nowhere'; it needs a folder"),
        ({"files": {"x": 1}}, "texts by path"),
    ],
)
def test_a_row_that_cannot_be_run_is_refused(change, sentence):
    with pytest.raises(RowError, match=sentence):
        run("done", row={**ROW, **change})


@pytest.mark.process
class TestConformance(AgentLoopConformance):
    def make_loop(self, server, tokenizer):
        return create_loop("swe", server, tokenizer)

    def make_row(self, index):
        return {**super().make_row(index), "files": {"n": str(index)}, "tests": {"command": f"grep -q {index} n"}}


ODD = ["a\0b", "a\ud800b"]


@pytest.mark.process
@pytest.mark.parametrize("text", ODD, ids=["nul", "lone"])
def test_a_command_with_odd_text_is_answered(text):
    """A NUL cannot be in a command: the model reads why, and goes on."""
    output = run(f"$ echo {text}", "done")
    (said,) = answers(output)
    assert said == (
        "a\ufffdb" if "\0" not in text else "error: the command could not be run: ValueError: embedded null byte"
    )
    assert output.metrics["num_tool_error"] == ("\0" in text)


@pytest.mark.process
@pytest.mark.parametrize("text", ODD, ids=["nul", "lone"])
@pytest.mark.parametrize("column", ["files", "path", "tests", "command", "prompt", "repository"])
def test_odd_text_of_a_row_ends_as_a_result(column, text):
    tests = {"command": text if column == "command" else "true", "files": {"t.py": text} if column == "tests" else {}}
    row = {"prompt": [{"role": "user", "content": text if column == "prompt" else "go"}], "tests": tests}
    row |= {"files": {text if column == "path" else "a.py": text}} if column != "repository" else {"repository": text}

    async def main():
        loop = create_loop("swe", says("done"), TOKENIZER)
        try:
            return [result async for result in AgentRunner(lambda _: loop, max_attempts=1).run([row], {})]
        finally:
            await loop.close()

    (result,) = asyncio.run(main())
    fails = column in ("command", "repository") or (column == "path" and "\0" in text)
    assert isinstance(result.outputs, Failure) == fails, result.outputs
    repr(result.outputs).encode()
