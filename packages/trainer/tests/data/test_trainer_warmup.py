"""The supervised training before a run, in a process of its own."""

import json
import sys
from dataclasses import replace

import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from rl_trainer.config import load_config
from rl_trainer.data import load_datasets, warmup
from rl_trainer.data.warmup import _run
from rl_trainer.errors import InputError, TrainerError

pytestmark = pytest.mark.process


@pytest.mark.promise("The quickstart starts from the model that is shipped with it")
def test_the_quickstart_starts_from_the_model_that_is_shipped(tmp_path, monkeypatch):
    """As long as recipe, data and seed are those that it was made of; else it would be made on the spot."""
    monkeypatch.setattr(warmup, "_run", lambda *_: pytest.fail("it is trained"))
    config = load_config("quickstart")
    rows = load_datasets(config.data, seed=config.seed).train
    folder = warmup.make_small_model(
        tmp_path, config.model.warmup, rows, seed=config.seed, timeout_s=1, on_line=lambda line: None
    )
    weights = load_file(folder / "model.safetensors")
    assert {array.dtype.name for array in weights.values()} == {"float32"}
    assert sum(array.size for array in weights.values()) == 1_228_416
    assert {"config.json", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    for other in (replace(config.model.warmup, lr=1e-3), config.model.warmup):
        digest = warmup.digest_of(other, tmp_path / "sft.jsonl", seed=1 if other is config.model.warmup else 0)
        assert digest != warmup._shipped_digest()


CHAT = [
    {"role": "user", "content": "add 12 and 3"},
    {"role": "assistant", "content": "15 is it"},
    {"role": "tool", "content": "yes"},
    {"role": "assistant", "content": "is it"},
]


def test_a_row_may_demonstrate_whole_chats(tmp_path, monkeypatch):
    """It is what the model imitates, and the tokenizer has its words."""
    monkeypatch.setattr(warmup, "_run", lambda *_: None)
    row = {"prompt": CHAT[:1], "reward_model": {"ground_truth": "15"}, "demonstrations": [CHAT]}
    config = load_config("gym").model.warmup
    warmup.make_small_model(tmp_path, config, [row] * 3, seed=0, timeout_s=1, on_line=lambda line: None)
    assert [json.loads(line)["messages"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()] == [CHAT] * 3
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "untrained")
    pieces = [tokenizer.decode([each]) for each in tokenizer.encode("and 15 is Zoe")]
    assert pieces == ["and", " ", "1", "5", " ", "is", " ", "Z", "o", "e"]
    shown = tokenizer.decode(tokenizer.apply_chat_template(CHAT, return_dict=False))
    assert shown == "<|user|>add 12 and 3<|assistant|>15 is it<eos><|tool|>    yes<|assistant|>is it<eos>"
    assert json.loads((tmp_path / "untrained" / "config.json").read_text())["vocab_size"] == len(tokenizer)


def test_a_warm_up_without_rows_is_refused(tmp_path):
    config = load_config("gym").model.warmup
    with pytest.raises(InputError, match="no rows to imitate, since they are streamed or come from an environment"):
        warmup.make_small_model(tmp_path, config, [], seed=0, timeout_s=1, on_line=lambda line: None)


def python(code):
    return [sys.executable, "-c", code]


def test_its_lines_are_forwarded_and_the_last_shown_on_failure():
    lines = []
    _run(python("print('a'); print('b')"), 60, lines.append)
    assert lines == ["a", "b"]
    with pytest.raises(TrainerError, match=r"rl-sft failed; its last lines:\n  \| no such data"):
        _run(python("print('no such data'); raise SystemExit(3)"), 60, lines.append)


def test_one_that_hangs_without_a_word_is_ended_at_its_deadline():
    with pytest.raises(TrainerError, match=r"did not finish within 0\.5 s"):
        _run(python("import time; time.sleep(300)"), 0.5, print)
