"""The number format that suits this machine, and signs of life of a run that is slow."""

import time

import pytest
import torch

from rl_engine import EngineConfig, Precision, auto_precision, for_this_machine, registry
from rl_engine.finetune.loop import SignsOfLife

ZEN4 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 vnni\n"
ZEN3 = "processor\t: 0\nflags\t\t: fpu avx2 fma\n"
GRAVITON3 = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n"


@pytest.fixture
def processor(monkeypatch):
    """Have /proc/cpuinfo say something else, on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def pretend(text):
        registry._processor_flags.cache_clear()
        monkeypatch.setattr(registry.Path, "read_text", lambda self: text)

    yield pretend
    registry._processor_flags.cache_clear()


@pytest.mark.parametrize(
    ("text", "wanted"), [(ZEN4, "bfloat16"), (ZEN3, "float32"), (GRAVITON3, "bfloat16"), ("", "float32")]
)
def test_auto_is_bfloat16_where_the_processor_has_it(processor, text, wanted):
    processor(text)
    assert auto_precision()[0] == wanted
    config = EngineConfig(model_path="m", precision=Precision.AUTO, activation_checkpointing=None)
    found = for_this_machine(config)
    assert (found.precision, found.activation_checkpointing) == (wanted, False)


@pytest.mark.parametrize(("is_native", "wanted"), [(True, "bfloat16"), (False, "float32")])
def test_auto_on_a_gpu(monkeypatch, is_native, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_native)
    found = for_this_machine(EngineConfig(model_path="m", precision=Precision.AUTO, activation_checkpointing=None))
    assert (found.precision, found.activation_checkpointing) == (wanted, True)


def test_what_is_set_stays(processor):
    processor(ZEN3)
    config = EngineConfig(model_path="m", precision=Precision.BFLOAT16, activation_checkpointing=True)
    assert for_this_machine(config) == config


def test_a_slow_step_says_how_long_it_will_take():
    alive = SignsOfLife(print, 40)
    now = time.perf_counter()
    assert alive.line(now + 12).startswith("loading model and data, 12 s")
    alive.begin(1)
    assert alive.line(alive._since + 30) == "step 1/40, 30 s; at least 20.0 min to go"
    alive._begun = alive._since - 60
    alive._step, alive._first = 3, 1
    assert alive.line(alive._since + 5) == "step 3/40, 5 s; 19.0 min to go"


def test_lines_come_without_a_step(monkeypatch):
    monkeypatch.setattr(SignsOfLife, "interval_s", 0.005)
    lines = []
    with SignsOfLife(lines.append, 3) as alive:
        while not lines:
            alive._is_over.wait(0.001)
    assert lines[0].startswith("loading model and data")
