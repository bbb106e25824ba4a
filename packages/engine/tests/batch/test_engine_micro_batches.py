from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from rl_engine import BatchError
from rl_engine.batch.micro_batches import (
    CostModel,
    Load,
    balance_units,
    bundle,
    check_budget,
    cost_model,
    partition,
    plan_micro_batches,
    plan_rows,
)
from rl_engine.batch.plan import ModelReplicas, assign_rows
from rl_engine.batch.prefix_tree import PrefixTree, unshared


def apart(values):
    """Rows that have nothing in common."""
    return Load(alone=values, prefix=lambda _, depth: depth, tree=unshared(len(values)))


def of_prompts(values, prompts, groups):
    """Rows of one group share their prompt."""
    order = sorted(range(len(values)), key=groups.__getitem__)
    rank = [order.index(row) for row in range(len(values))]
    depths = [prompts[one] if groups[one] == groups[other] else 0 for one, other in pairwise(order)]
    return Load(alone=values, prefix=lambda _, depth: depth, tree=PrefixTree(rank=rank, depths=depths, groups=groups))


def both_ways(work_items):
    return work_items, work_items


def test_differences_are_merged_largest_first():
    # {8,7,6} against {5,4} at first, as in Karmarkar and Karp's example: 30 halved as 16 and 14
    assert [sorted(group) for group in partition([8, 7, 6, 5, 4], 2)] == [[1, 3, 4], [0, 2]]
    assert partition([], 2) == [[], []]


def test_costs_decide_and_the_budget_limits():
    assert plan_micro_batches([5, 1, 4, 2], 6) == [[0, 1], [2, 3]]
    assert plan_micro_batches([4, 2, 2, 2, 2], 8, costs=[16, 4, 4, 4, 4]) == [[0], [1, 2, 3, 4]]
    # by cost the long row would be alone with two thirds of the tokens left for a budget of 7
    assert plan_micro_batches([4, 2, 2, 2, 2], 7, costs=[16, 4, 4, 4, 4]) == [[0, 3], [1, 2, 4]]


def test_one_micro_batch_when_the_budget_allows():
    assert plan_micro_batches([3, 9, 3], 15) == [[1, 0, 2]]


def test_more_micro_batches_on_request_but_never_more_than_rows():
    assert plan_micro_batches([3, 2], 100, min_count=2) == [[0], [1]]
    assert plan_micro_batches([3, 2], 100, min_count=5) == [[0], [1]]


def test_no_rows_no_micro_batches():
    assert plan_micro_batches([], 10, min_count=3) == []


def test_what_fits_in_no_micro_batch_is_named():
    with pytest.raises(BatchError, match="Row 1 has 11 tokens; max_tokens_per_gpu is 10"):
        check_budget(apart([3, 11]), [[0], [1]], 10)
    with pytest.raises(BatchError, match="Rows 0, 2 share a pair_id and have 12 tokens; max_tokens_per_gpu is 10"):
        check_budget(apart([6, 1, 6]), [[0, 2], [1]], 10)
    check_budget(of_prompts([6, 1, 6], [2, 1, 2], [0, 1, 0]), [[0, 2], [1]], 10)


@pytest.mark.process
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 120), st.integers(0, 20))
def test_every_row_once_within_the_budget_and_as_many_as_asked(lengths, budget, min_count):
    plan = plan_micro_batches(lengths, budget, costs=[length**2 for length in lengths], min_count=min_count)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(rows and sum(lengths[row] for row in rows) <= budget for rows in plan)
    assert len(plan) >= min(min_count, len(lengths))
    assert len(plan) <= max(min_count, 2 * -(-sum(lengths) // budget))


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 8))
def test_groups_differ_by_no_more_than_the_largest_item(costs, count):
    groups = partition(costs, count)
    assert sorted(item for group in groups for item in group) == list(range(len(costs)))
    sums = [sum(costs[item] for item in group) for group in groups]
    assert sums == sorted(sums, reverse=True)
    assert sums[0] - sums[-1] <= max(costs, default=0)


@pytest.mark.process
@given(st.lists(st.lists(st.integers(1, 50), max_size=12), min_size=1, max_size=5))
def test_dealing_never_makes_the_fullest_rank_fuller(costs):
    dealt = balance_units(costs)
    if dealt is None:
        return
    sums = [0] * len(costs)
    for mine, owners in zip(costs, dealt, strict=True):
        for cost, owner in zip(mine, owners, strict=True):
            sums[owner] += cost
    assert max(sums) < max(map(sum, costs))


def test_balanced_ranks_keep_their_rows_and_others_move_few():
    assert balance_units([[5, 5], [10], [4, 6]]) is None
    assert balance_units([[4, 4, 4, 4], []]) == [[0, 1, 1, 0], []]
    assert balance_units([[9, 4, 3], [2]]) == [[0, 1, 1], [1]]  # what is heaviest stays


