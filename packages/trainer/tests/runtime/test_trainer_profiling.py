"""`tracking.profiler`: traces of torch by role and step, which the summary names, and what cannot be recorded."""

import json

import pytest
from rich.console import Console

from rl_trainer.config import load_config
from rl_trainer.errors import PlanError
from rl_trainer.pipeline.roles import has
from rl_trainer.run import run
from rl_trainer.runtime.profiling import check_profiler

TORCH = ["tracking.profiler.tools=[torch]"]
SMALL = ["steps=2", "eval_every=0", "data.eval_size=4", "data.options.num_rows=64", "batch.batch_size=4"]
SMALL += ["batch.mini_batch_size=4", "batch.group_size=2", "rollout.max_new_tokens=4", "timeout_s=120"]


@pytest.mark.process
@pytest.mark.parametrize("runtime", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_steps_are_recorded_and_named_in_the_summary(model, tmp_path, runtime):
    roles = "[engine,rollout]" if runtime == "inline" else "[engine]"
    settings = [*SMALL, f"model.path={model}", f"runtime={runtime}", f"output_dir={tmp_path / 'out'}"]
    settings += ["tracking.profiler.tools=[torch]", "tracking.profiler.steps=[2]", f"tracking.profiler.roles={roles}"]
    summary = run(load_config("quickstart", settings), Console(quiet=True))
    trace = tmp_path / "out" / "profile" / "step-2-engine-0.trace.json"
    assert summary["profiles"] == [str(trace)]  # of the servers too, where all roles are in one process
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any("backward" in name.lower() for name in names)
    assert any("AdamW" in name for name in names)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["steps=3", "tracking.profiler.steps=[4]"], r"steps has 4; the run has the steps 1 to 3"),
        (["tracking.profiler.roles=[rollout]", "runtime=ray"], "recorded with runtime=inline alone"),
        (["tracking.profiler.roles=[critic]"], "has critic, which this run does not have"),
        (["tracking.profiler.tools=[torch,nvtx]"], "both record operators"),
        (["tracking.profiler.tools=[memory]", "runtime=inline"], "memory, which needs a GPU"),
    ],
)
def test_what_cannot_be_recorded_is_an_error_of_the_plan(settings, message):
    with pytest.raises(PlanError, match=message):
        check_profiler(load_config("quickstart", [*TORCH, *settings]), has)
