"""Rows of rl-sft: raw text, tools, and what Arrow fills in."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from rl_engine.finetune.data import ChatTokenizer, read_rows, without_nulls
from rl_engine.finetune.sft import tokenize_file
from rl_rollout.testing import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("m") / "model", max_position_embeddings=4096)


def test_raw_text_is_learned_whole_and_ends_with_eos(tmp_path, model):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "once upon a time"}) + "\n")
    rows = tokenize_file(file, model)
    tokenizer = ChatTokenizer(model)._tokenizer()
    ids = [*rows["prompt_token_ids"][0].tolist(), *rows["completion_token_ids"][0].tolist()]
    assert ids == [*tokenizer("once upon a time")["input_ids"], tokenizer.eos_token_id]
    assert len(rows["prompt_token_ids"][0]) == 1


def test_nulls_that_arrow_fills_in_are_no_fields(tmp_path):
    calls = [{"name": "a", "arguments": {"city": "paris"}}, {"name": "b", "arguments": {"expr": "1+1"}}]
    rows = [{"messages": [{"role": "assistant", "content": None, "tool_calls": [c]}]} for c in calls]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet", (("messages",),)) == rows


def test_lone_surrogates_of_rows_are_replaced():
    assert without_nulls([{"role": "user", "content": "a\ud800"}]) == [{"role": "user", "content": "a\ufffd"}]
