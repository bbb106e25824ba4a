"""Rows at the edge of a micro-batch, of a rank's share, and of what a rank knows of the others."""

from types import SimpleNamespace

import pytest
import torch

from rl_engine.batch.gradient_free import forward_backward
from rl_engine.batch.micro_batches import cost_model, plan_micro_batches
from rl_engine.batch.packed import one_token_row
from rl_engine.batch.plan import Assignment, ModelReplicas, send_rows
from rl_engine.batch.row_batch import RowBatch
from rl_engine.testing import ragged_batch
from rl_engine.types import BatchCounts

BATCH = ragged_batch([[1, 2], [3], [4]], [[5], [6, 7, 8], [9, 10]])


class World:
    """One rank, and what the others answer."""

    rank, size = 0, 1

    def __init__(self, *others: object) -> None:
        self._others = others

    def exchange(self, own: object) -> list[object]:
        return [own, *self._others]

    def all_to_all(self, parts: list[object]) -> list[object]:
        return parts


def test_rows_may_fill_a_micro_batch_to_its_last_token():
    """By their costs the two long rows go together, which is one token too many."""
    plan = plan_micro_batches([3, 3, 2, 2], 5, costs=[8.0, 2.0, 6.0, 4.0])
    assert sorted(map(sorted, plan)) == [[0, 2], [1, 3]]


def test_more_micro_batches_than_needed_are_balanced_too():
    lengths = [5, 4, 3, 2]
    plan = plan_micro_batches(lengths, 20, min_count=2)
    assert [sum(lengths[row] for row in rows) for rows in plan] == [7, 7]


def test_one_expert_is_met_where_a_config_does_not_say():
    shapes = {"layers.0.mlp.experts.0.weight": (8, 4)}
    config = SimpleNamespace(hidden_size=4, num_attention_heads=1, vocab_size=16, num_local_experts=4)
    assert cost_model(config, shapes).per_token == 2 * 8 * 4 / 4
    assert cost_model(SimpleNamespace(**vars(config), num_experts_per_tok=2), shapes).per_token == 2 * 8 * 4 / 2


def test_a_stand_in_row_has_one_token_and_counts_for_nothing():
    row = one_token_row(torch.device("cpu"))
    assert (row.lengths, row.completions, row.num_valid) == ((1,), (1,), 1)
    assert row.counts == BatchCounts(tokens=0.0, sequences=0.0)


def test_a_rank_s_rows_arrive_whole():
    own = RowBatch(BATCH, needs_mask=True, device=torch.device("cpu"))
    replicas = ModelReplicas(replica_of=(0,), leaders=(0,))
    sent = send_rows(Assignment(replicas=replicas, target=((0, 0, 0),)), own, World())
    assert sent.batch_size == torch.Size([3])
    assert [row.tolist() for row in sent["completion_token_ids"].unbind()] == [[5], [6, 7, 8], [9, 10]]


class HalfOfThem:
    """A loss without a gradient in one row."""

    @staticmethod
    def has_gradient(data: object) -> torch.Tensor:
        del data
        return torch.tensor([True, False, True])


@pytest.mark.parametrize(("others", "calls"), [((), [2, 1]), ((None,), [3])])
def test_rows_are_told_apart_only_where_every_rank_does(others, calls):
    """A rank whose rows cannot be separated answers None; the call over all of them reports why."""
    seen = []

    def run(data, loss, has_backward):
        del loss, has_backward
        seen.append(len(data))
        ids = data["completion_token_ids"]
        columns = {"logprobs": torch.nested.nested_tensor_from_jagged(ids.values().float(), ids.offsets())}
        return SimpleNamespace(columns=columns, metrics={}, num_micro_batches=1)

    forward_backward(run, BATCH, HalfOfThem(), World(*others))
    assert seen == calls
