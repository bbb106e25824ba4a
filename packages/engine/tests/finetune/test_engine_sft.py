import io
import json
import re
import sys
from dataclasses import replace

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_csrc.inference.folder_tokens import read_folder_tokens
from rl_engine import ConfigError, DataError, EngineConfig, create_engine
from rl_engine.finetune.cli import parse_config, sft_main
from rl_engine.finetune.loop import batches
from rl_engine.finetune.preferences import tokenize_labelled, tokenize_pairs
from rl_engine.finetune.sft import SftConfig, tokenize_file, train
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


def logged(lines):
    """Lines of steps with metrics: a slow run says between them how long it will take."""
    return [line for line in lines if line.startswith("step") and not line.endswith("to go")]


@pytest.mark.process
def test_it_learns_and_saves_a_folder_that_loads(tmp_path, model):
    data = write(tmp_path / "data.jsonl", [chat(f"{a}+{b}=", str(a + b)) for a in range(5) for b in range(5)])
    lines = []
    config = SftConfig(
        model_path=str(model), data_path=str(data), output_dir=str(tmp_path / "out"),
        steps=60, batch_size=25, lr=1e-2, log_every=10,
    )  # fmt: skip
    outcome = train(config, lines.append)
    assert lines[0] == (
        "25 rows, 200 tokens, longest row 8; 25 rows a step, packed without padding into micro-batches of at most "
        "8192 tokens"
    )
    assert lines[1] == "a turn ends at <eos> (1)"
    assert len(logged(lines)) == 6
    assert lines[-1].startswith("step 60/60  loss ")
    assert outcome.metrics["loss"] < 0.7  # 4.4 at first
    assert (outcome.steps, outcome.num_rows) == (60, 25)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    engine = create_engine("fsdp", EngineConfig(model_path=str(tmp_path / "out"), optimizer=None))
    engine.initialize()
    columns = engine.forward_backward_batch(tokenize_file(data, model), None).columns
    assert -columns["logprobs"].values().mean() < 0.8
    engine.close()


@pytest.mark.process
def test_it_stops_at_the_target_loss(tmp_path, model):
    data = write(tmp_path / "data.jsonl", [chat("1+1=", "2")] * 3)
    config = SftConfig(
        model_path=str(model), data_path=str(data), output_dir=str(tmp_path / "out"),
        steps=200, batch_size=2, lr=1e-2, log_every=5, target_loss=0.5,
    )  # fmt: skip
    outcome = train(config, lambda _: None)
    assert outcome.metrics["loss"] <= 0.5
    assert outcome.steps < 200


@pytest.mark.process
def test_it_stops_at_the_target_sequence_accuracy(tmp_path, model):
    data = write(tmp_path / "data.jsonl", [chat("1+1=", "2"), chat("1+2=", "3")])
    config = SftConfig(
        model_path=str(model), data_path=str(data), output_dir=str(tmp_path / "out"),
        steps=200, batch_size=2, lr=1e-2, log_every=5, target_sequence_accuracy=1.0,
    )  # fmt: skip
    outcome = train(config, lambda _: None)
    assert outcome.metrics["sequence_accuracy"] == 1.0
    assert 5 < outcome.steps < 200


def test_a_run_that_reached_its_target_resumes_at_its_end(tmp_path, model):
    data = write(tmp_path / "data.jsonl", [chat("1+1=", "2"), chat("1+2=", "3")])
    config = SftConfig(
        model_path=str(model), data_path=str(data), output_dir=str(tmp_path / "out"),
        steps=30, batch_size=2, log_every=3, target_loss=100.0, save_every=1,
    )  # fmt: skip
    first = train(config, lambda _: None)
    again = train(replace(config, resume=True), lambda _: None)
    assert (first.steps, again.steps) == (3, 3)
    assert again.metrics == first.metrics


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


