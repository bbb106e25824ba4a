import json
import math
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl_engine import BatchError, ConfigError, EngineConfig, Head, Precision, create_engine
from rl_engine.finetune.cli import distill_main
from rl_engine.finetune.distill import DistillConfig, train
from rl_engine.losses import DistillLoss
from rl_engine.testing import ragged, ragged_batch, write_tiny_model
from rl_engine.types import BatchCounts, ModelOutput

ROWS = ([[3, 4, 5], [6]], [[7, 8], [9, 10, 11]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distill")
    teacher = write_tiny_model(folder / "teacher", seed=5, tie_word_embeddings=False)
    tensors = load_file(teacher / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # the last token decides most of the next one
        tensors[name] *= 20
    save_file(tensors, teacher / "model.safetensors", metadata={"format": "pt"})
    return write_tiny_model(folder / "student", tie_word_embeddings=False), teacher


def built(folder, **changes):
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), precision=Precision.FLOAT64, **changes))
    engine.initialize()
    return engine


def full_logprobs(folder, temperature=1.0):
    """(C, V) of a plain model that sees one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    return model, torch.cat(
        [
            (model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
            for prompt, completion in zip(*ROWS, strict=True)
        ]
    )


@pytest.mark.process
@pytest.mark.parametrize("has_linear_head", [True, False])
def test_candidates_are_the_likeliest_tokens_with_gradients(folders, has_linear_head):
    folder = folders[1]
    model, want = full_logprobs(folder, temperature=0.7)
    engine = built(folder, temperature=0.7, num_candidates=5)
    if not has_linear_head:
        engine.parts.built.scorer.head = None
    columns = engine.forward_backward_batch(ragged_batch(*ROWS), None).columns
    top = want.detach().topk(5, -1)
    assert torch.equal(columns["candidate_token_ids"].values(), top.indices)
    torch.testing.assert_close(columns["candidate_logprobs"].values(), top.values, rtol=1e-5, atol=1e-6)
    chosen = torch.randint(0, 78, (5, 3), generator=torch.Generator().manual_seed(0))
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = ragged_batch(*ROWS)
    batch["candidate_token_ids"] = ragged([chosen[:2], chosen[2:]])
    batch["weight"] = ragged([weight[:2], weight[2:]], torch.float64)
    engine.forward_backward_batch(
        batch, lambda output, rows: ((output.candidate_logprobs * rows["weight"].values()).sum(), {})
    )
    (want.gather(1, chosen) * weight).sum().backward()
    for name, parameter in engine.parts.built.scorer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    engine.close()


def test_distillation_losses_by_hand():
    student, teacher = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.6, 0.3]]).log()
    output = ModelOutput(
        token_logprobs=torch.tensor([-1.0]),
        token_candidate_logprobs=student,
        entropy=None,
        cu_seqlens=torch.tensor([0, 1]),
        counts=BatchCounts(tokens=2.0, sequences=1.0),
    )
    rows = ragged_batch([[1]], [[2]])
    rows["teacher_candidate_logprobs"] = ragged([teacher], torch.float32)
    rows["teacher_logprobs"] = ragged([[-0.4]], torch.float32)
    forward = (0.6 * math.log(0.6 / 0.5) + 0.3 * math.log(0.3 / 0.25) + 0.1 * math.log(0.1 / 0.25)) / 2
    reverse = 0.5 * 0.6**2 / 2
    for kind, want in (("forward", forward), ("reverse", reverse), ("mixed", 0.2 * forward + 0.8 * reverse)):
        loss, metrics = DistillLoss(kind=kind, forward_weight=0.2)(output, rows)
        assert float(loss) == pytest.approx(want, rel=1e-5)
    assert float(metrics["teacher_gap"]) == pytest.approx(0.3)


def write_rows(path, count, seed):
    draw = random.Random(seed)
    rows = [
        {
            "prompt_token_ids": [draw.randrange(4, 78) for _ in range(draw.randint(1, 4))],
            "completion_token_ids": [draw.randrange(4, 78) for _ in range(draw.randint(4, 8))],
        }
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "metric", "left"),
    [
        ("forward", "forward_kl", 0.6),
        pytest.param("reverse", "reverse_kl", 0.85, marks=pytest.mark.slow),
        pytest.param("mixed", "loss", 0.85, marks=pytest.mark.slow),
    ],
)  # random completions are no sample of the student's, and tell little of the teacher
def test_a_student_comes_near_its_teacher_on_rows_not_seen(folders, tmp_path, kind, metric, left):
    files = {
        name: write_rows(tmp_path / name, count, seed) for name, count, seed in (("train", 256, 0), ("eval", 32, 1))
    }
    config = DistillConfig(
        model_path=str(folders[0]), teacher_path=str(folders[1]), data_path=files["train"], eval_path=files["eval"],
        output_dir=str(tmp_path / "out"), loss=kind, steps=60, batch_size=64, lr=2e-2, eval_every=1, log_every=10,
        **({} if kind == "reverse" else {"num_candidates": 8}),
    )  # fmt: skip
    lines = []
    report = train(config, report=lines.append)
    named = metric.replace("_", " ")
    first = next(line for line in lines if "held out" in line)
    before = float(first.split(f"{named} ")[1].split()[0])
    assert report.eval_metrics[metric] < left * before


@pytest.mark.process
def test_what_cannot_be_compared_is_refused(folders, tmp_path, capsys):
    (tmp_path / "rows.jsonl").touch()
    arguments = [f"model.path={folders[0]}", f"data.path={tmp_path / 'rows.jsonl'}", f"output_dir={tmp_path / 'out'}"]
    assert distill_main([*arguments, f"teacher.path={folders[1]}", "num_candidates=0"]) == 2
    assert "num_candidates must be 1 or more" in capsys.readouterr().err
    other = write_tiny_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["0"], tokenizer["model"]["vocab"]["1"] = 5, 4
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert distill_main([*arguments, f"teacher.path={other}"]) == 2
    assert "differ" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="num_candidates is 3"):
        built(folders[0], num_candidates=3, head=Head.VALUE)
    engine = built(folders[0])
    for column, message in ((ragged([[1, 2], [3, 4, 5]]), "rows of shape"), (ragged([[[99]] * 2, [[1]] * 3]), "id 99")):
        batch = ragged_batch(*ROWS)
        batch["candidate_token_ids"] = column
        with pytest.raises(BatchError, match=message):
            engine.forward_backward_batch(batch, None)
    with pytest.raises(ConfigError, match="a column candidate_token_ids"):
        engine.forward_backward_batch(ragged_batch(*ROWS), lambda output, _: (output.candidate_logprobs.sum(), {}))
    engine.close()
