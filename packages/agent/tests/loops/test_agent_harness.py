"""Harnesses: agents of others in a sandbox, recorded by the proxy, scored by a verifier."""

import asyncio
import json
import socket
import sys

import pytest

from rl_agent import AgentRunner, Failure, LoopError, PluginError, RowError, create_loop, validate_output
from rl_agent.base import Policy
from rl_agent.errors import FailureError
from rl_agent.loops.harness import credited
from rl_agent.sandbox import worker as workers
from rl_agent.testing import AgentLoopConformance, FakeGenerator, FakeTokenizer
from rl_agent.types import AgentLoopOutput
from rl_rollout.errors import ServerLostError

TOKENIZER = FakeTokenizer()
ROW = {"prompt": [{"role": "user", "content": "say 5"}], "files": {"answer.txt": "4\n"}}
HARNESS = '''
import json, os, subprocess, urllib.request

HISTORY = []

def ask(messages, **fields):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages, **fields}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())["choices"][0]["message"]

def run(row):
    """Runs what the model writes, until it says done."""
    messages = [{"role": "user", "content": os.environ["RL_TASK"]}]
    assert row["prompt"][-1]["content"] == os.environ["RL_TASK"]
    while True:
        message = ask(messages)
        if message["content"] == "done":
            return
        said = subprocess.run(message["content"], shell=True, capture_output=True, text=True).stdout
        messages += [message, {"role": "user", "content": said or "ok"}]

def once(row):
    ask(row["prompt"])

def compacting(row):
    """Starts anew from a summary after its first turn."""
    ask([{"role": "user", "content": "long"}])
    ask([{"role": "user", "content": "summary"}])

def probing(row):
    """Tries to reach more than the model."""
    import socket, urllib.error
    found = []
    root = os.environ["ANTHROPIC_BASE_URL"]
    for url in (root + "/sessions", root + "/sessions/x/reward"):
        try:
            urllib.request.urlopen(urllib.request.Request(url, b"{}", {
                "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}), timeout=30)
            found.append("opened")
        except urllib.error.HTTPError as error:
            found.append(error.code)
    try:
        socket.create_connection((row["host"], row["port"]), timeout=5).close()
        found.append("connected")
    except OSError:
        found.append("refused")
    ask([{"role": "user", "content": json.dumps(found)}])

def crashing(row):
    print(os.environ["OPENAI_BASE_URL"], flush=True)
    ask([{"role": "user", "content": "go"}])
    raise SystemExit(3)

def idle(row):
    print("nothing to do")

async def waiting(row):
    ask([{"role": "user", "content": "go"}])
    import asyncio
    await asyncio.sleep(600)
'''
VERIFIERS = """
import time

def right(row, folder, outputs):
    return float((folder / "answer.txt").read_text() == "5\\n")

def terms(row, folder, outputs):
    return {"right": 1.0, "cost": -0.25 * len(outputs)}

async def each(row, folder, outputs):
    return [float(i) for i in range(len(outputs))]

def late(row, folder, outputs):
    time.sleep(600)

def broken(row, folder, outputs):
    return "good"

def raising(row, folder, outputs):
    raise KeyError("x")
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "agent.py").write_text(HARNESS)
    (tmp_path / "checks.py").write_text(VERIFIERS)
    return lambda name: f"{tmp_path / ('agent.py' if f'def {name}(' in HARNESS else 'checks.py')}:{name}"


@pytest.mark.process
class TestHarnessLoop(AgentLoopConformance):
    """The suite that every loop passes."""

    @pytest.fixture(autouse=True)
    def _files(self, files):
        self.options = {"entry": files("once"), "verifier": files("terms"), "max_harnesses": 4}

    def make_loop(self, server, tokenizer):
        return create_loop("harness", server, tokenizer, **self.options)


def run(server, row=ROW, params=None, **options):
    async def main():
        loop = create_loop("harness", server, TOKENIZER, **options)
        try:
            made = await loop.run(params or {"max_new_tokens": 4096}, row)
        finally:
            await loop.close()
        for output in made:
            validate_output(output)
        return made

    return asyncio.run(main())


def says(*turns):
    turns = iter(turns)
    return FakeGenerator(lambda _: [*TOKENIZER.encode(next(turns)), 1], weight_version=3)


@pytest.mark.promise("A harness in a sandbox is recorded as its model's server emitted it, and scored by a verifier")
@pytest.mark.process
@pytest.mark.parametrize("may_isolate", [True, False], ids=["namespace", "loopback"])
def test_a_harness_edits_a_file_and_is_scored(files, may_isolate, monkeypatch):
    start = workers.Worker.start
    monkeypatch.setattr(
        workers.Worker, "start", lambda *args, **kwargs: start(*args, **kwargs, may_isolate=may_isolate)
    )
    server = says("cat answer.txt", "echo 5 > answer.txt", "done")
    (output,) = run(server, entry=files("run"), verifier=files("right"))
    assert (output.reward, output.num_turns) == (1.0, 3)
    assert output.extra_fields["harness"]["exit_status"] == 0
    pairs = [*zip(output.completion_token_ids, output.loss_mask, strict=True)]
    assert [i for i, m in pairs if m] == [i for answer in server.outputs for i in answer.token_ids]
    assert [x for x, (_, m) in zip(output.rollout_logprobs, pairs, strict=True) if m] == [
        x for answer in server.outputs for x in answer.logprobs
    ]
    assert {v for v, (_, m) in zip(output.weight_versions, pairs, strict=True) if m} == {3}
    assert "user\n4\n<|im_end|>" in TOKENIZER.decode([i for i, m in pairs if not m])


@pytest.mark.process
def test_a_command_of_the_row_and_its_tests():
    tests = {"command": "grep -q 5 answer.txt && test -e new.txt", "files": {"new.txt": "x"}}
    script = "import sys; sys.path.insert(0, '/workspace'); import agent; agent.run({'prompt': [{'content': 'say 5'}]})"
    row = {**ROW, "files": {**ROW["files"], "agent.py": HARNESS}, "tests": tests, "command": f'python -c "{script}"'}
    (output,) = run(says("echo 5 > answer.txt", "done"), row, command="exit 9")
    assert (output.reward, output.extra_fields["tests"]["exit_status"]) == (1.0, 0)


@pytest.mark.process
def test_a_compacted_context_is_two_trajectories_and_one_reward(files):
    both = run(says("a", "b"), entry=files("compacting"), verifier=files("terms"))
    assert [output.reward for output in both] == [0.5, 0.5]
    assert both[0].metrics["reward/cost"] == -0.5
    last = run(says("a", "b"), entry=files("compacting"), verifier=files("terms"), credit="last")
    assert [(output.text, output.metrics["num_left_out"]) for output in last] == [("b", 1.0)]
    each = run(says("a", "b"), entry=files("compacting"), verifier=files("each"), credit="trajectory")
    assert [output.reward for output in each] == [0.0, 1.0]


@pytest.mark.process
def test_a_harness_reaches_the_model_and_nothing_else(files):
    async def main():
        listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        loop = create_loop("harness", says("x"), TOKENIZER, entry=files("probing"), verifier=files("terms"))
        made = await loop.run({}, {**ROW, "host": "127.0.0.1", "port": port})
        await loop.close()
        listener.close()
        return made

    (output,) = asyncio.run(main())
    assert '[401, 401, "refused"]' in TOKENIZER.decode(output.prompt_token_ids)


@pytest.mark.process
def test_a_harness_that_fails_after_it_used_the_model_is_scored(files):
    (output,) = run(says("x"), entry=files("crashing"), verifier=files("right"))
    assert (output.reward, output.extra_fields["harness"]["exit_status"]) == (0.0, 3)


@pytest.mark.process
def test_past_its_deadline_a_harness_is_ended_and_scored(files):
    options = {"entry": files("waiting"), "verifier": files("right"), "harness_timeout_s": 3.0}
    (output,) = run(says("x"), **options)
    assert (output.reward, output.extra_fields["harness"]["exit_status"]) == (0.0, None)


@pytest.mark.process
@pytest.mark.parametrize(
    ("entry", "verifier", "sentence"),
    [
        ("idle", "right", "the harness never asked the model; it said: nothing to do"),
        ("crashing", "broken", "the verifier returned 'good'; a number"),
        ("crashing", "raising", "the verifier raised KeyError: 'x'"),
        ("crashing", "each", "returned 1 rewards for 1 trajectories, with credit=rollout"),
    ],
)
def test_what_cannot_be_scored_is_a_failure(files, entry, verifier, sentence):
    with pytest.raises(FailureError, match=sentence):
        run(says("x"), entry=files(entry), verifier=files(verifier))


@pytest.mark.process
def test_a_verifier_that_hangs_is_a_failure(files):
    with pytest.raises(FailureError, match="the verifier did not end within 0.5 s"):
        run(says("x"), entry=files("crashing"), verifier=files("late"), verifier_timeout_s=0.5)


@pytest.mark.process
def test_a_lost_server_is_a_failure_and_no_reward(files):
    def lose(_):
        raise ServerLostError("the fake server went away")

    async def main():
        loop = create_loop("harness", FakeGenerator(lose), TOKENIZER, entry=files("crashing"), verifier=files("right"))
        agents = AgentRunner(lambda _: loop, max_attempts=1, timeout_s=60)
        results = [result async for result in agents.run([ROW], {})]
        await agents.close()
        return results[0].outputs

    failure = asyncio.run(main())
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.is_retryable) == ("transport", True)
    assert "the fake server went away" in failure.message


@pytest.mark.process
def test_sampling_is_the_runs_whatever_the_harness_asks(files, tmp_path):
    (tmp_path / "cold.py").write_text(
        "import agent\ndef run(row):\n"
        "    agent.ask([{'role': 'user', 'content': 'x'}], temperature=0, seed=9, max_tokens=5)\n"
    )
    server = says("x")
    run(
        server,
        params={"temperature": 0.7, "seed": 1, "max_new_tokens": 50},
        entry=f"{tmp_path}/cold.py:run",
        verifier=files("right"),
    )
    params = server.requests[0].sampling_params
    assert (params.temperature, params.seed, params.max_new_tokens) == (0.7, 1, 5)


@pytest.mark.process
def test_after_its_end_no_proxy_is_left(files, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (output,) = run(says("x"), entry=files("crashing"), verifier=files("right"))
    port = int(output.extra_fields["harness"]["output"].partition("127.0.0.1:")[2].partition("/")[0])
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=10)
    assert not [*tmp_path.glob("rl-agent-*")]


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"command": "x", "entry": "a.py:b"}, LoopError, "leave one of them out"),
        ({"entry": "nowhere.py:run"}, LoopError, "there is no file nowhere.py"),
        ({"entry": "run"}, LoopError, "neither FILE.py:NAME nor MODULE:NAME"),
        ({"command": "x", "verifier": "nowhere.py:run"}, PluginError, "verifier 'nowhere.py:run': there is no file"),
        (
            {"command": "x", "credit": "first"},
            LoopError,
            "credit is 'first'; it is one of rollout, trajectory and last",
        ),
        ({"command": "x", "harness_timeout_s": 0}, ValueError, "must be positive"),
    ],
)
def test_options_that_cannot_be_used_are_errors_at_once(options, error, sentence):
    with pytest.raises(error, match=sentence):
        create_loop("harness", says(), TOKENIZER, **options)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({}, "field 'prompt' of the row is None"),
        (ROW, "field 'tests' of the row is None"),
        ({**ROW, "command": 5}, "field 'command' of the row is 5"),
        ({**ROW, "prompt": [{"role": "user", "content": ["x"]}]}, "a harness takes its task as text"),
    ],
)
def test_rows_that_cannot_be_run_are_errors_by_field(row, sentence):
    with pytest.raises(RowError, match=sentence):
        run(says(), row, command="true")


def test_rewards_that_do_not_fit_the_trajectories_fail():
    output = AgentLoopOutput(
        prompt_token_ids=(1,),
        completion_token_ids=(2,),
        loss_mask=(1,),
        rollout_logprobs=(-1.0,),
        weight_versions=(0,),
        finish_reason="stop",
    )
    for reward, credit in (([1.0], "trajectory"), (1.0, "trajectory"), (float("nan"), "rollout"), (None, "rollout")):
        with pytest.raises(FailureError):
            credited([output, output], reward, credit)
    assert json.dumps([each.reward for each in credited([output], {"a": 1, "b": 2}, "rollout")]) == "[3.0]"


@pytest.mark.process
def test_the_openai_client_runs_in_the_sandbox(files, tmp_path):
    pytest.importorskip("openai", reason="needs the openai client")
    (tmp_path / "client.py").write_text(
        "import os, openai\n"
        "def run(row):\n"
        "    client = openai.OpenAI(max_retries=0)\n"
        "    found = client.chat.completions.create(model='policy', messages=row['prompt'])\n"
        "    open('answer.txt', 'w').write(found.choices[0].message.content + chr(10))\n"
    )
    prefix = sys.prefix if sys.prefix != sys.base_prefix else None
    entry = f"{tmp_path}/client.py:run"
    (output,) = run(says("5"), entry=entry, verifier=files("right"), venv=prefix)
    assert output.extra_fields["harness"] == {"exit_status": 0, "output": ""}
    assert output.reward == 1.0


@pytest.mark.process
def test_a_harness_of_two_policies_is_rewarded_by_policy(files, tmp_path):
    (tmp_path / "checks.py").write_text(
        "def by_policy(row, folder, outputs):\n    return [{'one': 1.0, 'two': -1.0}[o.policy] for o in outputs]\n"
    )
    (tmp_path / "agent.py").write_text(
        HARNESS + "\ndef talking(row):\n    ask(row['prompt'], model='one')\n    ask(row['prompt'], model='two')\n"
    )
    servers = {"one": says("a"), "two": says("b")}

    async def main():
        policies = {name: Policy(server, TOKENIZER) for name, server in servers.items()}
        options = {"entry": f"{tmp_path}/agent.py:talking", "verifier": f"{tmp_path}/checks.py:by_policy"}
        loop = create_loop("harness", servers["one"], TOKENIZER, policies, credit="trajectory", **options)
        try:
            return await loop.run({"max_new_tokens": 64}, ROW)
        finally:
            await loop.close()

    outputs = asyncio.run(main())
    assert [(output.policy, output.text, output.reward) for output in outputs] == [
        ("one", "a", 1.0),
        ("two", "b", -1.0),
    ]
