import datetime
import itertools
import json
import uuid
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_trainer.config.schema import DataConfig
from rl_trainer.data import PromptOrder, load_datasets
from rl_trainer.data.rows import plain
from rl_trainer.errors import DataError

ROW = {
    "prompt": [{"role": "user", "content": "2+2="}],
    "data_source": "mine",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {},
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_last_rows_of_a_single_file_are_held_out(tmp_path):
    rows = [{**ROW, "extra_info": {"n": n}} for n in range(40)]
    data = load_datasets(DataConfig(path=write(tmp_path / "all.jsonl", rows), eval_size=3), seed=0)
    assert [r["extra_info"]["n"] for r in data.train] == list(range(37))
    assert [r["extra_info"]["n"] for r in data.eval] == [37, 38, 39]


def test_at_most_a_tenth_is_held_out(tmp_path):
    data = load_datasets(DataConfig(path=write(tmp_path / "all.jsonl", [ROW] * 300)), seed=0)
    assert (len(data.train), len(data.eval)) == (270, 30)


def test_rows_may_have_fields_of_other_names_and_prompts_of_text(tmp_path):
    path = write(tmp_path / "all.jsonl", [{"question": "2+2=", "solution": "4", "level": 1}] * 20)
    options = {"columns": {"prompt": "question", "answer": "solution"}}
    row = load_datasets(DataConfig(path=path, options=options), seed=0).train[0]
    assert row["prompt"] == [{"role": "user", "content": "2+2="}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "4"}
    assert (row["data_source"], row["level"]) == ("rows", 1)


def test_all_complaints_about_a_file_are_told_at_once(tmp_path):
    rows = [ROW, {"prompt": 1}, ROW, {"prompt": []}, {"prompt": [1]}, {"text": 1}]
    with pytest.raises(DataError) as error:
        load_datasets(DataConfig(path=write(tmp_path / "all.jsonl", rows)), seed=0)
    told = str(error.value)
    assert "4 of 6 rows cannot be used" in told
    assert "row 2:" in told
    assert "row 6 has no field" in told
    assert "leave them out with data.on_bad_row=drop" in told
    assert told.endswith('The first of them is {"prompt": 1}')


def test_a_folder_has_a_test_split_and_parquet_equals_jsonl(tmp_path):
    write(tmp_path / "train.jsonl", [ROW] * 4)
    parquet.write_table(pa.Table.from_pylist([{**ROW, "extra_info": {"n": 1}}]), tmp_path / "test.parquet")
    data = load_datasets(DataConfig(path=str(tmp_path)), seed=0)
    assert len(data.train) == 4
    assert data.eval == [{**ROW, "extra_info": {"n": 1}}]


def test_gsm8k_lines_are_read_as_they_are(tmp_path):
    line = {"question": "How many?", "answer": "Twice 600 is <<2*600=1200>>1,200.\n#### 1,200"}
    path = write(tmp_path / "train.jsonl", [line] * 3)
    row = load_datasets(DataConfig(format="gsm8k", path=path, eval_size=1), seed=0).train[0]
    assert row["reward_model"]["ground_truth"] == "1200"
    assert row["prompt"][0]["content"].startswith("How many?\n")
    assert row["data_source"] == "gsm8k"


@pytest.mark.parametrize(
    ("rows", "config", "words"),
    [
        ([ROW, {"data_source": "x", "reward_model": {}}], {}, "row 2 has no field 'prompt'"),
        ([{**ROW, "prompt": {}}], {}, "row 1: 'prompt' must be a non-empty list of messages"),
        ([{**ROW, "prompt": [{"role": "user", "content": None}]}], {}, "message 1 of 'prompt' has content None"),
        ([{**ROW, "prompt": [{"role": "user", "content": 5}]}], {}, "message 1 of 'prompt' has content 5"),
        (
            [{**ROW, "prompt": [{"role": "assistant", "content": "4"}]}],
            {},
            "row 1: 'prompt' ends with a message of the",
        ),
        (
            [{**ROW, "reward_model": {"style": "rule"}}],
            {},
            "row 1: 'reward_model' must be an object with 'ground_truth'",
        ),
        ([{"question": "q", "answer": "a"}], {"format": "gsm8k"}, "row 1: the answer has no line '#### <number>'"),
        ([{"question": "q"}], {"format": "gsm8k"}, "row 1 has no text field 'answer'"),
        ([ROW], {"eval_size": 3}, "has 1 rows, too few to hold one out"),
        ([{"question": "q"}], {}, "row 1 has no field 'prompt', but question; data.options.columns={prompt: NAME}"),
        ([ROW], {"options": {"columns": {"prompt": "text"}}}, "has no field 'text', which data.options.columns.prompt"),
    ],
)
def test_a_bad_row_is_named_with_its_number(tmp_path, rows, config, words):
    with pytest.raises(DataError, match=words):
        load_datasets(DataConfig(path=write(tmp_path / "d.jsonl", rows), **{"eval_size": 1, **config}), seed=0)


def test_missing_files_and_broken_json(tmp_path):
    with pytest.raises(DataError, match="there is no file .*nowhere.jsonl"):
        load_datasets(DataConfig(path=str(tmp_path / "nowhere.jsonl")), seed=0)
    with pytest.raises(DataError, match=r"has no train.jsonl or train.parquet"):
        load_datasets(DataConfig(path=str(tmp_path)), seed=0)
    (tmp_path / "bad.jsonl").write_text(json.dumps(ROW) + "\n{oops\n")
    with pytest.raises(DataError, match="row 2 is not JSON"):
        load_datasets(DataConfig(path=str(tmp_path / "bad.jsonl")), seed=0)
    with pytest.raises(DataError, match="needs data.path"):
        load_datasets(DataConfig(), seed=0)


@pytest.mark.process
@pytest.mark.promise("Held-out rows are never trained on")
def test_reasoning_gym_holds_out_problems_never_trained_on():
    config = DataConfig(
        format="reasoning_gym",
        options={
            "task": "basic_arithmetic",
            "task_config": {
                "min_terms": 2,
                "max_terms": 2,
                "min_digits": 1,
                "max_digits": 1,
                "operators": ["+"],
                "allow_negation": False,
            },
            "prompt_template": "{expression} =",
            "num_rows": 300,
        },
        eval_size=20,
    )
    data = load_datasets(config, seed=1)
    train, held_out = ({r["prompt"][0]["content"] for r in rows} for rows in (data.train, data.eval))
    assert len(held_out) == 20
    assert not train & held_out
    first = data.train[0]
    assert str(eval(first["prompt"][0]["content"].removesuffix(" ="))) == first["reward_model"]["ground_truth"]
    assert load_datasets(config, seed=1) == data
    assert load_datasets(config, seed=2) != data


def test_a_wrong_reasoning_gym_task_or_template_is_told():
    with pytest.raises(DataError, match="cannot make task 'no_such_task'"):
        load_datasets(DataConfig(format="reasoning_gym", options={"task": "no_such_task"}), seed=0)
    with pytest.raises(DataError, match=r"prompt_template names 'nothing', but task 'chain_sum' has \["):
        load_datasets(DataConfig(format="reasoning_gym", options={"prompt_template": "{nothing}"}), seed=0)


@pytest.mark.process
@given(st.integers(1, 30), st.integers(0, 100), st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_order_uses_rows_once_per_epoch_and_resumes_anywhere(num_rows, seed, counts):
    whole = PromptOrder(num_rows=num_rows, seed=seed)
    taken = [index for count in counts for index in whole.take(count)]
    for at in range(0, len(taken) - num_rows + 1, num_rows):
        assert sorted(taken[at : at + num_rows]) == list(range(num_rows))
    resumed = PromptOrder(num_rows=num_rows, seed=seed, position=counts[0])
    assert resumed.take(sum(counts[1:])) == taken[counts[0] :]


@pytest.mark.process
def test_a_shuffled_stream_of_datasets_that_goes_on_loses_rows(tmp_path):
    """Why our stream is our own: each row once. Once this fails, `datasets` can take its place."""
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(2000)))

    def stream():
        return datasets.load_dataset("json", data_files=str(file), split="train", streaming=True).shuffle(
            seed=1, buffer_size=100
        )

    begun = stream()
    first = [row["n"] for row in itertools.islice(begun, 300)]
    resumed = stream()
    resumed.load_state_dict(begun.state_dict())
    rest = [row["n"] for row in resumed]
    assert len({*range(2000)} - {*first, *rest}) > 0, "lost"
    assert len({*first} & {*rest}) > 0, "given twice"


