"""The trainer of one's own in examples/ learns, and stays as short as it claims to be."""

import asyncio
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_trainer.py"


@pytest.mark.promise("The example of a trainer of one's own is under 80 lines, and learns")
def test_the_custom_trainer_learns(model):
    train = runpy.run_path(str(EXAMPLE))["train"]
    means = asyncio.run(train(str(model), 20))
    assert means[-1] > means[0] + 0.2
    assert len(EXAMPLE.read_text().splitlines()) < 80
