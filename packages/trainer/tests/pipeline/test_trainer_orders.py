"""Whatever the order of prompts, a run that stops anywhere goes on with exactly the prompts it would have had."""

import io
import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packages.trainer.tests.support.stand_ins import FakeAgents
from rich.console import Console

from rl_trainer.config import load_config
from rl_trainer.config.schema import DataConfig
from rl_trainer.data import Datasets, load_datasets
from rl_trainer.data.datasets import Record, Source, StreamedRows
from rl_trainer.data.sampler import CurriculumOrder, MixtureOrder, PromptOrder, StreamOrder, make_prompts
from rl_trainer.errors import ConfigError, DataError, InputError
from rl_trainer.pipeline.rollout_source import RolloutSource
from rl_trainer.pipeline.staleness import create_schedule
from rl_trainer.planning.plan import make_plan
from rl_trainer.run import run
from rl_trainer.samples import read_samples

LENGTHS = (3, 1, 9, 2, 4, 9, 9, 1, 2, 9, 3)


def row(number, words=1):
    prompt = [{"role": "user", "content": " ".join(["word"] * words)}]
    return {"prompt": prompt, "data_source": "mine", "reward_model": {"ground_truth": str(number)}, "extra_info": {}}


def measure(rows):
    return [len(row["prompt"][0]["content"].split()) for row in rows]


def stream(seed=0, buffer_size=4):
    rows = [row(number, words) for number, words in enumerate(LENGTHS)]
    source = Source("mine", lambda: (Record(f"row {n}", lambda r=r: r) for n, r in enumerate(rows)))
    return StreamedRows(source, lambda record, where: dict(record), seed=seed, buffer_size=buffer_size)


ORDERS = {
    "epochs": lambda seed: PromptOrder(num_rows=7, seed=seed),
    "mixture": lambda seed: MixtureOrder(parts=["a"] * 3 + ["b"] * 5, weights={"a": 3.0, "b": 1.0}, seed=seed),
    "curriculum": lambda seed: CurriculumOrder(num_rows=6, seed=seed, low=0.0, high=1.0, revisit=0.3),
    "stream": lambda seed: StreamOrder(rows=stream(seed), measure=measure, longest=4),
}


def go(order, counts, rewards):
    """Take, learn what the rows were worth, take again."""
    taken = []
    for count, reward in zip(counts, rewards, strict=True):
        indices = order.take(count)
        for index in indices:
            order.observe(index, [reward, 1.0 if index % 2 else reward])
        taken += [(i, order[i]["reward_model"]["ground_truth"]) for i in indices] if hasattr(order, "__getitem__") else indices  # fmt: skip  # noqa: E501
    return taken


@pytest.mark.promise("A resumed run takes exactly the prompts that the first would have taken")
@pytest.mark.process
@pytest.mark.parametrize("kind", ORDERS)
@given(data=st.data(), seed=st.integers(0, 50), counts=st.lists(st.integers(1, 9), min_size=2, max_size=8))
def test_an_order_goes_on_from_its_state_exactly(kind, data, seed, counts):
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(counts), max_size=len(counts)))
    stop = data.draw(st.integers(0, len(counts) - 1))
    whole = go(ORDERS[kind](seed), counts, rewards)
    first, second = ORDERS[kind](seed), ORDERS[kind](seed)
    begun = go(first, counts[:stop], rewards[:stop])
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert begun + go(second, counts[stop:], rewards[stop:]) == whole
    second.load_state_dict(state)  # back again
    assert begun + go(second, counts[stop:], rewards[stop:]) == whole


@given(st.integers(0, 50), st.integers(1, 15), st.integers(1, 40), st.lists(st.integers(0, 60), max_size=6))
def test_stream_rows_are_the_same_in_any_order(seed, buffer_size, count, places):
    rows = stream(seed, buffer_size)
    in_order = [rows[i]["reward_model"]["ground_truth"] for i in range(count)]
    size = len(LENGTHS)
    for begin in range(0, count - size + 1, size):
        assert sorted(in_order[begin : begin + size], key=int) == [str(n) for n in range(size)]
    again = stream(seed, buffer_size)
    for place in [p for p in places if p < count]:
        assert again[place]["reward_model"]["ground_truth"] == in_order[place]


