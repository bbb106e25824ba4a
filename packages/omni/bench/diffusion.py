"""GRPO on a tiny picture model by rl-train: python packages/omni/bench/diffusion.py FOLDER [KEY=VALUE ...].

A model that was pretrained on flat pictures of any colour learns to paint the colour that its prompt names. Writes
curve.json and grid.png into FOLDER, and the run into FOLDER/run.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import torch
from PIL import Image

from rl_omni import colour_reward
from rl_omni.pipeline import load_pipeline
from rl_omni.testing import write_tiny_pipeline
from rl_rollout.registry import create_server
from rl_rollout.types import GenerateRequest, SamplingParams, ServerConfig

EXAMPLE = Path(__file__).parents[3] / "examples/pictures"
COLOURS = {(1,): (0.8, 0.2, 0.2), (2,): (0.2, 0.8, 0.2), (3,): (0.2, 0.2, 0.8)}
"""Colour by prompt; inside the range, so that clamping to it is no short cut."""


def pretrain(folder, num_steps=400):
    """Flow matching on flat pictures of uniformly random colours, whatever the prompt."""
    torch.manual_seed(0)
    model = load_pipeline(folder)
    optimizer = torch.optim.AdamW(model.transformer.parameters(), lr=2e-3)
    prompts = [model.encode(prompt) for prompt in COLOURS]
    for _ in range(num_steps):
        data = (torch.rand(32, 3, 1, 1) * 2 - 1).expand(32, 3, 8, 8)
        noise, times = torch.randn(32, 3, 8, 8), torch.rand(32)
        mixed = data + times.view(-1, 1, 1, 1) * (noise - data)
        picked = [prompts[i] for i in torch.randint(3, (32,)).tolist()]
        loss = (model.velocity(mixed, times, picked) - (noise - data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.transformer.save_pretrained(Path(folder) / "transformer")


async def pictures(folder):
    """Eight pictures for each prompt, with the same seeds for every model."""
    server = create_server("diffusion", ServerConfig(model_path=str(folder), options={"num_steps": 8, "noise": 0.7}))
    await server.start()
    prompts = [prompt for prompt in COLOURS for _ in range(8)]
    outputs = await asyncio.gather(
        *(
            server.generate(
                GenerateRequest(request_id=str(i), prompt_token_ids=p, sampling_params=SamplingParams(seed=i))
            )
            for i, p in enumerate(prompts)
        )
    )
    await server.stop()
    return [output.columns["picture"] for output in outputs]


def random_reward():
    """Mean reward of decoded noise: a policy that does not denoise."""
    torch.manual_seed(0)
    noise = ((torch.randn(48, 3, 8, 8) + 1) / 2).clamp(0, 1)
    return sum(colour_reward(each, list(COLOURS.values())[i % 3]) for i, each in enumerate(noise)) / 48


def draw(before, after, file):
    """One row per prompt; eight pictures before RL on the left, the same seeds after it on the right."""
    rows = [
        torch.cat(
            [
                torch.nn.functional.pad(picture, (1, 1, 1, 1), value=1.0)
                for grid in (before, after)
                for picture in grid[i : i + 8]
            ],
            2,
        )
        for i in range(0, 24, 8)
    ]
    pixels = (torch.cat(rows, 1).permute(1, 2, 0) * 255).byte().numpy()
    image = Image.fromarray(pixels)
    image.resize((image.width * 4, image.height * 4), Image.Resampling.NEAREST).save(file)


def main():
    folder, keys = Path(sys.argv[1]), sys.argv[2:]
    model, run = folder / "model", folder / "run"
    write_tiny_pipeline(model)
    pretrain(model)
    command = [sys.executable, "-m", "rl_trainer.cli", str(EXAMPLE / "colours.yaml"), f"model.path={model}"]
    command += [f"data.{key}={EXAMPLE / 'colours.jsonl'}" for key in ("path", "eval_path")]
    subprocess.run([*command, f"output_dir={run}", *keys], check=True)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [record["reward"] for record in records if record["step"] > 0]
    draw(asyncio.run(pictures(model)), asyncio.run(pictures(max(run.glob("checkpoint-*/model")))), folder / "grid.png")
    result = {"random_policy": random_reward(), "curve": curve}
    (folder / "curve.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
