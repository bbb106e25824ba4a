"""What a run that goes on takes over from the one before, what it is told of, and what it refuses."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from packages.trainer.tests.support.stand_ins import FakeAgents, FakeJob
from rich.console import Console

import rl_engine.checkpoint.sharded
from rl_engine import read_manifest, write_manifest
from rl_engine.errors import CheckpointError
from rl_trainer import checkpoints
from rl_trainer.algorithms.kl_controller import AdaptiveKl
from rl_trainer.checkpoints import RunState, check_output_dir
from rl_trainer.config import as_tree, load_config
from rl_trainer.data import PromptOrder
from rl_trainer.errors import InputError
from rl_trainer.metrics import Evaluation, StepRecord
from rl_trainer.pipeline.rollout_source import RolloutSource
from rl_trainer.pipeline.staleness import create_schedule
from rl_trainer.run import run
from rl_trainer.setup import kl_of

STATE = RunState(seed=0, num_rows=9)
KL = ["algorithm.kl_coef=0.3", "algorithm.kl_in_reward=true"]


def saved(config, kl):
    """The state after a step, as it is read again."""
    manager = SimpleNamespace(order=PromptOrder(num_rows=9, seed=0))
    components = replace(FakeJob(config).components(), kl=kl, source=manager)
    record = StepRecord.of_evaluation(1, Evaluation(reward=0.5, accuracy=0.5), {}, position=0)
    return RunState(**json.loads(json.dumps(STATE.after(record, components, config))))


def test_an_adaptive_kl_weight_continues_and_others_are_reset():
    """A fixed coefficient is read from the configuration again."""
    moving, still = (load_config("quickstart", [*KL, *more]) for more in (["algorithm.kl_target=0.1"], []))
    followed = saved(moving, AdaptiveKl(coef=0.2, target=0.1))
    assert kl_of(moving, followed).coef == 0.2
    assert kl_of(still, followed).coef == 0.3
    before = saved(still, AdaptiveKl(coef=0.0, target=0.0))
    assert before.kl_coef is None
    assert kl_of(moving, before).coef == kl_of(still, before).coef == 0.3
    assert kl_of(still, replace(STATE, kl_coef=0.1)).coef == 0.3  # as it was written before


@pytest.mark.promise("Keys that are others than those of the run before stand in the plan")
def test_the_keys_that_are_others_than_before_are_told():
    first = load_config("quickstart", ["output_dir=a", "algorithm.advantage=gae", "critic.lr=1e-5"])
    state = saved(first, AdaptiveKl(coef=0.0, target=0.0))
    again = replace(first, output_dir="b", resume_from="a/checkpoint-1", model=replace(first.model, path="a/model"))
    assert state.changes(again) == []
    other = load_config("quickstart", ["engine.optimizer.lr=0.5", "batch.batch_size=64"])
    assert set(state.changes(other)) == {
        "batch.batch_size=64 (was 128)",
        "batch.mini_batch_size=32 (was 64)",
        "engine.optimizer.lr=0.5 (was 0.0006)",
        "algorithm.advantage=grpo (was gae)",
        *(f"critic.{key}=None (was {value})" for key, value in as_tree(first)["critic"].items() if value is not None),
    }
    assert STATE.changes(other) == []  # of a version that did not write it


def checkpoint(folder, *engines, named=None):
    folder.mkdir()
    for name in engines:
        (folder / name).mkdir()
        write_manifest(folder / name / "manifest.json", {}, {})
    state = {"step": 1, "seed": 0, "num_rows": 9} | ({} if named is None else {"engines": named})
    write_manifest(folder / checkpoints.STATE_FILE, state, {})
    return folder


class Engine:
    def __init__(self, name, told):
        self.name, self.told = name, told

    def __getattr__(self, method):
        return lambda *given: self.told.append((method, self.name, *given))


def test_every_engine_and_waiting_row_is_saved_and_restored(tmp_path):
    told, config = [], load_config("quickstart", [])
    names = ("actor", "critic", "queue", "ema_reference")
    beside = {name: Engine(name, told) for name in names}
    components = replace(FakeJob(config).components(), **beside)
    state = {"step": 3, "held": [], "history": {}, "pending": [], "config": {"batch": {"over_sampling": 0.0}}}
    checkpoints.save(components, tmp_path, state)
    engines = {"actor": "engine", "critic": "critic"}
    written = [("save_checkpoint", name, str(tmp_path / folder), 3) for name, folder in engines.items()]
    assert set(told) == {
        *written, ("save_model", "actor", str(tmp_path / "model")), ("save", "ema_reference", tmp_path),
    }  # fmt: skip
    assert read_manifest(tmp_path / checkpoints.STATE_FILE) == state | {"files": {}}
    for rows in ({"held": [[1, 0, 0, 1, 0]]}, {"history": {"groups": [[1, 0, 0, 1, 0]]}}):
        checkpoints.save(components, tmp_path, state | rows)
        assert ("snapshot", "queue", tmp_path / "queue") in told[-6:]
    told.clear()
    checkpoints.load(components, tmp_path)
    assert told == [("load_checkpoint", name, str(tmp_path / folder)) for name, folder in engines.items()]
    checkpoints.finish(components)
    assert told[2:] == [("finish", "critic"), ("finish", "actor")]


def test_a_checkpoint_with_an_unfinished_critic_is_not_one(tmp_path):
    checkpoint(tmp_path / "checkpoint-1", "engine", "critic", named=["engine", "critic"])
    last = checkpoint(tmp_path / "checkpoint-2", "engine", named=["engine", "critic"])
    assert checkpoints.newest(tmp_path) == tmp_path / "checkpoint-1"
    (last / "critic").mkdir()
    assert checkpoints.newest(tmp_path) == last
    assert RunState.read(last).engines == ("engine", "critic")
    assert RunState.read(checkpoint(tmp_path / "checkpoint-3", "engine")).engines == ("engine",)


@pytest.mark.promise("A folder in which a run was cut off is refused without `--resume`")
def test_two_runs_do_not_become_one_in_a_folder(tmp_path):
    own = tmp_path / "out"
    own.mkdir()
    config = load_config("quickstart", [f"output_dir={own}"])
    check_output_dir(config, own)
    (own / "metrics.jsonl").write_text("")
    check_output_dir(config, own)
    (own / "metrics.jsonl").write_text('{"step": 1}')
    with pytest.raises(InputError, match="already holds a run that did not end; go on with it"):
        check_output_dir(config, own)
    check_output_dir(config, own, is_resumed=True)  # it failed before its first checkpoint, and begins again
    first, second = (checkpoint(own / f"checkpoint-{step}", "engine") for step in (1, 2))
    check_output_dir(replace(config, resume_from=str(second)), own)
    with pytest.raises(InputError, match="is not the newest checkpoint in output_dir, which is checkpoint-2"):
        check_output_dir(replace(config, resume_from=str(first)), own)
    (own / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match="already holds a run that did not end"):
        check_output_dir(config, own)
    other = tmp_path / "other"
    check_output_dir(replace(config, resume_from=str(first)), other)  # a branch of its own


def test_returned_prompts_are_awaited_by_the_next_process():
    sizes = ["batch.batch_size=2", "batch.mini_batch_size=2", "batch.group_size=2", "batch.over_sampling=0.5"]
    config = load_config("quickstart", sizes)
    order = PromptOrder(num_rows=100, seed=0, position=3, returned=[77])
    agents = FakeAgents(config, slow=[1])
    policy = create_schedule(config).policy
    source = RolloutSource(agents, [{}] * 100, order, agents.queue, config, policy, poll_s=0.0)
    source.release(1)
    generated = source.take(1)
    assert agents.submitted[0][0].row_index == 77
    assert 77 in [group.row_index for group in generated.groups]


@pytest.mark.process
def test_an_unwritten_last_checkpoint_fails_the_run(model, tmp_path, monkeypatch):
    """What writes it beside training fails after the last step, when nothing is asked of the engine any more."""
    save, out = rl_engine.checkpoint.sharded.save, tmp_path / "out"

    def full_at_last(path, *rest):
        if "checkpoint-2" in str(path):
            raise CheckpointError("no space left")
        save(path, *rest)

    monkeypatch.setattr(rl_engine.checkpoint.sharded, "save", full_at_last)
    sizes = ["data.options.num_rows=2000", "data.eval_size=4", "batch.batch_size=2", "batch.mini_batch_size=2"]
    sizes += ["batch.group_size=2", "steps=2", "save_every=1", "eval_every=0", "tracking.trackers=[]"]
    how = ["runtime=inline", "engine.async_checkpoints=true", f"model.path={model}", f"output_dir={out}"]
    with pytest.raises(CheckpointError, match=r"checkpoint-2/engine was not written \(no space left\)"):
        run(load_config("quickstart", [*sizes, *how]), Console(quiet=True))
    assert not (out / "summary.json").exists()
    assert checkpoints.newest(out) == out / "checkpoint-1"
