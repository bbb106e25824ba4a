"""Rewards: rules, functions in processes, and how they are put together. Served models have a file of their own."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from rl_trainer import plugins
from rl_trainer.config.schema import RewardPart, RewardSection
from rl_trainer.errors import ConfigError, RewardError
from rl_trainer.rewards import Score, Scorer
from rl_trainer.rewards.process_pool import FunctionPool, _Process
from rl_trainer.rewards.worker import GROUP

FUNCTIONS = """
import asyncio, os, subprocess, sys, time
import beside

def length(text, row):
    print("a function may print")
    assert "torch" not in sys.modules, "a reward process has to start quickly"
    return len(text) * row["extra_info"]["factor"]

async def later(text, row):
    if text == "block":
        time.sleep(600)
    await asyncio.sleep(600 if text == "hang" else 0.01)
    return {"length": len(text), "even": len(text) % 2 == 0}

class Panic(BaseException):
    pass

async def leaves(text, row):
    async def inside():
        raise SystemExit(3)

    match text:
        case "exit":
            raise SystemExit(3)
        case "inside":
            await asyncio.gather(inside())
        case "panic":
            raise Panic("called unwrap")
        case "cancel":
            raise asyncio.CancelledError("stray")
        case "interrupt":
            raise KeyboardInterrupt("mine")
        case "group":
            raise BaseExceptionGroup("two", [SystemExit(1), ValueError("a")])
        case "lone":
            raise ValueError("a\\ud800b")
        case "name":
            return {"a\\ud800b": 1.0, "c\\0d": 2.0}
    return 1.0

def odd(text, row):
    match text:
        case "hang":
            subprocess.Popen(["sleep", "601"])
            time.sleep(600)
        case "die":
            os._exit(3)
        case "exit":
            raise SystemExit(3)
        case "raise":
            raise KeyError("no such thing")
        case "nan":
            return float("nan")
        case "none":
            return None
        case "empty":
            return {}
        case "parts":
            return {"a": 1, "b": 2}
    return os.getpid()
"""


def row(truth="4", source="math", **fields):
    return {"data_source": source, "reward_model": {"ground_truth": truth}, **fields}


@pytest.fixture
def functions(tmp_path):
    """Path of a file with reward functions; it imports what lies beside it."""
    (tmp_path / "beside.py").write_text("")
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return str(file)


def score(section, *texts, source="math", truth="4", **fields):
    """What a scorer gives for each text: a score, or the error."""

    async def main():
        scorer = Scorer(section)
        try:
            async with asyncio.timeout(120):
                works = (scorer.score(text, row(truth, source, **fields)) for text in texts)
                return await asyncio.gather(*works, return_exceptions=True)
        finally:
            await scorer.close()

    return asyncio.run(main())


@pytest.mark.process
def test_by_default_the_loops_reward_counts_or_else_the_rule():
    async def main():
        scorer = Scorer()
        found = [
            await scorer.score("\\boxed{4}", row("4")),
            await scorer.score("\\boxed{4}", row("4"), 0.25),
            await scorer.score("7", row("7", "reasoning_gym/chain_sum")),
        ]
        await scorer.close()
        return found

    assert asyncio.run(main()) == [
        Score(reward=1.0, is_right=True),
        Score(reward=0.25, is_right=False),
        Score(reward=1.0, is_right=True),
    ]


RIGHT = """
def graded(text, row):
    return float(text) / 4

def named(text, row):
    return {"style": 9.0, "acc": float(text == "4")}

def unnamed(text, row):
    return {"style": 1.0, "length": 1.0}
