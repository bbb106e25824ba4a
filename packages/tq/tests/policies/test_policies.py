"""Policies of one's own, and what policies refuse."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest
import torch

import rl_tq
from rl_tq import policies
from rl_tq.policies import policy_from_json
from rl_tq.registry import create_policy
from rl_tq.types import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum(Policy):
    """The easiest rows first, once one is at least as hard as `at_least`."""

    at_least: float
    name: ClassVar[str] = "curriculum"

    def choose(self, rows, batch_size):
        order = sorted(range(len(rows)), key=lambda i: rows[i].tags["hardness"])
        is_there = any(row.tags["hardness"] >= self.at_least for row in rows)
        return order[:batch_size] if is_there and len(rows) >= batch_size else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong(Policy):
    positions: tuple[int, ...] = (0, 0)
    name: ClassVar[str] = "wrong"

    def __post_init__(self):
        object.__setattr__(self, "positions", tuple(self.positions))

    def choose(self, rows, batch_size):
        return [[][self.positions[0]]] if self.positions[0] < 0 else list(self.positions)


@pytest.fixture
def installed(monkeypatch):
    def entries(group):
        names = {"curriculum": "Curriculum", "wrong": "Wrong", "missing": "NoSuch", "int": "int"}
        return [EntryPoint(name, f"{__name__}:{what}", group) for name, what in names.items()]

    class Loaded:
        def __init__(self, entry):
            self.name = entry.name
            self._entry = entry

        def load(self):
            if self.name == "missing":
                raise ImportError("No module named 'far'")
            return {"curriculum": Curriculum, "wrong": Wrong, "int": int}[self.name]

    monkeypatch.setattr(policies, "entry_points", lambda group: [Loaded(entry) for entry in entries(group)])


@pytest.fixture(params=["inproc://", "shm://"])
def queue(request):
    with rl_tq.serve(request.param, timeout_s=20.0) as served:
        yield served


CLAIM = {"partition": "p", "columns": ["a"], "task": "t", "timeout_s": 0.0}


def test_a_policy_of_ones_own_runs_in_the_server(installed, queue):
    tags = [{"hardness": h} for h in (3.0, 1.0, 2.0, 5.0)]
    queue.put({"a": torch.arange(3)}, partition="p", tags=tags[:3])
    easy = Curriculum(at_least=4.0)
    with pytest.raises(rl_tq.WaitTimeoutError, match="among which the policy did not choose"):
        queue.get_meta(**CLAIM, batch_size=2, sampler=easy)
    queue.put({"a": torch.tensor([3])}, partition="p", tags=tags[3:])
    meta = queue.get_meta(**CLAIM, batch_size=2, sampler=easy)
    assert queue.get(meta)["a"].tolist() == [1, 2]
    queue.ack(meta)


def test_a_policy_that_fails_is_named_and_the_queue_goes_on(installed, queue):
    queue.put({"a": torch.arange(2)}, partition="p")
    for policy, message in (
        (Wrong(), r"chose \[0, 0\].*different positions below 2"),
        (Wrong(positions=(7,)), "different positions below 2"),
        (Wrong(positions=(-1,)), "failed on 2 ready rows: IndexError"),
    ):
        with pytest.raises(rl_tq.PolicyError, match=message):
            queue.get_meta(**CLAIM, batch_size=2, sampler=policy)
    assert queue.get(queue.get_meta(**CLAIM, batch_size=2))["a"].tolist() == [0, 1]


def test_what_is_not_installed_where_the_server_runs_is_refused(installed, queue):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Elsewhere(Policy):
        name: ClassVar[str] = "elsewhere"

    with pytest.raises(
        ValueError, match=r"no policy 'elsewhere' where the server runs; there are .*'all_ready', 'batch_ratio', 'cur"
    ):
        queue.get_meta(**CLAIM, batch_size=1, sampler=Elsewhere())
    for name, message in (("missing", "cannot be imported where the server runs: No module"), ("int", "subclass of")):
        with pytest.raises(ValueError, match=message):
            policy_from_json({"name": name})


def test_policies_travel_as_json():
    policy = policies.GroupComplete(group_size=4)
    assert policy_from_json(policy.to_json()) == policy
    assert hash(policy_from_json(policy.to_json())) == hash(policy)
    with pytest.raises(ValueError, match=r"'fifo' takes \[\], not \['x'\]"):
        policy_from_json({"name": "fifo", "x": 1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: policies.GroupComplete(group_size=0), "group_size is 0"),
        (lambda: policies.GroupComplete(group_size=2).check(3), "groups have 2 rows"),
    ],
)
def test_policies_that_make_no_sense_are_refused_at_once(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_wait_for_a_group_that_was_given_before_says_so(queue):
    """As in a second epoch, where the group_id is an index of the dataset."""
    policy = policies.GroupComplete(group_size=2)
    data, tags = {"a": torch.arange(2)}, [{"group_id": 0}] * 2
    queue.put(data, partition="p", tags=tags)
    meta = queue.get_meta(**CLAIM, batch_size=2, sampler=policy)
    queue.ack(meta)
    queue.clear(meta)
    queue.put(data, partition="p", tags=tags)
    with pytest.raises(rl_tq.WaitTimeoutError, match="2 rows stay out, as their groups were given before"):
        queue.get_meta(**CLAIM, batch_size=2, sampler=policy)
    assert "2 rows stay out" in queue.explain(partition="p", columns=["a"], batch_size=2, task="t", sampler=policy)


def test_a_policy_is_made_by_its_name():
    assert create_policy("group_complete", group_size=8) == policies.GroupComplete(group_size=8)
    with pytest.raises(ValueError, match=r"'group_complete' takes \['group_size'\], not \['n'\]"):
        create_policy("group_complete", n=1)
    with pytest.raises(ValueError, match="there is no policy 'newest'"):
        create_policy("newest")
