"""Any number of ranks, any dealing of rows to them and any micro-batches give the same gradient: for every loss."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.timeout(600), pytest.mark.process]  # two processes on a machine that may be busy
SCRIPT = Path(__file__).parents[1] / "support" / "cut_ranks.py"
_spec = spec_from_file_location("cut_ranks", SCRIPT)
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)


def run_ranks(start_ranks, folder, size, first_seed, num_seeds):
    ranks.write_models(folder)
    return start_ranks(SCRIPT, folder, size, str(first_seed), str(num_seeds))


@pytest.fixture(scope="module")
def two(tmp_path_factory, start_ranks):
    return run_ranks(start_ranks, tmp_path_factory.mktemp("two"), 2, 0, 2)


@pytest.fixture(scope="module")
def many(tmp_path_factory, start_ranks):
    return [
        run_ranks(start_ranks, tmp_path_factory.mktemp(f"{size} ranks"), size, first, count)
        for size, first, count in ((2, 100, 20), (4, 200, 10))
    ]


def check(seen, name):
    cases = [case for case in seen if case.split(":")[1:2] == [name]]
    expected = {case.rpartition(":")[2]: None for case in cases}
    for seed in expected:
        expected[seed] = ranks.reference(seen["folder"], int(seed), name)
    for case in cases:
        metrics, gradients = expected[case.rpartition(":")[2]]
        assert seen[case][0] == pytest.approx(metrics, rel=1e-9, abs=1e-11), case
        torch.testing.assert_close(seen[case][1], gradients, rtol=1e-8, atol=1e-11)
    return {case.split(":")[0] for case in cases}, len(expected)


@pytest.mark.promise("nor on the ranks and the dealing of rows")
@pytest.mark.parametrize("name", ranks.LOSSES)
def test_no_cut_over_two_ranks_changes_the_gradient(two, name):
    assert check(two, name) == ({"dp2", "sp2"}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ranks.LOSSES)
def test_no_cut_over_two_and_four_ranks_changes_the_gradient(many, name):
    assert [check(seen, name)[1] for seen in many] == [20, 10]