"""


@pytest.mark.promise("`accuracy` is the share that the judge of the answer calls correct, and not the mean reward")
@pytest.mark.process
def test_right_means_the_answer_s_judge_gives_full_marks(tmp_path):
    (file := tmp_path / "graded.py").write_text(RIGHT)
    form, answer = RewardPart(kind="rule", rule="format", weight=2.0), RewardPart(kind="rule", rule="math", weight=0.5)

    def right(section, *texts):
        return [each.is_right for each in score(section, *texts)]

    both = RewardSection(parts={"form": form, "answer": answer})
    assert right(both, "\\boxed{4}", "<think>a</think><answer>5</answer>") == [True, False]
    pattern = RewardPart(kind="rule", rule="regex", options={"pattern": "[a-z]"})
    assert right(RewardSection(parts={"form": pattern, "answer": answer}), "4 apples \\boxed{4}", "x") == [True, False]
    assert right(RewardSection(parts={"form": form}), "4") == [None], "a form is no answer"
    assert right(RewardSection(path=f"{file}:graded"), "4", "3") == [True, False]
    assert right(RewardSection(path=f"{file}:named"), "4", "3") == [True, False]
    assert right(RewardSection(path=f"{file}:unnamed"), "4") == [None]
    own = RewardPart(kind="function", path=f"{file}:named")
    assert right(RewardSection(parts={"own": own, "form": form}), "4", "3") == [True, False]


@pytest.mark.process
def test_a_function_of_a_file_gets_the_text_and_the_row(functions):
    section = RewardSection(path=f"{functions}:length")
    found = score(section, "abc", "", extra_info={"factor": 2.5})
    assert [each.reward for each in found] == [7.5, 0.0]


@pytest.mark.process
def test_a_coroutine_function_runs_concurrent_calls_in_a_process(functions):
    async def main():
        pool = FunctionPool(f"{functions}:later", timeout_s=60)
        await pool.start()
        found = await asyncio.gather(*(pool.call("x" * i, row()) for i in range(100)))
        (process,) = pool.processes
        await pool.close()
        return found, process.load

    found, load = asyncio.run(main())
    assert found == [{"length": float(i), "even": float(i % 2 == 0)} for i in range(100)]
    assert load == 0


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("raise", "raised KeyError: 'no such thing'"),
        ("exit", "raised SystemExit: 3"),
        ("nan", "raised ValueError: it gave nan; a finite number is needed"),
        ("none", "raised ValueError: it gave None; a number, or numbers by name, are needed"),
        ("empty", "raised ValueError: it gave no part of a reward"),
        ("die", "ended by itself"),
    ],
)
def test_a_failing_function_scores_nothing_and_the_next_works(functions, text, sentence):
    async def main():
        pool = FunctionPool(f"{functions}:odd", timeout_s=60)
        with pytest.raises(RewardError, match=sentence):
            await pool.call(text, row())
        pid = await pool.call("fine", row())
        await pool.close()
        return pid

    assert asyncio.run(main()) > 0


@pytest.mark.process
def test_a_coroutine_function_that_leaves_is_named_by_type(functions):
    """One process serves all calls, and outlives what each of them raises."""
    wanted = {
        "exit": "raised SystemExit: 3",
        "inside": "raised SystemExit: 3",
        "panic": "raised Panic: called unwrap",
        "cancel": "raised CancelledError: stray",
        "interrupt": "raised KeyboardInterrupt: mine",
        "group": "raised BaseExceptionGroup: two (2 sub-exceptions)",
        "lone": "raised ValueError: a\ufffdb",
    }

    async def main():
        pool = FunctionPool(f"{functions}:leaves", timeout_s=60)
        await pool.start()
        first = pool.processes[0]
        raised = {text: await asyncio.gather(pool.call(text, row()), return_exceptions=True) for text in wanted}
        named = await pool.call("name", row())
        assert pool.processes == [first]
        await pool.close()
        return {text: str(error) for text, (error,) in raised.items()}, named

    found, named = asyncio.run(main())
    assert {text: said.partition("leaves' ")[2] for text, said in found.items()} == wanted
    assert named == {"a\ufffdb": 1.0, "c\0d": 2.0}, "names of components are metrics"


def processes_with(text):
    """Numbers of the running processes whose command line holds a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended
    return found


@pytest.mark.promise("A reward function past `timeout_s` ends with all that it started")
@pytest.mark.process
def test_a_stuck_function_is_killed_with_its_children(functions):
    async def main():
        pool = FunctionPool(f"{functions}:odd", timeout_s=60)
        first = await pool.call("fine", row())
        assert await pool.call("fine", row()) == first, "the process stays warm"
        pool._timeout_s = 0.5
        with pytest.raises(TimeoutError, match="did not score a text of 4 characters within 0.5 s"):
            await pool.call("hang", row())
        pool._timeout_s = 60
        second = await pool.call("fine", row())
        await pool.close()
        return int(first), int(second)

    first, second = asyncio.run(main())
    assert first != second
    assert not [pid for pid in processes_with(functions) if pid in (first, second)]
    deadline = time.monotonic() + 20
    while processes_with("sleep\0601") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_with("sleep\0601")


