import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl_engine import BatchError, ConfigError, DataError, EngineConfig, OptimizerConfig, Precision, create_engine
from rl_engine.batch.row_batch import RowBatch
from rl_engine.finetune.cli import dpo_main, rm_main
from rl_engine.finetune.preferences import DpoConfig, RmConfig, tokenize_pairs, tokenize_steps
from rl_engine.finetune.preferences import train as train_dpo
from rl_engine.finetune.preferences import train as train_rm
from rl_engine.losses import DpoLoss, KtoLoss, process_reward_loss, reward_loss
from rl_engine.testing import ragged, ragged_batch, write_tiny_model
from rl_engine.types import BatchCounts, ModelOutput

VOWELS = "aeiou"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("preferences") / "model")


def vowels_are_better(path, count, seed):
    """Pairs of random strings; the one with more vowels is chosen."""
    draw, rows = random.Random(seed), []
    while len(rows) < count:
        texts = ["".join(draw.choice("bcdfghaeiou") for _ in range(draw.randint(5, 9))) for _ in range(2)]
        worse, better = sorted(texts, key=lambda text: sum(text.count(vowel) for vowel in VOWELS))
        if sum(better.count(vowel) - worse.count(vowel) for vowel in VOWELS) >= 2:
            rows.append({"prompt": [{"role": "user", "content": "say"}], "chosen": better, "rejected": worse})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def output_of(rows, **scores):
    lengths = [len(row) for row in rows]
    return ModelOutput(
        **({"token_logprobs": None} | scores),
        entropy=None,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        counts=BatchCounts(tokens=float(sum(lengths)), sequences=float(len(rows))),
    )


def two_pairs(**columns):
    """Completions of 2, 1, 1 and 2 tokens; the second pair's rows come rejected first."""
    batch = ragged_batch([[1]] * 4, [[2, 3], [4], [5], [6, 7]])
    batch["pair_id"], batch["is_chosen"] = torch.tensor([7, 7, 3, 3]), torch.tensor([True, False, False, True])
    for name, values in columns.items():
        batch[name] = ragged(values, torch.float32)
    return batch


LOGPROBS = torch.tensor([-1.0, -2.0, -2.0, -3.0, -0.5, -0.5])
REFERENCE = [[-1.5, -2.0], [-1.0], [-3.0], [-0.5, -1.5]]
MARGINS = (1.5, 1.0)  # (0.5 - -1) and (1 - 0)


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("sigmoid", sum(math.log(1 + math.exp(-0.5 * margin)) for margin in MARGINS) / 2),
        ("hinge", sum(max(0.0, 1 - 0.5 * margin) for margin in MARGINS) / 2),
        ("ipo", sum((margin - 1.0) ** 2 for margin in (0.25 + 1.0, 0.5 - 0.0)) / 2),  # log-ratios averaged over tokens
    ],
)
def test_preference_losses_by_hand(kind, want):
    loss, metrics = DpoLoss(kind=kind, beta=0.5)(
        output_of(REFERENCE, token_logprobs=LOGPROBS), two_pairs(ref_logprobs=REFERENCE)
    )
    assert float(loss) == pytest.approx(want, rel=1e-6)
    assert float(metrics["accuracy"]) == 1.0


def test_label_smoothing_and_no_reference_by_hand():
    output = output_of(REFERENCE, token_logprobs=LOGPROBS)
    loss, metrics = DpoLoss(beta=1.0, label_smoothing=0.1, is_reference_free=True)(output, two_pairs())
    margins = (-3.0 + 2.0, -1.0 + 3.0)
    softplus = lambda x: math.log(1 + math.exp(x))  # noqa: E731
    assert float(loss) == pytest.approx(sum(0.9 * softplus(-m) + 0.1 * softplus(m) for m in margins) / 2, rel=1e-6)
    assert (float(metrics["accuracy"]), float(metrics["margin"])) == (0.5, 0.5)


