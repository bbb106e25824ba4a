"""Muon where matrices are sharded: as on one rank, up to the bfloat16 in which torch orthogonalises."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from rl_engine.testing import write_tiny_model

pytestmark = pytest.mark.timeout(600)  # engines of two libraries in one start of two processes, on a busy machine
SCRIPT = Path(__file__).parents[1] / "support" / "muon_ranks.py"
_spec = spec_from_file_location("muon_ranks", SCRIPT)
support = module_from_spec(_spec)
_spec.loader.exec_module(support)
BACKENDS = ("fsdp", pytest.param("torchtitan", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def two(tmp_path_factory, start_ranks):
    return run_ranks(tmp_path_factory, start_ranks, "fsdp")


@pytest.fixture(scope="module")
def of_torchtitan(tmp_path_factory, start_ranks):
    return run_ranks(tmp_path_factory, start_ranks, "torchtitan")


@pytest.fixture
def seen(request, backend):
    """What the ranks found that ran this backend."""
    return request.getfixturevalue("two" if backend == "fsdp" else "of_torchtitan")


def run_ranks(tmp_path_factory, start_ranks, backend):
    folder = tmp_path_factory.mktemp("muon")
    write_tiny_model(folder / "model", intermediate_size=50)  # of which two ranks have 25 rows each
    alone = support.build(folder, "fsdp")
    before = support.ranks.weights(alone)
    after = support.three_steps(alone, support.ranks.batch_of(support.ranks.draw_rows(support.SEED)))
    alone.close()
    return {"alone": after, "before": before} | start_ranks(SCRIPT, folder, 2, backend)


@pytest.mark.promise("Muon on sharded matrices steps as on one rank")
@pytest.mark.process
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_step_like_one(seen, backend):
    (steps, weights), (alone, wanted) = seen[backend], seen["alone"]
    assert [step[0] for step in steps] == pytest.approx([step[0] for step in alone], rel=1e-3)
    assert [step[1] for step in steps] == pytest.approx([step[1] for step in alone], rel=1e-2)
    for name, weight in weights.items():
        moved = (wanted[name] - seen["before"][name]).norm()
        assert (weight - wanted[name]).norm() < 0.03 * moved, name


@pytest.mark.process
def test_matrices_of_layers_move_by_the_same_size(two):
    """An orthogonalised update has a root mean square of about 0.2 times the rate, whatever its gradient."""
    weights, before = two["alone"][1], two["before"]
    for name in weights:
        if ".layers." in name and weights[name].ndim == 2:
            size = (weights[name] - before[name]).square().mean().sqrt() / (3 * support.LR)
            assert 0.05 < size < 0.3, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_of_its_state_continues(seen, backend):
    step, weights = seen[f"{backend} again"]
    assert step == pytest.approx(seen[backend][0][-1], rel=1e-9)
    torch.testing.assert_close(weights, seen[backend][1], rtol=1e-9, atol=1e-12)
    alone = support.build(seen["folder"], "fsdp")
    assert alone.load_checkpoint(seen["folder"] / f"by {backend}") == 2
    data = support.ranks.batch_of(support.ranks.draw_rows(support.SEED))
    assert support.ranks.one_step(alone, data) == pytest.approx(seen[backend][0][-1], rel=1e-2)
    alone.close()
