"""Trajectories of one session that branches reach the engine as a tree: what they have in common is computed once."""

import pytest
import torch

from rl_agent.proxy.recording import Exchange, Recording, trajectories
from rl_engine import EngineConfig, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch, write_tiny_model
from rl_rollout.types import FinishReason, TokenOutput

pytestmark = pytest.mark.process


def said(parent, prompt, answer, name):
    output = TokenOutput(
        request_id=name, token_ids=tuple(answer), logprobs=(-1.0,) * len(answer), weight_versions=(0,) * len(answer),
        finish_reason=FinishReason.STOP,
    )  # fmt: skip
    return Exchange(
        parent=parent, prompt_token_ids=tuple(prompt), sampled_spans=(), output=output, conversation=(), tools="",
        text="", response_id=name,
    )  # fmt: skip


@pytest.mark.process
def test_a_session_that_branches_is_learned_from_as_a_tree(tmp_path):
    """A prompt of 20 tokens, one answer of 20, and behind it two questions of 20 with answers of 20 each."""
    root = [*range(3, 23)]
    first = [*range(23, 43)]
    recording = Recording(exchanges=[said(None, root, first, "a")])
    for branch in range(2):
        question = [43 + branch] * 20
        recording.exchanges.append(said(0, [*root, *first, *question], [50 + branch] * 20, f"b{branch}"))
    made = trajectories(recording, 1.0)
    columns = [[list(getattr(each, name)) for each in made] for name in ("prompt_token_ids", "completion_token_ids")]
    batch = ragged_batch(*columns, loss_mask=[list(each.loss_mask) for each in made])
    folder, seen = write_tiny_model(tmp_path / "model"), []
    for shares in (None, False):
        config = EngineConfig(model_path=str(folder), prefix_sharing=shares)
        engine, fed = create_engine("fsdp", config), []
        engine.initialize()
        engine.parts.built.scorer.register_forward_pre_hook(lambda _, rows, fed=fed: fed.append(len(rows[0].token_ids)))
        loss = engine.forward_backward_batch(batch, sft_loss).metrics["loss"]
        seen.append((sum(fed), loss, engine.optimizer_step()))
        engine.close()
    assert [each[0] for each in seen] == [20 + 20 + 2 * 39, 2 * 79]
    torch.testing.assert_close(torch.tensor(seen[0][1:]), torch.tensor(seen[1][1:]), rtol=1e-5, atol=0)
