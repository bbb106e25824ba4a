"""`rl_trainer.train`: rows, functions and a run from Python; plug-ins by path; the examples of both."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packages.trainer.tests.support.stand_ins import FakeAgents, QueueJob
from rich.console import Console

import rl_trainer
from rl_agent.loops.single_turn import SingleTurnLoop
from rl_trainer.api import _config
from rl_trainer.config import as_tree, load_config
from rl_trainer.errors import ConfigError, DataError, TrainerError
from rl_trainer.loop import run_loop
from rl_trainer.plugins import Serialized, absolute
from rl_trainer.trackers import Tracker

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = {
    "runtime": "inline", "steps": 2, "eval_every": 0, "timeout_s": 120, "tracking.trackers": {},
    "batch": {"batch_size": 2, "mini_batch_size": 2, "group_size": 2},
}  # fmt: skip
ROWS = [{"prompt": f"{n} + 1 =", "answer": str(n + 1), "n": n} for n in range(20)]


@pytest.fixture
def start(model, tmp_path):
    """Trains the tiny model on `ROWS` in this process."""

    def begin(**given):
        how = {"data": ROWS, "model": model, "output_dir": tmp_path / "out", "console": Console(quiet=True)}
        return rl_trainer.train("quickstart", **how | SMALL | given)

    return begin


@pytest.mark.promise(
    "`rl_trainer.train` trains on rows of one's own with a reward, an advantage and a loss of one's own"
)
@pytest.mark.process
def test_custom_functions_train_a_model_on_custom_rows(start, tmp_path):
    scale, told = 3.0, []

    def length(text, row):
        return scale * len(text) + row["n"]

    def against_mean(data):
        rewards = data.sum_rewards()
        return data.broadcast(rewards - rewards.mean())

    def likely(loss):
        return -loss.logprobs * loss.advantages * (1 + 0 * loss.rollout_logprobs)

    run = start(reward=length, advantage=against_mean, loss=likely, callback=told.append)
    assert [step["step"] for step in run.metrics] == [0, 1, 2]
    assert run.metrics[2]["reward"] >= 3.0
    assert [record.step for record in told] == [record.step for record in run] == [0, 1, 2]
    assert (run.model_path / "config.json").is_file()
    assert run.summary["output_dir"] == str(tmp_path / "out")
    tree = as_tree(run.config)
    assert tree["reward"]["path"].endswith("length>")
    assert "<" in tree["algorithm"]["loss"]
    (file,) = (tmp_path / "out").glob("rows-*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[3]["prompt"] == [{"role": "user", "content": "3 + 1 ="}]
    assert rows[3]["reward_model"]["ground_truth"] == "4"


EXAMPLES_OF = {
    "advantage": {"advantage": f"{EXAMPLES}/own_advantage.py:above_median"},
    "loss": {"loss": f"{EXAMPLES}/own_loss.py:importance_weighted"},
    "stage": {"algorithm.stages": [f"{EXAMPLES}/own_stage.py:variety"], "advantage": f"{EXAMPLES}/own_stage.py:varied"},
    "loop": {"agent.loop": f"{EXAMPLES}/own_loop.py:RepeatedLoop"},
    "filter": {"batch.filter": f"{EXAMPLES}/own_filter.py:is_mixed", "batch.max_refills": 50},
}
PLUG_INS = [
    pytest.param(given, id=name, marks=[] if name in ("advantage", "loop") else [pytest.mark.slow])
    for name, given in EXAMPLES_OF.items()
]


@pytest.mark.promise("An advantage, a loss and a stage are found as `FILE.py:NAME`; examples of at most 15 lines")
@pytest.mark.process
@pytest.mark.parametrize("plug_ins", PLUG_INS)
def test_an_example_s_plug_in_trains_by_its_path(start, plug_ins):
    run = start(reward=lambda text, row: float(sum(map(ord, text)) % 2), steps=1, **plug_ins)
    assert torch.tensor(run.metrics[1]["policy_loss"]).isfinite()
    assert run.metrics[1]["grad_norm"] > 0


@pytest.mark.process
def test_a_loop_and_a_filter_of_one_s_own_come_as_objects_too(start):
    class Loop(SingleTurnLoop):
        async def run(self, sampling_params, row):
            output = await super().run(sampling_params, row)
            return replace(output, reward=float(row["n"]))

    def is_late(samples):
        return samples[0]["reward"] >= 5

    keys = {"agent.loop": Loop, "batch.filter": is_late, "batch.max_refills": 50}
    run = start(**keys, **{"reward.parts": {"own": {"kind": "loop"}}}, steps=1)
    assert run.metrics[1]["reward/own"] >= 5
    assert run.metrics[1]["dropped_groups"] > 0


@pytest.mark.process
def test_losses_advantages_and_stages_read_columns_and_tags(start):
    names = ("group_id", "num_tokens", "reward", "weight_version_min")

    @rl_trainer.reads("loss_mask", "num_tokens")
    def length(rows):
        assert rows["num_tokens"].tolist() == [len(mask) for mask in rows["loss_mask"].unbind()]
        return {"length": rows["num_tokens"].float()}

    @rl_trainer.reads("length", "reward")
    def centred(data):
        assert data.columns["reward"].tolist() == data.sum_rewards().tolist()
        return data.broadcast(data.columns["length"] - data.columns["length"].mean())

    @rl_trainer.reads("length", *names)
    def weighted(loss):
        lengths = loss.cu_seqlens.diff()
        assert loss.columns["length"].tolist() == loss.columns["num_tokens"].tolist() == lengths.tolist()
        assert all(loss.columns[name].shape == lengths.shape for name in names)
        return -loss.logprobs * loss.advantages

    plug_ins = {"algorithm.stages": [length], "advantage": centred, "loss": weighted}
    run = start(reward=lambda text, row: float(sum(map(ord, text)) % 3), steps=1, **plug_ins)
    assert run.metrics[1]["grad_norm"] > 0


@pytest.mark.slow
def test_rows_come_as_a_dataset_or_as_a_path_too(start, tmp_path):
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    whole = start(data=datasets.Dataset.from_list(ROWS), reward=lambda text, row: float(row["n"]), steps=1)
    path = {"output_dir": tmp_path / "other", "data.format": "rows", "data.options": {}}
    named = start(data=file, reward=lambda text, row: 1.0, steps=1, **path)
    assert len(whole.metrics) == len(named.metrics) == 2
    assert 0 <= whole.metrics[1]["reward"] < 20


@pytest.mark.process
def test_a_filter_that_fails_is_named(start):
    def broken(samples):
        raise ZeroDivisionError("by hand")

    with pytest.raises(TrainerError, match=r"batch.filter=.*broken> raised ZeroDivisionError: by hand"):
        start(**{"batch.filter": broken}, reward=lambda text, row: 1.0)


@pytest.mark.promise("A schedule is a function of one's own")
def test_the_example_s_schedule_runs_ahead_as_far_as_it_says():
    sizes = ["batch.batch_size=4", "batch.mini_batch_size=4", "batch.group_size=2", "steps=6", "eval_every=0"]
    config = load_config("quickstart", [*sizes, f"pipeline={EXAMPLES}/own_schedule.py:half_a_batch_ahead"])
    job = QueueJob(config, FakeAgents(config, per_poll=2))
    records = list(run_loop(job.components(), config, [{}]))[1:]
    assert {len(r.pending) + len(r.held) for r in records[:-2]} == {6}
    assert 0 < max(r.metrics["staleness_max"] for r in records) <= 1


@pytest.mark.parametrize("name", ["advantage", "loss", "stage", "schedule", "loop", "filter"])
def test_an_example_is_short(name):
    code = [line for line in (EXAMPLES / f"own_{name}.py").read_text().splitlines()[1:] if line.strip()]
    assert len(code) <= 15


@pytest.mark.promise("and it learns")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_readme_s_example_learns(tmp_path):
    """As it ships, on Ray: a reward of `__main__`, rows of a generator, the recipe's small model."""
    told = subprocess.run(
        [sys.executable, EXAMPLES / "train_sums.py"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    first, _, last, folder = told.splitlines()[-1].split()
    assert float(last) > float(first) + 0.05
    assert (tmp_path / folder / "config.json").is_file()


@pytest.mark.promise("`wait=False` gives the steps as they end; it runs where an event loop runs, as in a notebook")
@pytest.mark.process
def test_steps_arrive_during_the_run_and_it_ends_on_request(start):
    run = start(reward=lambda text, row: 1.0, steps=50, wait=False)
    for record in run:
        if record.step == 2:
            run.stop()
    assert 2 <= len(run.metrics) - 1 < 50
    assert run.summary["interrupted"]


@pytest.mark.slow
def test_it_runs_where_an_event_loop_runs_already(start):
    async def cell():
        return start(reward=lambda text, row: 1.0, steps=1)

    assert asyncio.run(cell()).metrics[-1]["step"] == 1


NOTEBOOK = [
    """
import rl_trainer
from rich.console import Console
scale, told = 3.0, []
def length(text, row):
    return scale * len(text) + row["n"]
rows = [{"prompt": f"{n} + 1 =", "n": n} for n in range(20)]
""",
    """
run = rl_trainer.train(
    "quickstart", model=MODEL, data=rows, reward=length, callback=told.append, runtime=RUNTIME, steps=2, eval_every=0,
    batch={"batch_size": 2, "mini_batch_size": 2, "group_size": 2}, console=Console(quiet=True),
)
""",
    "[record.step for record in told], run.metrics[-1]['reward'] >= 3.0, (run.model_path / 'config.json').is_file()",
]


@pytest.mark.promise("`rl_trainer.train` runs in the cells of a notebook, on Ray and inline")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_it_trains_in_the_cells_of_a_notebook(model, tmp_path, runtime):
    """In a real kernel, whose event loop runs: the reward is a function of `__main__`, defined in another cell."""
    nbformat = pytest.importorskip("nbformat", reason="uv run --group notebook")
    nbclient = pytest.importorskip("nbclient", reason="uv run --group notebook")
    cells = [f"MODEL, RUNTIME = {str(model)!r}, {runtime!r}", *NOTEBOOK]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    assert notebook.cells[-1].outputs[0].data["text/plain"] == "([0, 1, 2], True, True)"


@pytest.mark.slow
def test_a_tracker_of_one_s_own_comes_as_an_object_too(start, tmp_path):
    class Lines(Tracker):
        def __init__(self, run):
            self.file = run.output_dir / "lines"

        def log(self, record):
            with self.file.open("a") as file:
                file.write(f"{record.step}\n")

        def close(self, summary):
            assert summary["steps"] == 1

    start(reward=lambda text, row: 1.0, steps=1, **{"tracking.trackers": [Lines]})
    assert (tmp_path / "out" / "lines").read_text().split() == ["0", "1"]


@pytest.mark.process
def test_a_run_that_fails_raises_where_it_is_waited_for(start):
    def broken(data):
        raise ZeroDivisionError("by hand")

    with pytest.raises((TrainerError, ZeroDivisionError), match="by hand"):
        start(advantage=broken, reward=lambda text, row: 1.0)


@pytest.mark.process
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"data": []}, DataError, "data has no rows"),
        ({"data": [{"question": "?"}]}, DataError, r"row 1 has no 'prompt', but \['question'\]"),
        ({"data": [{"prompt": "x", "when": object()}]}, DataError, "row 1: field 'when' holds"),
        ({"step": 3}, ConfigError, "key step; the nearest one is steps"),
        ({"steps": print}, ConfigError, "steps is .* by default; a function or a class is not allowed there"),
        ({"advantage": "grp"}, ConfigError, "algorithm.advantage='grp' is not known; there are"),
        ({"loss": f"{EXAMPLES}/own_loss.py:importance"}, ConfigError, "did you mean 'importance_weighted'"),
        ({"loss": f"{EXAMPLES}/nothing.py:f"}, ConfigError, "nothing.py is not a file"),
        ({"reward": 3}, ConfigError, "reward.path"),
        (
            {"agent.loop": f"{EXAMPLES}/own_filter.py:is_mixed"},
            ConfigError,
            "is_mixed is not a subclass of rl_agent.AgentLoop",
        ),
        ({"agent.loop": f"{EXAMPLES}/own_loop.py:Twice"}, ConfigError, "defines no 'Twice' at its top level"),
        (
            {"batch.filter": f"{EXAMPLES}/own_loop.py:RepeatedLoop"},
            ConfigError,
            "has to be a function of a group's tags",
        ),
        ({"algorithm.stages": ["nothing"]}, ConfigError, "algorithm.stages='nothing' is not known"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_starts(start, given, error, words):
    with pytest.raises(error, match=words):
        start(**given)


@pytest.mark.process
def test_an_object_carries_its_module_and_cannot_be_in_a_file(tmp_path, monkeypatch):
    (tmp_path / "mine_of_a_test.py").write_text("LIMIT = 5\n\ndef f(x):\n    return x + LIMIT\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import mine_of_a_test  # pyright: ignore[reportMissingImports]

    sent = Serialized.of(mine_of_a_test.f)
    (tmp_path / "mine_of_a_test.py").unlink()
    monkeypatch.delitem(__import__("sys").modules, "mine_of_a_test")
    assert Serialized.from_payload(sent.payload).load()(2) == 7
    with pytest.raises(ConfigError, match="cannot be sent to the workers"):
        Serialized.of(Console(quiet=True)._lock)
    with pytest.raises(ConfigError, match=r"algorithm\.advantage"):
        _config("quickstart", {"algorithm.advantage": {"name": "x", "payload": "y"}})


def test_a_file_path_is_made_absolute_for_remote_workers(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert absolute("a/b.py:f") == f"{tmp_path}/a/b.py:f"
    assert [absolute(name) for name in ("grpo", "package.module:f", "http://x.py:80")] == [
        "grpo", "package.module:f", "http://x.py:80",
    ]  # fmt: skip
    assert load_config("quickstart", ["reward.path=own.py:f"]).reward.path == f"{tmp_path}/own.py:f"


@pytest.mark.process
def test_a_plug_in_s_file_stands_in_nobody_s_way(tmp_path):
    (tmp_path / "colorsys.py").write_text("raise ImportError('shadowed')\n")
    (tmp_path / "random.py").write_text("def f(data):\n    return data\n")
    script = (
        "import sys; from rl_trainer.plugins import find\n"
        f"f = find('{tmp_path}/random.py:f', 'g', key='k')\n"
        "import colorsys, random\n"
        "assert f(3) == 3 and random.random() < 1\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_recipe_s_loss_options_do_not_go_to_another_loss():
    """The same loss keeps the recipe's options."""
    options = [load_config("quickstart", [f"algorithm.loss={name}"]).algorithm.loss_options for name in ("ppo", "sapo")]
    assert options == [{"clip_high": 0.28}, {}]


@pytest.mark.process
def test_a_second_run_does_not_overwrite_rows_of_a_live_one(start, tmp_path):
    start(reward=lambda text, row: 1.0, steps=1)
    (first,) = (tmp_path / "out").glob("rows-*.jsonl")
    before = first.read_bytes()
    with pytest.raises(rl_trainer.InputError):
        start(reward=lambda text, row: 1.0, data=ROWS[:10], eval_size=0)
    assert first.read_bytes() == before
