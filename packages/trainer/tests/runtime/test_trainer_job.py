"""Whole jobs in processes of their own, with every real part and a tiny model."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from safetensors import safe_open

from rl_tq.registry import staleness_policies
from rl_trainer import checkpoints
from rl_trainer.config import load_config
from rl_trainer.run import run

pytestmark = pytest.mark.process

SMALL = [
    "data.options.num_rows=2000",
    "data.eval_size=16",
    "batch.batch_size=4",
    "batch.mini_batch_size=2",
    "batch.group_size=4",
]


def start(model, output_dir, *overrides):
    command = [
        sys.executable,
        "-m",
        "rl_trainer.cli",
        "quickstart",
        "runtime=ray",
        *SMALL,
        f"model.path={model}",
        f"output_dir={output_dir}",
        *overrides,
    ]
    with Path(f"{output_dir}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def losses(output_dir):
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["metrics"]["policy_loss"] for r in records if r["metrics"]}


@pytest.mark.promise("In `sync` a resumed run has the losses of one that was never stopped")
@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(model, tmp_path):
    common = ["runtime=inline", "algorithm.kl_coef=0.01", "algorithm.old_logprobs=recompute", "eval_every=0"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert start(model, whole, *common, "steps=4", "save_every=2").wait(200) == 0
    assert start(model, resumed, *common, "steps=4", f"resume_from={whole / 'checkpoint-2'}").wait(200) == 0
    expected = losses(whole)
    assert sorted(expected) == [1, 2, 3, 4]
    assert losses(resumed) == {3: expected[3], 4: expected[4]}


@pytest.mark.slow
def test_one_step_off_learns_from_tokens_of_the_weights_before(model, tmp_path):
    """On Ray: the sampler agrees with the engine on the first batch, and is one update behind it on the later ones."""
    output_dir = tmp_path / "out"
    overrides = ["pipeline=one_step_off", "algorithm.old_logprobs=recompute", "algorithm.correction=tis"]
    overrides += [
        "engine.matmul_precision=highest",
        "engine.optimizer.lr=1e-2",
        "engine.optimizer.warmup_steps=0",
        "steps=3",
    ]
    overrides += ["algorithm.entropy_coef=0.1"]  # an untrained model earns nothing, and would not change for it
    assert start(model, output_dir, *overrides).wait(200) == 0, Path(f"{output_dir}.log").read_text()[-3000:]
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    first, *later = [r["metrics"]["mismatch_abs"] for r in records if r["metrics"]]
    assert first < 1e-5
    assert all(value > 1e-3 for value in later)
    assert [r["position"] for r in records] == [0, 8, 12, 12]  # with the prompts of the next step, which are held
    assert [r["held"] for r in records] == [0, 4, 4, 0]


LEARNING = [  # an untrained model earns nothing, and would not change for it
    "algorithm.old_logprobs=recompute", "algorithm.entropy_coef=0.1", "engine.matmul_precision=highest",
    "engine.optimizer.lr=1e-2", "engine.optimizer.warmup_steps=0", "eval_every=0",
]  # fmt: skip


REWARD = """
def spread(text, row):  # an untrained model is never right, and would learn nothing from rewards that are all 0
    return sum(map(ord, text)) % 7 / 7