def test_bad_rows_are_dropped_and_counted_when_asked(tmp_path):
    rows = [ROW, {"prompt": 1}, *[ROW] * 10, {"text": 1}]
    data = load_datasets(DataConfig(path=write(tmp_path / "all.jsonl", rows), on_bad_row="drop"), seed=0)
    assert (len(data.train) + len(data.eval), data.num_bad) == (11, 2)
    assert "all.jsonl, row 2: " in data.bad[0]
    assert data.where(1).endswith("all.jsonl, row 3")


def test_values_of_parquet_become_json_values(tmp_path):
    stamp = datetime.datetime(2026, 11, 28, 4, 5, 6)
    values = {"day": stamp.date(), "at": stamp, "price": Decimal("12.50"), "count": Decimal("3"), "sampling_params": 1}
    parquet.write_table(
        pa.Table.from_pylist([{**ROW, "extra_info": {"n": 1}, **values}] * 20), tmp_path / "all.parquet"
    )
    row = load_datasets(DataConfig(path=str(tmp_path / "all.parquet")), seed=0).train[0]
    assert json.loads(json.dumps(row)) == row
    assert (row["day"], row["at"], row["price"], row["count"]) == ("2026-11-28", "2026-11-28T04:05:06", 12.5, 3)


def test_numpy_values_become_json_values():
    given = {"a": np.float32(0.5), "b": np.arange(3), "c": np.bool_(True), "d": np.datetime64("2026-11-28", "ns")}
    made = plain(given, "f, row 1")
    assert made == {"a": 0.5, "b": [0, 1, 2], "c": True, "d": "2026-11-28T00:00:00.000000000"}
    assert json.loads(json.dumps(made)) == made


