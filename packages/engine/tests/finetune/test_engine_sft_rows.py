"""Rows of rl-sft: raw text, tools, and what Arrow fills in."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import AutoTokenizer

from rl_engine.errors import DataError
from rl_engine.finetune.data import ChatTokenizer, read_rows, well_formed
from rl_engine.finetune.preferences import tokenize_labelled, tokenize_pairs, tokenize_steps
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
    found = []
    read_rows(tmp_path / "rows.parquet", "no folder", (("messages",),), lambda row, *_: found.append(row))
    assert found == rows


def test_lone_surrogates_of_rows_are_replaced():
    assert well_formed([{"role": "user", "content": "a\ud800"}]) == [{"role": "user", "content": "a\ufffd"}]


ASKED = [{"role": "user", "content": "weather?"}]
SAID = {"role": "assistant", "content": "sunny"}
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "a town"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<eos>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def model_with(folder, template):
    model = write_tiny_model(folder, max_position_embeddings=4096)
    tokenizer = ChatTokenizer(model)._tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    return model


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory):
    return model_with(tmp_path_factory.mktemp("t") / "model", TEMPLATE)


def write(tmp_path, rows):
    (tmp_path / "rows.jsonl").write_text("\n".join(each if each == "" else json.dumps(each) for each in rows) + "\n")
    return tmp_path / "rows.jsonl"


PAIR = {"prompt": ASKED, "chosen": [SAID], "rejected": [{**SAID, "content": "no"}]}
READERS = {
    "messages": (tokenize_file, {"messages": [*ASKED, SAID]}),
    "completion": (tokenize_file, {"prompt": ASKED, "completion": [SAID]}),
    "pairs": (tokenize_pairs, PAIR),
    "labelled": (tokenize_labelled, PAIR),
    "kto": (tokenize_labelled, {"prompt": ASKED, "completion": "sunny", "label": True}),
    "steps": (tokenize_steps, {"prompt": ASKED, "steps": ["a", "b"], "labels": [1, 0]}),
}


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "text"])
@pytest.mark.parametrize("shape", READERS)
def test_a_rows_tools_are_in_every_commands_prompts(tmp_path, with_tools, shape, tools):
    read, row = READERS[shape]
    rows = [{**row, "tools": tools}]
    if shape == "kto":
        rows.append({**rows[0], "label": False})
    found = read(write(tmp_path, rows), with_tools)
    ids = getattr(found, "columns", found)["prompt_token_ids"].unbind()[0].tolist()
    tokenizer = ChatTokenizer(with_tools)._tokenizer()
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    assert ids == tokenizer.apply_chat_template(ASKED, tools=TOOLS, **options)
    assert len(ids) - len(tokenizer.apply_chat_template(ASKED, **options)) == len(
        tokenizer(json.dumps(TOOLS) + "<eos>", add_special_tokens=False)["input_ids"]
    )


BAD = {
    "sft": (tokenize_file, {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": 2}, "completion is 2"),
    "dpo": (tokenize_pairs, PAIR, {**PAIR, "chosen": 2}, "chosen is 2"),
    "kto": (tokenize_labelled, PAIR, {"prompt": "a", "completion": "b", "label": 2}, "has label 2"),
    "rm": (
        tokenize_steps,
        {"prompt": "a", "steps": ["b"], "labels": [1]},
        {"prompt": "a", "steps": ["b"], "labels": []},
        "has 1 steps and 0 labels",
    ),
}


@pytest.mark.parametrize("command", BAD)
def test_up_to_five_bad_rows_are_named_by_their_lines(tmp_path, with_tools, command):
    read, good, bad, reason = BAD[command]
    with pytest.raises(DataError) as caught:
        read(write(tmp_path, [good, "", bad, *[bad] * 6]), with_tools)
    told = str(caught.value)
    assert "rows.jsonl: 7 of 8 rows cannot be used: row 3" in told
    assert told.count(reason) == 5
    assert told.endswith("; and 2 more.")
    assert "row 7" in told
    assert "row 8" not in told


def test_a_row_that_the_template_refuses_is_named(tmp_path):
    template = "{% if messages[0].content == 'x' %}{{ raise_exception('no x') }}{% endif %}" + TEMPLATE
    model = model_with(tmp_path / "model", template)
    pair = {"prompt": "x", "chosen": "a", "rejected": "b"}
    for read, row in (
        (tokenize_file, {"prompt": "x", "completion": "y"}),
        (tokenize_pairs, pair),
        (tokenize_labelled, pair),
        (tokenize_steps, {"prompt": "x", "steps": ["b"], "labels": [1]}),
    ):
        with pytest.raises(DataError, match=r"rows.jsonl: row 1: The chat template .* cannot render .*no x"):
            read(write(tmp_path, [row]), model)


EACH = "{{% for message in messages %}}{{{{ message.role }}}}={}<eos>{{% endfor %}}"
OPEN = "{% if add_generation_prompt %}assistant={% endif %}"
PARTS = "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
BOTH = "{% if message.content is string %}{{ message.content }}{% else %}" + PARTS + "{% endif %}"
AS_TEXT = "{{ message.content }}"


@pytest.mark.parametrize("written", [AS_TEXT, PARTS, BOTH, "{{ message.content + '' }}"])
def test_contents_as_text_and_as_parts_are_learned_alike(tmp_path, written):
    model = model_with(tmp_path / "model", EACH.format(written) + OPEN)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for texts in (["1+1=", "2"], ["1+1=", "2", "2+2=", "4"]):
        turns = [*zip(["user", "assistant"] * 2, texts, strict=False)]
        as_text = [{"role": role, "content": text} for role, text in turns]
        as_parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
        rows = tokenize_file(write(tmp_path, [{"messages": as_text}, {"messages": as_parts}]), model)
        for prompt, said in zip(rows["prompt_token_ids"].unbind(), rows["completion_token_ids"].unbind(), strict=True):
            assert tokenizer.decode([*prompt, *said]) == "".join(f"{role}={text}<eos>" for role, text in turns)


def test_reasoning_that_the_template_leaves_out_is_refused(tmp_path):
    said = {"role": "assistant", "content": "2", "reasoning_content": "1 and 1"}
    chat = [{"role": "user", "content": "1+1="}, said]
    rows = write(tmp_path, [{"messages": chat}, {"prompt": "1+1=", "completion": [said]}])
    with pytest.raises(DataError, match="2 of 2 rows .* leaves out reasoning_content"):
        tokenize_file(rows, model_with(tmp_path / "without", EACH.format(AS_TEXT) + OPEN))
    tokenize_file(rows, model_with(tmp_path / "with", EACH.format("{{ message.reasoning_content }}" + AS_TEXT) + OPEN))


def test_a_folder_without_a_tokenizer_is_named_once(tmp_path):
    with pytest.raises(DataError, match=r"^Model folder .* has no tokenizer"):
        tokenize_file(write(tmp_path, [{"prompt": "a", "completion": "b"}] * 9), tmp_path)


CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}{% endfor %}"


@pytest.mark.parametrize("turns", [1, 2])
def test_arguments_as_text_and_as_object_are_learned_alike(tmp_path, turns):
    model = model_with(tmp_path / "model", TEMPLATE.replace("{{ m.content }}", "{{ m.content or '' }}" + CALLS))
    found = []
    for arguments in ({"city": "paris"}, '{"city": "paris"}'):
        call = {"function": {"name": "weather", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        rows = tokenize_file(
            write(tmp_path, [{"messages": [*ASKED, said, *([*ASKED, SAID] if turns == 2 else [])]}]), model
        )
        found.append(rows["completion_token_ids"][0].tolist())
    assert found[0] == found[1]
    wanted = ChatTokenizer(model).ids('<call>{"city": "paris"}')
    assert found[0][: len(wanted)] == wanted


def test_a_template_that_leaves_out_calls_names_the_row(tmp_path, with_tools):
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    with pytest.raises(DataError, match=r"rows.jsonl: row 1: .*leaves out tool calls"):
        tokenize_file(write(tmp_path, [{"messages": [*ASKED, said]}]), with_tools)


def test_nulls_that_a_row_spells_are_kept(tmp_path, with_tools):
    """A schema's `"default": null` is in the prompt; only tables fill fields in that a row has not."""
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"unit": {"type": "string", "default": None}}}}
    ]
    rows = [{"messages": [*ASKED, SAID], "tools": given} for given in (tools, json.dumps(tools))]
    found, wanted = tokenize_file(write(tmp_path, rows), with_tools), ChatTokenizer(with_tools).ids(json.dumps(tools))
    for ids in found["prompt_token_ids"].unbind():
        assert ids.tolist()[: len(wanted)] == wanted


def test_rows_that_cannot_be_held_or_are_ambiguous_are_named(tmp_path, with_tools):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "a", "text": "b"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl: row 2 has 'text' twice"):
        tokenize_file(tmp_path / "rows.jsonl", with_tools)
    days = pa.array([0, 10**15], pa.date64())
    parquet.write_table(pa.table({"text": pa.array(["a", "b"]), "day": days}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet: row 2 is not a row that Python can hold: date value"):
        tokenize_file(tmp_path / "rows.parquet", with_tools)
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet has 'text' twice"):
        tokenize_file(tmp_path / "rows.parquet", with_tools)
