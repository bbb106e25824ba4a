"""Reward models that the run serves itself, alone and in turn with the engine."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

from rl_bench.waiting import until
from rl_trainer.config import load_config
from rl_trainer.config.schema import RewardPart, RewardSection
from rl_trainer.errors import InputError, RewardError
from rl_trainer.planning.preflight import check
from rl_trainer.rewards import Scorer
from rl_trainer.runtime.base import WorkerContext
from rl_trainer.workers.reward_server import RewardServers

ROW = {"prompt": [{"role": "user", "content": "2 + 2"}], "data_source": "mine", "reward_model": {"ground_truth": "4"}}


def own(folder):
    return RewardSection(parts={"liked": RewardPart(kind="classifier", path=str(folder))})


def test_without_the_run_that_serves_it_there_is_no_score():
    with pytest.raises(RewardError, match="serve it here .rl-serve folder --task score., and give its url"):
        asyncio.run(Scorer(own("folder")).score("4", ROW))


def test_a_folder_without_a_model_is_refused(tmp_path):
    config = load_config("quickstart", [f"reward.parts.a={{kind: classifier, path: {tmp_path}}}"])
    with pytest.raises(InputError, match="has no config.json, so it is not a folder of a reward model"):
        check(config, [])


@pytest.fixture(scope="module")
def reward_model(model, tmp_path_factory):
    """The tiny model of the other tests, with a head of one label."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("reward") / "model"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_it_sleeps_and_wakes_and_says_the_same(reward_model, tmp_path):
    servers = RewardServers(WorkerContext(rank=0, world_size=1), folders={"liked": str(reward_model)}, timeout_s=200)

    async def score(urls):
        scorer = Scorer(own(reward_model))
        scorer.use(urls)
        try:
            return [(await scorer.score(text, ROW)).reward for text in ("4", "four")]
        finally:
            await scorer.close()

    try:
        first = asyncio.run(score(servers.wake()))
        assert len(set(first)) == 2
        assert servers.wake() == servers.wake(), "it is awake"
        pid = servers._processes["liked"]._process.pid
        servers.sleep()
        assert not is_there(pid), "what ended holds no memory"
        assert asyncio.run(score(servers.wake())) == pytest.approx(first, abs=1e-6)
    finally:
        servers.close()
    broken = RewardServers(WorkerContext(rank=0, world_size=1), folders={"liked": str(tmp_path)}, timeout_s=200)
    with pytest.raises(
        RewardError, match=r"(?s)server of reward.parts.liked .* ended while it started; .*no reward mode"
    ):
        broken.wake()


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["inline", "ray"])
@pytest.mark.parametrize("colocated", ["true", "false"])
def test_a_job_scores_by_its_own_reward_model(model, reward_model, tmp_path, runtime, colocated):
    """In a process of its own: with Ray, in the engine's pool where it is colocated."""
    import subprocess
    import sys

    out = tmp_path / "out"
    part = f"reward.parts.liked={{kind: classifier, path: {reward_model}}}"
    sizes = ["data.options.num_rows=200", "data.eval_size=4", "batch.batch_size=4", "batch.mini_batch_size=4"]
    sizes += ["batch.group_size=4", "steps=2", "eval_every=0", f"runtime={runtime}", f"rollout.colocated={colocated}"]
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", *sizes, part, f"model.path={model}"]
    ended = subprocess.run([*command, f"output_dir={out}"], capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
    assert [record["failures"] for record in records] == [{}, {}]
    assert all(record["metrics"]["grad_norm"] > 0 for record in records), "its scores differ, so there is a signal"
    assert all(record["metrics"]["reward/liked"] == pytest.approx(record["reward"]) for record in records)


ALONE = """
import sys, time
from rl_trainer.runtime.base import WorkerContext
from rl_trainer.workers.reward_server import RewardServers

context = WorkerContext(rank=0, world_size=1)
servers = RewardServers(context, folders={"liked": sys.argv[1]}, timeout_s=300, heartbeat_s=3)
servers.wake()
print(servers._processes["liked"].pid, flush=True)
time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_its_end_is_that_of_its_keeper(reward_model, number):
    with subprocess.Popen(
        [sys.executable, "-c", ALONE, reward_model], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as keeper:
        pid = int(keeper.stdout.readline())
        os.kill(pid, number)
        _, told = keeper.communicate(timeout=60)
    assert keeper.returncode == 1
    assert f"the server of reward.parts.liked ({reward_model}) is gone; process {pid} " in told
    until(lambda: not is_there(pid))


@pytest.mark.promise("What rl-rm writes, `rl-serve --task score` serves")
@pytest.mark.slow
def test_what_rl_rm_writes_rl_serve_scores(model, tmp_path):
    """The folder of one command line is what the other takes, in processes of their own; the scores are the model's."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    pairs = [{"prompt": ROW["prompt"], "chosen": str(n), "rejected": "+" * (n % 3 + 1)} for n in range(8)]
    data, judge = tmp_path / "pairs.jsonl", tmp_path / "judge"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    learn = ["-c", "from rl_engine.finetune.cli import rm_main; raise SystemExit(rm_main())"]
    settings = [f"model.path={model}", f"data.path={data}", f"output_dir={judge}", "steps=2", "batch_size=4"]
    done = subprocess.run([sys.executable, *learn, *settings], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    servers = RewardServers(WorkerContext(rank=0, world_size=1), folders={"liked": str(judge)}, timeout_s=200)

    async def scores():
        scorer = Scorer(own(judge))
        scorer.use(servers.wake())
        try:
            return [(await scorer.score(text, ROW)).reward for text in ("4", "+")]
        finally:
            await scorer.close()

    try:
        found = asyncio.run(scores())
    finally:
        servers.close()
    tokenizer, scored = AutoTokenizer.from_pretrained(judge), AutoModelForSequenceClassification.from_pretrained(judge)
    assert type(scored).__name__ == "Qwen3ForSequenceClassification"
    for text, score in zip(("4", "+"), found, strict=True):
        messages = [*ROW["prompt"], {"role": "assistant", "content": text}]
        prompt = tokenizer.apply_chat_template(
            ROW["prompt"], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        learned = [*prompt, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            want = float(scored(torch.tensor([learned])).logits[0, 0])
        assert score == pytest.approx(want, abs=1e-4), messages
