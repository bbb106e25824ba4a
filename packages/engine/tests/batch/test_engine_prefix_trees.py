"""Rows that branch, as a tree of any depth, are fed each common token once; gradients are those of the flat batch."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import EngineConfig, LoraConfig, create_engine
from rl_engine.batch import prefix_tree
from rl_engine.batch.micro_batches import Load, bundle, plan_rows
from rl_engine.batch.prefix_tree import prefix_tree as tree_of
from rl_engine.batch.row_batch import RowBatch
from rl_engine.losses import token_local
from rl_engine.testing import ragged, ragged_batch, write_tiny_model

GPT2 = {
    "vocab_size": 70, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LENGTH = 20


def trajectories(branches, seed=0):
    """Prompts and completions of a tree of depth 3: a prompt, `branches` first turns, as many second ones each."""
    draw = random.Random(seed)

    def turn():
        return [draw.randrange(70) for _ in range(LENGTH)]

    prompt, rows = turn(), []
    for _ in range(branches):
        first = turn()
        rows += [first + turn() for _ in range(branches)]
    draw.shuffle(rows)
    return [prompt] * len(rows), rows


def batch_of(prompts, completions):
    batch, draw = ragged_batch(prompts, completions), random.Random(1)
    batch["advantages"] = ragged([[draw.uniform(-1, 1)] * len(row) for row in completions], torch.float64)
    return batch


@token_local
def in_the_head(output, rows):
    return -(output.logprobs * rows["advantages"].values()).sum() / output.counts.tokens, {}


def apart(output, rows):
    scores = output.logprobs * rows["advantages"].values() + 0.1 * output.entropy
    return -scores.sum() / output.counts.tokens, {}


def rows_one_at_a_time(folder, prompts, completions, loss):
    """Gradients of a plain transformers model in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    advantages = batch_of(prompts, completions)["advantages"].unbind()
    total = 0.0
    for prompt, completion, advantage in zip(prompts, completions, advantages, strict=True):
        full = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        scores = full.gather(1, torch.tensor(completion)[:, None])[:, 0] * advantage
        total = total - scores.sum() - (0.1 * -(full.exp() * full).sum() if loss is apart else 0.0)
    (total / sum(map(len, completions))).backward()
    return {name: value.grad for name, value in model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **GPT2)).save_pretrained(folder / "gpt2")
    write_tiny_model(folder / "qwen3")
    return folder


def learned(path, batch, loss, **changes):
    """Gradients of the engine, and the tokens that it was fed and scored."""
    changes = {"precision": "float64", "entropy": True} | changes
    engine = create_engine("fsdp", EngineConfig(model_path=str(path), **changes))
    engine.initialize()
    scorer, fed, scored = engine.parts.built.scorer, [], []
    scorer.register_forward_pre_hook(lambda _, given: fed.append(len(given[0].token_ids)))
    scorer.register_forward_pre_hook(lambda _, given: scored.append(len(given[0].labels)))
    output = engine.forward_backward_batch(batch, loss)
    named = scorer.model.named_parameters()
    grads = {name: value.grad.clone() for name, value in named if value.grad is not None}
    columns = {name: column.values().clone() for name, column in output.columns.items()}
    engine.close()
    return grads, columns, sum(fed), sum(scored)


@pytest.mark.promise("Each common token of rows that branch is computed once, and nothing depends on it")
@pytest.mark.process
@pytest.mark.parametrize("loss", [in_the_head, apart])
@pytest.mark.parametrize("branches", [2, 4, 8])
def test_a_tree_has_the_gradient_of_the_flat_batch(folder, branches, loss):
    prompts, completions = trajectories(branches)
    found, _, fed, scored = learned(folder / "gpt2", batch_of(prompts, completions), loss)
    leaves = branches**2
    assert fed == LENGTH * (1 + branches) + leaves * (LENGTH - 1)
    assert scored == LENGTH * (branches + leaves)
    wanted = rows_one_at_a_time(folder / "gpt2", prompts, completions, loss)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-11)