def test_every_assistant_turn_of_a_chat_is_learned_only(tmp_path, model):
    turns = [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows = tokenize_file(write(tmp_path / "data.jsonl", [{"messages": messages}]), model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt, completion, mask = (
        rows[name].values() for name in ("prompt_token_ids", "completion_token_ids", "loss_mask")
    )
    assert tokenizer.decode(prompt) == "<user>1+1=<assistant>"
    assert tokenizer.decode(completion) == "2<eos><user>2+2=<assistant>4<eos>"
    assert tokenizer.decode(completion[mask.bool()]) == "2<eos>4<eos>"


def with_template(folder, change):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = change(tokenizer.chat_template)
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_what_a_template_adds_behind_eos_is_not_learned(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    tokenizer = with_template(folder, lambda text: text.replace("<eos>", "<eos>\n"))
    turns = [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows = tokenize_file(write(tmp_path / "data.jsonl", [{"messages": messages}]), folder)
    assert tokenizer.decode(rows["completion_token_ids"].values()) == "2<eos>\n<user>2+2=<assistant>4<eos>"
    assert rows["loss_mask"].values().tolist() == [1, 1] + [0] * 7 + [1, 1]


@pytest.mark.promise("Rows of every shape end and are trimmed alike")
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: text.replace("<eos>", "<user>\n"),  # no eos token of any file
        lambda text: text.replace("<eos>", ""),
        lambda text: text.replace("message['content']", "message['content'] | trim"),
        lambda text: text.replace("{% if message['role'] == 'assistant' %}<eos>", "{% if not loop.last %}<eos>"),
    ],
    ids=["eos", "another token", "none", "trims", "between turns"],
)
def test_all_shapes_of_rows_end_and_trim_alike(tmp_path, change):
    folder, question = write_tiny_model(tmp_path / "model"), {"role": "user", "content": "1+1="}
    with_template(folder, change)
    answers = [{"role": "assistant", "content": " 2 "}, {"role": "assistant", "content": "3"}]
    rows = [{"messages": [question, answers[0]]}, {"prompt": "1+1=", "completion": " 2 "}]
    rows.append({"prompt": [question], "completion": [answers[0]]})
    found = tokenize_file(write(tmp_path / "rows.jsonl", rows), folder)
    pairs = [{"prompt": "1+1=", "chosen": " 2 ", "rejected": "3"}]
    pairs.append({"chosen": [question, answers[0]], "rejected": [question, answers[1]]})
    paired = tokenize_pairs(write(tmp_path / "pairs.jsonl", pairs), folder).columns
    labelled = [{"prompt": "1+1=", "completion": text, "label": text == "3"} for text in (" 2 ", "3")]
    judged = tokenize_labelled(write(tmp_path / "labelled.jsonl", labelled), folder).columns
    for name in ("prompt_token_ids", "completion_token_ids"):
        rows_of = [[row.tolist() for row in columns[name].unbind()] for columns in (found, paired, judged)]
        assert len({str(row) for row in (*rows_of[0], *rows_of[1][::2], rows_of[2][0])}) == 1
    assert read_folder_tokens(folder).turn_end_id == rows_of[0][0][-1]
    assert found["loss_mask"].values().min() == 1


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}] * 2
    data = write(tmp_path / "data.jsonl", [{"messages": messages}])
    with pytest.raises(DataError, match="row 1: the chat template writes an earlier turn differently"):
        tokenize_file(data, folder)


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
        ("{", "row 1 is not JSON that can be read"),
        ("", "has no rows"),
        ('{"prompt_token_ids": [], "completion_token_ids": [1]}', "row 1 needs at least one prompt token"),
        (
            '{"prompt_token_ids": [1], "completion_token_ids": [1, 2], "loss_mask": [1]}',
            "row 1 has 1 of loss_mask for 2 tokens",
        ),
        ('{"messages": [{"role": "user", "content": "1"}]}', "row 1: messages has no assistant turn"),
        ('{"prompt": 1, "completion": "2"}', "row 1: prompt is 1; wanted text or a list of chat messages"),
        (
            '{"prompt": [{"role": "user", "content": "1"}], "completion": 2}',
            "row 1: completion is 2; wanted text or a list",
        ),
        (
            '{"prompt_token_ids": [1.5], "completion_token_ids": [1]}',
            r"row 1: prompt_token_ids is \[1\.5\]; wanted a list",
        ),
        (
            '{"prompt_token_ids": [1], "completion_token_ids": [1], "loss_mask": [2]}',
            r"row 1: loss_mask is \[2\]; wanted a list of 0 and 1",
        ),
        (
            '{"prompt_token_ids": [1], "completion_token_ids": [1, 2], "loss_mask": [0, 0]}',
            "loss_mask is 0 on every token of every row, so that there is nothing to learn",
        ),
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
        (["seed=1", "steps"], "Argument 'steps' is not key=value."),
        (["steps"], "there is no recipe 'steps' of rl-sft: give sft, sft-vlm, or a .yaml file, or key=value."),
        (["steps=many"], "steps is 'many'; wanted a whole number."),
        (["precision=int4"], "precision is 'int4'; wanted float32, bfloat16, float64, auto."),
        (["seed=1", "seed=2"], "Key 'seed' is given twice."),
        (["seed=1"], "model.path and data.path and output_dir must be given"),
        (["model.path=x", "data.path=/no/file", "output_dir=o"], "Data file /no/file does not exist."),
        (["model.path=x", "data.path=d", "output_dir=o", "steps=0"], "steps is 0; it must be at least 1."),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"rl-sft: {message}")
    assert err.endswith("\n  more in docs/guides/fine-tuning.md\n")
    assert err.count("\n") == 2


