"""Every comparison of ALGORITHMS.md; of those with a package, what is installed.

pip install verl trl torchrl openrlhf skyrl
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import peer_formulas


@pytest.mark.promise("The algorithms say the same as others' implementations")
@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("what", "peer"), [row for row in peer_formulas.ROWS if row[1] in peer_formulas.PACKAGES])
def test_a_peer_says_the_same(what, peer):
    try:
        found = peer_formulas.difference(what, peer, range(5))
    except ImportError as error:
        pytest.skip(f"{peer} cannot be imported: {error}")
    assert found < 2e-5  # of sums in float32 with terms up to 10


@pytest.mark.promise("What no small package has says the same as its restatement")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("what", "peer"), [row for row in peer_formulas.ROWS if row[1] not in peer_formulas.PACKAGES])
def test_a_restated_formula_says_the_same(what, peer):
    assert peer_formulas.difference(what, peer, range(5)) < 2e-5