def test_a_stream_reads_within_its_buffer_and_counts_long_rows():
    read = []
    source = Source("mine", lambda: (Record("", lambda n=n: read.append(n) or row(n, LENGTHS[n % 11])) for n in range(10**9)))  # fmt: skip  # noqa: E501
    order = StreamOrder(rows=StreamedRows(source, lambda r, _: r, seed=0, buffer_size=1), measure=measure, longest=4)
    assert order.take(8) == [0, 1, 3, 4, 7, 8, 10, 11]
    assert order.num_too_long == 4
    assert read == list(range(64))


def test_a_stream_of_prompts_that_are_all_too_long_is_told():
    order = StreamOrder(rows=stream(), measure=measure, longest=0)
    with pytest.raises(DataError, match="none of the 11 rows of the stream has a prompt of at most"):
        order.take(1)


def test_late_bad_rows_of_a_stream_are_named_by_file_and_number(tmp_path):
    """What the sample before the start does not reach is checked as it is read."""
    lines = [json.dumps({"prompt": f"q{n}", "answer": "1"}) for n in range(400)]
    lines[299:307] = ["{}", *['{"prompt": "images", "answer": "1"}'] * 7]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "test.jsonl").write_text(lines[0])
    config = DataConfig(path=str(tmp_path), format="rows", options={"stream_buffer": 1}, on_bad_row="drop")

    def ask(rows):
        return ["no images" if row["prompt"][0]["content"] == "images" else 3 for row in rows]

    def order(**options):
        return StreamOrder(rows=load_datasets(config, seed=0).stream, measure=ask, longest=4, **options)

    with pytest.raises(DataError) as caught:
        order().take(400)
    told = str(caught.value)
    assert "8 of 64 rows cannot be used" in told
    assert [f"train.jsonl, row {n}" in told for n in range(300, 306)] == [True] * 5 + [False]
    dropping = order(drops=True)
    taken = dropping.take(392)
    assert (dropping.num_bad, len(set(taken)), dropping.where(taken[-1])) == (
        8,
        392,
        f"{tmp_path}/train.jsonl, row 400",
    )


def test_an_empty_stream_is_told():
    with pytest.raises(DataError, match="mine has no rows"):
        StreamedRows(Source("mine", lambda: iter(())), lambda r, _: dict(r), seed=0, buffer_size=2)[0]


@pytest.mark.promise("A mixture is drawn by weight, whatever the sizes")
def test_a_mixture_draws_by_weight_whatever_the_sizes():
    order = MixtureOrder(parts=["big"] * 900 + ["small"] * 10, weights={"big": 1.0, "small": 3.0}, seed=1)
    taken = order.take(4000)
    small = [index for index in taken if index >= 900]
    assert len(small) / 4000 == pytest.approx(0.75, abs=0.03)
    counts = Counter(small)
    assert max(counts.values()) - min(counts.values()) <= 1  # epochs of its own


@pytest.mark.promise("A curriculum passes over rows whose last group taught nothing")
def test_a_curriculum_passes_over_what_taught_nothing():
    order = CurriculumOrder(num_rows=4, seed=0, low=0.0, high=1.0, revisit=0.0)
    assert sorted(order.take(4)) == [0, 1, 2, 3]
    for index, rewards in enumerate([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.5, 0.0]]):
        order.observe(index, rewards)
    assert sorted(order.take(2)) == [1, 3]
    assert sorted(order.take(2)) == [1, 3]
    order.observe(1, [1.0, 1.0])
    order.observe(3, [1.0, 1.0])
    assert set(order.take(2)) <= {0, 1, 2, 3}  # nothing is left: it takes all the same