def test_a_folder_without_tokenizer_is_bad_input(capsys, tmp_path):
    data = write(tmp_path / "data.jsonl", [chat("1+1=", "2")])
    folder = write_tiny_model(tmp_path / "model")
    for file in folder.glob("*token*"):
        file.unlink()
    code, _, err = run(capsys, f"model.path={folder}", f"data.path={data}", f"output_dir={tmp_path / 'out'}")
    assert code == 2
    assert "has no tokenizer" in err


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.path=modle", "Model folder modle does not exist"),
        ("backend=fsddp", "No engine backend is named 'fsddp'"),
        ("backend=fsdpp", "No engine backend is named 'fsdpp'"),
        ("eval.path=nothing", "Data file nothing does not exist"),
    ],
)
def test_what_cannot_run_is_said_before_the_data_is_read(capsys, tmp_path, model, key, message):
    (tmp_path / "data.jsonl").write_text("no JSON")
    arguments = {"model.path": model, "data.path": tmp_path / "data.jsonl", "output_dir": tmp_path / "out"}
    given = [f"{name}={value}" for name, value in arguments.items() if not key.startswith(name)]
    code, _, err = run(capsys, *given, key)
    assert code == 2
    assert message in err


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.process
def test_a_terminal_is_shown_a_bar_and_everything_else_lines(capsys, monkeypatch, tmp_path, model):
    config = resumable(tmp_path, model, steps=2, overwrite=True)
    train(config)
    plain = capsys.readouterr()
    assert "\nstep 1/2  loss " in plain.out
    assert "2/2" not in plain.err
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    train(config)
    assert "2/2" in screen.getvalue()
    assert "loss " in screen.getvalue()
    assert capsys.readouterr().out.count("step 2/2  loss ") == 1


