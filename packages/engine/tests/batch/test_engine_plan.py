"""Rows that move to the replica that computes them, without processes: what another rank sent is put in by hand."""

import copy

import torch

from rl_engine.batch.plan import Assignment, ModelReplicas, return_columns, send_rows
from rl_engine.batch.row_batch import RowBatch
from rl_engine.distributed.world import World
from rl_engine.testing import ragged_batch

CPU = torch.device("cpu")
ONE_REPLICA = Assignment(replicas=ModelReplicas(replica_of=(0, 0), leaders=(0,)), target=((0, 0), (0, 0)))


class TwoRanks(World):
    """Rank 0 of two, of which the other sends what this one sends."""

    def all_to_all(self, payloads):
        return [payloads[0], copy.deepcopy(payloads[0])]

    def exchange(self, value):
        return [value, value]


def test_pairs_of_two_ranks_stay_pairs_where_their_numbers_are_the_same():
    data = ragged_batch([[1], [1]], [[2], [3]])
    data["pair_id"], data["is_chosen"] = torch.tensor([5, 5]), torch.tensor([True, False])
    world = TwoRanks(rank=0, size=2, device=CPU, owns_group=False)
    merged = send_rows(ONE_REPLICA, RowBatch(data, needs_mask=True, device=CPU), world)
    assert merged["pair_id"].tolist() == [10, 10, 11, 11]
    assert RowBatch(merged, needs_mask=True, device=CPU).units() == [[0, 1], [2, 3]]


class Answered(TwoRanks):
    """Rank 0 of two, of which each computed one of its rows."""

    def all_to_all(self, payloads):
        return [{"logprobs": torch.tensor([4.0])}, {"logprobs": torch.tensor([2.0, 3.0])}]


def test_results_come_back_in_the_order_of_the_rows():
    own = RowBatch(ragged_batch([[1], [1]], [[2, 3], [4]]), needs_mask=True, device=CPU)
    swapped = Assignment(replicas=ModelReplicas(replica_of=(0, 1), leaders=(0, 1)), target=((1, 0), (1, 0)))
    columns = return_columns(swapped, None, own, Answered(rank=0, size=2, device=CPU, owns_group=False))
    assert [row.tolist() for row in columns["logprobs"].unbind()] == [[2.0, 3.0], [4.0]]
