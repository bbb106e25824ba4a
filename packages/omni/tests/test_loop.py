import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packages.omni.tests.test_server import served

from rl_agent.errors import RowError
from rl_agent.registry import create_loop, create_tokenizer
from rl_omni.pictures import data_url, picture_of
from rl_omni.rewards import colour
from rl_rollout.errors import GenerationError

ROOT = Path(__file__).parents[3]
ROW = {"prompt": [{"role": "user", "content": "green"}]}


def test_a_picture_is_a_trajectory_of_its_steps(pipeline):
    async def run(server):
        return await create_loop("picture", server, create_tokenizer(pipeline)).run(
            {"seed": 5, "temperature": 1.0}, ROW
        )

    output = asyncio.run(served(pipeline, run))
    assert (output.prompt_token_ids, output.completion_token_ids) == ((2,), ())
    assert (output.loss_mask, output.weight_versions) == ((1, 1, 1), (0, 0, 0))
    assert output.columns.keys() == {"latents", "timesteps", "step_stds"}
    pixels = ((output.columns["latents"][-1] + 1) / 2).clamp(0, 1)
    assert (picture_of(output.text) - pixels).abs().max() <= 0.5 / 255 + 1e-6


def test_what_is_no_picture_is_refused(pipeline):
    async def aborted(server):
        loop = create_loop("picture", server, create_tokenizer(pipeline))
        with pytest.raises(RowError, match="the text of a row's last message"):
            await loop.prompt({"prompt": [{"content": [1]}]})
        await server.pause("keep")
        running = asyncio.create_task(loop.run({}, ROW))
        while not running.done():
            await server.abort()
            await asyncio.wait([running], timeout=0.01)
        with pytest.raises(GenerationError, match="ended after 0 steps: abort"):
            await running

    asyncio.run(served(pipeline, aborted))
    with pytest.raises(ValueError, match="no data URL of an image"):
        picture_of("green")


def test_a_colour_is_rewarded_by_its_distance():
    green = data_url(torch.tensor([0.2, 0.8, 0.2]).view(3, 1, 1).expand(3, 4, 2))
    assert colour(green, {"reward_model": {"ground_truth": "0.2 0.8 0.2"}}) == pytest.approx(1)
    assert colour(green, {"reward_model": {"ground_truth": "0.8 0.8 0.2"}}) == pytest.approx(0.8)


@pytest.mark.promise("rl-train trains a picture model by the loop that trains language models")
@pytest.mark.process
def test_the_trainer_trains_a_picture_model(pipeline, tmp_path):
    words = [
        f"model.path={pipeline}",
        f"output_dir={tmp_path / 'out'}",
        "steps=2",
        "batch.group_size=4",
        "batch.mini_batch_size=3",
    ]
    command = [sys.executable, "-m", "rl_trainer.cli", "examples/pictures/colours.yaml", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    for version, record in enumerate(records[1:], 2):
        assert record["weights"]["version"] == version
        assert record["num_tokens"] == 3 * 4 * 8
        assert not record["failures"]
        assert record["metrics"]["ratio"] == pytest.approx(1, abs=1e-3)  # server and engine agree on the log-probs
    assert (tmp_path / "out/checkpoint-2/model/model_index.json").is_file()