def test_pairs_stay_together_and_copy_ranks_share_their_rows():
    alone = ModelReplicas(replica_of=(0, 1), leaders=(0, 1))
    assignment = assign_rows(alone, [both_ways([(2.0, [0, 2]), (2.0, [1, 3])]), both_ways([])])
    assert assignment is not None
    assert assignment.target[0][0] == assignment.target[0][2] != assignment.target[0][1] == assignment.target[0][3]
    both = ModelReplicas(replica_of=(0, 0), leaders=(0,))
    assignment = assign_rows(both, [both_ways([(1.0, [0])]), both_ways([(2.0, [0]), (1.0, [1])])])
    assert assignment is not None
    assert assignment.target == ((0,), (0, 0))


def test_rows_of_one_prompt_take_it_once():
    tokens = of_prompts([7, 9, 8, 4], [5, 5, 5, 2], [0, 0, 0, 1])
    assert tokens.of([0, 1, 2, 3]) == 7 + 4 + 3 + 4
    assert tokens.of([3, 1]) == 13
    assert bundle(tokens, [[0], [1], [2], [3]], 14) == [[[0], [1], [2]], [[3]]]
    # 5 + 2 + 4 + 3 tokens in 11: twice the prompt, and the completions 4 and 2 + 3
    assert bundle(tokens, [[0], [1], [2], [3]], 11) == [[[2], [0]], [[1]], [[3]]]
    assert plan_rows(tokens, [[0], [1], [2], [3]], 18) == [[0, 1, 2, 3]]
    assert plan_rows(tokens, [[0], [1], [2], [3]], 14) == [[0, 1, 2], [3]]
    assert plan_rows(tokens, [[0], [1], [2], [3]], 14, min_count=3) == [[1, 2], [0], [3]]
    assert len(plan_rows(tokens, [[0], [1], [2], [3]], 14, min_count=9)) == 4


@pytest.mark.process
@given(st.data())
def test_no_micro_batch_has_more_unique_tokens_than_the_budget(data):
    prompts = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    groups = data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=40))
    own = data.draw(st.lists(st.integers(1, 10), min_size=len(groups), max_size=len(groups)))
    lengths = [prompts[group] + more for group, more in zip(groups, own, strict=True)]
    tokens = of_prompts(lengths, [prompts[group] for group in groups], groups)
    cut = data.draw(st.sets(st.integers(0, len(groups))).map(sorted))
    units = [list(range(first, last)) for first, last in zip([0, *cut], [*cut, len(groups)], strict=True)]
    units = [unit for unit in units if unit]
    budget = data.draw(st.integers(0, 60)) + int(max(map(tokens.of, units)))
    plan = plan_rows(tokens, units, budget, min_count=data.draw(st.integers(0, 8)))
    assert sorted(row for rows in plan for row in rows) == list(range(len(groups)))
    assert all(tokens.of(rows) <= budget for rows in plan)
    place = {row: index for index, rows in enumerate(plan) for row in rows}
    assert all(len({place[row] for row in unit}) == 1 for unit in units)


def test_a_group_is_split_only_if_it_gains_more_than_its_prompt():
    alone = ModelReplicas(replica_of=(0, 1), leaders=(0, 1))
    group = of_prompts([30.0] * 4, [20.0] * 4, [0] * 4)
    fine = [(30.0, [row]) for row in range(4)]
    assignment = assign_rows(alone, [([(group.of(range(4)), [0, 1, 2, 3])], fine), both_ways([])])
    assert assignment is None  # 60 here, and twice 60 if each row brought its prompt along
    fine = [(12.0, [row]) for row in range(4)]
    assignment = assign_rows(alone, [([(42.0, [0, 1, 2, 3])], fine), both_ways([])])
    assert assignment is not None
    assert sorted(assignment.target[0]) == [0, 0, 1, 1]
    together = [(42.0, [0, 1]), (42.0, [2, 3])]
    assignment = assign_rows(alone, [(together, [(22.0, [row]) for row in range(4)]), both_ways([])])
    assert assignment is not None
    assert assignment.target[0] in ((0, 0, 1, 1), (1, 1, 0, 0))


def test_a_row_costs_its_products_and_the_pairs_it_sees():
    model = CostModel(per_token=10.0, per_pair=1.0, per_score=100.0, windows=(None, 3))
    assert model(5, 2) == 50 + 15 + (6 + 2 * 3) + 200
    config = AutoConfig.for_model(
        "qwen3_moe", num_experts=8, num_experts_per_tok=2, hidden_size=4, vocab_size=7, num_attention_heads=2,
        head_dim=3, num_hidden_layers=1,
    )  # fmt: skip
    shapes = {"layers.0.self_attn.q_proj.weight": (6, 4), "layers.0.mlp.experts.gate_up_proj": (8, 10, 4), "norm": (4,)}
    found = cost_model(config, shapes)
    assert found == CostModel(per_token=2 * 24 + 2 * 320 * 0.25, per_pair=24.0, per_score=56.0, windows=(None,))
