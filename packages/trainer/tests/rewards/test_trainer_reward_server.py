"""Reward models that the run serves itself, alone and in turn with the engine."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from rl_bench.waiting import until
from rl_trainer.config import load_config
from rl_trainer.config.schema import RewardPart, RewardSection, ServedModel
from rl_trainer.errors import InputError, RewardError
from rl_trainer.planning.preflight import check
from rl_trainer.rewards import Scorer
from rl_trainer.runtime.base import WorkerContext
from rl_trainer.workers.reward_server import RewardServers

ROW = {"prompt": [{"role": "user", "content": "2 + 2"}], "data_source": "mine", "reward_model": {"ground_truth": "4"}}


def own(folder):
    return RewardSection(parts={"liked": RewardPart(kind="classifier", model=ServedModel(path=str(folder)))})


PARSER = """
def ask(text, row):
    return [{"role": "system", "content": "+"}, {"role": "user", "content": f"{row['prompt'][0]['content']}={text}"}]

def length(answer, row):
    return float(len(answer))
"""


def judged(folder, functions, **model):
    return RewardPart(
        kind="judge",
        model=ServedModel(path=str(folder), max_model_len=64, **model),
        prompt=f"{functions}:ask",
        parser=f"{functions}:length",
        max_tokens=9,
    )


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "judging.py").write_text(PARSER)
    return tmp_path / "judging.py"


def serving(models, *, is_own_process=False, heartbeat_s=30.0, timeout_s=200):
    return RewardServers(
        WorkerContext(rank=0, world_size=1),
        models=models,
        is_own_process=is_own_process,
        timeout_s=timeout_s,
        heartbeat_s=heartbeat_s,
    )


def models_of(section):
    tasks = {"judge": "generate", "classifier": "score"}
    return {name: (tasks[part.kind], part.served_model) for name, part in section.parts.items()}


async def scores(section, servers, texts):
    scorer = Scorer(section)
    scorer.use({name: [each for part, each in servers if part == name] for name, _ in servers})
    try:
        return [dict((await scorer.score(text, ROW)).components) for text in texts]
    finally:
        await scorer.close()


def test_without_the_run_that_serves_it_there_is_no_score():
    with pytest.raises(RewardError, match="serve it here .rl-serve folder --task score., and give its url"):
        asyncio.run(Scorer(own("folder")).score("4", ROW))


def test_a_folder_without_a_model_is_refused(tmp_path):
    config = load_config("quickstart", [f"reward.parts.a={{kind: classifier, model: {{path: {tmp_path}}}}}"])
    with pytest.raises(InputError, match="has no config.json, so it is not a folder of a model"):
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


def judge_alone(folder, text):
    """Length of what the judge writes, by transformers alone, greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "system", "content": "+"}, {"role": "user", "content": f"2 + 2={text}"}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        found = model.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False)[0, len(ids) :]
    return float(len(tokenizer.decode(found, skip_special_tokens=True)))


@pytest.mark.process
def test_judge_and_classifier_keep_their_weights_asleep(model, reward_model, functions):
    """Two replicas of a judge and a classifier: scores by hand, and after sleep; requests wait while they sleep."""
    section = RewardSection(parts={"wise": judged(model, functions, num_replicas=2), **own(reward_model).parts})
    servers = serving(models_of(section))
    texts = ["4", "7 + 1"]
    try:
        addresses = servers.wake()
        assert [name for name, _ in addresses] == ["wise", "wise", "liked"]
        first = asyncio.run(scores(section, addresses, texts))
        assert [each["wise"] for each in first] == [judge_alone(model, text) for text in texts]
        assert first[0]["liked"] != first[1]["liked"]
        servers.sleep()
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(asyncio.run, scores(section, addresses, texts))
            assert not wait([waiting], timeout=0.5).done, "they sleep"
            assert servers.wake() == addresses
            assert waiting.result(timeout=60) == first
    finally:
        servers.close()


@pytest.mark.slow
def test_a_server_that_cannot_start_names_its_part(tmp_path):
    said = r"(?s)server of reward.parts.liked .* did not start: .*no reward mode"
    with pytest.raises(RewardError, match=said):
        serving({"liked": ("score", ServedModel(path=str(tmp_path)))}, is_own_process=True)


SIZES = ["data.options.num_rows=200", "data.eval_size=4", "batch.batch_size=4", "batch.mini_batch_size=4"]
SIZES += ["batch.group_size=4", "steps=2", "eval_every=0"]


def train(*overrides):
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", *SIZES, *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["inline", "ray"])
@pytest.mark.parametrize("colocated", ["true", "false"])
def test_a_job_scores_by_its_own_reward_models(model, reward_model, functions, tmp_path, runtime, colocated):
    """A judge of two replicas and a classifier; with Ray in the engine's pool where they are colocated."""
    out = tmp_path / "out"
    parts = [
        f"reward.parts.liked={{kind: classifier, model: {{path: {reward_model}}}}}",
        "reward.parts.wise.kind=judge",
        f"reward.parts.wise.model={{path: {model}, num_replicas: 2, max_model_len: 64}}",
        f"reward.parts.wise.prompt={functions}:ask",
        f"reward.parts.wise.parser={functions}:length",
        "reward.parts.wise.max_tokens=9",
    ]
    layout = [f"runtime={runtime}", f"rollout.colocated={colocated}", "tracking.keep_samples=true"]
    ended = train(*layout, *parts, f"model.path={model}", f"output_dir={out}")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
    assert [record["failures"] for record in records] == [{}, {}]
    for record in (each["metrics"] | {"reward": each["reward"]} for each in records):
        assert record["grad_norm"] > 0, "its scores differ, so there is a signal"
        assert record["reward/liked"] + record["reward/wise"] == pytest.approx(record["reward"])
        assert 0 <= record["reward/wise"] <= 9 * 8


@pytest.mark.slow
def test_a_judge_without_a_score_names_file_and_row(model, functions, tmp_path):
    functions.write_text(PARSER.replace("float(len(answer))", "None"))
    data = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{n} + 1", "answer": str(n + 1)} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = f"{{kind: judge, model: {{path: {model}, max_model_len: 64}}, prompt: '{functions}:ask', "
    judge += f"parser: '{functions}:length', max_attempts: 1, max_tokens: 4}}"
    given = [f"data.path={data}", "data.format=rows", "data.options={}", f"reward.parts.wise={judge}"]
    ended = train(*given, f"model.path={model}", f"output_dir={tmp_path / 'out'}")
    assert ended.returncode != 0
    said = ended.stdout + ended.stderr
    assert re.search(
        r"sums\.jsonl, row \d+: .*reward 'wise' got no score from http.* in 1 attempts; the last: ", said
    ), said


ALONE = """
import sys, time
from rl_trainer.config.schema import ServedModel
from rl_trainer.runtime.base import WorkerContext
from rl_trainer.workers.reward_server import RewardServers

context, models = WorkerContext(rank=0, world_size=1), {"liked": ("score", ServedModel(path=sys.argv[1]))}
servers = RewardServers(context, models=models, is_own_process=True, timeout_s=300, heartbeat_s=3)
print(servers.wake()[0][1].pid, flush=True)
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
    assert f"the server of reward.parts.liked ({reward_model}) is gone: " in told
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
    servers = serving(models_of(own(judge)), is_own_process=True)
    try:
        found = [each["liked"] for each in asyncio.run(scores(own(judge), servers.wake(), ("4", "+")))]
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
