"""Every command line on two ranks, as torchrun starts it, learns what it learns on one."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_engine.testing import write_tiny_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.process]  # two processes on a machine that may be busy
SCRIPT = Path(__file__).parents[1] / "support" / "cli_ranks.py"
_spec = spec_from_file_location("cli_ranks", SCRIPT)
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)


FEW = ["sft", "rm"]
COMMANDS = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in ranks.RUNS]


@pytest.fixture(scope="module")
def few(tmp_path_factory, start_ranks):
    return run_ranks(tmp_path_factory, start_ranks, FEW)


@pytest.fixture(scope="module")
def others(tmp_path_factory, start_ranks):
    return run_ranks(tmp_path_factory, start_ranks, [name for name in ranks.RUNS if name not in FEW])


@pytest.fixture
def two(request, name):
    """What the ranks left that ran this command."""
    return request.getfixturevalue("few" if name in FEW else "others")


def run_ranks(tmp_path_factory, start_ranks, names):
    folder = tmp_path_factory.mktemp("cli")
    write_tiny_model(folder / "model")
    write_tiny_model(folder / "teacher", seed=1)
    asked = [[{"role": "user", "content": f"{n}+{n}="}] for n in range(7)]
    rows = [{"prompt": prompt, "completion": str(2 * n)} for n, prompt in enumerate(asked)]
    pairs = [{"prompt": prompt, "chosen": str(2 * n), "rejected": "no idea"} for n, prompt in enumerate(asked)]
    for name, found in (("rows", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return start_ranks(SCRIPT, folder, 2, *names)


@pytest.mark.promise("Two processes learn what one learns, in every command")
@pytest.mark.parametrize("name", COMMANDS)
def test_two_ranks_learn_what_one_learns(two, name):
    assert two[name] == 0
    assert ranks.run(two["folder"], name, f"{name}-one") == 0
    many, one = (load_file(two["folder"] / f"{name}-{size}" / "model.safetensors") for size in ("many", "one"))
    torch.testing.assert_close(many, one, rtol=1e-6, atol=1e-6)  # norms are float32, and Adam enlarges what they round
    before = load_file(two["folder"] / "model" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.allclose(one[name], before[name].double(), atol=1e-4)