def test_values_without_a_json_value_are_refused_by_row():
    with pytest.raises(DataError, match="f, row 7: field 'x' holds a builtins.set"):
        plain({"x": {1, 2}}, "f, row 7")


def test_fields_that_arrow_fills_in_are_dropped_from_chats(tmp_path):
    calls = [{"name": "a", "arguments": {"city": "paris"}}, {"name": "b", "arguments": {"expr": "1+1"}}]
    messages = [[*ROW["prompt"], {"role": "assistant", "content": None, "tool_calls": [call]}] for call in calls]
    table = pa.Table.from_pylist([{**ROW, "extra_info": {"n": 1}, "prompt": each} for each in messages] * 10)
    parquet.write_table(table, tmp_path / "all.parquet")
    data = load_datasets(DataConfig(path=str(tmp_path / "all.parquet")), seed=0)
    assert data.train[0]["prompt"] == messages[0]


def test_lone_surrogates_of_a_row_are_replaced(tmp_path):
    rows = [{"prompt": "a\ud800", "answer": "4"}] * 20
    row = load_datasets(DataConfig(path=write(tmp_path / "all.jsonl", rows)), seed=0).train[0]
    assert row["prompt"][0]["content"] == "a\ufffd"


TABLE_TYPES = {
    "time": (pa.array([datetime.time(1, 2, 3, 4)] * 20), "01:02:03.000004"),
    "duration": (pa.array([datetime.timedelta(seconds=1.5)] * 20), 1.5),
    "zoned": (pa.array([1_500_000] * 20, pa.timestamp("us", "+01:00")), "1970-01-01T01:00:01.500000+01:00"),
    "uuid": (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([uuid.UUID(int=5).bytes] * 20, pa.binary(16))),
        "00000000-0000-0000-0000-000000000005",
    ),
    "bytes": (pa.array([b"\xff\0"] * 20), b"\xff\0"),
    "large text": (pa.array(["x"] * 20, pa.large_string()), "x"),
    "dictionary": (pa.array(["a", "a"] * 10).dictionary_encode(), "a"),
    "nested": (
        pa.array([[{"a": 1, "b": [{"c": datetime.date(2026, 1, 2)}]}]] * 20),
        [{"a": 1, "b": [{"c": "2026-01-02"}]}],
    ),
    "decimal256": (
        pa.array([Decimal("123456789012345678901234567890123456789.5")] * 20, pa.decimal256(60, 1)),
        "123456789012345678901234567890123456789.5",
    ),
    "short decimal": (pa.array([Decimal("0.1")] * 20), 0.1),
    "map": (pa.array([[("k", 1)]] * 20, pa.map_(pa.string(), pa.int64())), [["k", 1]]),
    "half": (pa.array([np.float16(1.5)] * 20, pa.float16()), 1.5),
    "unsigned": (pa.array([2**64 - 1] * 20, pa.uint64()), 2**64 - 1),
    "none": (pa.nulls(20), None),
}


@pytest.mark.parametrize("kind", TABLE_TYPES)
def test_columns_of_a_table_become_json_values(tmp_path, kind):
    column, wanted = TABLE_TYPES[kind]
    table = pa.table({"prompt": pa.array(["hi"] * 20), "answer": pa.array(["4"] * 20), "x": column})
    parquet.write_table(table, tmp_path / "all.parquet")
    assert load_datasets(DataConfig(path=str(tmp_path / "all.parquet")), seed=0).train[0]["x"] == wanted


def test_a_value_that_python_cannot_hold_is_refused_by_row(tmp_path):
    far = pa.array([0] * 18 + [10**15] * 2, pa.date64())
    table = pa.table({"prompt": pa.array(["hi"] * 20), "answer": pa.array(["4"] * 20), "day": far})
    parquet.write_table(table, tmp_path / "all.parquet")
    with pytest.raises(
        DataError, match=r"2 of 20 rows .*all.parquet, row 19: field 'day' has a value that Python"
    ) as told:
        load_datasets(DataConfig(path=str(tmp_path / "all.parquet")), seed=0)
    assert "row 20" in str(told.value)


MISSING = {
    "numpy NaT": (np.datetime64("NaT"), None),
    "numpy duration": (np.timedelta64(1500, "ms"), 1.5),
    "numpy durations": (np.array([1500], "m8[ms]"), [1.5]),
    "numpy times": (np.array(["2026-11-28", "NaT"], "M8[D]"), ["2026-11-28", None]),
    "numpy objects": (np.array([Decimal("0.5"), None]), [0.5, None]),
    "huge decimal": (Decimal("1E+999999"), "1E+999999"),
}


@pytest.mark.parametrize("kind", MISSING)
def test_times_and_durations_of_numpy_become_json_values(kind):
    value, wanted = MISSING[kind]
    assert plain({"x": value}, "f, row 1") == {"x": wanted}


def test_missing_values_of_pandas_are_null():
    pandas = pytest.importorskip("pandas", reason="comes with the datasets package")
    given = {"a": pandas.NA, "b": [pandas.NaT], "c": pandas.Timestamp("2026-11-28")}
    assert plain(given, "f, row 1") == {"a": None, "b": [None], "c": "2026-11-28T00:00:00"}


NAMES = ["self", "params", "row", "kwargs", "", "not an identifier", "\u00fcn\u00ef", "data_source ", "class", "0"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_column_may_have_any_name(tmp_path, suffix):
    rows = [{**ROW, "extra_info": {"n": 1}, **{name: index for index, name in enumerate(NAMES)}}] * 20
    path = tmp_path / f"all.{suffix}"
    if suffix == "jsonl":
        write(path, rows)
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    row = load_datasets(DataConfig(path=str(path)), seed=0).train[0]
    assert [row[name] for name in NAMES] == [*range(len(NAMES))]


def test_names_that_are_given_twice_are_refused(tmp_path):
    (tmp_path / "all.jsonl").write_text(
        '{"prompt": "a", "answer": "4"}\n{"prompt": "a", "answer": "4", "answer": "5"}\n'
    )
    with pytest.raises(DataError, match=r"all.jsonl, row 2 has the field 'answer' twice; take one out"):
        load_datasets(DataConfig(path=str(tmp_path / "all.jsonl")), seed=0)
    columns = [pa.array(["hi"] * 2), pa.array([1] * 2), pa.array([2] * 2)]
    parquet.write_table(pa.Table.from_arrays(columns, names=["prompt", "x", "x"]), tmp_path / "all.parquet")
    with pytest.raises(DataError, match=r"all.parquet has two columns 'x'; rename one"):
        load_datasets(DataConfig(path=str(tmp_path / "all.parquet")), seed=0)
    with pytest.raises(DataError, match="f, row 1 has two fields '1'"):
        plain({1: "a", "1": "b"}, "f, row 1")
    with pytest.raises(DataError, match="f, row 1: field 'x' has names that are equal as texts"):
        plain({"x": {chr(0xD800): 1, chr(0xFFFD): 2}}, "f, row 1")


DEFAULT = {"type": "object", "properties": {"unit": {"type": "string", "default": None}}}


@pytest.mark.parametrize("columns", [{}, {"tools": "functions"}], ids=["same", "renamed"])
def test_nulls_that_a_row_spells_are_kept(tmp_path, columns):
    """`"default": null` of a schema says that nothing is passed; only tables fill fields in that a row has not."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": DEFAULT}}]
    call = {"function": {"name": "f", "arguments": {"unit": None}}}
    prompt = [*ROW["prompt"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    theirs = columns.get("tools", "tools")
    rows = [{**ROW, "extra_info": {"n": 1}, "prompt": prompt, theirs: tools}] * 20
    config = DataConfig(path=write(tmp_path / "all.jsonl", rows), options={"columns": columns})
    row = load_datasets(config, seed=0).train[0]
    assert (row["tools"], row["prompt"]) == (tools, prompt)
    other = [
        {"type": "function", "function": {"name": "g", "parameters": {**DEFAULT, "properties": {"n": {"type": "x"}}}}}
    ]
    parquet.write_table(pa.Table.from_pylist([rows[0], {**rows[0], theirs: other}] * 10), tmp_path / "all.parquet")
    config = DataConfig(path=str(tmp_path / "all.parquet"), options={"columns": columns})
    assert load_datasets(config, seed=0).train[1]["tools"] == other, "unit is a field of the other row"
