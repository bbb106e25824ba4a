import math

import pytest

from rl_bench.processes import Child, children, race, reset_peak, status_bytes
from rl_bench.shapes import qwen3, weight_shapes

ANSWERS = """
import sys
from rl_bench.processes import say
print("a library logs")
say("ready", *sys.argv[1:])
for line in sys.stdin:
    say("done", 1.5) if line == "go\\n" else sys.exit(3)
"""
WRITES = """
import json, pathlib, sys
settings, system = pathlib.Path(sys.argv[1]), sys.argv[2]
if system == "large":
    raise SystemExit("torch.OutOfMemoryError: no room")
assert system == "fine"
settings.with_name("fine.json").write_text(json.dumps({"twice": 2 * json.loads(settings.read_text())["n"]}))
"""


@pytest.mark.process
def test_a_child_answers_lines_and_its_end_is_an_error(tmp_path):
    (tmp_path / "child.py").write_text(ANSWERS)
    child = Child(tmp_path / "child.py", 1, "two")
    try:
        assert child.hear("ready") == "1 two"
        assert child.ask() == "1.5"
        assert child.cpu_ms == [1.5]
        with pytest.raises(RuntimeError, match="ended early"):
            child.ask("stop")
    finally:
        child.close()


@pytest.mark.process
def test_a_system_writes_its_figures_or_says_why_not(tmp_path):
    script = tmp_path / "system.py"
    script.write_text(WRITES)
    assert race(script, "fine", {"n": 3}, tmp_path) == {"twice": 6}
    assert race(script, "large", {"n": 3}, tmp_path) == "the GPU's memory is too small"
    with pytest.raises(RuntimeError, match=r"(?s)other failed: .*AssertionError"):
        race(script, "other", {"n": 3}, tmp_path)


def test_memory_of_a_process_and_its_peak():
    reset_peak()
    assert 2**20 < status_bytes("VmRSS") <= status_bytes("VmHWM")
    assert children(2**30) == []


@pytest.mark.parametrize(
    ("size", "changes", "num_experts", "parameters"),
    [
        ("0.6B", {}, 0, 596_049_920),
        ("1.7B", {}, 0, 1_720_574_976),
        ("8B", {}, 0, 8_190_735_360),
        (
            "8B",
            {"hidden_size": 2048, "intermediate_size": 768, "num_hidden_layers": 48, "num_key_value_heads": 4},
            128,
            30_532_122_624,
        ),
    ],
)
def test_shapes_have_the_parameters_of_the_published_models(size, changes, num_experts, parameters):
    shapes = weight_shapes(qwen3(size, **changes), num_experts)
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters
