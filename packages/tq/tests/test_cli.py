"""`rl-tq`: the installed command once, as somebody else runs it; the rest of its answers in this process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rl_tq
from rl_tq.cli import main
from rl_tq.policies import OldestToken

COMMAND = str(Path(sys.executable).with_name("rl-tq"))


@pytest.fixture(params=["shm://", "tcp://127.0.0.1:0"])
def queue(request):
    with rl_tq.serve(request.param, timeout_s=60.0) as served:
        served.configure("train", tasks=["actor"], staleness=OldestToken(max_staleness=2, batch_size=1))
        for group, oldest in ((0, 0), (1, 1)):
            credit = served.admit(partition="train", num_rows=4, group_id=group)
            tags = [{"group_id": group, "weight_version_min": oldest}] * 4
            served.put({"a": torch.zeros(4, 250)}, partition="train", tags=tags, credit=credit)
        served.put({"x": [1]}, partition='odd "name"\\\n')
        served.advance("train", 3)
        claimed = served.get_meta(partition="train", columns=["a"], batch_size=1, task="actor")
        served.nack(claimed.reorder([2]))
        served.ack(claimed.reorder([0]), step=1)
        yield served


@pytest.fixture
def run(capsys):
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        status = main(arguments)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, said.out, said.err)

    return call


def test_metrics_are_what_prometheus_reads(queue, run):
    parser = pytest.importorskip("prometheus_client.parser")
    done = run("metrics", queue.address)
    assert (done.returncode, done.stderr) == (0, "")
    families = {family.name: family for family in parser.text_string_to_metric_families(done.stdout)}
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    train = ("partition", "train")
    assert values["rl_tq_partition_rows", train] == 3  # 8, four too old, one acked by its only task and so cleared
    assert values["rl_tq_partition_weight_version", train] == 3
    assert values["rl_tq_partition_lag", train] == 2
    assert values["rl_tq_dropped_rows_total", train, ("reason", "stale")] == 4
    assert values["rl_tq_leased_rows", train, ("task", "actor")] == 2
    assert values["rl_tq_acked_rows_total", train, ("task", "actor")] == 1
    assert values["rl_tq_dead_rows", train, ("task", "actor")] == 0
    assert values["rl_tq_partition_rows", ("partition", 'odd "name"\\\n')] == 1
    assert values["rl_tq_rows",] == 4
    assert values["rl_tq_leases_expired_total",] == 0
    assert families["rl_tq_dropped_rows"].type == "counter"
    assert families["rl_tq_partition_rows"].type == "gauge"


def test_top_shows_partitions_and_tasks_as_often_as_asked(queue, run):
    done = run("top", "--count", "2", "--every", "0.05", queue.address)
    assert (done.returncode, done.stderr) == (0, "")
    looks = done.stdout.strip().split("\n\n")
    assert len(looks) == 2
    head, titles, *rows = looks[0].split("\n")
    assert head.endswith("4 rows, 0.0 MB, 1 leases")
    cells = dict(zip(titles.split(), next(row for row in rows if row.startswith("train")).split(), strict=True))
    assert cells["rows"] == "3"
    assert (cells["version"], cells["lag"], cells["dropped"]) == ("3", "2", "4")
    assert (cells["task"], cells["leased"], cells["acked"], cells["dead"]) == ("actor", "2", "1", "0")


@pytest.mark.process
def test_the_installed_command_prints_them_too():
    with rl_tq.serve("shm://") as queue:
        queue.put({"x": [1]}, partition="p")
        command = [COMMAND, "metrics", queue.address]
        assert "rl_tq_rows 1" in subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


def test_what_is_not_served_is_said_in_a_line(run):
    for address, words in (("shm://tq-cli-nobody", "no process serves"), ("nowhere", "is not an address")):
        done = run("top", address)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("rl-tq: ")
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
