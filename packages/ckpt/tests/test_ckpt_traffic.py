"""What a transfer plan moves, by hand-computed numbers; and how it is told."""

import pytest

from rl_ckpt import ShardSpec
from rl_ckpt.cli import main
from rl_ckpt.traffic import Traffic
from rl_ckpt.types import Placement, relay_groups

MB = 1 << 20


def cut(axis, rank, num_ranks=2):
    return [ShardSpec.on_mesh("w", (1024, 1024), mesh=(num_ranks,), placements=(axis,), coordinate=(rank,))]


def placement(targets, target_nodes, source_nodes=("a", "b"), **options):
    return Placement(
        **options,
        sizes={"w": 2},
        sources=[cut(0, rank) for rank in (0, 1)],
        targets=targets,
        source_nodes=source_nodes,
        target_nodes=target_nodes,
    )


def test_each_pair_exchanges_a_quarter_and_nodes_keep_their_own():
    traffic = Traffic(placement([cut(1, rank) for rank in (0, 1)], [["a", "b"], ["c", "c"]]))
    assert traffic.num_bytes == 2 * MB
    assert traffic.pairs == {(source, target): MB // 2 for source in (0, 1) for target in (0, 1)}
    assert traffic.copied == {"a": MB // 2, "b": MB // 2}
    assert traffic.sent == {"a": MB // 2 + MB, "b": MB // 2 + MB}
    assert traffic.received == {"a": MB // 2, "b": MB // 2, "c": 2 * MB}
    assert traffic.seconds(MB, 100 * MB) == 2.0, "c's link is the busiest"
    assert traffic.seconds(100 * MB, MB / 4) == 2.0, "a's and b's memory is"
    # a and b exchange halves, and rank 0 on a sends 2 MB to each of three ranks that are elsewhere
    assert traffic.gathered_seconds(MB, 100 * MB) == 6.0


def test_each_trainer_rank_has_one_relay_per_remote_node():
    """The sender's own node has no relay."""
    nodes = ["b", "c", "b", "a", "c", "c", "a"]
    assert relay_groups(0, "a", nodes) == [[0, 2], [1, 4, 5], [3], [6]]
    assert relay_groups(1, "a", nodes) == [[2, 0], [4, 5, 1], [3], [6]]
    assert relay_groups(5, "b", nodes) == [[0], [5, 1, 4], [2], [6, 3]]


def test_with_relays_one_copy_crosses_and_is_copied_on_the_node():
    whole = placement(None, [["c"], ["c"], ["c"], ["d"]], has_relays=True)
    traffic = Traffic(whole)
    assert traffic.sent == {"a": 2 * MB, "b": 2 * MB}, "half of the weights to each of two nodes"
    assert traffic.received == {"c": 2 * MB, "d": 2 * MB}
    assert traffic.copied == {"c": 4 * MB}
    told = traffic.lines(whole, 1.0, 1.0)
    assert told[1] == "rank 0 (a) -> receiver 0 (c by a relay, replica 0, to 1, 2 too, d): 0.00105 GB"
    assert told[2] == "rank 1 (b) -> receiver 0 (c by a relay, replica 1, to 2, 0 too, d): 0.00105 GB"
    alone = Traffic(placement(None, [["c"], ["c"], ["c"], ["d"]]))
    assert alone.sent == {"a": 4 * MB, "b": 4 * MB}


def test_a_server_of_one_rank_takes_all():
    traffic = Traffic(placement(None, [["c"]]))
    assert traffic.pairs == {(0, 0): MB, (1, 0): MB}
    assert traffic.received == {"c": 2 * MB}


@pytest.mark.promise("`rl-ckpt plan` tells who sends what to whom")
def test_a_plan_is_printed_from_the_file_that_a_run_has_written(tmp_path, capsys):
    placement([cut(1, rank) for rank in (0, 1)], [["c", "d"]]).save(tmp_path / "plan.json")
    assert main(["plan", str(tmp_path / "plan.json"), "--link-gbit", "0.008388608"]) == 0  # 1 MiB/s
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "weights: 0.0021 GB, 1 tensors, to 1 replicas"
    assert told[1] == "rank 0 (a) -> receiver 0 (c): 0.000524 GB"
    assert "c: sends 0 GB, receives 0.00105 GB, copies 0 GB" in told
    assert told[-2] == "speeds: 0.00838861 Gbit/s a node, 5 GB/s of memory"
    assert told[-1] == "expected: 1 s; gathered and sent by rank 0, 4 s at least"


@pytest.mark.parametrize(
    ("text", "words"),
    [("{}", "is not a plan"), ('{"format": "x"}', "its format is not 'rl-ckpt plan 1'"), ("[]", "is not a plan")],
)
def test_another_file_is_refused_in_a_sentence(text, words, tmp_path, capsys):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path / "plan.json")])
    assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path / "plan.json"), "--link-gbit", "0"])
    assert "--link-gbit is 0; give a number above 0" in capsys.readouterr().err