@pytest.mark.process
def test_a_curriculum_is_made_as_it_is_configured():
    config = load_config("quickstart", ["data.curriculum={pass_rate: [0.2, 0.8], revisit: 0}", "data.eval_size=1"])
    rows = [row(number) for number in range(6)]
    data = load_datasets(config.data, seed=0)
    order = make_prompts(config, replace(data, train=rows), measure).order
    assert sorted(order.take(6)) == list(range(6))
    for index, rate in enumerate((0.0, 0.2, 0.3, 0.7, 0.8, 1.0)):
        order.observe(index, [rate])
    assert sorted(order.take(2)) == [2, 3]


@pytest.mark.promise("Prompts that are too long are left out and counted")
def test_prompts_that_are_too_long_are_left_out():
    rows = [row(0, 2), row(1, 3), row(2, 4), row(3, 1)]
    config = load_config("quickstart", ["data.max_prompt_tokens=3"])
    data = Datasets(train=rows, eval=rows[:1])
    prompts = make_prompts(config, data, measure)
    assert (prompts.rows, prompts.num_too_long) == ([rows[0], rows[1], rows[3]], 1)
    with pytest.raises(InputError, match=r"none of 1 prompts has at most data.max_prompt_tokens=3 tokens; .* has 4"):
        make_prompts(config, Datasets(train=rows[2:3], eval=rows[:1]), measure)


def test_rows_that_cannot_be_asked_are_named_or_dropped():
    rows = [row(n) for n in range(9)]
    data = Datasets(train=rows, eval=rows[:1], numbers=([f"f.jsonl, row {n + 1}" for n in range(9)], []))

    def refuse(asked):
        return ["no role" if each["reward_model"]["ground_truth"] in "124567" else 1 for each in asked]

    config = load_config("quickstart", [])
    with pytest.raises(DataError, match=r"6 of 10 rows cannot be used: f.jsonl, row 2: no role; .* 7: .*; and 1 more"):
        make_prompts(config, data, refuse)
    config = load_config("quickstart", ["data.on_bad_row=drop"])
    prompts = make_prompts(config, data, refuse)
    assert (prompts.num_bad, prompts.num_too_long, list(prompts.rows)) == (6, 0, [rows[0], rows[3], rows[8]])


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_a_mixture_of_files_is_loaded_filtered_and_drawn(tmp_path):
    easy = write(tmp_path / "easy.jsonl", [row(n) for n in range(20)])
    hard = write(tmp_path / "hard.jsonl", [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(80)])
    tree = [f"data.mixture={{easy: {{path: {easy}}}, hard: {{path: {hard}, format: gsm8k, weight: 3}}}}"]
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("data: {eval_size: 8, max_prompt_tokens: 50}\n")
    config = load_config(str(recipe), tree)
    data = load_datasets(config.data, seed=0)
    assert Counter(r["mixture"] for r in data.eval) == {"easy": 2, "hard": 6}
    found = make_prompts(config, data, measure)
    taken = Counter(found.rows[i]["mixture"] for i in found.order.take(400))
    assert taken["hard"] == pytest.approx(300, abs=40)
    rows = [r for r in data.train if r["mixture"] == "easy"]
    with pytest.raises(InputError, match="no prompt of data.mixture.hard has at most data.max_prompt_tokens=50"):
        make_prompts(config, replace(data, train=rows), measure)


def test_a_streamed_file_has_held_out_rows_of_its_own(tmp_path):
    write(tmp_path / "train.jsonl", [row(n, words) for n, words in enumerate(LENGTHS)])
    with pytest.raises(DataError, match="data.options.stream_buffer=9 cannot hold out the last rows"):
        load_datasets(DataConfig(path=str(tmp_path / "train.jsonl"), options={"stream_buffer": 9}), seed=0)
    write(tmp_path / "test.jsonl", [row(n) for n in range(5)])
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"data: {{path: {tmp_path}, eval_size: 2, max_prompt_tokens: 4}}")
    config = load_config(str(recipe), ["data.options.stream_buffer=3"])
    data = load_datasets(config.data, seed=0)
    assert len(data.eval) == 2
    found = make_prompts(config, data, measure)
    taken = found.order.take(7)
    truths = [found.rows[i]["reward_model"]["ground_truth"] for i in taken]
    assert sorted(truths, key=int) == ["0", "1", "3", "4", "7", "8", "10"]
    resumed = make_prompts(config, load_datasets(config.data, seed=0), measure)
    resumed.order.load_state_dict({"position": taken[3] + 1, "returned": [taken[1]]})
    again = resumed.order.take(4)
    assert [resumed.rows[i]["reward_model"]["ground_truth"] for i in again] == [truths[1], *truths[4:]]