@pytest.mark.process
@pytest.mark.parametrize("branches", [2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {"lora": LoraConfig(rank=2)},
        {"max_tokens_per_gpu": 150},
        {"activation_checkpointing": True},
        {"recompute": ("attention", "mlp")},
        {"num_candidates": 3, "sum_pi_squared": True},
    ],
    ids=str,
)
def test_a_tree_goes_with_other_settings(folder, branches, changes):
    """Against the flat batch; norms of this model are computed in float32."""
    batch = batch_of(*trajectories(branches))
    found, want = (learned(folder / "qwen3", batch, apart, prefix_sharing=way, **changes) for way in (True, False))
    torch.testing.assert_close(found[0], want[0], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(found[1], want[1], rtol=1e-5, atol=1e-7)
    assert found[2] < want[2]


@pytest.mark.core
def test_what_rows_share_by_hand():
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9], [7, 8], [1, 2, 3, 4, 5, 8], [1, 2, 5], [7, 9]]
    tree = tree_of([np.array(row) for row in rows], [2, 2, 2, 4, 2, 1])
    assert tree.ordered(range(6)) == [0, 3, 1, 4, 2, 5]
    # 4 of the 5 tokens in common are the end of a prompt, 3 is too near to 2; the last row goes on from its prompt 7
    assert list(tree.depths) == [4, 2, 2, 0, 1]
    assert list(tree.groups) == [0, 0, 1, 0, 0, 1]
    assert sorted(tree.runs(range(6))) == sorted([
        ([0, 3, 1, 4], 0, 2), ([0, 3], 2, 4), ([0], 4, -1), ([3], 4, -1), ([1], 2, -1), ([4], 2, -1),
        ([2, 5], 0, 1), ([2], 1, -1), ([5], 1, -1),
    ])  # fmt: skip


@pytest.mark.core
def test_long_beginnings_are_shared_and_short_ones_left():
    system, other = np.arange(40), np.array([99])
    rows = [np.concatenate([system[:size], other + row]) for row, size in enumerate((40, 40, 31, 31))]
    assert list(tree_of(rows[:2], [41, 41]).depths) == [40]
    assert list(tree_of(rows[2:], [32, 32]).depths) == [0]


@pytest.mark.process
@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=7), min_size=1, max_size=9))
def test_no_token_is_fed_twice_where_all_branch_points_count(rows):
    """With thresholds of one token and a common beginning, what is fed are the distinct prefixes."""
    rows = [[5, *row] for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "MIN_APART", 1)
        batch = RowBatch(
            ragged_batch([row[:1] for row in rows], [[*row[1:], 0] for row in rows]),
            needs_mask=True, device=torch.device("cpu"), shares_prefixes=True,
        )  # fmt: skip
        packed = batch.pack(range(len(rows)))
    assert len(packed.token_ids) == len({tuple(row[:size]) for row in rows for size in range(1, len(row) + 1)})
    assert batch.tokens().of(range(len(rows))) == len(packed.token_ids) + len(rows)


@pytest.mark.core
def test_a_tree_above_the_budget_is_cut_into_neighbours():
    """Two subtrees of two rows: 20 tokens, 20 of each subtree and 20 of each row."""
    _, completions = trajectories(2)
    rows = [np.array([3] * LENGTH + completion) for completion in completions]
    tree = tree_of(rows, [LENGTH] * 4)
    tokens = Load(alone=[60] * 4, prefix=lambda _, depth: depth, tree=tree)
    assert tokens.of(range(4)) == 20 + 2 * 20 + 4 * 20
    units = [[row] for row in range(4)]
    order = tree.ordered(range(4))
    cut = [sorted(row for unit in bundled for row in unit) for bundled in bundle(tokens, units, 100)]
    assert sorted(cut) == sorted([sorted(order[:2]), sorted(order[2:])])
    assert all(tokens.of(planned) <= 100 for planned in plan_rows(tokens, units, 100))