def test_kto_by_hand():
    rows = two_pairs(ref_logprobs=REFERENCE)
    rows["is_desirable"], rows["reference_point"] = torch.tensor([True, False, False, True]), torch.full((4,), 0.25)
    loss, metrics = KtoLoss(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)(
        output_of(REFERENCE, token_logprobs=LOGPROBS), rows
    )
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    ratios = (0.5, -1.0, 0.0, 1.0)
    want = 2 * (1 - sigmoid(0.5 * (ratios[0] - 0.25))) + 3 * (1 - sigmoid(0.5 * (0.25 - ratios[1])))
    want += 3 * (1 - sigmoid(0.5 * (0.25 - ratios[2]))) + 2 * (1 - sigmoid(0.5 * (ratios[3] - 0.25)))
    assert float(loss) == pytest.approx(want / 4, rel=1e-6)
    assert float(metrics["accuracy"]) == 1.0
    assert float(metrics["desirable_reward"]) == pytest.approx(0.5 * 1.5 / 4)
    with pytest.raises(ConfigError, match="use KtoLoss"):
        DpoLoss(kind="kto")


@pytest.mark.process
def test_kto_learns_from_rows_without_a_pair(model, tmp_path):
    files = {}
    for name, count, seed in (("train", 200, 0), ("eval", 50, 1)):
        written = Path(vowels_are_better(tmp_path / "pairs.jsonl", count, seed)).read_text()
        pairs = [json.loads(line) for line in written.splitlines()]
        rows = [{"prompt": pair["prompt"], "completion": pair["chosen"], "label": True} for pair in pairs]
        rows += [{"prompt": pair["prompt"], "completion": pair["rejected"], "label": False} for pair in pairs]
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DpoConfig(
        model_path=str(model), data_path=str(files["train"]), eval_path=str(files["eval"]),
        output_dir=str(tmp_path / "out"), loss="kto", steps=60, batch_size=32, lr=1e-2, beta=0.3, log_every=10,
    )  # fmt: skip
    report = train_dpo(config, report=lambda line: None)
    assert report.eval_metrics["accuracy"] > 0.8
    assert report.eval_metrics["desirable_reward"] > report.eval_metrics["undesirable_reward"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt_token_ids": [1], "completion_token_ids": [2], "label": "yes"},
            "label 'yes'; wanted true or false",
        ),
        ({"prompt_token_ids": [1], "completion_token_ids": [2], "label": True}, "every label is true"),
    ],
)
def test_bad_judgements_are_refused(model, tmp_path, capsys, row, message):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    arguments = [f"model.path={model}", f"data.path={tmp_path / 'rows.jsonl'}", f"output_dir={tmp_path / 'out'}"]
    assert dpo_main([*arguments, "loss=kto"]) == 2
    assert message in capsys.readouterr().err
    assert dpo_main([*arguments, "desirable_weight=2"]) == 2
    assert "do nothing with loss=sigmoid" in capsys.readouterr().err


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_an_empty_completion_is_found_in_its_pair(model, tmp_path, capsys, loss):
    pairs = [{"prompt_token_ids": [1], "chosen_token_ids": [2], "rejected_token_ids": ids} for ids in ([3], [], [4])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    arguments = [f"model.path={model}", f"data.path={tmp_path / 'rows.jsonl'}", f"output_dir={tmp_path / 'out'}"]
    assert dpo_main([*arguments, f"loss={loss}"]) == 2
    assert "row 2 needs at least one prompt token" in capsys.readouterr().err


def test_reward_losses_by_hand():
    values = torch.tensor([9.0, 1.0, 0.5, -1.0, 9.0, 2.0])  # the last masked token of each row decides
    loss, metrics = reward_loss(output_of(REFERENCE, token_values=values), two_pairs())
    assert float(loss) == pytest.approx((math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(-3.0))) / 2, rel=1e-6)
    assert (float(metrics["accuracy"]), float(metrics["margin"])) == (1.0, 1.75)
    rows = two_pairs(step_labels=[[0, 1], [1], [0], [0, 1]])
    rows["loss_mask"] = ragged([[0, 1], [1], [1], [0, 1]])
    output = output_of(REFERENCE, token_values=values)
    loss, metrics = process_reward_loss(output, rows)
    want = sum(math.log(1 + math.exp(-x)) for x in (1.0, 0.5, 1.0, 2.0)) / 6  # counts are those of `output`
    assert float(loss) == pytest.approx(want, rel=1e-6)
    assert float(metrics["accuracy"]) == pytest.approx(4 / 6)


def test_a_pair_without_its_other_half_is_refused():
    for chosen, message in (
        ([True, True, False, True], "pair_id 7 has 2 rows with is_chosen and 0 without; a pair is one of each"),
        ([True, False, False, False], "pair_id 3 has 0 rows with is_chosen and 2 without"),
    ):
        batch = two_pairs(ref_logprobs=REFERENCE)
        batch["is_chosen"] = torch.tensor(chosen)
        with pytest.raises(BatchError, match=message):
            RowBatch(batch, needs_mask=True, device=torch.device("cpu"))
    batch["pair_id"] = torch.ones(4, 2)
    with pytest.raises(BatchError, match=r"Column pair_id must have one entry per row, shape \(B,\)"):
        RowBatch(batch, needs_mask=True, device=torch.device("cpu"))


