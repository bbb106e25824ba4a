"""The orders in which rows are claimed, each against a model that looks through all rows."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rl_tq import policies
from rl_tq.errors import PolicyError
from rl_tq.metadata.rows import Row

pytestmark = pytest.mark.process

TAGS = st.fixed_dictionaries(
    {},
    optional={
        "group_id": st.sampled_from("xyz"),
        "weight_version_min": st.integers(0, 3),
        "spread": st.integers(0, 1),
    },
)


class Order(RuleBasedStateMachine):
    """Rows come, come late, come back, get other tags and leave, in any order; claims take them."""

    policy: policies.Policy = policies.Fifo()

    def __init__(self) -> None:
        super().__init__()
        self.closed = {"z"}
        self.index = self.policy.make_index(lambda: {"z"})
        self.offered: dict[int, Row] = {}
        self.ready: dict[int, Row] = {}
        """In the order in which they became so."""
        self.given: dict[int, Row] = {}
        self.returned: set[int] = set()
        self.incomplete: dict[int, Row] = {}
        self.num_rows = 0

    # The model

    def is_ready(self, row: Row) -> bool:
        return True

    def came(self, row: Row) -> None:
        self.offered[row.number] = row
        if self.is_ready(row):
            self.ready.setdefault(row.number, row)

    def left(self, number: int) -> None:
        self.offered.pop(number, None)
        self.ready.pop(number, None)

    def expected(self, count: int) -> list[int] | None:
        return sorted(self.ready)[:count] if len(self.ready) >= count else None

    # What may happen

    def _new(self, tags: dict) -> Row:
        self.num_rows += 1
        return Row(self.num_rows, None, tags, frozenset())

    @rule(several=st.lists(TAGS, min_size=1, max_size=4))
    def put(self, several: list[dict]) -> None:
        rows = [self._new(tags) for tags in several]
        self.index.extend([row.number for row in rows], rows)
        for row in rows:
            self.came(row)

    @rule(tags=TAGS)
    def put_a_part(self, tags: dict) -> None:
        row = self._new(tags)
        self.incomplete[row.number] = row

    @precondition(lambda self: self.incomplete)
    @rule(data=st.data())
    def put_the_rest(self, data: st.DataObject) -> None:
        self._offer(self.incomplete.pop(data.draw(st.sampled_from(sorted(self.incomplete)))))

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        row = self.given.pop(data.draw(st.sampled_from(sorted(self.given))))
        self.returned.add(row.number)
        self._offer(row)

    @precondition(lambda self: self.offered)
    @rule(data=st.data(), tags=st.none() | TAGS)
    def put_more(self, data: st.DataObject, tags: dict | None) -> None:
        """Columns, or columns and tags."""
        row = self.offered[data.draw(st.sampled_from(sorted(self.offered)))]
        if tags:
            self._leave([row.number])
            row.tags = {**row.tags, **tags}
        self._offer(row)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self._leave(data.draw(st.lists(st.integers(1, self.num_rows + 1), unique=True, max_size=6)))

    @rule(count=st.sampled_from([2, 4, 6]))
    def claim(self, count: int) -> None:
        try:
            expected = self.expected(count)
        except PolicyError:
            with pytest.raises(PolicyError):
                self.index.take(count)
            return
        taken = self.index.take(count)
        assert (None if taken is None else list(taken)) == expected
        for number in expected or ():
            self.given[number] = self.offered[number]
            self.returned.discard(number)
            self.left(number)

    def _offer(self, row: Row) -> None:
        self.index.add(row, is_back=row.number in self.returned)
        self.came(row)

    def _leave(self, numbers: list[int]) -> None:
        self.index.discard(numbers)
        for number in numbers:
            self.left(number)

    @invariant()
    def the_same_are_ready(self) -> None:
        assert self.index.members == self.ready


class Grouped(Order):
    policy = policies.GroupComplete(group_size=2)

    def __init__(self) -> None:
        super().__init__()
        self.complete: list[str] = []

    def _mates(self, group: str) -> list[int]:
        return [number for number, row in self.ready.items() if row.group == group]

    def is_ready(self, row: Row) -> bool:
        return row.group is not None and (row.group not in self.closed or row.number in self.returned)

    def came(self, row: Row) -> None:
        super().came(row)
        if len(self._mates(row.group)) >= 2 and row.group not in self.complete:
            self.complete.append(row.group)

    def left(self, number: int) -> None:
        super().left(number)
        self.complete = [group for group in self.complete if len(self._mates(group)) >= 2]

    def expected(self, count: int) -> list[int] | None:
        groups = self.complete[: count // 2]
        if len(groups) < count // 2:
            return None
        self.closed |= {*groups}
        mates = [self._mates(group) for group in groups]
        for late in [number for each in mates for number in each[2:]]:
            del self.ready[late]  # they stay out
        return [number for each in mates for number in sorted(each[:2])]


@pytest.mark.parametrize("order", [Order, Grouped])
def test_rows_are_given_in_the_order_of_the_policy(order):
    run_state_machine_as_test(order, settings=settings(max_examples=25, stateful_step_count=30))
