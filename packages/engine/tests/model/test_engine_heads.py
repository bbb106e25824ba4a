import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rl_engine import ConfigError, EngineConfig, ModelFolderError, OptimizerConfig, Precision, create_engine
from rl_engine.losses import sft_loss, token_mean, token_values
from rl_engine.testing import ragged, ragged_batch, write_tiny_model

PROMPTS, COMPLETIONS = [[5, 6, 7], [8], [9, 9]], [[9, 10], [11, 12, 13], [4]]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("heads") / "policy")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, policy):
    folder = tmp_path_factory.mktemp("heads") / "classifier"
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float64)
    model.save_pretrained(folder)
    return folder


def build(folder, head, **changes):
    options = {"precision": Precision.FLOAT64, "optimizer": OptimizerConfig(lr=1e-2)}
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), head=head, **(options | changes)))
    engine.initialize()
    return engine


def value_loss(output, rows):
    error = output.values - token_values(rows, "returns", output.values)
    return token_mean(error * error, token_values(rows, "loss_mask", output.values), output), {}


def batch_with_returns():
    batch = ragged_batch(PROMPTS, COMPLETIONS)
    batch["returns"] = ragged([[0.5] * len(row) for row in COMPLETIONS], torch.float64)
    return batch


def states(folder, row):
    """The classifier's number at every position of one row."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        return model.score(model.model(torch.tensor([row])).last_hidden_state)[0, :, 0]


@pytest.mark.process
@pytest.mark.parametrize(("head", "shift"), [("value", 1), ("reward", 0)])
@pytest.mark.parametrize("budget", [4096, 6])
def test_values_precede_their_token_and_rewards_follow_it(classifier, head, shift, budget):
    engine = build(classifier, head, max_tokens_per_gpu=budget)
    columns = engine.forward_backward_batch(ragged_batch(PROMPTS, COMPLETIONS), None).columns
    engine.close()
    assert list(columns.keys()) == ["values"]
    for prompt, completion, values in zip(PROMPTS, COMPLETIONS, columns["values"].unbind(), strict=True):
        want = states(classifier, prompt + completion)[len(prompt) - shift :][: len(completion)]
        torch.testing.assert_close(values, want, rtol=1e-6, atol=1e-7)


def test_the_last_reward_is_what_hugging_face_gives_the_row(classifier):
    engine = build(classifier, "reward", optimizer=None)
    values = engine.forward_backward_batch(ragged_batch(PROMPTS, COMPLETIONS), None).columns["values"].unbind()
    engine.close()
    model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float64)
    for prompt, completion, found in zip(PROMPTS, COMPLETIONS, values, strict=True):
        assert float(found[-1]) == pytest.approx(model(torch.tensor([prompt + completion])).logits.item(), abs=1e-6)


@pytest.mark.process
def test_any_cut_gives_the_same_step(classifier):
    seen = []
    for budget in (4096, 6):
        engine = build(classifier, "value", max_tokens_per_gpu=budget)
        seen.append(
            (engine.forward_backward_batch(batch_with_returns(), value_loss).metrics["loss"], engine.optimizer_step())
        )
        engine.close()
    assert seen[0] == pytest.approx(seen[1], rel=1e-6)


@pytest.mark.process
def test_a_causal_folder_trains_and_saves_as_a_classifier(tmp_path, policy):
    engine = build(policy, "value")
    batch, losses = batch_with_returns(), []
    for _ in range(30):
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(batch, value_loss)
        losses.append(output.metrics["loss"])
        engine.optimizer_step()
    values = engine.forward_backward_batch(batch, None).columns["values"].values()
    engine.save_model(tmp_path / "critic")
    engine.save_checkpoint(tmp_path / "checkpoint", 1)
    engine.close()
    assert losses[0] == 0.25  # zeros against returns of 0.5
    assert losses[-1] < 0.01
    for kind in ("checkpoint", "critic"):
        again = build(tmp_path / "critic" if kind == "critic" else policy, "value")
        if kind == "checkpoint":
            assert again.load_checkpoint(tmp_path / "checkpoint") == 1
        torch.testing.assert_close(again.forward_backward_batch(batch, None).columns["values"].values(), values)
        again.close()


@pytest.mark.process
def test_reading_what_the_head_does_not_give_is_one_sentence(classifier, policy):
    critic = build(classifier, "value")
    with pytest.raises(ConfigError, match=r"reads log-probs, which this engine does not give; it needs head=lm"):
        critic.forward_backward_batch(ragged_batch(PROMPTS, COMPLETIONS), sft_loss)
    critic.close()
    actor = build(policy, "lm")
    with pytest.raises(ConfigError, match="reads values"):
        actor.forward_backward_batch(batch_with_returns(), value_loss)
    actor.close()
    with pytest.raises(ConfigError, match="entropy is True; it needs head=lm"):
        build(classifier, "value", entropy=True)


def test_a_classifier_is_no_policy(classifier):
    with pytest.raises(ModelFolderError, match=r"beyond what the architecture takes, 1 tensor\(s\): score.weight"):
        build(classifier, "lm")