@pytest.mark.process
def test_pairs_stay_together_whatever_the_cut(model):
    draw, seen = random.Random(0), []
    rows = [[[draw.randrange(4, 70) for _ in range(draw.randint(1, 9))] for _ in range(12)] for _ in range(2)]
    batch = ragged_batch(*rows)
    order = torch.tensor([0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0])
    batch["pair_id"], batch["is_chosen"] = order, torch.arange(12) < 6
    for budget in (4096, 60, 40):
        config = EngineConfig(
            model_path=str(model), precision=Precision.FLOAT64, max_tokens_per_gpu=budget, optimizer=OptimizerConfig()
        )
        engine = create_engine("fsdp", config)
        engine.initialize()
        output = engine.forward_backward_batch(batch, DpoLoss(is_reference_free=True))
        seen.append((output.metrics["loss"], output.metrics["margin"], engine.optimizer_step()))
        if budget == 40:
            assert output.num_micro_batches > 1
        engine.close()
    assert seen[1] == pytest.approx(seen[0], rel=1e-9)
    assert seen[2] == pytest.approx(seen[0], rel=1e-9)


@pytest.mark.process
def test_a_pair_may_come_twice_in_one_step(tmp_path, model):
    """The end of one time round the data and the beginning of the next."""
    rows = [{"prompt_token_ids": [5, n], "chosen_token_ids": [7, 8], "rejected_token_ids": [9]} for n in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for config, train in ((DpoConfig, train_dpo), (RmConfig, train_rm)):
        pairs, out = str(tmp_path / "pairs.jsonl"), str(tmp_path / "out")
        run = config(
            model_path=str(model), data_path=pairs, eval_path=pairs, output_dir=out, steps=2, batch_size=5,
            overwrite=True,
        )  # fmt: skip
        assert train(run).steps == 2


def test_a_pair_over_the_budget_is_named(model):
    engine = create_engine("fsdp", EngineConfig(model_path=str(model), max_tokens_per_gpu=10))
    engine.initialize()
    batch = ragged_batch([[1], [1] * 3, [3] * 3], [[2], [2] * 3, [2] * 3])
    batch["pair_id"] = torch.tensor([0, 1, 1])
    with pytest.raises(BatchError, match=r"Rows 1, 2 share a pair_id and have 12 tokens; max_tokens_per_gpu is 10"):
        engine.forward_backward_batch(batch, None)
    alike = ragged_batch([[5], [1] * 3, [1] * 3], [[2], [2] * 3, [4] * 3])
    alike["pair_id"] = batch["pair_id"]
    assert engine.forward_backward_batch(alike, None).num_micro_batches == 2  # of 9 tokens and of 2
    engine.close()


@pytest.mark.process
def test_preferences_are_learned_and_hold_on_pairs_not_seen(tmp_path, model):
    config = DpoConfig(
        model_path=str(model),
        data_path=vowels_are_better(tmp_path / "train.jsonl", 256, 0),
        eval_path=vowels_are_better(tmp_path / "eval.jsonl", 64, 1),
        output_dir=str(tmp_path / "out"),
        steps=40, batch_size=32, lr=3e-3, eval_every=40, log_every=40,
    )  # fmt: skip
    lines = []
    outcome = train_dpo(config, lines.append)
    assert outcome.eval_metrics["accuracy"] > 0.9
    assert outcome.eval_metrics["margin"] > 0.1  # 0 before: policy and reference are the same
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


@pytest.mark.process
def test_dpo_starts_at_log_two_with_itself_as_the_reference(tmp_path, model):
    config = DpoConfig(
        model_path=str(model), data_path=vowels_are_better(tmp_path / "train.jsonl", 8, 0),
        output_dir=str(tmp_path / "out"), steps=1, batch_size=8, lr=0.0,
    )  # fmt: skip
    outcome = train_dpo(config, lambda _: None)
    assert outcome.metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert outcome.metrics["margin"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21 reads it
def test_an_adapter_of_a_reward_model_learns_its_head_too(tmp_path, model):
    peft = pytest.importorskip("peft")
    pairs = vowels_are_better(tmp_path / "train.jsonl", 256, 0)

    def config(name, **more):
        return RmConfig(
            model_path=str(model), data_path=pairs, eval_path=pairs, output_dir=str(tmp_path / name), steps=30,
            batch_size=64, lr=5e-3, log_every=30, lora_rank=4, **more,
        )  # fmt: skip

    merged = train_rm(config("merged"), lambda _: None)
    assert merged.eval_metrics["accuracy"] > 0.7, "a head of zeros that stays one tells nothing apart"
    alone = train_rm(config("alone", lora_export="adapter"), lambda _: None)
    assert alone.eval_metrics == pytest.approx(merged.eval_metrics)
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "alone")
    ids = torch.tensor([[5, 6, 7, 8]])
    assert loaded(ids).logits.item() == pytest.approx(whole(ids).logits.item(), abs=1e-4)


def test_pairs_are_texts_or_chats_that_differ_in_the_last_turn(tmp_path, model):
    asked = [{"role": "user", "content": "1+1="}]

    def says(text):
        return [{"role": "assistant", "content": text}]

    def tokens(name, row):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
        columns = tokenize_pairs(tmp_path / name, model).columns
        return [columns[part].values().tolist() for part in ("prompt_token_ids", "completion_token_ids")]

    want = tokens("texts.jsonl", {"prompt": asked, "chosen": "2", "rejected": "3"})
    for row in (
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"chosen": asked + says("2"), "rejected": asked + says("3")},
        {"prompt": asked, "chosen": says("2"), "rejected": says("3")},
    ):
        assert tokens("other.jsonl", row) == want
    for row, told in (
        ({"chosen": "2", "rejected": "3"}, "row 1 has no prompt"),
        ({"chosen": says("1") + says("2"), "rejected": asked + says("3")}, "begin with different messages"),
        ({"chosen": says("2") + asked, "rejected": says("2") + asked}, "have to end with a message of the assistant"),
    ):
        with pytest.raises(DataError, match=told):
            tokens("bad.jsonl", row)


