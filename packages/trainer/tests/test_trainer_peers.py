"""Every comparison of ALGORITHMS.md; of those with a package, what is installed.

pip install verl trl torchrl openrlhf skyrl
"""

import importlib.util
import sys
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location(
    "trainer_algorithms", Path(__file__).parent.parent / "bench" / "trainer_algorithms.py"
)
bench = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = bench
spec.loader.exec_module(bench)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("what", "peer"), [row for row in bench.ROWS if row[1] in bench.PACKAGES])
def test_a_peer_says_the_same(what, peer):
    try:
        found = bench.difference(what, peer, range(5))
    except ImportError as error:
        pytest.skip(f"{peer} cannot be imported: {error}")
    assert found < 2e-5  # of sums in float32 with terms up to 10


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("what", "peer"), [row for row in bench.ROWS if row[1] not in bench.PACKAGES])
def test_a_restated_formula_says_the_same(what, peer):
    assert bench.difference(what, peer, range(5)) < 2e-5
