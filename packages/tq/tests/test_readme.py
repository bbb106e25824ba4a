import re
from pathlib import Path

import pytest
import torch

import rl_tq
from rl_tq.testing import fake_queue


@pytest.mark.promise("The README's example runs")
def test_the_examples_of_the_readme_run():
    root = Path(__file__).parents[1]
    (example,) = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.S)
    sampler, limits = re.findall(
        r"```python\n(.*?)```", (root.parents[1] / "docs/packages/tq/guide.md").read_text(), re.S
    )
    exec(example, {})
    exec(limits, {})
    names: dict = {}
    exec(sampler, names)
    with fake_queue() as queue:
        queue.put({"a": torch.arange(3)}, partition="p", tags=[{"group_id": i} for i in (0, 1, 1)])
        meta = queue.get_meta(partition="p", columns=["a"], batch_size=2, task="t", sampler=names["complete_group"])
        assert queue.get(meta)["a"].tolist() == [1, 2]
        assert isinstance(queue, rl_tq.TransferQueue)