@pytest.mark.process
def test_who_waits_for_a_process_hears_of_the_end(functions):
    async def main():
        pool = FunctionPool(f"{functions}:odd", num_processes=1, timeout_s=60)
        await pool.start()
        calls = [asyncio.create_task(pool.call("hang", row())) for _ in range(3)]
        await asyncio.sleep(0.1)
        await pool.close()
        async with asyncio.timeout(20):
            ended = await asyncio.gather(*calls, pool.call("fine", row()), return_exceptions=True)
        assert [type(error) for error in ended] == [RewardError] * 4, ended
        assert "closed before this score was given" in str(ended[-1])

    asyncio.run(main())
    assert not processes_with(functions)


@pytest.mark.process
@pytest.mark.parametrize("text", ["hang", "block"])
def test_a_stuck_coroutine_does_not_take_the_others_with_it(functions, monkeypatch, text):
    """One that waits is cancelled; one that blocks its process is killed, and what ran beside it starts again."""
    monkeypatch.setattr("rl_trainer.rewards.process_pool._GRACE_S", 0.5)
    call = _Process.call

    async def call_with_deadline(process, called, row, timeout_s):  # a short one for the stuck call alone
        return await call(process, called, row, 0.5 if called == text else timeout_s)

    monkeypatch.setattr(_Process, "call", call_with_deadline)

    async def main():
        pool = FunctionPool(f"{functions}:later", timeout_s=120)
        await pool.start()
        texts = ["a", "bb", text, "ccc"] if text == "hang" else [text, "a", "bb", "ccc"]
        found = await asyncio.gather(*(pool.call(each, row()) for each in texts), return_exceptions=True)
        await pool.close()
        return dict(zip(texts, found, strict=True))

    found = asyncio.run(main())
    assert isinstance(found.pop(text), TimeoutError)
    assert {name: value["length"] for name, value in found.items()} == {"a": 1.0, "bb": 2.0, "ccc": 3.0}


@pytest.mark.process
def test_as_many_processes_as_asked_for_score_at_a_time(functions):
    async def main():
        pool = FunctionPool(f"{functions}:odd", num_processes=2, timeout_s=60)
        await asyncio.gather(pool.start(), pool.start())
        found = await asyncio.gather(*(pool.call("fine", row()) for _ in range(20)))
        await pool.close()
        return set(found)

    assert len(asyncio.run(main())) == 2