def test_help_lists_the_keys(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "  model.path=needed" in out
    assert "  batch_size=256" in out


def resumable(folder, model, **changes):
    data = write(folder / "data.jsonl", [chat(f"{a}+{b}=", str(a + b)) for a in range(4) for b in range(4)])
    options = {"steps": 8, "batch_size": 6, "lr": 1e-2, "log_every": 1, "save_every": 4}
    return SftConfig(model_path=str(model), data_path=str(data), output_dir=str(folder / "out"), **(options | changes))


@pytest.mark.promise("A resumed rl-sft is the run that was not interrupted")
@pytest.mark.process
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path, model):
    straight, stopped = [], []
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    train(resumable(tmp_path / "a", model), straight.append)

    def stop(line):
        stopped.append(line)
        if line.startswith("step 6"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(resumable(tmp_path / "b", model), stop)
    outcome = train(resumable(tmp_path / "b", model, resume=True), stopped.append)
    assert outcome.steps == 8
    assert "resumed after step 4" in stopped
    again = []
    assert train(resumable(tmp_path / "b", model, resume=True), again.append).steps == 8
    assert again == ["resumed after step 8, the last"]
    losses = [[line.split("  ")[:4] for line in logged(lines)] for lines in (straight, stopped)]
    assert losses[1][6:] == losses[0][4:]
    measured = [[json.loads(line)["metrics"] for line in metrics_of(tmp_path / name)] for name in "ab"]
    assert [each["loss"] for each in measured[0]] == pytest.approx([each["loss"] for each in measured[1]])
    assert len(measured[0]) == 8, "steps 5 and 6 were taken twice, and stand there once"


def metrics_of(folder):
    return (folder / "out.run" / "metrics.jsonl").read_text().splitlines()


@pytest.mark.promise("`rl-sft` and its kin write nothing over what is there")
@pytest.mark.process
def test_what_is_there_is_not_overwritten(tmp_path, model):
    train(resumable(tmp_path, model, steps=1), lambda _: None)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="out has files in it; overwrite=true replaces them, or choose another"):
        train(resumable(tmp_path, model, steps=2), lambda _: None)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    train(resumable(tmp_path, model, steps=2, overwrite=True), lambda _: None)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before


@pytest.mark.process
def test_a_run_writes_config_metrics_summary_and_curve(tmp_path, model):
    pytest.importorskip("matplotlib")
    config = resumable(tmp_path, model, steps=3, save_every=0, trackers="tensorboard")
    outcome = train(replace(config, eval_path=config.data_path, eval_every=2), lambda _: None)
    folder = tmp_path / "out.run"
    lines = [json.loads(line) for line in metrics_of(tmp_path)]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert ["held_out_loss" in line["metrics"] for line in lines] == [False, True, True]
    assert lines[-1]["metrics"]["held_out_loss"] == outcome.eval_metrics["loss"]
    assert {"loss", "grad_norm", "lr", "tokens_per_s"} <= lines[0]["metrics"].keys()
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert (written["name"], written["steps"], written["batch_size"]) == ("rl-sft", 3, 6)
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3
    assert (folder / "learning_curve.png").stat().st_size > 1000
    assert list((folder / "tensorboard").iterdir())
    assert not (tmp_path / "out" / "metrics.jsonl").exists(), "the model folder holds a model"


@pytest.mark.process
def test_what_is_not_reached_is_said(tmp_path, model):
    lines = []
    config = resumable(tmp_path, model, steps=2, save_every=0, warmup_steps=5, target_loss=1e-6)
    train(replace(config, eval_path=config.data_path, eval_every=7), lines.append)
    assert "warmup_steps=5 is cut to 1, half of 2 steps" in lines
    assert "eval_every=7 is beyond 2 steps: held-out rows are scored at the end" in lines
    assert re.fullmatch(r"target_loss=1e-06 was not reached: loss is \d\.\d{4}", lines[-1])


@pytest.mark.process
def test_epochs_stand_in_the_place_of_steps(tmp_path, model):
    config = replace(resumable(tmp_path, model, save_every=0), steps=300, epochs=2)  # 16 rows, 6 a step
    assert train(config, lambda _: None).steps == 6
    with pytest.raises(ConfigError, match="epochs is 2 and steps 7; both say how long: leave one out"):
        train(replace(config, steps=7), lambda _: None)


def test_an_unknown_adapter_or_tracker_key_is_refused(tmp_path, model):
    with pytest.raises(ConfigError, match=r"lora.alpha does nothing without lora.rank"):
        train(resumable(tmp_path, model, lora_alpha=3.0), lambda _: None)
    with pytest.raises(ConfigError, match="trackers names 'tensorbord'; wanted tensorboard or wandb"):
        train(resumable(tmp_path, model, trackers="tensorbord"), lambda _: None)
    config = parse_config(
        SftConfig, ["model.path=m", "data.path=d", "output_dir=o", "lora.rank=4", "lora.export=adapter"]
    )
    assert (config.lora.rank, config.lora.export) == (4, "adapter")


