import json

import pytest
import torch
from transformers import AutoTokenizer

from rl_engine import DataError, EngineConfig, create_engine
from rl_engine.cli import parse_config, sft_main
from rl_engine.sft import SftConfig, batches, tokenize_file, train
from rl_engine.testing import ragged_batch, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("sft") / "model")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(question, answer):
    return {"prompt": [{"role": "user", "content": question}], "completion": answer}


def run(capsys, *arguments):
    code = sft_main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_learns_and_saves_a_folder_that_loads(tmp_path, model):
    data = write(tmp_path / "data.jsonl", [chat(f"{a}+{b}=", str(a + b)) for a in range(5) for b in range(5)])
    lines = []
    config = SftConfig(
        model_path=str(model), data_path=str(data), output_dir=str(tmp_path / "out"),
        steps=60, batch_size=25, lr=1e-2, log_every=10,
    )  # fmt: skip
    outcome = train(config, lines.append)
    assert len(lines) == 6
    assert lines[-1].startswith("step 60/60  loss ")
    assert outcome.loss < 0.7  # 4.4 at first
    assert (outcome.steps, outcome.num_rows) == (60, 25)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    engine = create_engine("fsdp", EngineConfig(model_path=str(tmp_path / "out"), optimizer=None))
    engine.initialize()
    columns = engine.forward_backward_batch(tokenize_file(data, model), None).columns
    assert -columns["logprobs"].values().mean() < 0.8
    engine.close()


def test_it_stops_at_the_target_loss(tmp_path, model):
    data = write(tmp_path / "data.jsonl", [chat("1+1=", "2")] * 3)
    config = SftConfig(
        model_path=str(model), data_path=str(data), output_dir=str(tmp_path / "out"),
        steps=200, batch_size=2, lr=1e-2, log_every=5, target_loss=0.5,
    )  # fmt: skip
    outcome = train(config, lambda _: None)
    assert outcome.loss <= 0.5
    assert outcome.steps < 200


def test_it_stops_at_the_target_sequence_accuracy(tmp_path, model):
    data = write(tmp_path / "data.jsonl", [chat("1+1=", "2"), chat("1+2=", "3")])
    config = SftConfig(
        model_path=str(model), data_path=str(data), output_dir=str(tmp_path / "out"),
        steps=200, batch_size=2, lr=1e-2, log_every=5, target_sequence_accuracy=1.0,
    )  # fmt: skip
    outcome = train(config, lambda _: None)
    assert outcome.sequence_accuracy == 1.0
    assert 5 < outcome.steps < 200


def test_text_goes_through_the_template_and_ends_with_eos(tmp_path, model):
    data = write(
        tmp_path / "data.jsonl", [chat("1+1=", "2"), {"prompt_token_ids": [9, 8], "completion_token_ids": [7]}]
    )
    rows = tokenize_file(data, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts, completions = rows["prompt_token_ids"].unbind(), rows["completion_token_ids"].unbind()
    assert tokenizer.decode(prompts[0]) == "<user>1+1=<assistant>"
    assert tokenizer.decode(completions[0]) == "2<eos>"
    assert (prompts[1].tolist(), completions[1].tolist()) == ([9, 8], [7])
    assert rows["loss_mask"].values().tolist() == [1, 1, 1]


def test_pretokenised_rows_need_no_tokenizer(tmp_path):
    data = write(tmp_path / "data.jsonl", [{"prompt_token_ids": [9, 8], "completion_token_ids": [7]}])
    want = ragged_batch([[9, 8]], [[7]])
    rows = tokenize_file(data, tmp_path / "nowhere")
    assert all(torch.equal(rows[name].values(), want[name].values()) for name in list(want.keys()))


def test_every_row_comes_once_before_any_comes_again():
    drawn = list(batches(5, 2, seed=0, steps=5))
    assert sorted([row for rows in drawn for row in rows]) == sorted(2 * list(range(5)))
    assert sorted([row for rows in drawn for row in rows][:5]) == list(range(5))
    assert drawn == list(batches(5, 2, seed=0, steps=5))
    assert drawn != list(batches(5, 2, seed=1, steps=5))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": []}', "row 1 has prompt; wanted prompt and completion"),
        ("[1]", "row 1 has list"),
        ("{", "line 1 is not JSON"),
        ("", "has no rows"),
        ('{"prompt_token_ids": [], "completion_token_ids": [1]}', "row 1 needs at least one prompt token"),
    ],
)
def test_bad_rows_are_named(tmp_path, model, text, message):
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        tokenize_file(tmp_path / "data.jsonl", model)


def test_keys_are_parsed_by_the_type_of_their_field():
    config = parse_config(
        SftConfig, ["model.path=m", "data.path=d", "output_dir=o", "--steps=3", "lr=0.5", "target_loss=0.1"]
    )
    assert config == SftConfig(model_path="m", data_path="d", output_dir="o", steps=3, lr=0.5, target_loss=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batchsize=3"], "Unknown key 'batchsize'; the nearest is 'batch_size'."),
        (["steps"], "Argument 'steps' is not key=value."),
        (["steps=many"], "steps is 'many'; wanted a whole number."),
        (["precision=int4"], "precision is 'int4'; wanted float32, bfloat16, float64."),
        (["seed=1", "seed=2"], "Key 'seed' is given twice."),
        (["seed=1"], "model.path and data.path and output_dir must be given"),
        (["model.path=x", "data.path=/no/file", "output_dir=o"], "Data file /no/file does not exist."),
        (["model.path=x", "data.path=d", "output_dir=o", "steps=0"], "steps is 0; it must be at least 1."),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"rl-sft: {message}")
    assert err.count("\n") == 1


def test_a_folder_without_tokenizer_is_bad_input(capsys, tmp_path):
    data = write(tmp_path / "data.jsonl", [chat("1+1=", "2")])
    (tmp_path / "empty").mkdir()
    code, _, err = run(
        capsys, f"model.path={tmp_path / 'empty'}", f"data.path={data}", f"output_dir={tmp_path / 'out'}"
    )
    assert code == 2
    assert "has no tokenizer" in err


def test_help_lists_the_keys(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "  model.path=needed" in out
    assert "  batch_size=256" in out