@pytest.mark.process
@pytest.mark.parametrize("stream", [{}, {"stream_buffer": 100}])
def test_a_dataset_of_the_datasets_package(tmp_path, stream):
    import datasets

    made = {
        "fit": datasets.Dataset.from_list([row(n) for n in range(6)]),
        "test": datasets.Dataset.from_list([row(n) for n in range(10, 14)]),
    }
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "saved"))
    config = DataConfig(path=f"hf:{tmp_path / 'saved'}", options={"train_split": "fit", **stream}, eval_size=3)
    data = load_datasets(config, seed=0)
    assert [r["reward_model"]["ground_truth"] for r in data.eval] == ["10", "11", "12"]
    rows = [data.stream[i] for i in range(6)] if data.stream else data.train
    assert (data.stream is not None) == bool(stream)
    assert sorted(r["reward_model"]["ground_truth"] for r in rows) == list("012345")
    with pytest.raises(DataError, match=r"has no split 'train'; it has fit, test"):
        load_datasets(DataConfig(path=str(tmp_path / "saved")), seed=0)


@pytest.mark.process
@pytest.mark.parametrize("stream", [{}, {"stream_buffer": 100}])
def test_images_of_the_datasets_package_stay_files(tmp_path, stream):
    import datasets
    from PIL import Image

    seen = [{**row(n), "images": [Image.new("RGB", (2, 2 + n))]} for n in range(6)]
    for each in seen:
        each["prompt"] = [{"role": "user", "content": "<image>?"}]
    made = datasets.Dataset.from_list(seen).cast_column("images", datasets.List(datasets.Image()))
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "saved"))
    data = load_datasets(DataConfig(path=f"hf:{tmp_path / 'saved'}", options=stream, eval_size=3), seed=0)
    for _ in range(2):
        rows = [*([data.stream[i] for i in range(6)] if data.stream else data.train), *data.eval]
        heights = sorted(Image.open(io.BytesIO(each["images"][0]["bytes"])).height for each in rows)
        assert heights == [2, 2, 3, 3, 4, 4, 5, 6, 7]


def test_a_dataset_of_your_own_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "class Mine:\n"
        "    def __init__(self, config, *, seed):\n"
        "        self.train = [self.row(n) for n in range(config.options['count'])]\n"
        "        self.eval = [self.row(seed)]\n"
        "    def row(self, n):\n"
        "        return {'prompt': [{'role': 'user', 'content': 'x'}], 'data_source': 'mine',\n"
        "                'reward_model': {'ground_truth': str(n)}}\n"
        "def empty(config, *, seed):\n"
        "    return Mine.__new__(Mine)\n"
    )
    data = load_datasets(DataConfig(format=f"{file}:Mine", options={"count": 3}), seed=7)
    assert [r["reward_model"]["ground_truth"] for r in data.train] == ["0", "1", "2"]
    assert data.eval[0]["reward_model"]["ground_truth"] == "7"
    for name, words in (("empty", "gave no rows as 'train'"), ("Other", "defines no 'Other'")):
        with pytest.raises(InputError, match=words):
            load_datasets(DataConfig(format=f"{file}:{name}"), seed=0)
    with pytest.raises(ConfigError, match=r"data.format='jsn' is not known; there are gsm8k, reasoning_gym, rows"):
        load_datasets(DataConfig(format="jsn"), seed=0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.path=x"], "data.path='x' does nothing with data.format=reasoning_gym"),
        (["data.options.stream_buffer=9"], "stream_buffer is not an option of data.format=reasoning_gym"),
        (["data.options.num_row=5"], "data.options.num_row is not an option .*; the nearest one is num_rows"),
        (["data.options.num_rows=many"], "data.options.num_rows: .*, got 'many'"),
        (["data.curriculum.pass_rate=[1, 1]"], "the first has to be the lower"),
    ],
)
def test_keys_that_do_nothing_with_the_dataset_are_refused(overrides, words):
    with pytest.raises(InputError, match=words):
        make_plan(load_config("quickstart", overrides))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.options.num_rows=5"], "data.options.num_rows is not an option of data.format=gsm8k"),
        (
            ["data.mixture={a: {path: y}}", "data.options.stream_buffer=5"],
            "stream_buffer=5 does nothing with data.mix",
        ),
        (["data.mixture={a: {path: y, options: {stream_buffer: 5}}}"], "mixture.a.options.stream_buffer does nothing"),
        (["data.options.load_options={name: x}"], "does nothing unless data.path is of the datasets package"),
        (["data.format=rows", "data.options.prompt_template=x"], "prompt_template='x' does nothing with data.format"),
        (["data.mixture={a: {path: y, options: {wait: 2}}}"], "data.options.wait is not an option"),
        (["data.path=x", "data.mixture={a: {path: y}}"], "data.path='x' does nothing with data.mixture"),
        (
            ["data.mixture={a: {path: y}}", "data.curriculum.revisit=0.2"],
            "data.curriculum chooses among all rows of one",
        ),
        (["data.mixture={a: {path: y, wait: 2}}"], "unknown configuration key data.mixture.a.wait"),
        (["data.path=hf:x", "data.eval_path=y"], "set data.options.eval_split"),
    ],
)
def test_keys_that_do_nothing_with_files_are_refused(overrides, words):
    with pytest.raises(InputError, match=words):
        make_plan(load_config("gsm8k", overrides))


