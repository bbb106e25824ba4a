"""The trace of a run: every process is in it, spans of one thread nest, and a phase holds the work done for it."""

import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from rl_trainer.config import load_config
from rl_trainer.run import run
from rl_trainer.runtime.tracing import VARIABLE, chrome_trace, profiled, span

SIZES = [
    "data.options.num_rows=200", "data.eval_size=4", "batch.batch_size=4", "batch.mini_batch_size=2",
    "batch.group_size=2", "steps=2", "eval_every=0", "algorithm.old_logprobs=recompute", "data.max_prompt_tokens=16",
]  # fmt: skip


def spans(trace, pid=None):
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and pid in (None, e["pid"])]


def end(event):
    return event["ts"] + event["dur"]


def require_nested(trace):
    threads = {}
    for event in spans(trace):
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in threads.values():
        open_until = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or end(event) <= open_until[-1] + 1.0, event  # a microsecond: they are floats
            open_until.append(end(event))


def within(trace, inner, outer):
    """Whether every span `inner` lies in time within a span `outer`, of whatever process."""
    outers = [e for e in spans(trace) if e["name"] == outer]
    inners = [e for e in spans(trace) if e["name"] == inner]
    assert inners, inner
    return all(any(o["ts"] - 1 <= i["ts"] and end(i) <= end(o) + 1 for o in outers) for i in inners)


def check(trace):
    require_nested(trace)
    for inner, outer in (
        ("EngineWorker.update_actor", "update"),
        ("forward_backward", "EngineWorker.update_actor"),
        ("optimizer_step", "EngineWorker.update_actor"),
        ("forward", "EngineWorker.compute_log_prob"),
        ("EngineWorker.compute_log_prob", "old_logprobs"),
        ("AgentWorker.submit", "generate"),
        ("RolloutWorker.update_weights", "weight_sync"),
    ):
        assert within(trace, inner, outer), (inner, outer)
    assert "put" in {e["name"] for e in spans(trace)}  # the queue's own
    begun = [e for e in trace["traceEvents"] if e["ph"] == "b"]
    assert len(begun) == 2 * 4 + 2 * 8  # requests: two evaluations of 4, two steps of 4 x 2
    assert all(e["args"]["completion_tokens"] > 0 for e in begun)
    assert {e["id"] for e in begun} == {e["id"] for e in trace["traceEvents"] if e["ph"] == "e"}


@pytest.mark.process
def test_a_run_in_one_process(model, tmp_path):
    settings = [
        *SIZES,
        "runtime=inline",
        "tracking.profile=true",
        f"model.path={model}",
        f"output_dir={tmp_path / 'out'}",
    ]
    run(load_config("quickstart", settings), Console(quiet=True))
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    check(trace)
    assert VARIABLE not in os.environ
    (name,) = (e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M")
    assert name == f"controller, process {os.getpid()}"


@pytest.mark.promise("`--profile` has the spans of every process in one trace")
@pytest.mark.slow
def test_a_run_in_many_processes(model, tmp_path):
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", "runtime=ray", "--profile", *SIZES]
    done = subprocess.run(
        [*command, f"model.path={model}", f"output_dir={tmp_path / 'out'}"], timeout=280, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    check(trace)
    homes = {name: {e["pid"] for e in spans(trace) if e["name"] == name} for name in ("update", "forward_backward", "AgentWorker.submit", "RolloutWorker.update_weights")}  # fmt: skip  # noqa: E501
    assert len(set.union(*homes.values())) == 4  # controller, engine, agent, rollout
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    told = {name: {names[pid].split(",")[0] for pid in pids} for name, pids in homes.items()}
    assert told == {
        "update": {"controller"}, "forward_backward": {"engine 0"}, "AgentWorker.submit": {"agent 0"},
        "RolloutWorker.update_weights": {"rollout 0"},
    }  # fmt: skip


def test_nothing_is_written_unless_asked_for(tmp_path):
    assert span("one") is span("two")  # nothing is made
    with profiled(None), span("three"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_failed_run_leaves_its_trace_and_torn_lines_are_cut(tmp_path):
    with pytest.raises(LookupError), profiled(tmp_path), span("outer", step=3), span("inner"):
        raise LookupError
    trace = json.loads((tmp_path / "trace.json").read_text())
    inner, outer = spans(trace)
    assert (inner["name"], outer["name"], outer["args"]) == ("inner", "outer", {"step": 3})
    assert outer["ts"] <= inner["ts"] <= end(inner) <= end(outer) + 1
    (file,) = (tmp_path / "trace").iterdir()
    with file.open("a") as stream:
        stream.write('{"name": "torn')
    assert chrome_trace(tmp_path / "trace") == trace
