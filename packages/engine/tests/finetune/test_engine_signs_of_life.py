"""Progress lines of every fine-tuning command while a step is slow: what it is at, and how long it will take."""

import json
import re
import time

import pytest

from rl_engine.finetune.cli import distill_main, dpo_main, rm_main, sft_main
from rl_engine.finetune.loop import SignsOfLife
from rl_engine.testing import write_tiny_model

pytestmark = pytest.mark.process

ROW = {"prompt_token_ids": [4, 5], "completion_token_ids": [6, 7]}
PAIR = {"prompt_token_ids": [4, 5], "chosen_token_ids": [6, 7], "rejected_token_ids": [8]}
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("signs") / "model")


@pytest.fixture
def slow_steps(monkeypatch):
    """Steps that go on until a line has named them; a line is due at once instead of after ten seconds."""
    assert SignsOfLife.interval_s == 10.0
    monkeypatch.setattr(SignsOfLife, "interval_s", 0.001)
    line, begin, named = SignsOfLife.line, SignsOfLife.begin, set()

    def recorded(self, now):
        named.add(self._step)
        return line(self, now)

    def slow(self, step):
        begin(self, step)
        deadline = time.monotonic() + DEADLINE_S
        while step not in named and time.monotonic() < deadline:
            self._is_over.wait(0.001)

    monkeypatch.setattr(SignsOfLife, "line", recorded)
    monkeypatch.setattr(SignsOfLife, "begin", slow)


@pytest.mark.process
@pytest.mark.parametrize(
    ("main", "row", "keys"),
    [
        pytest.param(sft_main, ROW, [], id="rl-sft"),
        pytest.param(dpo_main, PAIR, [], id="rl-dpo"),
        pytest.param(rm_main, PAIR, [], id="rl-rm"),
        pytest.param(dpo_main, ROW, ["loss=kto"], id="rl-kto"),
        pytest.param(distill_main, ROW, ["teacher.path={model}", "num_candidates=4"], id="rl-distill"),
    ],
)
def test_a_slow_command_prints_lines_and_an_estimate(model, tmp_path, capsys, slow_steps, main, row, keys):
    rows = [row | {"label": bool(number % 2)} for number in range(4)] if "loss=kto" in keys else [row] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    arguments = [f"model.path={model}", f"data.path={tmp_path / 'rows.jsonl'}", f"output_dir={tmp_path / 'out'}"]
    assert main([*arguments, "steps=2", "batch_size=2", *(key.format(model=model) for key in keys)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^loading model and data, \d+ s$", said, re.MULTILINE)
    assert re.search(r"^step 1/2, \d+ s; at least \d+\.\d min to go$", said, re.MULTILINE)
    assert re.search(r"^step 2/2, \d+ s; \d+\.\d min to go$", said, re.MULTILINE)