"""


def numbers(output_dir):
    """By step, what two runs with the same weights and completions have in common to the last bit."""
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    names = ("policy_loss", "grad_norm", "mismatch_abs")
    return {r["step"]: (r["reward"], *(r["metrics"][name] for name in names)) for r in records if r["metrics"]}


@pytest.fixture(scope="module")
def on_policy(model, tmp_path_factory):
    """The options of three steps, and the numbers of `sync`."""
    folder = tmp_path_factory.mktemp("on_policy")
    (folder / "rewards.py").write_text(REWARD)
    options = [*LEARNING, f"reward.path={folder / 'rewards.py'}:spread", "steps=3"]
    assert start(model, folder / "out", *options).wait(500) == 0, (folder / "out.log").read_text()[-3000:]
    return options, numbers(folder / "out")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("pipeline", ["one_step_off", "fully_async"])
def test_without_staleness_every_pipeline_has_the_losses_of_sync(model, tmp_path, on_policy, pipeline):
    """On Ray, bit for bit."""
    output_dir, (options, wanted) = tmp_path / "out", on_policy
    process = start(model, output_dir, *options, "staleness.max_staleness=0", f"pipeline={pipeline}")
    assert process.wait(500) == 0, Path(f"{output_dir}.log").read_text()[-3000:]
    assert sorted(wanted) == [1, 2, 3]
    assert 0.0 not in {loss for _, loss, *_ in wanted.values()}
    assert numbers(output_dir) == wanted


@pytest.mark.promise("In one process the quickstart has the numbers that it has with `runtime=ray`")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_in_one_process_has_the_numbers_of_one_on_ray(model, tmp_path, on_policy):
    """Bit for bit, as the README says of the quickstart."""
    output_dir, (options, wanted) = tmp_path / "out", on_policy
    assert start(model, output_dir, *options, "runtime=auto").wait(500) == 0, Path(f"{output_dir}.log").read_text()
    words = re.findall(r"[\w.]+", Path(f"{output_dir}.log").read_text())  # without the table's lines
    assert "runtime inline" in " ".join(words)
    assert numbers(output_dir) == wanted


FIRST, *REST = staleness_policies()
POLICIES_OF_RUNS = [pytest.param([FIRST], id=FIRST), pytest.param(REST, id="the others", marks=pytest.mark.slow)]


@pytest.mark.promise(
    "At `staleness.max_staleness=0` every pipeline and staleness policy has the losses of `sync`, bit for bit"
)
@pytest.mark.parametrize("policies", POLICIES_OF_RUNS)
def test_without_staleness_every_policy_has_the_losses_of_sync(model, tmp_path, monkeypatch, policies):
    """Real components in this process, bit for bit."""
    (tmp_path / "rewards.py").write_text(REWARD)
    monkeypatch.setattr("rl_trainer.planning.plan._check_layout", lambda config: None)  # inline takes sync alone
    common = [*SMALL, *LEARNING, f"reward.path={tmp_path}/rewards.py:spread", f"model.path={model}", "steps=2"]
    common += ["runtime=inline", "timeout_s=120", "rollout.max_new_tokens=5"]

    def trained(name, *overrides):
        run(load_config("quickstart", [*common, *overrides, f"output_dir={tmp_path / name}"]), Console(quiet=True))
        return numbers(tmp_path / name)

    wanted = trained("sync")
    assert len(wanted) == 2
    assert 0.0 not in {loss for _, loss, *_ in wanted.values()}
    zero = "staleness.max_staleness=0"
    if policies == REST:
        assert trained("one_step_off", "pipeline=one_step_off", zero) == wanted
    for name in policies:
        assert trained(name, "pipeline=fully_async", zero, f"staleness.policy={name}") == wanted, name


@pytest.mark.slow
def test_the_optimal_token_baseline_gets_its_inputs(model, tmp_path):
    """Checkpoints are written at the same time as training."""
    output_dir = tmp_path / "out"
    overrides = [*LEARNING, "algorithm.advantage=optimal_token_baseline", "engine.async_checkpoints=true"]
    process = start(model, output_dir, *overrides, "steps=2", "save_every=1", "runtime=inline")
    assert process.wait(300) == 0, Path(f"{output_dir}.log").read_text()[-3000:]
    assert len(losses(output_dir)) == 2
    assert checkpoints.newest(output_dir) == output_dir / "checkpoint-2"


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "sleep"), [("ray", "true"), ("ray", "false"), ("inline", "true")])
def test_colocated_servers_have_the_losses_of_split_pools(model, tmp_path, runtime, sleep):
    """Servers that sleep while the engine trains, or stay, in its own processes on Ray, and in this one inline."""
    split, colocated = tmp_path / "split", tmp_path / "colocated"
    for output_dir, overrides in ((split, []), (colocated, ["rollout.colocated=true", f"rollout.sleep={sleep}"])):
        process = start(model, output_dir, *LEARNING, *overrides, "steps=3", f"runtime={runtime}")
        assert process.wait(300) == 0, Path(f"{output_dir}.log").read_text()[-3000:]
    assert len(losses(split)) == 3
    assert losses(colocated) == pytest.approx(losses(split), abs=1e-6)


@pytest.mark.slow
def test_fully_async_runs_ahead_and_resumes_pending_work(model, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    overrides = [*LEARNING, "algorithm.correction=tis", "pipeline=fully_async", "staleness.max_staleness=2"]
    assert start(model, first, *overrides, "steps=6", "save_every=2").wait(200) == 0, Path(f"{first}.log").read_text()[
        -3000:
    ]
    records = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    ages = [r["metrics"]["staleness_mean"] for r in records if r["metrics"]]
    assert ages[0] == 0
    assert 0 < max(ages) <= 2
    state = json.loads((first / "checkpoint-2" / "trainer_state.json").read_text())
    assert len(state["pending"]) + len(state["held"]) == 12  # three batches ahead
    resume = [f"resume_from={first / 'checkpoint-2'}", "steps=6"]
    assert start(model, second, *overrides, *resume).wait(200) == 0, Path(f"{second}.log").read_text()[-3000:]
    assert sorted(losses(second)) == [3, 4, 5, 6]
    # Every prompt that was drawn has been learned from, in one run or the other: none is left, none was drawn again.
    last = json.loads((second / "checkpoint-6" / "trainer_state.json").read_text())
    assert (last["position"], last["pending"]) == (24, [])


@pytest.mark.slow
def test_another_engine_in_another_layout_has_the_same_losses(model, tmp_path, megatron_on_cpu):
    engine = [f"engine.backend={megatron_on_cpu}", "engine.world_size=2", "engine.parallel.tp=2"]
    one, other = tmp_path / "one", tmp_path / "other"
    for output_dir, overrides in ((one, []), (other, engine)):
        process = start(model, output_dir, *LEARNING, *overrides, "steps=2")
        assert process.wait(300) == 0, Path(f"{output_dir}.log").read_text()[-3000:]
    assert len(losses(one)) == 2
    assert losses(other) == pytest.approx(losses(one), abs=1e-5)


@pytest.mark.slow
def test_an_adapter_is_trained_and_reaches_the_servers(model, tmp_path):
    output_dir = tmp_path / "out"
    overrides = [*LEARNING, "engine.lora.rank=4", "steps=2"]
    assert start(model, output_dir, *overrides).wait(200) == 0, Path(f"{output_dir}.log").read_text()[-3000:]
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(r["metrics"]["mismatch_abs"] < 1e-4 for r in records if r["metrics"])  # sampler and engine agree
    saved = output_dir / "checkpoint-2" / "model" / "model.safetensors"
    with safe_open(saved, "pt") as after, safe_open(Path(model) / "model.safetensors", "pt") as before:
        assert set(after.keys()) == set(before.keys())
        name = next(key for key in before.keys() if "q_proj" in key)  # noqa: SIM118 - a file, not a mapping
        assert not after.get_tensor(name).equal(before.get_tensor(name))


@pytest.mark.promise("Ctrl-C ends the run after its step, with a checkpoint, and leaves nothing")
@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_leaves_nothing(model, tmp_path):
    before = set(Path("/dev/shm").iterdir())
    output_dir = tmp_path / "out"
    process = start(model, output_dir, "steps=100000", "eval_every=0")
    deadline = time.monotonic() + 200
    while not (output_dir / "metrics.jsonl").exists() or len(losses(output_dir)) < 2:
        assert process.poll() is None, (tmp_path / "out.log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(100) == 130
    summary = json.loads((output_dir / "summary.json").read_text())
    assert summary["interrupted"]
    assert (Path(summary["checkpoint"]) / "model" / "config.json").exists()
    assert not abandoned(set(Path("/dev/shm").iterdir()) - before)
    assert not [
        p
        for p in Path("/proc").glob("[0-9]*")
        if str(output_dir).encode() in read(p / "cmdline") or model_served(p, model)
    ]


def abandoned(files):
    """Those that no process has open: another program's own are not this job's doing."""
    held = {link(fd) for fd in Path("/proc").glob("[0-9]*/fd/*")}
    mapped = b"".join(read(maps) for maps in Path("/proc").glob("[0-9]*/maps"))
    return [f for f in files if f.is_file() and str(f) not in held and str(f).encode() not in mapped]


def link(path):
    try:
        return str(path.readlink())
    except OSError:
        return ""


def model_served(process, model):
    return b"rl_rollout" in read(process / "cmdline") and str(model).encode() in read(process / "cmdline")


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


REWARDS = """
async def parts(text, row):
    return {"length": len(text) / 10, "digits": sum(c.isdigit() for c in text) / max(len(text), 1)}
