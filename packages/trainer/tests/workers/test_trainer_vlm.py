"""The recipe for vision-language models, on images that are drawn here: what cannot be known without looking."""

import base64
import io
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from csrc.tests.support.video_reference import encoded, url_of_file
from PIL import Image
from rich.console import Console

from rl_rollout.backends.embedded.embedded_server import EmbeddedServer
from rl_rollout.testing import write_tiny_vl_model
from rl_trainer.config import load_config
from rl_trainer.errors import TrainerError
from rl_trainer.planning.preflight import video_facts
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


def film(colour, draw):
    """A data URL of an mp4 file of six frames at three a second."""
    frames = [np.full((16, 16, 3), COLOURS[colour], np.int64) + draw.randint(-30, 30) for _ in range(6)]
    return url_of_file(encoded(np.stack(frames).clip(0, 255).astype(np.uint8), rate=3))


def trained(folder, steps, *overrides, column="images", rows=None, **model):
    """The summary and the records of a run; a video is three pictures, of which two are shown, or a file of them."""
    draw = random.Random(0)
    place = {"type": "image"} if column == "images" else {"type": "video", "nframes": 2}
    made = {"images": picture, "videos": lambda *seen: [picture(*seen) for _ in range(3)], "files": film}[column]
    content = [place, {"type": "text", "text": "colour?"}]
    rows = rows or [
        {
            "prompt": [{"role": "user", "content": content}],
            "images" if column == "images" else "videos": [made(colour, draw)],
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


@pytest.mark.parametrize(
    ("column", "family"),
    [
        ("images", "qwen2_5_vl"),
        ("files", "qwen2_5_vl"),
        ("files", "qwen3_vl"),
        ("videos", "qwen3_5"),
        ("files", "llava"),
    ],
)
def test_steps_on_images_and_videos(tmp_path, column, family):
    """LLaVA sees the frames of a video as images, the others the video; the second step follows a weight sync."""
    summary, records = trained(tmp_path, 2, "engine.optimizer.lr=1e-2", column=column, family=family)
    assert (summary["steps"], summary["rows_too_long"]) == (2, 0)
    for record in records[1:]:
        assert record["metrics"]["grad_norm"] > 0
        assert record["metrics"]["mismatch_abs"] < 1e-4


def test_a_server_without_videos_gets_their_frames(tmp_path, monkeypatch):
    """The embedded server, which then refuses a request with a video; a film is two frames of two tokens."""
    can = EmbeddedServer.capabilities.fget
    frames = property(lambda server: replace(can(server), takes_videos=False))
    monkeypatch.setattr(EmbeddedServer, "capabilities", frames)
    summary, records = trained(tmp_path, 2, "engine.optimizer.lr=1e-2", column="files", family="qwen2_5_vl")
    assert (summary["steps"], summary["rows_too_long"]) == (2, 0)
    for record in records[1:]:
        assert record["metrics"]["grad_norm"] > 0
        assert record["metrics"]["mismatch_abs"] < 1e-4


@pytest.mark.parametrize("backend", ["embedded", "vllm", "sglang"])
def test_the_plan_says_how_videos_reach_the_model(tmp_path, backend):
    model = write_tiny_vl_model(tmp_path / "model")
    config = load_config("vlm", [f"model.path={model}", f"rollout.backend={backend}"])
    rows = [{"prompt": [{"role": "user", "content": [{"type": "video"}]}], "videos": ["a.mp4"]}]
    frames = f"as frames (nframes), each an image: rollout.backend={backend} takes no videos"
    assert video_facts(config, rows) == [("videos", "as videos" if backend == "embedded" else frames)]
    assert video_facts(config, [{"prompt": [{"role": "user", "content": "text"}]}]) == []


def test_a_video_that_cannot_be_read_is_refused_with_its_row(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": [{"type": "video"}]}], "videos": [url], "data_source": "colours",
         "reward_model": {"ground_truth": "red"}}
        for url in (film("red", random.Random(0)), "data:video/mp4;base64,AAAA")
    ]  # fmt: skip
    with pytest.raises(TrainerError, match=r"rows.jsonl, row 2: .*a video of 3 bytes cannot be decoded"):
        trained(tmp_path, 1, "data.eval_size=1", rows=rows)


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