@pytest.mark.process
def test_no_process_outlives_its_parent(functions, tmp_path):
    """A scorer that is killed leaves none behind, stuck ones included."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, os, sys\n"
        "from rl_trainer.rewards.process_pool import FunctionPool\n"
        "async def main():\n"
        "    pool = FunctionPool(sys.argv[1] + ':odd', timeout_s=600)\n"
        "    await pool.start()\n"
        "    asyncio.create_task(pool.call('hang', {}))\n"
        "    await asyncio.sleep(0.5)\n"
        "    print(pool.processes[0]._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )

    async def main():
        import sys

        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), functions, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        pid = int(await asyncio.wait_for(process.stdout.readline(), 120))
        await process.wait()
        return pid

    pid = asyncio.run(main())
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    for stray in processes_with("sleep\0601"):
        os.kill(stray, 9)


@pytest.mark.process
def test_parts_are_weighted_and_kept_by_name(functions):
    section = RewardSection(
        parts={
            "right": RewardPart(kind="rule", weight=2.0),
            "size": RewardPart(kind="function", path=f"{functions}:later", weight=0.5),
        }
    )
    (found,) = score(section, "\\boxed{4}")
    assert found.components == {"right": 1.0, "size/even": 0.0, "size/length": 9.0}
    assert found.weights == {"right": 2.0, "size/even": 0.5, "size/length": 0.5}
    assert found.reward == 2.0 + 0.5 * 9


@pytest.mark.process
def test_a_part_that_fails_fails_the_score(functions):
    section = RewardSection(
        parts={"right": RewardPart(kind="rule"), "odd": RewardPart(kind="function", path=f"{functions}:odd")}
    )
    found = score(section, "raise", "\\boxed{4}")
    assert isinstance(found[0], RewardError)
    assert found[1].components["right"] == 1.0
    (found,) = score(RewardSection(parts={"own": RewardPart(kind="loop")}), "x")
    assert "reward.parts.own is the agent loop's own reward, and the loop gave none" in str(found)


@pytest.mark.process
def test_a_function_has_to_give_the_same_parts_every_time(functions):
    async def main():
        scorer = Scorer(RewardSection(path=f"{functions}:odd"))
        assert (await scorer.score("parts", row())).components == {"a": 1.0, "b": 2.0}
        with pytest.raises(RewardError, match=r"gave parts \[''\] and before \['a', 'b'\]"):
            await scorer.score("fine", row())
        await scorer.close()

    asyncio.run(main())


def test_a_penalty_is_a_part_where_there_are_parts():
    assert Score(reward=1.0).less(0.25) == Score(reward=0.75)
    found = Score(reward=1.0, components={"a": 0.5}, weights={"a": 2.0}).less(0.25)
    assert found.reward == sum(found.weights[name] * value for name, value in found.components.items()) == 0.75


@pytest.mark.process
def test_what_is_no_function_is_told_before_anything_starts(functions, tmp_path):
    plugins.check(f"{functions}:later", GROUP, key="reward.path")
    plugins.check("rl_trainer.rewards.rules:exact_match", GROUP, key="reward.path")
    for path, sentence in (
        (f"{tmp_path}/none.py:f", "none.py is not a file"),
        (f"{functions}:lenght", "functions.py defines no 'lenght' at its top level"),
        ("no_such_module:f", "no module 'no_such_module' is installed"),
        ("mine", r"reward.path='mine' is not known; there are none. One of your own is given as FILE.py:NAME"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            plugins.check(path, GROUP, key="reward.path")

    async def start(path):
        scorer = Scorer(RewardSection(path=path))
        try:
            await scorer.start()
        finally:
            await scorer.close()

    (tmp_path / "broken.py").write_text("import no_such_module\ndef f(text, row): ...\n")
    with pytest.raises(RewardError, match="broken.py:f cannot be loaded: ModuleNotFoundError: .*no_such_module"):
        asyncio.run(start(f"{tmp_path}/broken.py:f"))


@pytest.mark.process
def test_a_function_is_found_by_entry_point(monkeypatch, tmp_path):
    """As a distribution gives it; the process finds it by itself."""
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rl_trainer.rewards]\nshout = mine_rewards:shout\n")
    (tmp_path / "mine_rewards.py").write_text("def shout(text, row):\n    return float(text.isupper())\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plugins.check("shout", GROUP, key="reward.path")
    assert [each.reward for each in score(RewardSection(path="shout"), "LOUD", "quiet")] == [1.0, 0.0]


TAKES_THE_PIPE = """
import os, pickle, struct

class Bomb:
    def __reduce__(self):
        return open, ({path!r}, "w")

def f(text, row):
    data = pickle.dumps((0, "ok", Bomb()))
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, struct.pack("<Q", len(data)) + data)
        except OSError:
            pass
    return 1.0
"""


@pytest.mark.process
def test_what_a_function_writes_to_the_pipe_runs_nothing_here(tmp_path):
    file, mark = tmp_path / "function.py", tmp_path / "ran"
    file.write_text(TAKES_THE_PIPE.format(path=str(mark)))

    async def main():
        pool = FunctionPool(f"{file}:f", timeout_s=60.0)
        try:
            return await asyncio.gather(pool.call("x", {}), return_exceptions=True)
        finally:
            await pool.close()

    (found,) = asyncio.run(main())
    assert isinstance(found, RewardError)
    assert not mark.exists()


@pytest.mark.process
def test_a_row_arrives_as_it_was_and_what_cannot_is_told(tmp_path):
    file = tmp_path / "function.py"
    file.write_text(
        "def f(text, row): return float(row['image'] == b'\\x00x' and row['n'] == [1, None] and text == 'é')"
    )

    async def main():
        pool = FunctionPool(f"{file}:f", timeout_s=60.0)
        try:
            rows = ({"image": b"\x00x", "n": [1, None]}, {"image": object()})
            return await asyncio.gather(*(pool.call("é", row) for row in rows), return_exceptions=True)
        finally:
            await pool.close()

    good, bad = asyncio.run(main())
    assert good == 1.0
    assert "a value of type object cannot be sent to a reward function" in str(bad)
