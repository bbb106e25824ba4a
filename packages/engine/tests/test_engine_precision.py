"""The number format that suits this machine, and signs of life of a run that is slow."""

from types import SimpleNamespace

import pytest
import torch

from rl_bench.waiting import until
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


def test_a_slow_step_says_how_long_it_will_take(monkeypatch):
    now = iter([0.0, 12.0, 42.0, 72.0])
    monkeypatch.setattr("rl_engine.finetune.loop.time", SimpleNamespace(perf_counter=lambda: next(now)))
    alive = SignsOfLife(print, 40)
    assert alive.line(12.0) == "loading model and data, 12 s"
    alive.begin(1)
    assert alive.line(42.0) == "step 1/40, 30 s; at least 20.0 min to go"
    alive.begin(2)
    alive.begin(3)
    assert alive.line(77.0) == "step 3/40, 5 s; 19.0 min to go"


def test_lines_come_without_a_step(monkeypatch):
    monkeypatch.setattr(SignsOfLife, "interval_s", 0.005)
    lines = []
    with SignsOfLife(lines.append, 3):
        until(lambda: lines)
    assert lines[0].startswith("loading model and data")