@pytest.mark.process
def test_a_run_on_a_stream_counts_what_it_passed_over(model, tmp_path):
    def sum_of(number, width):
        text = f"{number} + 1 =".rjust(width)
        source = {"data_source": "reasoning_gym/sums", "reward_model": {"ground_truth": str(number + 1)}}
        return {"prompt": [{"role": "user", "content": text}], **source}

    write(tmp_path / "train.jsonl", [sum_of(n, 40 if n % 4 == 0 else 8) for n in range(200)])
    write(tmp_path / "test.jsonl", [sum_of(n, 8) for n in range(4)])
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"steps: 2\neval_every: 0\nruntime: inline\nmodel: {{path: {model}}}\noutput_dir: {tmp_path / 'out'}\n"
        f"data: {{path: {tmp_path}, options: {{stream_buffer: 1}}, max_prompt_tokens: 16}}\n"
        "batch: {batch_size: 4, mini_batch_size: 4, group_size: 2}\nrollout: {max_new_tokens: 4, max_model_len: 64}\n"
        "tracking: {keep_samples: true}\n"
    )
    summary = run(load_config(str(recipe)), Console(quiet=True))
    assert summary["rows_too_long"] == 3  # of the first 11, in the order of the file
    assert len(set(read_samples(tmp_path / "out")["prompt"].to_pylist())) == 8


class Agents(FakeAgents):
    """Completions of odd rows are right."""

    def rewards_of(self, group):
        return [float(next(job.row_index for job, _ in self.submitted if job.group_id == group) % 2)] * 2


def test_a_resumed_curriculum_draws_what_it_would_have_drawn():
    config = load_config("quickstart", ["batch.batch_size=3", "batch.group_size=2"])
    rows = [row(n) for n in range(6)]

    def manager():
        order = CurriculumOrder(num_rows=6, seed=0, low=0.0, high=1.0, revisit=0.2)
        agents = Agents(config, per_poll=3)
        return RolloutSource(agents, rows, order, agents.queue, config, create_schedule(config).policy, poll_s=0.0)

    def step(manager, version=1):
        manager.release(version)
        generated = manager.take(version)
        manager.finish(generated, version)
        return [group.row_index for group in generated.groups]

    first = manager()
    for version in range(1, 4):
        step(first, version)
    second = manager()
    second.order.load_state_dict(json.loads(json.dumps(first.order.state_dict())))
    assert [step(second, version) for version in range(1, 7)] == [step(first, version) for version in range(4, 10)]
