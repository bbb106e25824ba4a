"""GRPO on the sounds of an omni thinker, encoded here: what cannot be known without listening."""

import base64
import json
import random

import pytest
from rich.console import Console

from rl_rollout.testing import encoded_tone, write_tiny_omni_model, write_tiny_vl_model
from rl_trainer.config import load_config
from rl_trainer.errors import ConfigError, InputError, TrainerError
from rl_trainer.run import run

pytestmark = pytest.mark.process

HERTZ = {"low": 300, "high": 3000}
REWARD = """
def names_the_tone(text, row):
    return float(bool(text) and (ord(text[0]) % 2 == 0) == (row["reward_model"]["ground_truth"] == "low"))
"""
"""Half of all characters stand for a low tone, the others for a high one."""


def rows_of(sounds, folder):
    """Rows of a low or high tone, each given in another way."""
    draw, rows = random.Random(0), []
    for index in range(sounds):
        tone, kind = draw.choice(list(HERTZ)), ("wav", "flac", "mp3")[index % 3]
        encoded = encoded_tone(kind, HERTZ[tone] * draw.uniform(0.8, 1.25), seconds=0.3)
        if index % 2:
            file = folder / f"{index}.{kind}"
            file.write_bytes(encoded)
            audio = file.as_uri() if index % 4 == 1 else str(file)
        else:
            audio = f"data:audio/{kind};base64,{base64.b64encode(encoded).decode()}"
        rows.append(row_of(audio, tone))
    return rows


def row_of(audio, tone="low"):
    content = [{"type": "audio"}, {"type": "text", "text": "tone?"}]
    prompt = [{"role": "user", "content": content}]
    return {"prompt": prompt, "audios": [audio], "data_source": "tones", "reward_model": {"ground_truth": tone}}


def trained(folder, steps, *overrides, rows=None, write=write_tiny_omni_model, **model):
    """The summary and the records of a run."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or rows_of(160, folder)))
    (folder / "rewards.py").write_text(REWARD)
    sizes = ["data.eval_size=32", "data.max_prompt_tokens=64", "rollout.max_model_len=128", "rollout.max_new_tokens=1"]
    sizes += ["batch.batch_size=8", "batch.mini_batch_size=8", "batch.group_size=8", f"steps={steps}", "eval_every=0"]
    where = [f"data.path={folder / 'rows.jsonl'}", f"model.path={write(folder / 'model', **model)}"]
    reward = [f"reward.path={folder / 'rewards.py'}:names_the_tone", "engine.precision=float32"]
    settings = ["runtime=inline", "save_every=0", "timeout_s=240", f"output_dir={folder / 'out'}", *sizes, *where]
    summary = run(load_config("vlm", [*settings, *reward, *overrides]), Console(quiet=True))
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


@pytest.mark.parametrize(("family", "is_whole"), [("qwen2_5_omni", True), ("qwen3_omni_moe", False)])
def test_steps_on_sounds(tmp_path, family, is_whole):
    """The second step follows a weight sync: engine and server compute the same log-probs of what was heard."""
    summary, records = trained(tmp_path, 2, "engine.optimizer.lr=1e-2", family=family, is_whole=is_whole)
    assert (summary["steps"], summary["rows_too_long"]) == (2, 0)
    for record in records[1:]:
        assert record["metrics"]["grad_norm"] > 0
        assert record["metrics"]["mismatch_abs"] < 1e-4


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        ("data:audio/wav;base64,AAAA", "an? audio cannot be used: it cannot be decoded"),
        (base64.b64encode(encoded_tone("wav", 300, seconds=5)).decode(), "audio .* is not a data URL"),
        ([[0.0] * 80_000, 16_000], "an? audio cannot be used: it is longer than 4 s"),
        ([[2.0] * 80, 16_000], r"is not \[samples, rate\]"),
    ],
)
def test_a_sound_that_cannot_be_used_is_refused_with_its_row(tmp_path, audio, message):
    rows = [row_of([[0.5, -0.5] * 2400, 16_000]), row_of(audio)]
    with pytest.raises(TrainerError, match=f"rows.jsonl, row 2: .*{message}"):
        trained(tmp_path, 1, "data.eval_size=1", rows=rows)


def test_a_model_that_takes_no_sounds_is_refused_by_the_plan(tmp_path):
    with pytest.raises(InputError, match="have sounds, and the model .* takes none; models that do: Qwen2.5-Omni"):
        trained(tmp_path, 1, write=write_tiny_vl_model)


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_server_without_ears_is_refused_at_the_plan(tmp_path, backend):
    with pytest.raises(ConfigError, match=f"rollout.backend={backend} takes no sounds for this model"):
        trained(tmp_path, 1, f"rollout.backend={backend}")


@pytest.mark.slow
def test_a_policy_learns_to_name_a_tone_that_it_hears(tmp_path):
    summary, records = trained(tmp_path, 40, "engine.optimizer.lr=3e-3")
    assert summary["accuracy_first"] < 0.75
    assert summary["accuracy_last"] > 0.9
    assert sum(record["reward"] for record in records[-5:]) / 5 > 0.8
