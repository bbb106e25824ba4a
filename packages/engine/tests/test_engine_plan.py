import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_engine import BatchError
from rl_engine._plan import plan_micro_batches


def test_longest_first_into_the_emptiest():
    assert plan_micro_batches([5, 1, 4, 2], 6) == [[0, 1], [2, 3]]


def test_one_micro_batch_when_the_budget_allows():
    assert plan_micro_batches([3, 9, 3], 15) == [[1, 0, 2]]


def test_more_micro_batches_on_request_but_never_more_than_rows():
    assert plan_micro_batches([3, 2], 100, min_count=2) == [[0], [1]]
    assert plan_micro_batches([3, 2], 100, min_count=5) == [[0], [1]]


def test_no_rows_no_micro_batches():
    assert plan_micro_batches([], 10, min_count=3) == []


def test_a_row_over_the_budget_is_named():
    with pytest.raises(BatchError, match="Row 1 has 11 tokens; max_tokens_per_gpu is 10"):
        plan_micro_batches([3, 11], 10)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 120), st.integers(0, 20))
def test_every_row_once_within_the_budget_and_as_many_as_asked(lengths, budget, min_count):
    plan = plan_micro_batches(lengths, budget, min_count=min_count)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(rows and sum(lengths[row] for row in rows) <= budget for rows in plan)
    assert len(plan) >= min(min_count, len(lengths))
    assert len(plan) <= max(min_count, 2 * -(-sum(lengths) // budget))