@pytest.mark.promise("`rl-sft lora.export=adapter` writes a folder that peft loads")
@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21 reads it
def test_an_adapter_alone_is_a_folder_that_peft_loads(tmp_path, model):
    peft = pytest.importorskip("peft")
    config = resumable(tmp_path, model, steps=4, save_every=0, lora_rank=2, lora_export="adapter")
    train(config, lambda _: None)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    base = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([[5, 6, 7]])
    before = base(ids).logits
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    assert not torch.allclose(loaded(ids).logits, before)


@pytest.mark.process
def test_rows_of_parquet_and_text_are_those_of_chats(tmp_path, model):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    want = tokenize_file(write(tmp_path / "rows.jsonl", [chat("1+1=", "2"), chat("1+2=", "3")]), model)
    said = [{"prompt": "1+1=", "completion": "2"}, chat("1+2=", [{"role": "assistant", "content": "3"}])]
    got = tokenize_file(write(tmp_path / "text.jsonl", said), model)
    assert torch.equal(got["prompt_token_ids"].values(), want["prompt_token_ids"].values())
    assert torch.equal(got["completion_token_ids"].values(), want["completion_token_ids"].values())
    parquet.write_table(
        pa.table({"prompt": ["1+1=", "1+2="], "completion": ["2", "3"], "messages": [None, None]}),
        tmp_path / "rows.parquet",
    )
    got = tokenize_file(tmp_path / "rows.parquet", model)
    assert torch.equal(got["completion_token_ids"].values(), want["completion_token_ids"].values())
    (tmp_path / "no.parquet").write_text("PAR2")
    with pytest.raises(DataError, match="no.parquet cannot be read as parquet"):
        tokenize_file(tmp_path / "no.parquet", model)


@pytest.mark.process
def test_another_run_is_not_resumed(tmp_path, model):
    train(resumable(tmp_path, model), lambda _: None)
    with pytest.raises(ConfigError, match=r"written with batch_size=6, this run has 5"):
        train(resumable(tmp_path, model, resume=True, batch_size=5), lambda _: None)


@pytest.mark.process
def test_an_unsaved_run_does_not_resume_an_older_checkpoint(tmp_path, model):
    train(resumable(tmp_path, model), lambda _: None)

    def stop(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(resumable(tmp_path, model, lr=1e-3, overwrite=True), stop)
    with pytest.raises(ConfigError, match=r"written with lr=0.01, this run has 0.001"):
        train(resumable(tmp_path, model, lr=1e-3, resume=True), lambda _: None)


@pytest.mark.process
def test_an_interrupted_checkpoint_replacement_is_found(tmp_path, model):
    train(resumable(tmp_path, model, steps=4), lambda _: None)
    (tmp_path / "out.checkpoint").rename(tmp_path / ".out.checkpoint.previous")
    lines = []
    train(resumable(tmp_path, model, steps=4, resume=True), lines.append)
    assert lines == ["resumed after step 4, the last"]


@pytest.mark.process
def test_held_out_rows_are_scored_and_not_learned(tmp_path, model):
    lines = []
    held_out = write(tmp_path / "eval.jsonl", [chat("9+9=", "18")])
    outcome = train(resumable(tmp_path, model, eval_path=str(held_out), eval_every=4), lines.append)
    assert [line.split("  ")[0] for line in lines if "held out" in line] == ["step 4/8", "step 8/8"]
    engine = create_engine("fsdp", EngineConfig(model_path=str(tmp_path / "out"), optimizer=None))
    engine.initialize()
    scored = engine.forward_backward_batch(tokenize_file(held_out, model), None).columns["logprobs"].values()
    engine.close()
    assert outcome.eval_metrics["loss"] == pytest.approx(-scored.mean().item(), abs=1e-4)
