"""The recipe for vision-language models, on images that are drawn here: what cannot be known without looking."""

import base64
import io
import json
import random

import pytest
from PIL import Image
from rich.console import Console

from rl_rollout.testing import write_tiny_vl_model
from rl_trainer.config import load_config
from rl_trainer.run import run

pytestmark = pytest.mark.process

COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220)}
REWARD = """
def names_the_colour(text, row):
    return float(bool(text) and (ord(text[0]) % 2 == 0) == (row["reward_model"]["ground_truth"] == "red"))
"""
"""Half of all characters stand for red, the others for blue, so that a policy that guesses is right half the time."""


def picture(colour, draw):
    """A data URL of 16 x 16 pixels of about the colour."""
    pixels = bytes(min(max(value + draw.randint(-30, 30), 0), 255) for _ in range(256) for value in COLOURS[colour])
    file = io.BytesIO()
    Image.frombytes("RGB", (16, 16), pixels).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def trained(folder, steps, *overrides, column="images", **model):
    """The summary and the records of a run; a video is one of three pictures, of which two are shown."""
    draw = random.Random(0)
    place = {"type": "image"} if column == "images" else {"type": "video", "nframes": 2}
    content = [place, {"type": "text", "text": "colour?"}]
    rows = [
        {
            "prompt": [{"role": "user", "content": content}],
            column: [picture(colour, draw) if column == "images" else [picture(colour, draw) for _ in range(3)]],
            "data_source": "colours",
            "reward_model": {"ground_truth": colour},
        }
        for colour in draw.choices(list(COLOURS), k=160)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)
    sizes = ["data.eval_size=32", "data.max_prompt_tokens=64", "rollout.max_model_len=128", "rollout.max_new_tokens=1"]
    sizes += ["batch.batch_size=8", "batch.mini_batch_size=8", "batch.group_size=8", f"steps={steps}", "eval_every=0"]
    model = write_tiny_vl_model(folder / "model", **model)
    where = [f"data.path={folder / 'rows.jsonl'}", f"model.path={model}", f"output_dir={folder / 'out'}"]
    reward = [f"reward.path={folder / 'rewards.py'}:names_the_colour", "engine.precision=float32"]
    settings = ["runtime=inline", "save_every=0", "timeout_s=240", *sizes, *where, *reward, *overrides]
    summary = run(load_config("vlm", settings), Console(quiet=True))
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


@pytest.mark.parametrize("column", ["images", pytest.param("videos", marks=pytest.mark.slow)])
def test_a_step_on_images_and_on_the_frames_of_videos(tmp_path, column):
    summary, records = trained(tmp_path, 1, column=column)
    assert (summary["steps"], summary["rows_too_long"]) == (1, 0)
    metrics = records[1]["metrics"]
    assert metrics["grad_norm"] > 0
    assert metrics["mismatch_abs"] < 1e-4


@pytest.mark.parametrize("family", ["qwen3_5", "llava", "internvl", "mistral3"])
def test_the_server_follows_the_engine_over_updates(tmp_path, family):
    _, records = trained(tmp_path, 2, "engine.optimizer.lr=1e-2", family=family)
    assert records[2]["metrics"]["grad_norm"] > 0
    assert records[2]["metrics"]["mismatch_abs"] < 1e-4


def test_experts_of_image_prompts_are_replayed(tmp_path):
    """The server computes in float32, the engine in bfloat16: many routers of a random model are near ties."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "family": "qwen3_vl_moe"}

    def mismatch(replays):
        folder = tmp_path / replays
        folder.mkdir()
        how = [f"engine.router_replay={replays}", "engine.precision=bfloat16", "rollout.max_new_tokens=32"]
        _, records = trained(folder, 1, *how, **sizes)
        return records[1]["metrics"]["mismatch_k3"]

    replayed, chosen_anew = mismatch("true"), mismatch("false")
    assert 0 < replayed < 0.5 * chosen_anew


@pytest.mark.slow
def test_a_policy_learns_to_name_a_colour_that_it_sees(tmp_path):
    summary, records = trained(tmp_path, 40, "engine.optimizer.lr=3e-3")
    assert summary["accuracy_first"] < 0.75
    assert summary["accuracy_last"] > 0.9
    assert sum(record["reward"] for record in records[-5:]) / 5 > 0.8