"""


@pytest.mark.slow
def test_reward_components_reach_the_estimator_that_reads_them(model, tmp_path):
    """A coroutine function of a file beside the rule, in processes of their own; gdpo normalises each part alone."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    parts = [f"reward.parts.form.{key}" for key in ("kind=function", f"path={tmp_path}/rewards.py:parts", "weight=0.5")]
    overrides = ["runtime=inline", "algorithm.advantage=gdpo", "reward.parts.right.kind=rule", *parts, "eval_every=0"]
    overrides += ["reward.overlong_buffer=2", "steps=2"]
    output_dir = tmp_path / "out"
    assert start(model, output_dir, *overrides).wait(200) == 0, Path(f"{output_dir}.log").read_text()[-3000:]
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(r["metrics"]["grad_norm"] > 0 for r in records if r["metrics"]), "the parts differ, so there is a signal"
    assert not any(r["failures"] for r in records)


@pytest.mark.slow
def test_an_unloadable_reward_function_ends_the_run(model, tmp_path):
    (tmp_path / "rewards.py").write_text("import no_such_module\ndef f(text, row): ...\n")
    output_dir = tmp_path / "out"
    path = f"reward.path={tmp_path}/rewards.py:f"
    assert start(model, output_dir, "runtime=inline", path, "steps=1").wait(200) != 0
    assert "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'" in " ".join(
        Path(f"{output_dir}.log").read_text().split()
    )
