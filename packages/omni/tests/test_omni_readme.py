import re
from pathlib import Path

import pytest
import torch

from rl_omni import colour_reward, colourfulness

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.promise("The example of the README runs as it stands")
@pytest.mark.process
def test_the_example_of_the_readme_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {"__name__": "page"}
    exec(compile(code, README, "exec"), names)
    assert names["columns"]["latents"].shape == (5, 3, 8, 8)
    first, second = names["outputs"]
    assert torch.equal(first.columns["picture"], second.columns["picture"])  # of one seed


def test_rewards_have_their_values():
    red = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1).expand(3, 2, 2)
    assert colour_reward(red, (1, 0, 0)) == 1
    assert colour_reward(red, (0, 0, 1)) == pytest.approx(1 / 3)
    assert colourfulness(torch.full((3, 2, 2), 0.5)) == 0
    assert colourfulness(red) == pytest.approx(0.3 * (1 + 0.25) ** 0.5)