@pytest.mark.process
def test_a_reward_model_ranks_pairs_not_seen_and_loads_elsewhere(tmp_path, model):
    config = RmConfig(
        model_path=str(model),
        data_path=vowels_are_better(tmp_path / "train.jsonl", 512, 0),
        eval_path=vowels_are_better(tmp_path / "eval.jsonl", 100, 1),
        output_dir=str(tmp_path / "out"),
        steps=60, batch_size=64, lr=5e-3, log_every=60,
    )  # fmt: skip
    outcome = train_rm(config, lambda _: None)
    assert outcome.eval_metrics["accuracy"] > 0.9
    judge, told = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    assert judge.config.architectures == [type(judge).__name__] == ["Qwen3ForSequenceClassification"]
    pairs = tokenize_pairs(config.eval_path, model).columns
    rows = zip(pairs["prompt_token_ids"].unbind(), pairs["completion_token_ids"].unbind(), strict=True)
    with torch.no_grad():
        scores = torch.cat([judge(torch.cat(row)[None]).logits[:, 0] for row in rows]).view(-1, 2)
    assert float((scores[:, 0] > scores[:, 1]).float().mean()) == pytest.approx(
        outcome.eval_metrics["accuracy"], abs=0.011
    )


def pads_with(folder, token, *, in_config):
    """The folder with another padding, or none, in its tokenizer and in its config."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("pad_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | ({"pad_token": token} if token else {})))
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": in_config}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.promise("transformers scores rows as a saved reward model's engine does, padded or not")
@pytest.mark.process
@pytest.mark.parametrize(
    ("token", "in_config", "want"),
    [("<eos>", 1, "<assistant>"), (None, None, "<assistant>"), ("<pad>", 1, "<pad>"), ("<pad>", 0, "<pad>")],
)
def test_transformers_scores_rows_as_we_do_padded_or_not(tmp_path, token, in_config, want):
    folder, out = write_tiny_model(tmp_path / "model"), tmp_path / "out"
    pads_with(folder, token, in_config=in_config)
    data = vowels_are_better(tmp_path / "train.jsonl", 32, 0)
    config = RmConfig(model_path=str(folder), data_path=data, output_dir=str(out), steps=20, batch_size=16, lr=5e-3)
    train_rm(config, lambda _: None)
    columns = tokenize_pairs(data, folder).columns
    engine = create_engine("fsdp", replace(config.engine, model_path=str(out), optimizer=None))
    engine.initialize()
    ours = [float(row[-1]) for row in engine.forward_backward_batch(columns, None).columns["values"].unbind()]
    engine.close()
    judge, tokenizer = AutoModelForSequenceClassification.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    parts = zip(columns["prompt_token_ids"].unbind(), columns["completion_token_ids"].unbind(), strict=True)
    rows = [torch.cat(row).tolist() for row in parts]
    assert {row[-1] for row in rows} == {1}
    padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    with torch.no_grad():
        assert [judge(torch.tensor([row])).logits.item() for row in rows] == pytest.approx(ours, abs=1e-5)
        assert judge(**padded).logits[:, 0].tolist() == pytest.approx(ours, abs=1e-5)
    assert tokenizer.pad_token == want
    assert judge.config.pad_token_id == tokenizer.pad_token_id


def test_an_adapter_alone_where_eos_is_padding_is_refused(tmp_path, capsys):
    folder = write_tiny_model(tmp_path / "model")
    pads_with(folder, "<eos>", in_config=1)
    arguments = [f"model.path={folder}", "data.path=no.jsonl", f"output_dir={tmp_path / 'out'}", "lora.rank=2"]
    assert rm_main([*arguments, "lora.export=adapter"]) == 2
    assert "pads with token 1, which ends a turn" in capsys.readouterr().err
    assert rm_main(arguments) == 2
    assert "no.jsonl does not exist" in capsys.readouterr().err


def test_a_tokenizer_with_nothing_to_pad_with_is_refused(tmp_path, capsys):
    folder = write_tiny_model(tmp_path / "model")
    tokenizer = {"model": {"vocab": {"<eos>": 1}}, "added_tokens": [{"id": 1, "content": "<eos>", "special": True}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    arguments = [f"model.path={folder}", "data.path=no.jsonl", f"output_dir={tmp_path / 'out'}"]
    assert rm_main(arguments) == 2
    assert "has no token to pad with but the one that ends a turn" in capsys.readouterr().err


@pytest.mark.process
def test_process_rewards_are_learned(tmp_path, model):
    draw, rows = random.Random(0), []
    for _ in range(256):
        steps = ["".join(draw.choice("bcdfg") for _ in range(3)) + draw.choice("ab") for _ in range(3)]
        rows.append(
            {
                "prompt": [{"role": "user", "content": "say"}],
                "steps": steps,
                "labels": [int(step[-1] == "a") for step in steps],
            }
        )
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RmConfig(
        model_path=str(model), data_path=str(tmp_path / "train.jsonl"), output_dir=str(tmp_path / "out"),
        loss="process", steps=30, batch_size=32, lr=1e-2, log_every=5,
    )  # fmt: skip
    assert train_rm(config, lambda _: None).metrics["accuracy"] > 0.95


def test_steps_are_judged_at_their_last_token(tmp_path, model):
    path = tmp_path / "steps.jsonl"
    path.write_text(
        json.dumps({"prompt": [{"role": "user", "content": "x"}], "steps": ["ab", "c"], "labels": [1, 0.5]})
    )
    rows = tokenize_steps(path, model).columns
    assert rows["loss_mask"].values().tolist() == [0, 1, 1]
    assert rows["step_labels"].values().tolist() == [1, 1, 0.5]
    path.write_text(json.dumps({"prompt": [], "steps": ["ab"], "labels": []}))
    with pytest.raises(DataError, match="row 1 has 1 steps and 0 labels"):
        tokenize_steps(path, model)


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (dpo_main, ["loss=pto"], "rl-dpo: loss is 'pto'; wanted sigmoid, ipo, hinge, kto."),
        (dpo_main, ["beta=0"], "rl-dpo: beta is 0.0"),
        (dpo_main, ["loss=ipo", "label_smoothing=0.1"], "rl-dpo: label_smoothing does nothing with loss=ipo"),
        (rm_main, ["betas=1"], "rl-rm: Unknown key 'betas'"),
        (rm_main, ["eval_every=3"], "rl-rm: eval_every is 3, but there is no eval_path"),
        (rm_main, ["resume=true"], "rl-rm: resume=true needs save_every"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, tmp_path, monkeypatch, main, arguments, message):
    monkeypatch.chdir(tmp_path)  # for the lock of output_dir
    assert main(["model.path=m", "data.path=d", "output_dir=o", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 2
